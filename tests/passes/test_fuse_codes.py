"""Codes that are moved as codes, and functions of codes that become tables: bit for bit what the float form gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from tests.passes.fuse_tools import Fused, Sketch, assert_same, fused

RNG = np.random.default_rng(23)
SCALE = np.float32(0.037)
ZERO = {np.uint8: 117, np.int8: -5}
SIGNS = pytest.mark.parametrize("dtype", [np.uint8, np.int8])


def dequantized(s: Sketch, codes: str, dtype: type, scale: Any = SCALE, zero: int | None = None) -> str:
    return s.DequantizeLinear(codes, np.float32(scale), np.array(ZERO[dtype] if zero is None else zero, dtype))


def quantized(s: Sketch, x: str, dtype: type, scale: Any = SCALE, zero: int | None = None) -> str:
    return s.QuantizeLinear(x, np.float32(scale), np.array(ZERO[dtype] if zero is None else zero, dtype))


def codes_input(s: Sketch, dtype: type, shape: list[int]) -> str:
    return quantized(s, s.input("x", shape), dtype)


def exact(s: Sketch, out: str, shape: tuple[int, ...]) -> Fused:
    """The codes of the fused and of the plain graph are equal, on the reference and on the CPU provider."""
    model = s.model(out)
    result = fused(model)
    x = RNG.normal(size=shape).astype(np.float32) * 3
    settings: list[dict[str, Any]] = [
        {"providers": ["reference"], "optimization": "none"},
        {"providers": ["reference"]},
        {},
    ]
    plain, *others = (next(iter(rv.load(model, **each).run({"x": x}).values())) for each in settings)
    for each in others:
        np.testing.assert_array_equal(each, plain)
    return result


MOVES: dict[str, Callable[[Sketch, str], str]] = {
    "Reshape": lambda s, x: s.Reshape(x, np.array([2, 48, 8])),
    "Transpose": lambda s, x: s.Transpose(x, perm=[0, 2, 3, 1]),
    "Flatten": lambda s, x: s.Flatten(x),
    "Unsqueeze": lambda s, x: s.Unsqueeze(x, np.array([1])),
    "Slice": lambda s, x: s.Slice(x, np.array([1, 0]), np.array([5, 7]), np.array([1, 2]), np.array([2, 3])),
    "Expand": lambda s, x: s.Expand(x, np.array([3, 2, 6, 8, 8])),
    "Tile": lambda s, x: s.Tile(x, np.array([1, 2, 1, 1])),
    "DepthToSpace": lambda s, x: s.DepthToSpace(s.Slice(x, np.array([0]), np.array([4]), np.array([1])), blocksize=2),
    "Gather": lambda s, x: s.Gather(x, np.array([5, 0, 3]), axis=1),
    "MaxPool": lambda s, x: s.MaxPool(x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    "Pad": lambda s, x: s.Pad(x, np.array([0, 0, 1, 2, 0, 0, 0, 1])),
    "Resize": lambda s, x: s.Resize(
        x, None, np.array([1, 1, 2, 2], np.float32), mode="nearest", coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    ),
    "Split": lambda s, x: s.Split(x, outputs=3, axis=1, num_outputs=3)[1],
}  # fmt: skip


@SIGNS
@pytest.mark.parametrize("move", MOVES)
def test_moves(move: str, dtype: type) -> None:
    s = Sketch()
    x = dequantized(s, codes_input(s, dtype, [2, 6, 8, 8]), dtype)
    result = exact(s, quantized(s, MOVES[move](s, x), dtype), (2, 6, 8, 8))
    assert result.ops["QuantizeLinear"] == 1  # the input's
    assert result.ops["DequantizeLinear"] == 0


@SIGNS
def test_moved_between_scales(dtype: type) -> None:
    s = Sketch()
    x = dequantized(s, codes_input(s, dtype, [3, 5, 7]), dtype)
    result = exact(s, quantized(s, s.Transpose(x, perm=[2, 0, 1]), dtype, 0.05, 3), (3, 5, 7))
    assert result.ops["QuantizeLinear"] == 2
    assert result.only("Transpose").inputs[0].type.dtype.numpy == dtype


@pytest.mark.parametrize("scales", [(0.037, 0.037), (0.037, 0.02)])
def test_joined(scales: tuple[float, float]) -> None:
    s = Sketch()
    x = codes_input(s, np.uint8, [2, 3, 4])
    y = quantized(s, s.Tanh(dequantized(s, x, np.uint8)), np.uint8, scales[1])
    parts = [dequantized(s, x, np.uint8), dequantized(s, y, np.uint8, scales[1])]
    result = exact(s, quantized(s, s.Concat(*parts, axis=1), np.uint8), (2, 3, 4))
    assert all(v.type.dtype.numpy == np.uint8 for v in result.only("Concat").inputs)


@SIGNS
@pytest.mark.parametrize("bounds", [None, (-0.5, 1.0), (0.0, 2.2)])
def test_bounded(bounds: tuple[float, float] | None, dtype: type) -> None:
    s = Sketch()
    x = dequantized(s, codes_input(s, dtype, [4, 9]), dtype)
    y = s.Relu(x) if bounds is None else s.Clip(x, *(np.float32(b) for b in bounds))
    result = exact(s, quantized(s, y, dtype), (4, 9))
    assert result.ops["DequantizeLinear"] == result.ops["Relu"] == 0


POOLS: list[dict[str, Any]] = [
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 2], "pads": [2, 1, 2, 1], "dilations": [3, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 3], "ceil_mode": 1},
]


@SIGNS
@pytest.mark.parametrize("attrs", POOLS, ids=str)
def test_numbers_become_codes_before_they_are_pooled(attrs: dict[str, Any], dtype: type) -> None:
    """Also where all of them are below what any code stands for, and where pads are: those never win."""
    for shift in (0.0, -50.0, 50.0):
        s = Sketch()
        pooled = s.MaxPool(s.Add(s.input("x", [2, 6, 8, 8]), np.float32(shift)), **attrs)
        result = exact(s, quantized(s, pooled, dtype), (2, 6, 8, 8))
        assert result.only("MaxPool").inputs[0].type.dtype.numpy == dtype


@SIGNS
def test_codes_are_made_before_all_pools_in_a_row(dtype: type) -> None:
    s = Sketch()
    x = dequantized(s, codes_input(s, dtype, [2, 6, 9, 9]), dtype)
    inner = s.MaxPool(s.Relu(x), **POOLS[1])
    result = exact(s, quantized(s, s.MaxPool(inner, **POOLS[0]), dtype), (2, 6, 9, 9))
    assert result.ops["MaxPool"] == 2
    assert result.ops["QuantizeLinear"] == 1  # the input's: what is left of the Relu is a bound of codes
    assert result.ops["DequantizeLinear"] == result.ops["Relu"] == 0


def test_what_others_need_is_pooled_as_it_is() -> None:
    """The numbers before the pool, those behind it, and the places of the largest."""
    s = Sketch()
    numbers = s.Exp(s.input("x", [1, 2, 8, 8]))
    read = s.model(quantized(s, s.MaxPool(numbers, **POOLS[0]), np.uint8), s.Sqrt(numbers))
    result = fused(read)
    assert result.only("MaxPool").inputs[0].type.dtype.numpy == np.float32
    assert "what is pooled is read elsewhere too" in result.reasons()
    s = Sketch()
    pooled = s.MaxPool(s.Exp(s.input("x", [1, 2, 8, 8])), **POOLS[0])
    result = fused(s.model(quantized(s, pooled, np.uint8), s.Sqrt(pooled)))
    assert result.only("MaxPool").inputs[0].type.dtype.numpy == np.float32
    s = Sketch()
    pooled, places = s.call("MaxPool", s.Exp(s.input("x", [1, 2, 8, 8])), outputs=2, **POOLS[0])
    result = assert_same(s.model(quantized(s, pooled, np.uint8), places))
    assert result.only("MaxPool").inputs[0].type.dtype.numpy == np.float32


def test_transposed_weights_keep_their_scales() -> None:
    s = Sketch()
    x = dequantized(s, codes_input(s, np.uint8, [3, 16]), np.uint8)
    codes = RNG.integers(-128, 128, (7, 16)).astype(np.int8)
    w = s.DequantizeLinear(codes, RNG.uniform(0.001, 0.003, 7).astype(np.float32), np.zeros(7, np.int8), axis=0)
    y = quantized(s, s.MatMul(x, s.Transpose(w, perm=[1, 0])), np.uint8, 0.05, 120)
    assert fused(s.model(y)).ops["QLinearMatMul"] == 1


def test_one_scale_and_many_zero_points_stay() -> None:
    """None of the zero points is left out."""
    s = Sketch()
    x = s.DequantizeLinear(codes_input(s, np.uint8, [3, 8, 5]), SCALE, np.arange(100, 108, dtype=np.uint8), axis=1)
    exact(s, s.Transpose(x, perm=[0, 2, 1]), (3, 8, 5))


def gelu(s: Sketch, x: str, dtype: type) -> str:
    """As a quantization tool writes it: every step between codes."""
    root = s.DequantizeLinear(np.array(100, np.uint8), np.float32(np.sqrt(2) / 100))
    inner = quantized(s, s.Erf(s.Div(x, root)), dtype, 1 / 128, 0)
    more = quantized(s, s.Add(dequantized(s, inner, dtype, 1 / 128, 0), np.float32(1.0)), dtype, 1 / 100, 0)
    return s.Mul(s.Mul(x, dequantized(s, more, dtype, 1 / 100, 0)), np.float32(0.5))


FUNCTIONS: dict[str, Callable[[Sketch, str, type], str]] = {
    "gelu": gelu,
    "swish": lambda s, x, dtype: s.Mul(x, s.Sigmoid(x)),
    "hard swish": lambda s, x, dtype: s.HardSwish(x),
    "tanh": lambda s, x, dtype: s.Tanh(x),
    "many steps": lambda s, x, dtype: s.Abs(s.Sub(s.Mul(x, np.float32(0.3)), np.float32(0.1))),
    "constants with axes": lambda s, x, dtype: s.Tanh(s.Mul(x, np.full((1, 1), 0.3, np.float32))),
}


@SIGNS
@pytest.mark.parametrize("shape", [(5, 77), (1, 4, 9, 6)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_tables(function: str, dtype: type, shape: tuple[int, ...]) -> None:
    s = Sketch()
    x = dequantized(s, codes_input(s, dtype, list(shape)), dtype)
    result = exact(s, quantized(s, FUNCTIONS[function](s, x, dtype), dtype, 0.021, 9), shape)
    assert result.ops["Gather"] == 1
    assert result.ops["DequantizeLinear"] == result.ops["Mul"] == result.ops["Erf"] == 0


def test_no_table() -> None:
    """Short work, work on two tensors, and work that others read the middle of stays."""
    s = Sketch()
    x = dequantized(s, codes_input(s, np.uint8, [4, 9]), np.uint8)
    assert fused(s.model(quantized(s, s.Add(x, np.float32(1.0)), np.uint8, 0.1))).ops["Gather"] == 0
    s = Sketch()
    x = dequantized(s, codes_input(s, np.uint8, [4, 9]), np.uint8)
    y = dequantized(s, quantized(s, s.input("y", [4, 9]), np.uint8), np.uint8)
    assert fused(s.model(quantized(s, s.Mul(s.Sigmoid(x), y), np.uint8, 0.1))).ops["Gather"] == 0
    s = Sketch()
    x = dequantized(s, codes_input(s, np.uint8, [4, 9]), np.uint8)
    middle = s.Sigmoid(x)
    assert fused(s.model(quantized(s, s.Mul(x, middle), np.uint8, 0.1), s.Exp(middle))).ops["Gather"] == 0


def test_no_table_where_a_constant_adds_an_axis() -> None:
    s = Sketch()
    x = dequantized(s, codes_input(s, np.int8, [9]), np.int8)
    y = quantized(s, s.Tanh(s.Mul(x, np.full((1, 1), 0.3, np.float32))), np.int8, 0.01)
    assert exact(s, y, (9,)).ops["Gather"] == 0


def test_fused_models_are_valid() -> None:
    s = Sketch()
    x = dequantized(s, codes_input(s, np.int8, [2, 6, 8, 8]), np.int8)
    y = quantized(s, s.Pad(s.Transpose(x, perm=[0, 3, 1, 2]), np.array([0, 0, 1, 1, 0, 0, 0, 2])), np.int8)
    assert_same(s.model(s.Abs(s.Tanh(dequantized(s, y, np.int8)))))
