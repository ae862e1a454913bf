"""Codes that come from a file: read when a layer is made, in memory until they are packed, read again when wanted."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from pathlib import Path
from typing import Any
from weakref import ref

import ml_dtypes
import numpy as np
import pytest

import ranvier as rv
from ranvier import nn
from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.providers.cpu.lower import dequantized_weights, weight_only
from ranvier.quantize import Integers, Quantized, Ternary, scheme
from ranvier.tensor.nn.modules import coded
from ranvier.tensor.stored import constant_behind
from ranvier.weights import FileChanged, WeightLoader, save_safetensors
from ranvier.weights.quantized import quantized_layers
from tests.weights.changing import CHANGES, HARMLESS, Event, aged, cut_off, written_over

Array = np.ndarray[Any, Any]
INPUTS, OUTPUTS = 128, 160
KINDS = {
    "uint4": lambda w: Integers(4, False, "group", 32, signed=False).quantize(w),
    "int8": lambda w: Integers(8, True, "channel").quantize(w),
    "nf4": lambda w: scheme("nf4").quantize(w),
    "float8": lambda w: scheme("fp8").quantize(w),
    "ternary": lambda w: Ternary().quantize(w),
}


@pytest.fixture(autouse=True)
def also_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "_LEAST", 1024)


class Reader:
    """Makes the same codes whenever it is called, and counts."""

    def __init__(self, kind: str, *shape: int, lasting: bool = True) -> None:
        self.kind, self.shape, self.lasting, self.times = kind, shape, lasting, 0

    def __call__(self) -> Quantized:
        self.times += 1
        rng = np.random.default_rng(5)
        return KINDS[self.kind](rng.standard_normal(self.shape or (OUTPUTS, INPUTS)).astype(np.float32))


def numbers(*shape: int) -> Array:
    return np.random.default_rng(6).standard_normal(shape).astype(np.float32)


def in_memory(layer: nn.Module, name: str = "codes") -> ref[Array]:
    """Dies with the codes of a layer, if nobody else has them."""
    constant = constant_behind(layer._buffers[name]._held)
    assert constant is not None
    return ref(constant.raw())


def read_another() -> None:
    """Others that were read again go then."""
    layer = nn.QuantizedLinear(Reader("uint4"))
    layer(numbers(1, INPUTS)).realise()
    layer.codes.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_go_when_they_are_packed(kind: str) -> None:
    read = Reader(kind)
    kept, layer = nn.QuantizedLinear(read()), nn.QuantizedLinear(read)
    there = in_memory(layer)
    assert there() is not None and read.times == 2
    for rows in (1, 5, 33):
        x = numbers(rows, INPUTS)
        np.testing.assert_array_equal(layer(x).numpy(), kept(x).numpy())
    gc.collect()
    assert there() is None
    assert read.times == 2  # also for other numbers of rows
    np.testing.assert_array_equal(layer.codes.numpy(), kept.codes.numpy())
    np.testing.assert_array_equal(layer.scales.numpy(), kept.scales.numpy())
    assert read.times == 3  # both of one reading
    assert layer.nbytes == kept.nbytes


def test_codes_that_cannot_be_read_again_stay() -> None:
    read = Reader("uint4", lasting=False)
    layer = nn.QuantizedLinear(read)
    layer(numbers(2, INPUTS)).realise()
    assert constant_behind(layer.codes._held) is None
    layer.codes.numpy()
    assert read.times == 1


def test_what_is_read_again_goes_again() -> None:
    layer = nn.QuantizedLinear(Reader("uint4"))
    layer(numbers(2, INPUTS)).realise()
    there = in_memory(layer)
    assert there() is not None  # for the one who asks for what belongs to it
    read_another()
    gc.collect()
    assert there() is None


def test_copies_and_states() -> None:
    read = Reader("uint4")
    layer = nn.QuantizedLinear(read, numbers(OUTPUTS))
    x = numbers(3, INPUTS)
    expected = layer(x).numpy()
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(made(x).numpy(), expected)
    taken = layer.state_dict()
    empty = nn.QuantizedLinear(Integers(4, False, "group", 32, signed=False).quantize(numbers(OUTPUTS, INPUTS) + 1))
    empty.register_parameter("bias", nn.Parameter(np.zeros(OUTPUTS, np.float32)))
    empty.load_state_dict(taken)
    np.testing.assert_array_equal(empty(x).numpy(), expected)
    layer.codes.assign(empty.codes.value)  # from now on it holds these
    times = read.times
    np.testing.assert_array_equal(layer(x).numpy(), expected)
    assert read.times == times


@pytest.mark.parametrize("lasting", [False, True])
def test_a_module_that_is_moved_to_where_it_is_compiles_nothing(lasting: bool) -> None:
    layer: Any = nn.QuantizedLinear(Reader("uint4", lasting=lasting))
    x = numbers(2, INPUTS)
    layer(x).realise()
    layer.to(device="cpu", dtype="float32")(x).realise()
    assert layer._compiled().traces == 1

    @rv.jit
    def moves(x: Any) -> rv.Tensor:
        found: rv.Tensor = layer.to(device="sim")(x)
        return found

    with pytest.raises(InvalidInput, match="a constant is part of the function that assigns it"):
        moves(x)
    np.testing.assert_array_equal(layer(x).numpy(), nn.QuantizedLinear(Reader("uint4"))(x).numpy())


def test_gradients() -> None:
    read = Reader("uint4")
    kept, layer = nn.QuantizedLinear(read()), nn.QuantizedLinear(read)
    x = numbers(3, INPUTS)
    layer(x).realise()

    def slope(of: nn.Module, jitted: bool) -> Array:
        derived = rv.grad(lambda given: (of(given) ** 2).sum())
        found: Array = (rv.jit(derived) if jitted else derived)(rv.Tensor(x)).numpy()
        return found

    for jitted in (False, True):
        np.testing.assert_array_equal(slope(layer, jitted), slope(kept, jitted))


def test_what_gradients_read_goes_with_the_functions_that_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of jit they read codes as they are, step after step."""
    packed: list[int] = []
    pack = weight_only.pack_coded
    monkeypatch.setattr(weight_only, "pack_coded", lambda *given, **named: packed.append(1) or pack(*given, **named))
    read = Reader("uint4")
    layer, x = nn.QuantizedLinear(read), nn.Parameter(numbers(3, INPUTS))
    for _ in range(3):
        layer(x).sum().backward()
        assert x.grad is not None
        x.grad.numpy()
    assert read.times == 2
    there = in_memory(layer)
    rv.jit(lambda x: 2 * layer(x))(numbers(2, INPUTS)).realise()
    assert len(packed) == 1  # it is known that these codes are the same
    read_another()
    layer._compiled().clear()  # type: ignore[attr-defined]
    gc.collect()
    assert there() is None


def test_functions_that_look_at_codes_while_they_are_traced() -> None:
    layer = nn.QuantizedLinear(Reader("uint4"))
    there = in_memory(layer)
    rv.jit(lambda x: float(layer.codes.numpy().max()) * layer(x))(numbers(2, INPUTS)).realise()
    read_another()
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_packed_of_one_reading_while_others_read_theirs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, x = Reader(kind), numbers(2, INPUTS)
    layer, other = nn.QuantizedLinear(read), nn.QuantizedLinear(Reader("int8"))
    expected = layer(x).numpy()
    other(x).realise()
    layer._compiled().clear()  # type: ignore[attr-defined]
    gc.collect()
    times, pack = read.times, weight_only.pack_coded

    def disturbed(some: Any, *given: Any, **named: Any) -> Any:
        def part(*which: int) -> Array:
            other.codes.numpy()
            return some(*which)

        return pack(part, *given, **named)

    monkeypatch.setattr(weight_only, "pack_coded", disturbed)
    monkeypatch.setattr(dequantized_weights, "pack_coded", disturbed)
    np.testing.assert_array_equal(layer(x).numpy(), expected)
    assert read.times == times + 1


def test_who_reads_may_compute_with_tensors() -> None:
    weight = numbers(OUTPUTS, INPUTS)
    layer = nn.QuantizedLinear(lambda: KINDS["uint4"]((rv.Tensor(weight) * 2).numpy()))
    layer(numbers(2, INPUTS)).realise()  # codes have gone
    found: list[Array] = []
    thread = threading.Thread(target=lambda: found.append((layer.codes + 1).numpy()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for itself"


def test_exported(tmp_path: Path) -> None:
    layer = nn.QuantizedLinear(Reader("uint4"))
    x = numbers(3, INPUTS)
    expected = layer(x).numpy()
    rv.export(layer, rv.Tensor(x), tmp_path / "m.onnx", dynamic_axes={"input": {0: "rows"}})
    (found,) = rv.load(tmp_path / "m.onnx").run({"input": x}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_tables() -> None:
    read = Reader("uint4")
    kept, table = nn.QuantizedEmbedding(read()), nn.QuantizedEmbedding(read)
    for rows in ([3, 0, 159], [1]):
        np.testing.assert_array_equal(table(np.array(rows)).numpy(), kept(np.array(rows)).numpy())
    assert read.times == 2


@pytest.mark.parametrize("gate", [False, True])
def test_experts(gate: bool) -> None:
    def layers(given: dict[str, Any]) -> nn.QuantizedExperts:
        return nn.QuantizedExperts(**given, top_k=2, activation="silu" if gate else "relu")

    shapes = {"up": (4, 64, 32), "down": (4, 32, 64)} | ({"gate": (4, 64, 32)} if gate else {})
    readers = {name: Experts(shape) for name, shape in shapes.items()}
    kept, own = layers({name: read() for name, read in readers.items()}), layers(readers)
    there = in_memory(own, "fc1_codes"), in_memory(own, "fc2_codes")
    for tokens in (1, 7):
        x, likes = numbers(tokens, 32), numbers(tokens, 4)
        np.testing.assert_array_equal(own(x, likes).numpy(), kept(x, likes).numpy())
    gc.collect()
    assert [each() for each in there] == [None, None]
    assert {read.times for read in readers.values()} == {2}
    for name, buffer in own.named_buffers():
        np.testing.assert_array_equal(buffer.numpy(), dict(kept.named_buffers())[name].numpy())


class Experts:
    """As :class:`Reader`, of one expert after the other."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.times = shape, 0

    def __call__(self) -> list[Quantized]:
        self.times += 1
        rng = np.random.default_rng(sum(self.shape))
        return [KINDS["uint4"](rng.standard_normal(self.shape[1:]).astype(np.float32)) for _ in range(self.shape[0])]


def checkpoint(path: Path) -> dict[str, Array]:
    """Of a layer in float8."""
    rng = np.random.default_rng(8)
    codes = rng.standard_normal((OUTPUTS, INPUTS)).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"inner.weight": codes, "inner.weight_scale": rng.uniform(0.5, 2, (OUTPUTS, 1)).astype(np.float32)}
    save_safetensors(path, tensors)
    return tensors


class Holder(nn.Module):
    def __init__(self, outputs: int = OUTPUTS) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, outputs, bias=False)

    def forward(self, x: Any) -> rv.Tensor:
        found: rv.Tensor = self.inner(x)
        return found


def test_a_checkpoint_is_read_again_where_it_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = checkpoint(path)
    opened = WeightLoader().open(path)
    assert quantized_layers(opened)["inner"].lasting
    assert len({*quantized_layers(opened).values(), *quantized_layers(opened).values()}) == 2  # as functions are
    module = Holder()
    nn.load_quantized_(module, opened)
    there = in_memory(module.inner)
    x = numbers(3, INPUTS)
    expected = x @ (tensors["inner.weight"].astype(np.float32) * tensors["inner.weight_scale"]).T
    np.testing.assert_allclose(module(x).numpy(), expected, rtol=1e-4, atol=1e-4)
    gc.collect()
    assert there() is None
    path.unlink()  # what is mapped stays
    np.testing.assert_array_equal(module.inner.codes.numpy().T, tensors["inner.weight"])
    wrong = Holder(OUTPUTS + 1)
    with pytest.raises(ShapeMismatch, match=r"inner.weight has the shape"):
        nn.load_quantized_(wrong, opened)


def test_a_checkpoint_in_memory_is_not(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    checkpoint(path)
    opened = WeightLoader().open(path.read_bytes(), format="safetensors")
    assert not quantized_layers(opened)["inner"].lasting
    module = Holder()
    nn.load_quantized_(module, opened)
    assert constant_behind(module.inner.codes._held) is None


def gguf_file(path: Path, **shapes: tuple[int, ...]) -> None:
    gguf = pytest.importorskip("gguf")
    writer, kind = gguf.GGUFWriter(path, "test"), gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers(*shape), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FILES = {"m.safetensors": checkpoint, "m.gguf": lambda path: gguf_file(path, inner=(OUTPUTS, INPUTS))}
SENTENCE = r"m\.\w+' (was written to after|had \d+ bytes when) .*: load the model again"


def loaded(path: Path) -> Holder:
    FILES[path.name](path)
    aged(path)
    module = Holder()
    nn.load_quantized_(module, WeightLoader().open(path))
    return module


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("event", CHANGES)
def test_codes_of_a_file_that_was_written_to_are_not_packed(tmp_path: Path, name: str, event: Event) -> None:
    module = loaded(tmp_path / name)
    function, x = rv.jit(module), numbers(3, INPUTS)
    expected = function(x).numpy()
    event(tmp_path / name)
    np.testing.assert_array_equal(function(x).numpy(), expected)  # what is packed is there
    assert function(numbers(5, INPUTS)).numpy().shape == (5, OUTPUTS)
    function.clear()
    gc.collect()
    for _ in range(2):
        with pytest.raises(FileChanged, match=SENTENCE):
            function(numbers(7, INPUTS)).realise()
        with pytest.raises(FileChanged, match=SENTENCE):
            module(numbers(7, INPUTS)).realise()
        with pytest.raises(FileChanged, match=SENTENCE):
            module.inner.codes.numpy()
    with pytest.raises(FileChanged, match=SENTENCE):
        rv.export(module, rv.Tensor(x), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("event", HARMLESS)
def test_codes_of_a_file_that_was_replaced_are_those_that_were_loaded(tmp_path: Path, name: str, event: Event) -> None:
    module = loaded(tmp_path / name)
    function, x = rv.jit(module), numbers(7, INPUTS)
    expected = function(x).numpy()
    function(numbers(3, INPUTS)).realise()
    there = in_memory(module.inner)
    event(tmp_path / name)
    function.clear()
    read_another()
    gc.collect()
    assert there() is None
    np.testing.assert_array_equal(function(x).numpy(), expected)


@pytest.mark.parametrize("event", [written_over, cut_off])
@pytest.mark.parametrize("outputs", [1, OUTPUTS])
def test_codes_in_memory_stay_what_they_are(tmp_path: Path, outputs: int, event: Event) -> None:
    """Those of one output lie in their file as the processor has them."""
    path = tmp_path / "m.safetensors"
    codes = numbers(outputs, 2048).astype(ml_dtypes.float8_e4m3fn)
    scales = np.full((outputs, 1), 0.5, np.float32)
    save_safetensors(path, {"a.weight": codes, "a.weight_scale": scales})
    aged(path)
    layer = nn.QuantizedLinear(quantized_layers(WeightLoader().open(path))["a"])
    assert constant_behind(layer.codes._held) is not None
    event(path)
    x = numbers(3, 2048)
    np.testing.assert_allclose(layer(x).numpy(), x @ (codes.astype(np.float32) / 2).T, rtol=1e-4, atol=1e-3)


def test_experts_of_a_file_that_was_written_to(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_file(path, up=(4, 64, 32), down=(4, 32, 64))
    aged(path)
    layers = quantized_layers(WeightLoader().open(path))
    experts = nn.QuantizedExperts(layers["up"], layers["down"], top_k=2, activation="relu")
    experts(numbers(1, 32), numbers(1, 4)).realise()
    written_over(path)
    experts(numbers(1, 32), numbers(1, 4)).realise()
    experts._compiled().clear()  # type: ignore[attr-defined]
    read_another()
    gc.collect()
    with pytest.raises(FileChanged, match=SENTENCE):
        experts(numbers(7, 32), numbers(7, 4)).realise()
