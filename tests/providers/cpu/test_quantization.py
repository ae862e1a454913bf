"""Quantize and dequantize on the CPU provider against the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

import ranvier as rv
from tests.providers.cpu.compare import Array, check, one_node, run

RNG = np.random.default_rng(7)


def numbers(*shape: int) -> Array:
    return (RNG.normal(size=shape) * 40).astype(np.float32)


def scale(*shape: int, dtype: type = np.float32) -> Array:
    return RNG.uniform(0.1, 0.9, size=shape).astype(dtype)


def zeros(dtype: type, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return RNG.integers(max(limits.min, -100), min(limits.max, 200) + 1, size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_quantize(dtype: type, axis: int | None) -> None:
    x = numbers(3, 5, 17)
    size = () if axis is None else (x.shape[axis],)
    attrs = {} if axis is None else {"axis": axis}
    check("QuantizeLinear", [x, scale(*size), zeros(dtype, *size)], attrs)
    check("QuantizeLinear", [x, scale(*size)], attrs)


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
def test_one_scale_and_many_zero_points(op: str) -> None:
    """No zero point is left out: generated code takes one, so the reference runs it."""
    x = numbers(3, 4) if op == "QuantizeLinear" else zeros(np.uint8, 3, 4)
    made = one_node(op, [x, scale(), zeros(np.uint8, 4)], {}, constant=(1, 2))
    (expected,) = run(made, {"x0": x}, "reference")
    with rv.load(made, providers=["cpu", "reference"]) as session:
        (found,) = session.run({"x0": x}).values()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_narrow_codes_of_the_contrib_domain(kind: type) -> None:
    codes = numbers(4, 6).astype(np.int8).astype(kind)
    zero = np.asarray(0 if kind is ml_dtypes.float8_e5m2 else 3).astype(kind)
    check("QuantizeLinear", [numbers(4, 6), scale(), zero], domain="com.microsoft")
    check("DequantizeLinear", [codes, scale(), zero], domain="com.microsoft")
    check("DequantizeLinear", [codes, scale(6)], {"axis": 1}, domain="com.microsoft")


def test_scales_that_are_powers_of_two() -> None:
    """Blocks with a shared exponent, as the microscaling formats have them."""
    x, exponents = numbers(4, 64), np.exp2(RNG.integers(-3, 6, (4, 2))).astype(ml_dtypes.float8_e8m0fnu)
    for kind, made in ((TensorProto.FLOAT4E2M1, ml_dtypes.float4_e2m1fn), (TensorProto.INT8, np.int8)):
        attrs = {"axis": 1, "block_size": 32, "output_dtype": kind}
        check("QuantizeLinear", [x, exponents], attrs)
        check("QuantizeLinear", [x, exponents], {**attrs, "precision": TensorProto.FLOAT}, constant=[1])
        attrs["output_dtype"] = TensorProto.FLOAT
        check("DequantizeLinear", [(x / 40).astype(made), exponents], attrs)
        check("DequantizeLinear", [(x / 40).astype(made), exponents], {**attrs, "output_dtype": TensorProto.BFLOAT16})


def test_scales_that_are_whole_numbers() -> None:
    x = RNG.integers(-(1 << 30), 1 << 30, (3, 50)).astype(np.int32)
    for kind in (np.int8, np.uint16):
        check("QuantizeLinear", [x, np.asarray(1 << 23, np.int32), zeros(kind)])
        check("QuantizeLinear", [x, RNG.integers(1 << 16, 1 << 24, 50).astype(np.int32), zeros(kind, 50)])


def test_ties_saturation_and_what_is_no_number() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -1e9, np.inf, -np.inf, np.nan, 300, -300], np.float32)
    one = np.ones((), np.float32)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16):
        check("QuantizeLinear", [x, one, np.array(3, dtype)])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
@pytest.mark.parametrize("step", [-0.3, -0.5])
def test_scales_below_zero(dtype: type, step: float) -> None:
    """They turn the order of codes round, also where they are known when code is made."""
    parameters = [np.asarray(step, np.float32), np.asarray(10, dtype)]
    x = np.linspace(-70, 70, 77, dtype=np.float32)
    (codes,) = check("QuantizeLinear", [x, *parameters], constant=[1, 2])
    check("DequantizeLinear", [codes, *parameters], constant=[1, 2])
    total = [codes, *parameters, codes[::-1].copy(), *parameters, *parameters]
    if dtype is not np.int16:
        check("QLinearAdd", total, domain="com.microsoft", constant=[1, 2, 4, 5, 6, 7])


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(kind: type) -> None:
    x = numbers(4, 33).astype(kind)
    check("QuantizeLinear", [x, scale(dtype=kind), zeros(np.int8)])
    check("DequantizeLinear", [RNG.integers(0, 255, (4, 33)).astype(np.uint8), scale(dtype=kind), zeros(np.uint8)])
    check("QuantizeLinear", [x, scale(), zeros(np.int8)], {"precision": TensorProto.FLOAT})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32])
@pytest.mark.parametrize("axis", [None, 0, 2])
def test_dequantize(dtype: type, axis: int | None) -> None:
    limits = np.iinfo(dtype)
    x = RNG.integers(limits.min, limits.max, (3, 4, 19), endpoint=True).astype(dtype)
    size = () if axis is None else (x.shape[axis],)
    attrs = {} if axis is None else {"axis": axis}
    check("DequantizeLinear", [x, scale(*size), zeros(dtype, *size)], attrs, rtol=0, atol=0)
    check("DequantizeLinear", [x, scale(*size)], attrs, rtol=0, atol=0)
    check("DequantizeLinear", [x, scale(*size), zeros(dtype, *size)], attrs, constant=[0, 1, 2], rtol=0, atol=0)


@pytest.mark.parametrize(("axis", "block"), [(1, 3), (0, 2), (2, 8)])
def test_blocks(axis: int, block: int) -> None:
    x = numbers(4, 7, 19)
    shape = [-(-d // block) if k == axis else d for k, d in enumerate(x.shape)]
    attrs = {"axis": axis, "block_size": block}
    check("QuantizeLinear", [x, scale(*shape), zeros(np.int8, *shape)], attrs)
    codes = RNG.integers(-128, 127, x.shape).astype(np.int8)
    check("DequantizeLinear", [codes, scale(*shape), zeros(np.int8, *shape)], attrs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
def test_four_bits(kind: type) -> None:
    x = numbers(5, 21)
    check("QuantizeLinear", [x, scale(), np.array(3).astype(kind)])
    codes = RNG.integers(0, 8, (5, 21)).astype(kind)
    check("DequantizeLinear", [codes, scale(5), RNG.integers(0, 8, 5).astype(kind)], {"axis": 0}, rtol=0, atol=0)


@pytest.mark.parametrize(
    "x",
    [
        numbers(3, 50),
        np.abs(numbers(7)),
        -np.abs(numbers(2, 3, 4)),
        np.zeros((5,), np.float32),
        np.array(-3.5, np.float32),
        np.array([np.nan, 1, 2, -4], np.float32),
        numbers(300, 700),
    ],
    ids=["both", "positive", "negative", "zeros", "scalar", "nan", "large"],
)
def test_dynamic_quantize(x: Array) -> None:
    check("DynamicQuantizeLinear", [x], outputs=3, rtol=0, atol=0)
