"""Quantized layers as exporters write them, between dequantize and quantize: they become operators on codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from tests.passes.fuse_tools import Fused, Sketch, fused

RNG = np.random.default_rng(19)
STEP = 0.05


def weights(*shape: int, dtype: type = np.int8) -> Any:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)


def within_a_step(s: Sketch, out: str, shape: tuple[int, ...], *, quantized: bool = True) -> Fused:
    """Fused and unfused on the reference: codes differ by one at most, floats by rounding."""
    model = s.model(out)
    result = fused(model)
    x = RNG.normal(size=shape).astype(np.float32) * 2
    plain, made = (
        next(iter(rv.load(model, providers=["reference"], optimization=level).run({"x": x}).values()))
        for level in ("none", "basic")
    )
    if quantized:
        assert np.abs(plain.astype(int) - made.astype(int)).max() <= 1
        assert (plain != made).mean() < 0.05
    else:
        np.testing.assert_allclose(plain, made, rtol=1e-4, atol=1e-4)
    return result


def codes_of(s: Sketch, x: str, dtype: type = np.uint8) -> str:
    scale, zero = np.float32(0.02), np.array(120 if dtype is np.uint8 else -3, dtype)
    return s.DequantizeLinear(s.QuantizeLinear(x, scale, zero), scale, zero)


def quantized(s: Sketch, x: str, zero: int = 0, dtype: type = np.uint8) -> str:
    return s.QuantizeLinear(x, np.float32(STEP), np.array(zero, dtype))


ACTIVATIONS = {
    "none": (lambda s, x: x, []),
    "relu": (lambda s, x: s.Relu(x), []),
    "relu6": (lambda s, x: s.Clip(x, 0.0, 6.0), ["Clip"]),
    "wide": (lambda s, x: s.Clip(x, -1e9, 1e9), []),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("per_filter", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_convolution(activation: str, per_filter: bool, dtype: type) -> None:
    s = Sketch()
    x = codes_of(s, s.input("x", [1, 5, 9, 9]), dtype)
    scale = RNG.uniform(0.001, 0.003, 8 if per_filter else ()).astype(np.float32)
    zero = np.zeros(scale.shape, np.int8) if per_filter else np.array(4, np.int8)
    w = s.DequantizeLinear(weights(8, 5, 3, 3), scale, zero, axis=0)
    unit = np.broadcast_to(np.float32(0.02) * scale, (8,)).astype(np.float32)
    bias = s.DequantizeLinear(RNG.integers(-2000, 2000, 8).astype(np.int32), unit, axis=0)
    y = s.Conv(x, w, bias, pads=[1, 1, 1, 1], strides=[2, 2])
    apply, left = ACTIVATIONS[activation]
    result = within_a_step(s, quantized(s, apply(s, y), 0 if dtype is np.uint8 else -128, dtype), (1, 5, 9, 9))
    assert result.ops["QLinearConv"] == 1
    assert result.ops["Conv"] == 0
    assert [op for op in ("Relu", "Clip") if result.ops[op]] == left


def test_bounds_inside_the_range_stay() -> None:
    s = Sketch()
    x = codes_of(s, s.input("x", [1, 4, 5, 5]))
    w = s.DequantizeLinear(weights(6, 4, 1, 1), np.float32(0.002))
    result = within_a_step(s, quantized(s, s.Relu(s.Conv(x, w)), 40), (1, 4, 5, 5))
    assert result.ops["QLinearConv"] == result.ops["Clip"] == 1


def test_scales_below_zero_are_left() -> None:
    """The lower bound of numbers is the upper one of such codes."""
    s = Sketch()
    x = codes_of(s, s.input("x", [3, 16]))
    y = s.Relu(s.MatMul(x, s.DequantizeLinear(weights(16, 7), np.float32(0.002))))
    result = within_a_step(s, s.QuantizeLinear(y, np.float32(-STEP), np.array(200, np.uint8)), (3, 16))
    assert result.ops["QLinearMatMul"] == 0


def test_float_bias() -> None:
    s = Sketch()
    x = codes_of(s, s.input("x", [1, 4, 5, 5]))
    w = s.DequantizeLinear(weights(6, 4, 1, 1), np.float32(0.002))
    result = within_a_step(s, quantized(s, s.Conv(x, w, RNG.normal(size=6).astype(np.float32)), 128), (1, 4, 5, 5))
    assert result.ops["QLinearConv"] == 1


@pytest.mark.parametrize("axis", [None, 1])
def test_product(axis: int | None) -> None:
    s = Sketch()
    x = codes_of(s, s.input("x", [3, 16]))
    scale = RNG.uniform(0.001, 0.003, () if axis is None else 7).astype(np.float32)
    w = s.DequantizeLinear(weights(16, 7), scale, axis=1)
    result = within_a_step(s, quantized(s, s.MatMul(x, w), 128), (3, 16))
    assert result.ops["QLinearMatMul"] == 1


@pytest.mark.parametrize("turned", [0, 1])
def test_gemm_multiplies_codes(turned: int) -> None:
    s = Sketch()
    x = codes_of(s, s.input("x", [3, 16]))
    scale = RNG.uniform(0.001, 0.003, 7).astype(np.float32)
    w = s.DequantizeLinear(weights(7, 16) if turned else weights(16, 7), scale, axis=1 - turned)
    bias = s.DequantizeLinear(RNG.integers(-2000, 2000, 7).astype(np.int32), scale * np.float32(0.02), axis=0)
    result = within_a_step(s, s.Tanh(s.Gemm(x, w, bias, transB=turned)), (3, 16), quantized=False)
    assert result.ops["MatMulInteger"] == 1
    assert result.ops["Gemm"] == 0


@pytest.mark.parametrize(
    ("shape", "axis"), [((7, 7), 0), ((7, 5), 0), ((7, 1), 0), ((7, 5), 1), ((1, 5), -1), ((5,), 0)]
)
def test_what_gemm_adds_has_scales_along_any_axis(shape: tuple[int, ...], axis: int) -> None:
    s = Sketch()
    x = codes_of(s, s.input("x", [7, 16]))
    w = s.DequantizeLinear(weights(16, 7 if shape == (7, 7) else 5), np.float32(0.002))
    numbers = RNG.integers(-2000, 2000, shape).astype(np.int32)
    added = s.DequantizeLinear(numbers, np.linspace(1e-4, 1e-3, shape[axis], dtype=np.float32), axis=axis)
    assert within_a_step(s, s.Gemm(x, w, added), (7, 16), quantized=False).ops["MatMulInteger"] == 1


def test_convolution_with_a_float_result() -> None:
    s = Sketch()
    x = codes_of(s, s.input("x", [2, 4, 6, 6]))
    w = s.DequantizeLinear(weights(6, 2, 3, 3), RNG.uniform(0.001, 0.003, 6).astype(np.float32), axis=0)
    y = s.Conv(x, w, RNG.normal(size=6).astype(np.float32), group=2)
    result = within_a_step(s, s.Sigmoid(y), (2, 4, 6, 6), quantized=False)
    assert result.ops["ConvInteger"] == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_mean_rounds_ties_to_even(dtype: type) -> None:
    """Sums of scaled codes are a rounding off, which decides a tie; sums of codes are not."""
    scale, zero = np.float32(0.0235), np.array(3, dtype)
    codes = np.zeros((1, 6, 2, 4), dtype)
    totals = np.array([20, 28, 12, 36, 100, 8 * 60 + 4])  # of eight codes: halves but for the first
    for c, total in enumerate(totals):
        codes[0, c] = np.full(8, total // 8).reshape(2, 4)
        codes[0, c].flat[: total % 8] += 1
    s = Sketch()
    x = s.DequantizeLinear(s.input("x", list(codes.shape), dtype), scale, zero)
    model = s.model(s.QuantizeLinear(s.GlobalAveragePool(x), scale, zero))
    assert fused(model).ops["ReduceSum"] == 1
    want = np.rint((totals / 8.0) - 3) + 3
    for provider in (["reference"], ["cpu", "reference"]):
        (got,) = rv.load(model, providers=provider).run({"x": codes}).values()
        np.testing.assert_array_equal(got.ravel(), want)


def test_what_is_left() -> None:
    s = Sketch()
    x = s.input("x", [1, 4, 5, 5])
    w = s.DequantizeLinear(weights(6, 4, 1, 1), np.float32(0.002))
    assert fused(s.model(quantized(s, s.Conv(x, w), 128))).ops["Conv"] == 1  # a float operand
    s = Sketch()
    x = codes_of(s, s.input("x", [3, 16]))
    w = s.DequantizeLinear(weights(16, 7), RNG.uniform(0.001, 0.003, 16).astype(np.float32), axis=0)
    assert fused(s.model(quantized(s, s.MatMul(x, w), 128))).ops["MatMul"] == 1  # scales along the depth
