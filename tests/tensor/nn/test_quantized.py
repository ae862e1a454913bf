"""Linear layers whose weights are codes: what they compute, how they learn around them, how they are saved and read."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

import ranvier as rv
from ranvier import nn, optim
from ranvier.errors import DTypeMismatch, InvalidConfig, InvalidInput, RanvierError, ShapeMismatch, WeightError
from ranvier.ops import registry
from ranvier.ops.contrib.levels import FP4_LEVELS, IQ4_LEVELS
from ranvier.providers.cpu.lower import weight_only
from ranvier.quantize import Integers, Quantized, scheme
from ranvier.tensor.state import Constant
from ranvier.weights import WeightLoader, save_safetensors

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(3)
INPUTS, OUTPUTS = 96, 40
FLOAT4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def numbers(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def levels(table: Array, block: tuple[int, ...], flat: bool) -> Quantized:
    codes = RNG.integers(0, 16, (OUTPUTS, INPUTS)).astype(np.uint8)
    shape = (codes.size // block[0],) if flat else (OUTPUTS, INPUTS // block[1])
    scales = RNG.uniform(0.5, 2, shape).astype(np.float32)
    return Quantized("levels", codes, scales, block, 4, table=table, flat=flat, axis=1)


def moved(groups: Array, size: int) -> Quantized:
    """Weights whose groups are not neighbours, as GPTQ with ``desc_act`` leaves them."""
    codes = RNG.integers(0, 16, (OUTPUTS, INPUTS)).astype(np.uint8)
    scales = RNG.uniform(0.5, 2, (OUTPUTS, INPUTS // size)).astype(np.float32)
    zeros = RNG.integers(0, 16, scales.shape).astype(np.uint8)
    return Quantized("gptq", codes, scales, (1, size), 4, zeros, axis=1, order=groups)


def shuffled() -> Array:
    return RNG.permutation(np.arange(INPUTS) // 32)


CODED = {
    "uint4": ("MatMulNBits", lambda: Integers(4, False, "group", 32, signed=False).quantize(numbers(OUTPUTS, INPUTS))),
    "int3": ("MatMulNBits", lambda: Integers(3, True, "group", 48).quantize(numbers(OUTPUTS, INPUTS))),
    "int2": ("MatMulNBits", lambda: Integers(2, True, "group", 32).quantize(numbers(OUTPUTS, INPUTS))),
    "int8 of rows": ("MatMulNBits", lambda: Integers(8, True, "channel").quantize(numbers(OUTPUTS, INPUTS))),
    "moved groups": ("MatMulNBits", lambda: moved(shuffled(), 32)),
    "nf4": ("MatMulBnb4", lambda: scheme("nf4", group=64).quantize(numbers(OUTPUTS, INPUTS))),
    "nf4 of an odd count": ("MatMulBnb4", lambda: scheme("nf4", group=16).quantize(numbers(OUTPUTS - 1, INPUTS - 1))),
    "fp4": ("MatMulBnb4", lambda: levels(FP4_LEVELS, (64,), True)),
    "float8": ("DequantizeLinear", lambda: scheme("fp8").quantize(numbers(OUTPUTS, INPUTS))),
    "float8 of rows": (
        "DequantizeLinear",
        lambda: scheme("fp8_e5m2", granularity="channel").quantize(numbers(OUTPUTS, INPUTS)),
    ),
    "float8 in squares": (
        "DequantizeLinear",
        lambda: scheme("fp8", granularity="block", group=16).quantize(numbers(OUTPUTS, INPUTS)),
    ),
    "nvfp4": ("DequantizeLinear", lambda: levels(FLOAT4, (1, 16), False)),
    "whole levels": ("MatMulNBits", lambda: levels(IQ4_LEVELS, (1, 32), False)),
    "ternary": ("BitLinear", lambda: scheme("ternary").quantize(numbers(OUTPUTS, INPUTS))),
    # what no operator has: groups of 3, groups of different sizes, a table of one's own
    "groups of 3": ("MatMul", lambda: Integers(4, True, "group", 3).quantize(numbers(OUTPUTS, INPUTS))),
    "uneven groups": ("MatMul", lambda: moved(RNG.integers(0, 3, INPUTS), 32)),
    "own levels": ("MatMul", lambda: levels(np.linspace(-1, 1, 16, dtype=np.float32), (1, 32), False)),
}


def expected(weight: Quantized, x: Array) -> Array:
    if weight.scheme != "ternary":
        return x @ weight.dequantize().T
    layer = nn.QuantizedLinear(weight)
    sizes = {"K": weight.shape[1], "N": weight.shape[0]}
    body = registry.evaluate("BitLinear", x, layer.codes.numpy(), layer.scales.numpy(), domain="ranvier", **sizes)
    return np.asarray(body)


@pytest.mark.parametrize("kind", CODED)
def test_products(kind: str) -> None:
    operator, make = CODED[kind]
    weight, bias = make(), numbers(OUTPUTS)
    bias = bias[: weight.shape[0]]
    layer = nn.QuantizedLinear(weight, bias)
    assert operator in repr(layer) and (layer.out_features, layer.in_features) == weight.shape
    compiled = rv.jit(lambda x: layer(x))
    for shape in ((1,), (5,), (2, 3), ()):
        x = numbers(*shape, weight.shape[1])
        wanted = expected(weight, x.reshape(-1, x.shape[-1])).reshape(*shape, -1) + bias
        for run in (layer, compiled):
            np.testing.assert_allclose(run(rv.Tensor(x)).numpy(), wanted, rtol=2e-4, atol=2e-4)
    if operator != "MatMul":
        assert layer.nbytes < 0.5 * 4 * weight.codes.size


@pytest.mark.parametrize("kind", CODED)
def test_gradients_go_through_to_the_input(kind: str) -> None:
    weight = CODED[kind][1]()
    layer, x, along = nn.QuantizedLinear(weight), numbers(3, weight.shape[1]), numbers(3, weight.shape[0])
    found = rv.grad(lambda x: (layer(x) * along).sum())(rv.Tensor(x)).numpy()
    np.testing.assert_allclose(found, along @ weight.dequantize(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["uint4", "nf4", "ternary", "float8"])
def test_adapters_learn_beside_codes_that_stay(kind: str) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.QuantizedLinear(CODED[kind][1](), np.zeros(OUTPUTS, np.float32))
            self.down, self.up = nn.Linear(INPUTS, 4, bias=False), nn.Linear(4, OUTPUTS, bias=False)

        def forward(self, x: Any) -> rv.Tensor:
            return self.base(x) + self.up(self.down(x))

    model, x, wanted = Adapted(), rv.Tensor(numbers(16, INPUTS)), rv.Tensor(numbers(16, OUTPUTS))
    opt = optim.Adam(model.parameters(), lr=0.02)
    before = {name: value.numpy().copy() for name, value in model.state_dict().items()}

    @rv.jit
    def step(x: rv.Tensor, t: rv.Tensor) -> rv.Tensor:
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), t)
        loss.backward()
        opt.step()
        return loss

    losses = [float(step(x, wanted)) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    changed = {name for name, value in model.state_dict().items() if not np.array_equal(value.numpy(), before[name])}
    assert changed == {"base.bias", "down.weight", "up.weight"}


def test_codes_are_part_of_compiled_functions_until_others_are_loaded() -> None:
    first, second = (nn.QuantizedLinear(CODED["uint4"][1]()) for _ in range(2))
    compiled, x = rv.jit(lambda x: first(x)), rv.Tensor(numbers(2, INPUTS))
    before = compiled(x).numpy()
    assert compiled.graphs == 1
    first.load_state_dict(second.state_dict())
    np.testing.assert_allclose(compiled(x).numpy(), second(x).numpy(), rtol=1e-5, atol=1e-5)
    assert compiled.graphs == 2 and not np.allclose(before, compiled(x).numpy())
    compiled(x)
    assert compiled.graphs == 2


def test_functions_of_one_layer_have_its_codes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    own = weight_only.pack_coded
    monkeypatch.setattr(weight_only, "pack_coded", lambda *a, **k: [packed.append(1), own(*a, **k)][1])
    layer, other = (nn.QuantizedLinear(CODED["uint4"][1]()) for _ in range(2))

    def compiled(factor: float) -> Any:
        return rv.jit(lambda x: layer(x) * factor)

    one, two, x = compiled(2.0), compiled(3.0), numbers(5, INPUTS)
    found = [run(rv.Tensor(x[:rows])).numpy() for run in (one, two) for rows in (1, 5)]
    np.testing.assert_allclose(found[1] * 3, found[3] * 2, rtol=1e-5, atol=1e-5)
    assert len(packed) == 1
    rv.jit(lambda x: other(x))(rv.Tensor(x)).numpy()
    assert len(packed) == 2
    del one, two, found
    gc.collect()
    compiled(4.0)(rv.Tensor(x)).numpy()  # nobody had it any more
    assert len(packed) == 3


def test_a_constant_is_not_assigned_by_the_function_it_is_part_of() -> None:
    held = Constant(np.arange(3.0, dtype=np.float32))
    with pytest.raises(InvalidInput, match="is part of the function"):
        rv.jit(lambda x: held.assign(held + x))(rv.Tensor(np.ones(3, np.float32)))
    held.assign(np.ones(3, np.float32))
    np.testing.assert_array_equal((held + 1).numpy(), np.full(3, 2.0))


def test_copies() -> None:
    layer, x = nn.QuantizedLinear(CODED["moved groups"][1](), numbers(OUTPUTS)), rv.Tensor(numbers(2, INPUTS))
    wanted = layer(x).numpy()  # compiled by now
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(made(x).numpy(), wanted)
        assert made.codes is not layer.codes


@pytest.mark.parametrize("kind", ["uint4", "nf4", "float8"])
def test_inputs_of_16_bits(kind: str) -> None:
    weight, x = CODED[kind][1](), numbers(4, INPUTS)
    found = nn.QuantizedLinear(weight)(rv.Tensor(x.astype(np.float16)))
    assert found.dtype.name == "float16"
    np.testing.assert_allclose(found.numpy().astype(np.float32), expected(weight, x), rtol=0.05, atol=0.2)


@pytest.mark.parametrize("kind", ["uint4", "nf4", "float8", "nvfp4", "ternary"])
def test_a_module_in_16_bits_keeps_its_codes(kind: str) -> None:
    weight, x = CODED[kind][1](), numbers(4, INPUTS)
    model = nn.Sequential(nn.QuantizedLinear(weight), nn.LayerNorm(OUTPUTS)).half()
    codes = model[0].codes
    assert codes.dtype.name != "float16" and model[1].weight.dtype.name == "float16"
    found = model(rv.Tensor(x.astype(np.float16))).numpy().astype(np.float32)
    rows = expected(weight, x)
    wanted = (rows - rows.mean(-1, keepdims=True)) / rows.std(-1, keepdims=True)
    np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05)


def test_8_bit_activations() -> None:
    weight, x = CODED["uint4"][1](), numbers(4, INPUTS)
    found = nn.QuantizedLinear(weight, activations="int8")(rv.Tensor(x)).numpy()
    off = np.linalg.norm(found - expected(weight, x)) / np.linalg.norm(found)
    assert 1e-4 < off < 0.02
    with pytest.raises(InvalidInput, match="int4"):
        nn.QuantizedLinear(weight, activations="int4")


def test_what_does_not_fit() -> None:
    layer = nn.QuantizedLinear(CODED["uint4"][1]())
    with pytest.raises(ShapeMismatch, match="95"):
        layer(rv.Tensor(numbers(2, 95)))
    with pytest.raises(DTypeMismatch, match="int64"):
        layer(rv.Tensor(np.zeros((2, INPUTS), np.int64)))
    with pytest.raises(ShapeMismatch, match="bias"):
        nn.QuantizedLinear(CODED["uint4"][1](), numbers(3))
    with pytest.raises(InvalidConfig, match="out, in"):
        nn.QuantizedLinear(scheme("ternary").quantize(numbers(4)))


TABLES = ["uint4", "int3", "int2", "int8 of rows", "nf4", "nvfp4", "whole levels", "moved groups", "groups of 3"]


def between(features: int) -> Quantized:
    """Codes whose zeros lie between them, as those of GGUF with minima."""
    codes = RNG.integers(0, 16, (OUTPUTS, features)).astype(np.uint8)
    scales = RNG.uniform(0.5, 2, (OUTPUTS, -(-features // 32))).astype(np.float32)
    return Quantized("q4_1", codes, scales, (1, 32), 4, RNG.uniform(0, 15, scales.shape).astype(np.float32), axis=1)


@pytest.mark.parametrize("kind", [*TABLES, "zeros between codes", "a last group that is not full"])
def test_tables(kind: str) -> None:
    made = {"zeros between codes": 96, "a last group that is not full": 80}
    weight = between(made[kind]) if kind in made else CODED[kind][1]()
    table = nn.QuantizedEmbedding(weight)
    assert (table.num_embeddings, table.embedding_dim) == weight.shape
    few = "GatherBlockQuantized" in repr(table)
    assert few == (kind not in ("nf4", "moved groups", "groups of 3", "a last group that is not full"))
    compiled = rv.jit(lambda x: table(x))
    for places in (np.array([3, 0, 39, 3]), np.array([[1], [2]]), np.array(7)):
        for run in (table, compiled):
            found = run(rv.Tensor(places)).numpy()
            np.testing.assert_allclose(found, weight.dequantize()[places], rtol=1e-5, atol=1e-5)
    with pytest.raises(DTypeMismatch, match="integers"):
        table(rv.Tensor(numbers(2)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(INPUTS)
        self.inner = nn.Sequential(nn.Linear(INPUTS, 64), nn.GELU(), nn.Linear(64, INPUTS, bias=False))
        self.head = nn.Linear(INPUTS, 10)
        self.few = nn.Linear(4, INPUTS)
        self.table = nn.Embedding(64, 32)

    def forward(self, x: Any) -> rv.Tensor:
        x = self.norm(x)
        return self.head(x + self.inner(x))


@pytest.mark.parametrize("name", ["int8w", "int4", "uint4", "nf4", "fp8", "ternary"])
def test_a_module_in_few_bits(name: str, tmp_path: Path) -> None:
    model, x = Net(), numbers(5, INPUTS)
    wanted = model(rv.Tensor(x)).numpy()
    assert nn.quantize_(model, name, keep=["head"]) == ["inner.0", "inner.2"]
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    assert [kinds[path] for path in ("inner.0", "inner.2")] == ["QuantizedLinear"] * 2
    assert kinds["head"] == kinds["few"] == "Linear"
    found = model(rv.Tensor(x)).numpy()
    off = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 1e-5 < off < (0.6 if name == "ternary" else 0.1)
    rv.export(model, rv.Tensor(x), tmp_path / "m.onnx")
    operators = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert operators & {"MatMulNBits", "MatMulBnb4", "BitLinear", "DequantizeLinear"}
    again = next(iter(rv.load(tmp_path / "m.onnx").run([x]).values()))
    np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-4)


def test_layers_that_share_weights_share_their_codes() -> None:
    model = nn.ModuleList([nn.Linear(32, 32)])
    model.append(model[0])
    assert nn.quantize_(model, group=16) == ["0", "1"]
    assert model[0] is model[1]


def test_schemes_and_weights_that_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="needs samples"):
        nn.quantize_(Net(), "gptq")
    with pytest.raises(InvalidConfig, match="known: int8w"):
        nn.quantize_(Net(), "int5")
    model = Net()
    array = model.head.weight.numpy().copy()
    array[1, 2] = np.nan
    model.head.weight.assign(array)
    with pytest.raises(RanvierError) as raised:
        nn.quantize_(model)
    assert any("'head'" in note for note in raised.value.__notes__)


def words(codes: Array) -> Array:
    """Codes of 4 bits along the first axis as 32-bit words, the low ones first."""
    grouped = codes.astype(np.uint32).reshape(-1, 8, codes.shape[1])
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    return np.bitwise_or.reduce(grouped << shifts, axis=1).view(np.int32)


def checkpoint(path: Path, net: Net) -> tuple[dict[str, Any], dict[str, Array]]:
    """A GPTQ checkpoint of a network, and the weights that its codes stand for."""
    tensors = {name: value.numpy() for name, value in net.state_dict().items()}
    stands_for = {}
    for name in ("inner.0", "inner.2", "table"):
        outputs, inputs = tensors.pop(f"{name}.weight").shape
        codes, zeros = RNG.integers(0, 16, (inputs, outputs)), RNG.integers(1, 16, (inputs // 32, outputs))
        scales = (RNG.random(zeros.shape) * 0.05).astype(np.float16)
        tensors[f"{name}.qweight"] = words(codes)
        tensors[f"{name}.qzeros"] = words((zeros - 1).T).T.copy()
        tensors[f"{name}.scales"] = scales
        tensors[f"{name}.g_idx"] = (np.arange(inputs) // 32).astype(np.int32)
        each = np.repeat(scales.astype(np.float32), 32, axis=0) * (codes - np.repeat(zeros, 32, axis=0))
        stands_for[name] = each.T
    save_safetensors(path, tensors)
    return {"quant_method": "gptq", "bits": 4, "group_size": 32}, stands_for


class Told:
    """Keeps what progress is told."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        self.said.append(("begin", total))

    def advance(self, name: str, count: int) -> None:
        self.said.append(("advance", count))

    def end(self, name: str) -> None:
        self.said.append(("end",))


def test_a_checkpoint_with_codes(tmp_path: Path) -> None:
    path, trained, x = tmp_path / "m.safetensors", Net(), numbers(3, INPUTS)
    trained.norm.bias.assign(numbers(INPUTS))
    config, weights = checkpoint(path, trained)
    model, told = Net(), Told()
    found = nn.load_quantized_(model, WeightLoader(offline=True).open(path), config, progress=told)
    assert found == ([], [])
    begun, *advanced, ended = told.said
    held = load_file(path)
    codes = sum(v.nbytes for k, v in held.items() if k.rpartition(".")[2] in ("qweight", "qzeros", "scales", "g_idx"))
    assert begun == ("begin", codes) and ended == ("end",) and sum(count for _, count in advanced) == codes
    assert len(advanced) == len(weights)
    for name, weight in weights.items():
        trained.get_submodule(name).weight.assign(weight.astype(np.float32))
    places = rv.Tensor(np.array([5, 63]))
    np.testing.assert_allclose(model.table(places).numpy(), trained.table(places).numpy(), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(model(rv.Tensor(x)).numpy(), trained(rv.Tensor(x)).numpy(), rtol=1e-3, atol=1e-3)
    assert isinstance(model.get_submodule("inner.2"), nn.QuantizedLinear)
    assert isinstance(model.table, nn.QuantizedEmbedding)


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    config, _ = checkpoint(path, Net())
    tensors = WeightLoader(offline=True).open(path)

    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(InvalidInput, match=r"without a value: more.bias, more.weight"):
        nn.load_quantized_(More(), tensors, config)
    loaded = nn.load_quantized_(More(), tensors, config, strict=False)
    assert loaded.missing_keys == ["more.bias", "more.weight"]
    lacking = Net()
    lacking.inner = nn.Sequential(nn.Linear(INPUTS, 64))
    with pytest.raises(InvalidInput, match=r"not known here: inner\.2"):
        nn.load_quantized_(lacking, tensors, config)
    other = Net()
    other.inner.add_module("0", nn.Linear(INPUTS, 32))
    told = Told()
    with pytest.raises(ShapeMismatch, match=r"inner.0.weight has the shape \[32, 96\], not \[64, 96\]"):
        nn.load_quantized_(other, tensors, config, progress=told)
    assert told.said[-1] == ("end",)  # a bar goes away also where something fails


def test_a_checkpoint_is_read_again_after_one_that_could_not_be(tmp_path: Path) -> None:
    good, bad, trained = tmp_path / "good.safetensors", tmp_path / "bad.safetensors", Net()
    config, weights = checkpoint(good, trained)
    tensors = dict(load_file(good))
    save_safetensors(bad, {**tensors, "inner.2.scales": tensors["inner.2.scales"][:1]})
    model, x = Net(), numbers(3, INPUTS)
    with pytest.raises(WeightError, match=r"layer 'inner\.2'"):
        nn.load_quantized_(model, WeightLoader(offline=True).open(bad), config)
    for name, weight in weights.items():
        trained.get_submodule(name).weight.assign(weight.astype(np.float32))
    for _ in range(2):
        assert nn.load_quantized_(model, WeightLoader(offline=True).open(good), {"quantization_config": config}) == (
            [],
            [],
        )
        np.testing.assert_allclose(model(rv.Tensor(x)).numpy(), trained(rv.Tensor(x)).numpy(), rtol=1e-3, atol=1e-3)
    other, others = checkpoint(tmp_path / "other.safetensors", Net())
    nn.load_quantized_(model, WeightLoader(offline=True).open(tmp_path / "other.safetensors"), other)
    found = model.table(rv.Tensor(np.arange(64))).numpy()
    np.testing.assert_allclose(found, others["table"], rtol=1e-3, atol=1e-3)


class Held(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(np.zeros(shape, np.float32))


def test_codes_of_a_checkpoint_become_numbers_where_a_module_has_numbers(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    kind, path = gguf.GGMLQuantizationType.Q8_0, tmp_path / "m.gguf"
    coded = gguf.quants.quantize(numbers(2, 3, 64), kind)
    writer = gguf.GGUFWriter(path, "other")
    writer.add_tensor("exps.weight", coded, raw_dtype=kind)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    model = nn.ModuleDict({"exps": Held(2, 3, 64)})
    assert nn.load_quantized_(model, WeightLoader(offline=True).open(path)) == ([], [])
    np.testing.assert_array_equal(model["exps"].weight.numpy(), gguf.quants.dequantize(coded, kind))


def test_layers_that_have_no_place_are_told_once(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    blocks = RNG.integers(0, 256, (2, 4, 1, 16)).astype(np.uint8)
    held = {"exps.up_blocks": blocks, "exps.up_scales": np.full((2, 4, 1), 127, np.uint8), "own.weight": numbers(3)}
    save_safetensors(path, held)
    model, config = nn.ModuleDict({"own": Held(3)}), {"quant_method": "mxfp4"}
    loaded = nn.load_quantized_(model, WeightLoader(offline=True).open(path), config, strict=False)
    assert loaded == ([], ["exps.up"])
    np.testing.assert_array_equal(model["own"].weight.numpy(), held["own.weight"])
