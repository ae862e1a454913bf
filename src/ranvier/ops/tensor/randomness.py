"""Random tensors. A node with a ``seed`` draws the same numbers at every call; without one they are fresh."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import exp
from typing import Any

import numpy as np

from ranvier.dtypes import DType, from_onnx, of
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.allocation import checked_shape
from ranvier.ops.registry import Array, op
from ranvier.ops.seed import fresh_generator

_FLOATS = frozenset({DType.float16, DType.bfloat16, DType.float32, DType.float64})
_INDICES = frozenset({DType.int32, DType.int64})
_FEW = 64
_NUMBERS = frozenset(d for d in DType if d in _FLOATS or d is DType.bool or (d.is_integer and not d.is_packed))


@op("RandomNormal", traits=("random",))
def random_normal(
    *, shape: Sequence[int], dtype: int = 1, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Array:
    return normal("RandomNormal", shape, from_onnx(dtype), mean, scale, seed)


@op("RandomNormalLike", traits=("random",))
def random_normal_like(
    input: Array, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Array:
    return normal("RandomNormalLike", input.shape, _dtype_or_like(dtype, input), mean, scale, seed)


@op("RandomUniform", traits=("random",))
def random_uniform(
    *, shape: Sequence[int], dtype: int = 1, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Array:
    return uniform("RandomUniform", shape, from_onnx(dtype), low, high, seed)


@op("RandomUniformLike", traits=("random",))
def random_uniform_like(
    input: Array, *, dtype: int | None = None, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Array:
    return uniform("RandomUniformLike", input.shape, _dtype_or_like(dtype, input), low, high, seed)


@op("Multinomial", since=7, traits=("random",))
def multinomial(input: Array, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Array:
    out_dtype = _require("Multinomial", from_onnx(dtype), _INDICES)
    if input.ndim != 2 or input.shape[1] == 0:
        raise ShapeMismatch(f"Multinomial: expected input of shape [batch, classes > 0], got {list(input.shape)}")
    rows = input.shape[0]
    shape = checked_shape((rows, sample_size), out_dtype, "Multinomial")
    drawn = draws(shape, seed)
    choose = _choose_of_few if input.size + drawn.size <= _FEW else _choose
    return np.array(choose(input.astype(np.float64), drawn), out_dtype).reshape(shape)


def _choose(logits: Array, draws: Array) -> Array:
    top = np.maximum.reduce(logits, axis=1, keepdims=True)
    _require_distribution(np.isfinite(top).all())  # NaN and inf spread into the maximum
    cumulative = np.add.accumulate(np.exp(logits - top), axis=1)
    # u < 1 keeps the draw below the row's total, so a class of probability zero is never chosen
    draws = draws * cumulative[:, -1:]
    result = np.empty(draws.shape, np.int64)
    for row in range(len(logits)):
        result[row] = cumulative[row].searchsorted(draws[row], "right")
    return result


def _choose_of_few(logits: Array, draws: Array) -> list[list[int]]:
    """As ``_choose`` in plain numbers: for a few of them the calls into NumPy would take most of the time."""
    chosen = []
    for row, wanted in zip(logits.tolist(), draws.tolist()):
        top = max(row)
        cumulative = list(accumulate([exp(x - top) for x in row]))
        total = cumulative[-1]
        _require_distribution(total >= 1)  # the largest alone makes 1, and NaN and inf leave NaN
        chosen.append([bisect_right(cumulative, u * total) for u in wanted])
    return chosen


def _require_distribution(holds: bool | np.bool_) -> None:
    if not holds:
        raise InvalidValue("Multinomial: every row needs a finite largest log-probability, without NaN or inf")


@op("Bernoulli", since=15, traits=("random",))
def bernoulli(input: Array, *, dtype: int | None = None, seed: float | None = None) -> Array:
    out_dtype = _require("Bernoulli", _dtype_or_like(dtype, input), _NUMBERS)
    probability = input.astype(np.float64)
    if not ((probability >= 0) & (probability <= 1)).all():
        raise InvalidValue("Bernoulli: every input must be a probability in [0, 1]")
    return np.asarray(draws(input.shape, seed) < probability).astype(out_dtype)


def draws(shape: Sequence[int], seed: float | None) -> Array:
    """Numbers in [0, 1) to decide by."""
    return _generator(seed).random(tuple(shape))


def normal(op_name: str, shape: Sequence[int], dtype: DType, mean: float, scale: float, seed: float | None) -> Array:
    out_dtype = _require(op_name, dtype, _FLOATS)
    sizes = checked_shape(shape, out_dtype, op_name)
    drawn = _generator(seed).standard_normal(sizes, _drawn_dtype(dtype))
    return np.asarray(drawn * scale + mean).astype(out_dtype)


def uniform(op_name: str, shape: Sequence[int], dtype: DType, low: float, high: float, seed: float | None) -> Array:
    out_dtype = _require(op_name, dtype, _FLOATS)
    sizes = checked_shape(shape, out_dtype, op_name)
    drawn = _generator(seed).random(sizes, _drawn_dtype(dtype))
    return np.asarray(drawn * (high - low) + low).astype(out_dtype)


def _drawn_dtype(dtype: DType) -> Any:
    """The generator draws float32 or float64; narrower types are rounded from float32."""
    return np.float64 if dtype is DType.float64 else np.float32


def _generator(seed: float | None) -> np.random.Generator:
    # the standard's seed is a float: its bits tell every two seeds apart, where int() would merge 0.1 and 0.2
    return fresh_generator() if seed is None else np.random.default_rng(int(np.float32(seed).view(np.uint32)))


def _dtype_or_like(dtype: int | None, like: Array) -> DType:
    return of(like) if dtype is None else from_onnx(dtype)


def _require(op_name: str, dtype: DType, allowed: frozenset[DType]) -> np.dtype[Any]:
    if dtype not in allowed:
        names = ", ".join(sorted(d.name for d in allowed))
        raise DTypeMismatch(f"{op_name}: output element type must be one of {names}, got {dtype.name}")
    return dtype.numpy
