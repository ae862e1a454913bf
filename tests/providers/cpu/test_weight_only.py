"""Products with weights in a few bits on the CPU provider against the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.codegen.llvm.coded import CodedB, Coding, pack_coded
from ranvier.codegen.llvm.coded.adding import multiplies_fours
from ranvier.codegen.llvm.coded.held import looks_up
from ranvier.codegen.llvm.isa import host
from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops import evaluate
from ranvier.ops.contrib.levels import IQ4_LEVELS
from ranvier.ops.contrib.weight_only import packed
from ranvier.providers.cpu.lower import weight_only as lowering
from ranvier.runtime.quantizing.coded_forms import linear_form
from ranvier.weights.quantized.gguf_blocks import gguf_layer
from ranvier.weights.stored import TensorInfo
from tests.providers.cpu.compare import Array, agree, check, one_node, run

MICROSOFT = "com.microsoft"
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
EXACT = {"domain": MICROSOFT, "K": 64, "N": 200, "bits": 4, "block_size": 32}


def nbits(k: int, n: int, bits: int, block: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Codes as they are stored, scales, and zero points as they are stored."""
    rng = np.random.default_rng(seed)
    blocks = -(-k // block)
    codes = packed(rng.integers(0, 1 << bits, (n, blocks, block)), bits)
    scales = rng.uniform(0.01, 0.1, n * blocks).astype(np.float32)
    zeros = packed(rng.integers(0, 1 << bits, (n, blocks)), bits)
    return codes, scales, zeros


def rows(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


def attributes(k: int, n: int, bits: int, block: int, **more: int) -> dict[str, int]:
    return {"K": k, "N": n, "bits": bits, "block_size": block, **more}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("k", "block"), [(64, 16), (96, 32), (100, 32), (256, 128), (30, 128), (64, 128)])
def test_nbits(bits: int, k: int, block: int) -> None:
    codes, scales, zeros = nbits(k, 33, bits, block, k)
    bias = rows(33)
    floats = np.random.default_rng(3).uniform(0, 3, (33, -(-k // block))).astype(np.float32)
    for given in (
        [codes, scales],
        [codes, scales, zeros.reshape(-1)],
        [codes, scales, floats],
        [codes, scales, zeros, None, bias],
    ):
        for m in (1, 3, 40):
            operands = [rows(m, k), *given]
            check(
                *("MatMulNBits", operands, attributes(k, 33, bits, block)),
                domain=MICROSOFT,
                constant=range(1, 6),
                **CLOSE,
            )


def test_groups_in_any_order() -> None:
    codes, scales, zeros = nbits(96, 20, 4, 32)
    rng = np.random.default_rng(5)
    for group_of in (np.arange(96) // 32, rng.permutation(np.arange(96) // 32), rng.integers(0, 3, 96)):
        for m in (1, 40):
            operands = [rows(m, 96), codes, scales, zeros, group_of.astype(np.int32)]
            check(
                *("MatMulNBits", operands, attributes(96, 20, 4, 32)), domain=MICROSOFT, constant=range(1, 6), **CLOSE
            )


def test_shapes_and_types() -> None:
    codes, scales, zeros = nbits(64, 24, 4, 32)
    for shape in ((64,), (2, 3, 64), (1, 1, 64), (2, 1, 5, 64), (0, 64)):
        operands = [rows(*shape), codes, scales, zeros]
        check(*("MatMulNBits", operands, attributes(64, 24, 4, 32)), domain=MICROSOFT, constant=range(1, 6), **CLOSE)
    for dtype, off in ((np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)):
        for m in (1, 5, 40):
            operands = [rows(m, 64, dtype=dtype), codes, scales.astype(dtype), zeros, None, rows(24, dtype=dtype)]
            how = {"rtol": off, "atol": 4 * off, "constant": range(1, 6)}
            check(*("MatMulNBits", operands, attributes(64, 24, 4, 32)), domain=MICROSOFT, **how)


@pytest.mark.parametrize(("k", "block"), [(64, 32), (61, 16)])
def test_one_column(k: int, block: int) -> None:
    codes, scales, zeros = nbits(k, 1, 4, block)
    for m in (1, 3, 40):
        operands = [rows(m, k), codes, scales, zeros]
        check(*("MatMulNBits", operands, attributes(k, 1, 4, block)), domain=MICROSOFT, constant=range(1, 6), **CLOSE)


def test_a_bias_is_added_before_rounding() -> None:
    """Whatever the shape of the activations: sums are rounded to 16 bits once."""
    codes, scales, _ = nbits(64, 200, 4, 32)
    narrow = [codes, scales.astype(np.float16), None, None, rows(200, dtype=np.float16) * np.float16(0.01)]
    for shape in ((64,), (1, 64)):
        x = rows(*shape, dtype=np.float16)
        found = check(
            *("MatMulNBits", [x, *narrow], attributes(64, 200, 4, 32)),
            domain=MICROSOFT,
            constant=range(1, 6),
            rtol=1e-3,
            atol=1e-6,
        )[0]
        weight = evaluate(*("MatMulNBits", np.eye(64, dtype=np.float32), codes, scales.astype(np.float16)), **EXACT)
        exact = x.astype(np.float64) @ weight + narrow[-1].astype(np.float64)
        off = np.abs(found.astype(np.float64) - exact)
        assert (off <= 0.5 * np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64) + 4e-6).all()


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 6, 40])
def test_accuracy_levels(level: int, m: int) -> None:
    """Levels 3 and 4 allow activations to be rounded, and no more than that."""
    codes, scales, zeros = nbits(128, 40, 4, 32)
    operands = [rows(m, 128), codes, scales, zeros]
    off = 1e-5 if level < 3 else 2e-2
    check(
        *("MatMulNBits", operands, attributes(128, 40, 4, 32, accuracy_level=level)),
        domain=MICROSOFT,
        constant=range(1, 6),
        rtol=off,
        atol=10 * off,
    )


@pytest.mark.parametrize("kind", ["Q3_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K"])
def test_blocks_of_gguf_files(kind: str) -> None:
    """Codes stay in as many bits as they have there, and are multiplied as the package of those files decodes them."""
    gguf = pytest.importorskip("gguf")
    rng, n, k = np.random.default_rng(3), 37, 512
    which = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[which]
    data = rng.integers(0, 256, (n, k // block, size), np.uint8)
    for at in {"Q3_K": (108,), "Q5_0": (0,), "Q6_K": (208,)}.get(kind, (0, 2)):
        data[..., at : at + 2] = rng.uniform(-0.1, 0.1, (n, k // block, 1)).astype("<f2").view(np.uint8)
    data = data.reshape(n, -1)
    info = TensorInfo("a.weight", DType.float32, (n, k), data.nbytes, kind)
    coded: Any = SimpleNamespace(info=info, raw=SimpleNamespace(read=lambda: data))
    weight = gguf.quants.dequantize(data, which)
    for level, m in ((0, 1), (0, 3), (0, 40), (3, 2), (3, 40), (4, 1), (4, 2), (4, 20)):
        form = linear_form(gguf_layer(coded), level=level)
        assert form.op == "MatMulNBits" and form.attrs["bits"] == int(kind[1])
        assert form.operands[0].nbytes == n * k * int(kind[1]) // 8
        x = rows(m, k)
        model = one_node(form.op, [x, *form.operands], dict(form.attrs), domain=form.domain, constant=range(1, 4))
        (found,) = run(model, {"x0": x}, "cpu")
        size = np.abs(x) @ np.abs(weight).T
        assert (np.abs(found - x @ weight.T) <= size * (1e-5 if level == 0 else 2e-2)).all()


def test_levels_of_a_known_table_are_read_as_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator has them as codes of 8 bits; kernels that multiply bytes need 4 of a position."""
    taken = []

    def recorded(codes: Any, coding: Coding, *about: Any, **more: Any) -> CodedB:
        taken.append(coding)
        return pack_coded(codes, coding, *about, **more)

    monkeypatch.setattr(lowering, "pack_coded", recorded)
    _, scales, zeros = nbits(128, 40, 8, 32)
    at = np.random.default_rng(0).integers(0, 16, (40, 4, 32))
    known, others = ((levels + 128).astype(np.uint8)[at] for levels in (IQ4_LEVELS, np.arange(16)))
    for m, level in ((1, 4), (3, 4), (20, 4), (1, 0)):
        for codes in (known, others):
            attrs = attributes(128, 40, 8, 32, accuracy_level=level)
            off = 2e-2 if level else 1e-5
            check(
                *("MatMulNBits", [rows(m, 128), codes, scales, zeros], attrs),
                domain=MICROSOFT,
                constant=range(1, 4),
                rtol=off,
                atol=100 * off,
            )
        assert [coding.bits for coding in taken] == [4 if looks_up(host()) else 8, 8]
        taken.clear()


def test_sessions_may_ask_for_less_accuracy() -> None:
    """The option does what accuracy level 4 does; without it, nodes that ask for nothing are exact."""
    codes, scales, _ = nbits(128, 40, 4, 32)
    operands = [rows(3, 128), codes, scales]

    def result(level: int, **options: bool) -> Array:
        attrs = attributes(128, 40, 4, 32, accuracy_level=level)
        model = one_node("MatMulNBits", operands, attrs, domain=MICROSOFT, constant=[1, 2])
        with rv.load(model, providers=["cpu"], provider_options={"cpu": options}) as session:
            return np.asarray(next(iter(session.run({"x0": operands[0]}).values())))

    rounded = result(4)
    np.testing.assert_array_equal(result(0, int8_activations=True), rounded)
    plain = result(0)
    assert np.abs(plain - rounded).max() < 0.02 * np.abs(plain).max()
    if multiplies_fours(host()):
        assert (plain != rounded).any()


def test_what_follows_is_fused() -> None:
    codes, scales, _ = nbits(64, 24, 4, 32)
    nodes = [
        helper.make_node("MatMulNBits", ["x", "codes", "scales"], ["p"], domain=MICROSOFT, **attributes(64, 24, 4, 32)),
        helper.make_node("Add", ["p", "bias"], ["q"]),
        helper.make_node("Sigmoid", ["q"], ["s"]),
        helper.make_node("Mul", ["q", "s"], ["y"]),
    ]
    stored = {"codes": codes, "scales": scales, "bias": rows(24)}
    graph = helper.make_graph(
        nodes,
        "fused",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["m", 64])],
        [onnx.ValueInfoProto(name="y")],
        [onnx.numpy_helper.from_array(x, name) for name, x in stored.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    for m in (1, 7, 40):
        agree(model, {"x": rows(m, 64)}, **CLOSE)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("k", "block"), [(64, 16), (96, 64), (64, 128), (50, 20)])
def test_bnb4(kind: int, k: int, block: int) -> None:
    """Blocks within rows, over several rows, and across their ends."""
    rng = np.random.default_rng(k)
    codes = rng.integers(0, 256, -(-k * 30 // 2)).astype(np.uint8)
    largest = rng.uniform(0.5, 2, -(-k * 30 // block)).astype(np.float32)
    attrs = {"K": k, "N": 30, "block_size": block, "quant_type": kind}
    for m in (1, 5, 40):
        check("MatMulBnb4", [rows(m, k), codes, largest], attrs, domain=MICROSOFT, constant=[1, 2], **CLOSE)
        operands = [rows(m, 30), codes, largest]
        check("MatMulBnb4", operands, {**attrs, "transB": 0}, domain=MICROSOFT, constant=[1, 2], **CLOSE)
    operands = [rows(30, dtype=np.float16), codes, largest.astype(np.float16)]
    half = {"domain": MICROSOFT, "constant": [1, 2], "rtol": 2e-3, "atol": 2e-2}
    check("MatMulBnb4", operands, {**attrs, "transB": 0}, **half)


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8(kind: Any) -> None:
    weight = rows(20, 96).astype(kind)
    scales = np.random.default_rng(2).uniform(0.5, 2, (20, 3)).astype(np.float32)
    for m, bias in ((1, None), (4, rows(20)), (40, rows(20))):
        operands = [rows(m, 96), weight, scales, None, bias]
        attrs = {"block_size": 32}
        check("MatMulBlockQuantizedFp8Weight", operands, attrs, domain=MICROSOFT, constant=[1, 2, 4], **CLOSE)


def test_float4() -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (20, 32)).astype(np.uint8)
    steps = rng.uniform(0.5, 2, (20, 4)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    for m in (1, 4, 40):
        operands = [rows(m, 64), codes, steps, np.array([0.3], np.float32)]
        check("MatMulBlockQuantizedFp4Weight", operands, domain=MICROSOFT, constant=[1, 2, 3], **CLOSE)


def test_a_bias_has_a_number_for_every_column_in_whatever_shape() -> None:
    """A column of them is no number for every row, and a single one is not meant for all."""
    n = 20
    codes, scales, _ = nbits(64, n, 4, 32)
    weight, steps = rows(n, 64).astype(ml_dtypes.float8_e4m3fn), np.ones((n, 2), np.float32)
    pairs, sixteenths = codes.reshape(n, 32), np.full((n, 4), 0x38, np.uint8)
    for name, operands, attrs in (
        ("MatMulNBits", [codes, scales, None, None], attributes(64, n, 4, 32)),
        ("MatMulBlockQuantizedFp8Weight", [weight, steps, None], {"block_size": 32}),
        ("MatMulBlockQuantizedFp4Weight", [pairs, sixteenths, np.ones(1, np.float32), None], {"block_size": 16}),
    ):
        for shape in ((n, 1), (1, n)):
            given = [rows(n, 64), *operands, rows(*shape)]
            check(name, given, attrs, domain=MICROSOFT, constant=range(1, 5), **CLOSE)
        model = one_node(name, [rows(3, 64), *operands, rows(1)], attrs, domain=MICROSOFT, constant=range(1, 6))
        with pytest.raises(ShapeMismatch, match="bias"):
            run(model, {"x0": rows(3, 64)}, "cpu")


@pytest.mark.parametrize("missing", ["quant_type", "block_size"])
def test_attributes_that_have_to_be_there(missing: str) -> None:
    codes, largest = np.zeros(64 * 20 // 2, np.uint8), np.ones(20, np.float32)
    attrs = {"K": 64, "N": 20, "block_size": 64, "quant_type": 0}
    del attrs[missing]
    model = one_node("MatMulBnb4", [rows(3, 64), codes, largest], attrs, domain=MICROSOFT, constant=[1, 2])
    with pytest.raises(InvalidValue, match=missing):
        run(model, {"x0": rows(3, 64)}, "cpu")
    if missing == "block_size":
        blocks = [np.zeros((20, 16, 2), np.uint8), np.ones((20, 16), np.float32)]
        model = one_node("MatMulNBits", [rows(3, 64), *blocks], {"K": 64, "N": 20}, domain=MICROSOFT, constant=[1, 2])
        with pytest.raises(InvalidValue, match=missing):
            run(model, {"x0": rows(3, 64)}, "cpu")


def test_weights_that_are_computed_are_left_to_the_reference() -> None:
    codes, scales, _ = nbits(64, 24, 4, 32)
    model = one_node("MatMulNBits", [rows(2, 64), codes, scales], attributes(64, 24, 4, 32), domain=MICROSOFT)
    with rv.load(model, providers=["cpu", "reference"], optimization="none") as session:
        (node,) = session.report.nodes
        assert node.provider == "reference"
        assert "operand 1 is no constant" in str(node.declined)
        (found,) = session.run({"x0": rows(2, 64), "x1": codes, "x2": scales}).values()
    assert found.shape == (2, 24)
