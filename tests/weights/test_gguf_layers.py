"""Blocks of GGUF files as codes, held against what the package gguf makes of the same bytes."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn
from ranvier.codegen.llvm.coded.numbers import factored
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, NotSupported, WeightError
from ranvier.ops import evaluate
from ranvier.quantize import rows
from ranvier.quantize.base import Quantized
from ranvier.runtime.quantizing.coded_forms import linear_form
from ranvier.runtime.quantizing.grouped import in_groups
from ranvier.weights import WeightLoader, save_safetensors
from ranvier.weights.quantized import gguf_grids, quantized_layers
from ranvier.weights.quantized.gguf_blocks import KINDS, gguf_layer
from ranvier.weights.stored import TensorInfo
from tests.providers.cpu.compare import one_node, run

gguf = pytest.importorskip("gguf")

Array = np.ndarray[Any, Any]
# where the float16 of a block lie, how many bits a code has and how many weights share a scale
HALVES = {
    "Q4_0": ((0,), 4, 32),
    "Q4_1": ((0, 2), 4, 32),
    "Q5_0": ((0,), 5, 32),
    "Q5_1": ((0, 2), 5, 32),
    "Q8_0": ((0,), 8, 32),
    "Q2_K": ((80, 82), 2, 16),
    "Q3_K": ((108,), 3, 16),
    "Q4_K": ((0, 2), 4, 32),
    "Q5_K": ((0, 2), 5, 32),
    "Q6_K": ((208,), 6, 16),
    "IQ4_NL": ((0,), 4, 32),
    "IQ4_XS": ((0,), 4, 32),
    "MXFP4": ((), 4, 32),
    "IQ1_S": ((0,), 2, 32),
    "IQ1_M": ((), 4, 16),  # its float16 is in four pieces
    "IQ2_XXS": ((0,), 3, 32),
    "IQ2_XS": ((0,), 3, 16),
    "IQ2_S": ((0,), 3, 16),
    "IQ3_XXS": ((0,), 6, 32),
    "IQ3_S": ((0,), 4, 32),
}
# of which a file has positions in a grid, and no codes; and bits of what groups have: scales, and of IQ1_S zeros
GRIDS = {"IQ1_S": 4, "IQ1_M": 3, "IQ2_XXS": 4, "IQ2_XS": 4, "IQ2_S": 4, "IQ3_XXS": 4, "IQ3_S": 4}
TABLES = ("IQ4_NL", "IQ4_XS", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S")
BETWEEN = ("IQ1_S", "IQ1_M", "IQ3_S")  # zeros that lie between codes, and are no minima
MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
TERNARY = ("TQ1_0", "TQ2_0")
# bytes that hold the scales of groups
SCALES = {"Q2_K": slice(0, 16), "Q4_K": slice(4, 16), "Q5_K": slice(4, 16)}
REFUSED = ("Q8_1", "Q8_K")


def sizes(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(block), int(size)


def expected(data: Array, kind: str) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))


def random_blocks(kind: str, n: int, blocks: int, seed: int) -> Array:
    """Any bytes, but for scales that a model may have."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (n, blocks, sizes(kind)[1]), np.uint8)
    for at in HALVES[kind][0]:
        halves = (rng.normal(size=(n, blocks, 1)) * 10.0 ** rng.integers(-4, 2, (n, blocks, 1))).astype("<f2")
        data[..., at : at + 2] = halves.view(np.uint8)
    if kind == "IQ1_M":
        halves = (rng.normal(size=(n, blocks, 1)) * 10.0 ** rng.integers(-4, 2, (n, blocks, 1))).astype("<f2")
        set_pieces(data, halves)
    if kind == "MXFP4":
        data[..., 0] = rng.integers(0, 240, (n, blocks))
        data[0, 0, 0], data[0, -1, 0] = 0, 1  # the least powers are no normal numbers of float32
    return data.reshape(n, -1)


def set_pieces(blocks: Array, halves: Array) -> None:
    """The float16 of IQ1_M: four bits of it above twelve others, four times."""
    words = np.ascontiguousarray(blocks[..., 48:]).view("<u2") & 0x0FFF
    pieces = (halves.view("<u2") >> np.array([0, 4, 8, 12], np.uint16)) & 0xF
    blocks[..., 48:] = (words | pieces << 12).astype("<u2").view(np.uint8)


def tensor(data: Array, kind: str, shape: tuple[int, ...] | None = None) -> Any:
    block, size = sizes(kind)
    shape = shape or (data.shape[0], data.shape[1] // size * block)
    info = TensorInfo("a.weight", DType.float32, shape, data.nbytes, kind)
    return SimpleNamespace(info=info, raw=SimpleNamespace(read=lambda: data))


def check(coded: Quantized, numbers: Array) -> None:
    """Where zeros stand for minima, three roundings of float32 are allowed for; else there is none."""
    got = coded.dequantize()
    assert got.dtype == np.float32 and got.shape == numbers.shape
    if coded.scheme.upper() not in MINIMA:
        np.testing.assert_array_equal(got, numbers)
        return
    terms = (coded.codes + np.abs(coded.each(coded.zeros))) * np.abs(coded.each(coded.scales))
    assert (np.abs(got - numbers) <= 4 * 2.0**-24 * terms).all()


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("seed", range(3))
def test_any_codes(kind: str, seed: int) -> None:
    data = random_blocks(kind, 5, 3, seed)
    coded = gguf_layer(tensor(data, kind))
    _, bits, group = HALVES[kind]
    check(coded, expected(data, kind))
    n, k = coded.shape
    assert coded.scheme == kind.lower() and coded.bits == bits and coded.block == (1, group)
    assert coded.codes.dtype == (np.uint8 if kind in MINIMA + TABLES + BETWEEN else np.int8)
    assert coded.scales.dtype == np.float32 and coded.scales.shape == (n, k // group)
    assert (coded.zeros is not None) == (kind in MINIMA + BETWEEN) and (coded.table is not None) == (kind in TABLES)
    if kind in GRIDS:
        assert coded.scale_bytes == n * k // 256 * 2 + n * k // group * GRIDS[kind] // 8
    else:
        assert coded.scale_bytes == data.size - n * k * bits // 8
    reach = (0, 1 << bits) if coded.codes.dtype == np.uint8 else (-(1 << (bits - 1)), 1 << (bits - 1))
    assert reach[0] <= coded.codes.min() and coded.codes.max() < reach[1]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *TERNARY])
def test_what_the_package_quantizes(kind: str) -> None:
    rng = np.random.default_rng(4)
    numbers = rng.normal(size=(6, 512)).astype(np.float32)
    numbers[1], numbers[2], numbers[3, 40:100] = 0, 0.75, -3
    data = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    check(gguf_layer(tensor(data, kind)), expected(data, kind))


@pytest.mark.parametrize("kind", MINIMA)
def test_groups_without_a_scale(kind: str) -> None:
    data = random_blocks(kind, 6, 4, 7)
    blocks = data.reshape(6, 4, -1)
    scale, minimum = HALVES[kind][0]
    blocks[0, :, scale : scale + 2] = 0  # constants
    blocks[1, :, minimum : minimum + 2] = 0
    blocks[2, :, scale : scale + 2] = blocks[2, :, minimum : minimum + 2] = 0
    if kind in SCALES:
        blocks[3, :, SCALES[kind]] &= 0xF0
        blocks[4, :, SCALES[kind]] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coded = gguf_layer(tensor(data, kind))
    numbers = expected(data, kind)
    check(coded, numbers)
    np.testing.assert_array_equal(coded.dequantize()[[0, 2]], numbers[[0, 2]])
    assert numbers[0].any() and not numbers[2].any()
    np.testing.assert_array_equal(in_groups(coded, 32).dequantize(), coded.dequantize())
    assert coded.codes.max() < 1 << coded.bits


@pytest.mark.parametrize("kind", [kind for kind in HALVES if sizes(kind)[0] == 256])
def test_scales_and_minima_are_multiples_of_few_numbers(kind: str) -> None:
    """Kernels keep a byte of each where they are: also of groups without a scale, and of whole blocks."""
    data = random_blocks(kind, 40, 4, 3)
    if kind in SCALES:
        data.reshape(40, 4, -1)[3, :, SCALES[kind]] &= 0xF0
    if kind == "IQ1_M":
        set_pieces(data.reshape(40, 4, -1)[2], np.zeros((4, 1), "<f2"))
    else:
        data.reshape(40, 4, -1)[2, :, HALVES[kind][0][0] :][:, :2] = 0
    coded = gguf_layer(tensor(data, kind))
    scales = factored(coded.scales, coded.block[1])
    assert scales is not None
    np.testing.assert_array_equal(np.repeat(scales[1], 256 // coded.block[1], axis=1) * scales[0], coded.scales)
    if coded.zeros is not None and kind != "IQ1_S":  # 135 times an eighth is the most there, which is no byte
        middle = 1 << (coded.bits - 1)
        assert factored(coded.zeros.astype(np.float64) - middle, coded.block[1], coded.scales, middle) is not None


@pytest.mark.parametrize("kind", [kind for kind in HALVES if kind not in TABLES])
def test_products(kind: str) -> None:
    data = random_blocks(kind, 24, 8, 2)
    coded = gguf_layer(tensor(data, kind))
    weight = coded.dequantize()
    np.testing.assert_array_equal(in_groups(coded, 32).dequantize(), weight)
    form = linear_form(coded)
    assert form.op == "MatMulNBits" and form.attrs["bits"] == coded.bits
    assert form.attrs["block_size"] == coded.block[1]
    x = np.random.default_rng(1).normal(size=(3, coded.shape[1])).astype(np.float32)
    y = evaluate(form.op, x, *form.operands, domain=form.domain, **form.attrs)
    np.testing.assert_allclose(y, x @ weight.T, rtol=1e-4, atol=1e-4 * np.abs(weight).max())


@pytest.mark.parametrize("kind", TABLES)
def test_products_with_tables(kind: str) -> None:
    data = random_blocks(kind, 24, 8, 2)
    if kind == "MXFP4":
        data.reshape(24, 8, -1)[..., 0] = 120
    coded = gguf_layer(tensor(data, kind))
    form = linear_form(coded)
    if kind == "MXFP4":
        assert form.op == "DequantizeLinear"
        weight = evaluate(form.op, *form.operands, **form.attrs).T
    else:  # levels are whole numbers: 8 bits hold them
        assert form.op == "MatMulNBits" and form.attrs["bits"] == 8
        weight = evaluate(
            form.op, np.eye(coded.shape[1], dtype=np.float32), *form.operands, domain=form.domain, **form.attrs
        ).T
    np.testing.assert_array_equal(weight, expected(data, kind))


@pytest.mark.parametrize("kind", HALVES)
def test_bytes_are_those_of_the_file(kind: str) -> None:
    data = random_blocks(kind, 4, 2, 5)
    coded = gguf_layer(tensor(data, kind))
    if kind in GRIDS:  # a code for each weight takes more than a position for eight, and less than a half
        assert data.size < coded.nbytes < 2.5 * data.size and coded.nbytes < coded.codes.size
    else:
        assert coded.nbytes == data.size


@pytest.mark.parametrize("kind", GRIDS)
def test_every_position_of_a_grid(kind: str) -> None:
    """Levels, signs and scales to the last bit, zeros with their signs among them."""
    data = random_blocks(kind, 128, 8, 1)
    blocks = data.reshape(128, 8, -1)
    for row, scale in enumerate((0.0, -0.0, 2.0**-24, -65504.0, np.inf)):
        halves = np.full((8, 1), scale, "<f2")
        if kind == "IQ1_M":
            set_pieces(blocks[row], halves)
        else:
            blocks[row, :, :2] = halves.view(np.uint8)
    coded = gguf_layer(tensor(data, kind))
    with np.errstate(all="ignore"):
        found = coded.dequantize()
    np.testing.assert_array_equal(found.view(np.uint32), expected(data, kind).view(np.uint32))
    levels = {"IQ1_S": 3, "IQ1_M": 6, "IQ2_XXS": 6, "IQ2_XS": 6, "IQ2_S": 6, "IQ3_XXS": 16, "IQ3_S": 16}
    assert len(np.unique(coded.codes)) == levels[kind]


@pytest.mark.parametrize("kind", GRIDS)
def test_grids_are_read_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_blocks(kind, 7, 2, 8)
    whole = gguf_layer(tensor(data, kind))
    monkeypatch.setattr(rows, "AT_A_TIME", 3 * 512)
    check(gguf_layer(tensor(data, kind)), whole.dequantize())


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("package", [None, SimpleNamespace(quants=SimpleNamespace())])
def test_grids_are_of_a_package(kind: str, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That may be missing, or too old to have them."""
    data = random_blocks(kind, 2, 1, 0)
    coded = tensor(data, kind)
    kept = [each for each in vars(gguf_grids).values() if hasattr(each, "cache_clear")]
    for each in kept:
        each.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", package)
        with pytest.raises(NotSupported, match=rf"the grid of {kind} is in the package 'gguf'"):
            gguf_layer(coded)
    check(gguf_layer(coded), expected(data, kind))


@pytest.mark.parametrize("kind", GRIDS)
def test_grids_of_compiled_products(kind: str) -> None:
    """The CPU provider multiplies their codes, in as few bits as an operator has for them."""
    rng, n, k = np.random.default_rng(3), 37, 512
    data = random_blocks(kind, n, k // 256, 2)
    weight = expected(data, kind)
    for level, m in ((0, 1), (0, 40), (4, 2)):
        form = linear_form(gguf_layer(tensor(data, kind)), level=level)
        bits = 8 if kind in TABLES else HALVES[kind][1]
        assert form.op == "MatMulNBits" and form.attrs["bits"] == bits
        assert form.operands[0].nbytes == n * k * bits // 8
        x = rng.standard_normal((m, k)).astype(np.float32)
        model = one_node(form.op, [x, *form.operands], dict(form.attrs), domain=form.domain, constant=range(1, 4))
        (found,) = run(model, {"x0": x}, "cpu")
        size = np.abs(x) @ np.abs(weight).T
        assert (np.abs(found - x @ weight.T) <= size * (1e-5 if level == 0 else 2e-2)).all()


def test_grids_of_modules(tmp_path: Path) -> None:
    """Linear layers, tables and experts of a file have codes, and give what its numbers do."""
    rng = np.random.default_rng(5)
    blocks = {f"{kind}.weight": (random_blocks(kind, 24, 2, 6), kind) for kind in GRIDS}
    for part, kind in (("up", "IQ2_XS"), ("gate", "IQ3_S"), ("down", "IQ1_S")):
        data = random_blocks(kind, 3 * 256, 1, 7)
        blocks[f"{part}_exps.weight"] = data.reshape(3, 256, -1), kind
    tensors = WeightLoader(offline=True).open(written(tmp_path / "m.gguf", blocks, {}))
    numbers = {name.removesuffix(".weight"): tensors[name].read() for name in blocks}
    layers = quantized_layers(tensors)
    assert layers.keys() == numbers.keys()

    def near(found: Any, wanted: Array) -> None:
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())

    model = nn.ModuleDict({kind: nn.Linear(512, 24, bias=False) for kind in GRIDS})
    missing, unexpected = nn.load_quantized_(model, tensors, strict=False)
    assert not missing and {*unexpected} == {f"{part}_exps" for part in ("up", "gate", "down")}
    x = rng.standard_normal((2, 512)).astype(np.float32)
    for kind in GRIDS:
        assert isinstance(model[kind], nn.QuantizedLinear)
        near(model[kind](rv.Tensor(x)), x @ numbers[kind].T)
        rows = nn.QuantizedEmbedding(layers[kind])(rv.Tensor(np.array([3, 0, 23])))
        np.testing.assert_array_equal(rows.numpy(), numbers[kind][[3, 0, 23]])
    up, gate, down = (layers[f"{part}_exps"] for part in ("up", "gate", "down"))
    experts = nn.QuantizedExperts(up, down, gate, top_k=1, activation="relu")
    x = rng.standard_normal((3, 256)).astype(np.float32)
    chosen = np.array([2, 0, 1])
    up, gate, down = (numbers[f"{part}_exps"][chosen] for part in ("up", "gate", "down"))
    inner = np.maximum(np.einsum("tk,tnk->tn", x, gate), 0) * np.einsum("tk,tnk->tn", x, up)
    near(experts(rv.Tensor(x), rv.Tensor(np.eye(3, dtype=np.float32)[chosen])), np.einsum("tk,tnk->tn", inner, down))


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 2, 256), (2, 0, 256), (2, 3, 0)])
def test_nothing(kind: str, shape: tuple[int, ...]) -> None:
    block, size = sizes(kind)
    coded = gguf_layer(tensor(np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8), kind, shape))
    assert coded.dequantize().shape == coded.shape == shape


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "IQ1_S", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_scales_that_are_no_numbers(kind: str) -> None:
    data = random_blocks(kind, 2, 2, 0)
    at = HALVES[kind][0][0]
    data.reshape(2, 2, -1)[0, 0, at : at + 2] = 0x01, 0x7C  # a NaN that NumPy warns of where it is made wider
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coded = gguf_layer(tensor(data, kind))
    np.testing.assert_allclose(coded.dequantize(), expected(data, kind), rtol=1e-5, atol=1e-5)
    assert np.isnan(coded.dequantize()[0, 0]) and linear_form(coded).op == "MatMul"


@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_without_codes(kind: str) -> None:
    data = np.zeros((2, sizes(kind)[1]), np.uint8)
    with pytest.raises(WeightError, match=rf"'a\.weight' is of {kind},.* read\(\) gives its numbers"):
        gguf_layer(tensor(data, kind))


@pytest.mark.parametrize("kind", [*HALVES, *TERNARY])
def test_bytes_that_do_not_fit(kind: str) -> None:
    block, size = sizes(kind)
    data = np.zeros((2, 3 * size), np.uint8)
    for shape in ((2, 2 * block), (3, 3 * block), (2, 3 * block + 8)):
        with pytest.raises(WeightError, match=rf"'a\.weight': {kind}: \d+ x \d+ weights do not fit in {data.size}"):
            gguf_layer(tensor(data, kind, shape))


@pytest.mark.parametrize("kind", [*HALVES, *TERNARY])
@pytest.mark.parametrize("experts", [1, 3])
def test_experts(kind: str, experts: int) -> None:
    """All in one tensor: codes of each are those of a matrix of its own."""
    k = 2 * sizes(kind)[0]
    if kind in TERNARY:
        numbers = np.random.default_rng(9).integers(-1, 2, (experts * 4, k)).astype(np.float32)
        data = gguf.quants.quantize(numbers * np.float32(0.75), gguf.GGMLQuantizationType[kind])
    else:
        data = random_blocks(kind, experts * 4, 2, 9)
    coded = gguf_layer(tensor(data, kind, (experts, 4, k)))
    check(coded, expected(data, kind).reshape(experts, 4, k))
    group = coded.block[-1]
    assert coded.shape == (experts, 4, k) and coded.block == (1, 1, group) and coded.axis == 2
    assert coded.scales.shape == (experts, 4, k // group)
    assert (coded.zeros is None) == (kind not in MINIMA + BETWEEN)
    assert coded.zeros is None or coded.zeros.shape == coded.scales.shape
    for each in range(experts):
        alone = gguf_layer(tensor(data[each * 4 : each * 4 + 4], kind))
        assert alone.scheme == coded.scheme and alone.bits == coded.bits
        np.testing.assert_array_equal(alone.codes, coded.codes[each])
        np.testing.assert_array_equal(alone.dequantize(), coded.dequantize()[each])
        assert alone.nbytes * experts == coded.nbytes


@pytest.mark.parametrize("kind", [*HALVES, *TERNARY])
def test_experts_that_do_not_fit(kind: str) -> None:
    block, size = sizes(kind)
    data = np.zeros((6, 2 * size), np.uint8)
    for shape in ((2, 2, 2 * block), (2, 3, block), (2, 3, 2 * block + 8)):
        with pytest.raises(WeightError, match=rf"'a\.weight': {kind}: \d+ x \d+ weights do not fit in {data.size}"):
            gguf_layer(tensor(data, kind, shape))


def test_experts_are_no_linear_layer() -> None:
    coded = gguf_layer(tensor(random_blocks("Q4_0", 6, 2, 0), "Q4_0", (2, 3, 64)))
    with pytest.raises(InvalidConfig, match=r"not \[2, 3, 64\]"):
        linear_form(coded)


def test_what_is_no_matrix_of_blocks() -> None:
    data = np.zeros((2, 18), np.uint8)
    for shape in ((64,), (1, 2, 1, 32)):
        with pytest.raises(WeightError, match=r"'a\.weight' \(Q4_0, .* is no matrix of blocks"):
            gguf_layer(tensor(data, "Q4_0", shape))
    plain: Any = SimpleNamespace(info=TensorInfo("n.weight", DType.float32, (2, 32), 256))
    with pytest.raises(WeightError, match=r"'n\.weight' \(float32, .* is no matrix of blocks"):
        gguf_layer(plain)
    without: Any = SimpleNamespace(info=tensor(data, "Q4_0").info)  # a part of one, for example
    with pytest.raises(WeightError, match="is no matrix of blocks"):
        gguf_layer(without)
    assert quantized_layers({"a.weight": without, "n.weight": plain}) == {}


def written(path: Path, blocks: dict[str, tuple[Array, str]], plain: dict[str, Array], **options: Any) -> Path:
    writer = gguf.GGUFWriter(path, "test", **options)
    for name, (data, kind) in blocks.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, array in plain.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_files(tmp_path: Path) -> None:
    blocks = {f"blk.{i}.ffn_up.weight": (random_blocks(kind, 4, 2, i), kind) for i, kind in enumerate(HALVES)}
    ternary = np.random.default_rng(0).integers(-1, 2, (4, 512)).astype(np.float32)
    for kind in TERNARY:
        packed = gguf.quants.quantize(ternary, gguf.GGMLQuantizationType[kind])
        blocks[f"{kind}.weight"] = packed, kind
    for part, kind in (("gate", "IQ3_S"), ("up", "IQ2_XXS"), ("down", "Q6_K")):
        blocks[f"blk.0.ffn_{part}_exps.weight"] = random_blocks(kind, 6, 2, 3).reshape(2, 3, -1), kind
    others = {
        "blk.0.shared.weight": (random_blocks("Q4_0", 4, 2, 1).reshape(1, 2, 2, 36), "Q4_0"),
        "blk.0.attn_k.weight": (np.zeros((2, sizes("Q8_K")[1]), np.uint8), "Q8_K"),
        "blk.0.table": (random_blocks("Q4_0", 4, 2, 1), "Q4_0"),
        "weight": (random_blocks("Q4_0", 4, 2, 1), "Q4_0"),
    }
    plain: dict[str, Array] = {
        "blk.0.attn_norm.weight": np.ones(32, np.float32),
        "output.weight": np.ones((4, 32), np.float16),
    }
    path = written(tmp_path / "m.gguf", blocks | others, plain)
    checkpoint = WeightLoader(offline=True).open(path)
    layers = quantized_layers(checkpoint)
    assert layers.keys() == {name.removesuffix(".weight") for name in blocks}
    assert {kind for _, kind in blocks.values()} == {*KINDS}
    assert layers["blk.0.ffn_down_exps"]().shape == (2, 3, 512)
    for name, layer in layers.items():
        check(layer(), checkpoint[f"{name}.weight"].read())
    assert layers["TQ2_0"]().scheme == "ternary"


def test_files_with_the_highest_byte_first(tmp_path: Path) -> None:
    data = random_blocks("Q4_0", 2, 1, 0)
    path = written(tmp_path / "m.gguf", {"a.weight": (data, "Q4_0")}, {}, endianess=gguf.GGUFEndian.BIG)
    layers = quantized_layers(WeightLoader(offline=True).open(path))
    with pytest.raises(NotSupported, match=r"'a\.weight'"):
        layers["a"]()


def test_other_checkpoints_are_not_looked_into(tmp_path: Path) -> None:
    class Tensor:
        def read(self) -> Array:
            raise AssertionError("read")

    assert quantized_layers({"a.weight": Tensor(), "weight": Tensor()}) == {}
    save_safetensors(tmp_path / "m.safetensors", {"a.weight": np.ones((2, 32), np.float32)})
    assert quantized_layers(WeightLoader(offline=True).open(tmp_path / "m.safetensors")) == {}
    # the file that an index names is opened when a tensor is asked for: there is none
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "model-1.safetensors"}}))
    assert quantized_layers(WeightLoader(offline=True).open(index)) == {}
