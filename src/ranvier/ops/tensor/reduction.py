"""Operators that combine the elements along axes: Reduce*, ArgMax, CumSum, Softmax and their kin.

Half-precision operands are accumulated in float32 and rounded once; integers stay integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue
from ranvier.ops.accumulate import widened
from ranvier.ops.operands import in_float32, integers, normal_axes, normal_axis, whole_number
from ranvier.ops.registry import Array, op

Ints = Sequence[int]
Axes = tuple[int, ...]


# -- Reduce* --------------------------------------------------------------------------------------------------------
# Each function reduces over `axes` and keeps them with size 1. Over no elements at all it gives the neutral element.


def _sum(x: Array, axes: Axes) -> Array:
    return np.sum(x, axis=axes, dtype=x.dtype, keepdims=True)


def _product(x: Array, axes: Axes) -> Array:
    return np.asarray(np.prod(x, axis=axes, dtype=x.dtype, keepdims=True))


def _maximum(x: Array, axes: Axes) -> Array:
    return np.asarray(np.max(x, axis=axes, keepdims=True, initial=_bounds(x.dtype)[0]))


def _minimum(x: Array, axes: Axes) -> Array:
    return np.asarray(np.min(x, axis=axes, keepdims=True, initial=_bounds(x.dtype)[1]))


def _bounds(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The least and the greatest value of a dtype."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return -math.inf, math.inf


def _mean(x: Array, axes: Axes) -> Array:
    count = math.prod(x.shape[axis] for axis in axes)
    if x.dtype.kind not in "iu":
        return np.asarray(_sum(x, axes) / np.asarray(count, x.dtype))
    total = np.sum(x, axis=axes, dtype=np.uint64 if x.dtype.kind == "u" else np.int64, keepdims=True)
    return np.asarray(np.sign(total) * (np.abs(total) // max(count, 1))).astype(x.dtype)  # cut toward zero


def _l1(x: Array, axes: Axes) -> Array:
    return _sum(np.abs(x), axes)


def _sum_square(x: Array, axes: Axes) -> Array:
    return _sum(x * x, axes)


def _l2(x: Array, axes: Axes) -> Array:
    return np.sqrt(_sum_square(x, axes))


def _log_sum(x: Array, axes: Axes) -> Array:
    return np.log(_sum(x, axes))


def _log_sum_exp(x: Array, axes: Axes) -> Array:
    peak = _maximum(x, axes)
    shift = np.where(np.isfinite(peak), peak, np.zeros((), x.dtype))  # with an infinite shift ∞ - ∞ would spoil it
    return np.asarray(np.log(_sum(np.exp(x - shift), axes)) + shift)


# (name, version from which `axes` is an input, function, whether integers have to go through float64)
REDUCTIONS: tuple[tuple[str, int, Callable[[Array, Axes], Array], bool], ...] = (
    ("ReduceL1", 18, _l1, False),
    ("ReduceL2", 18, _l2, True),
    ("ReduceLogSum", 18, _log_sum, True),
    ("ReduceLogSumExp", 18, _log_sum_exp, True),
    ("ReduceMax", 18, _maximum, False),
    ("ReduceMean", 18, _mean, False),
    ("ReduceMin", 18, _minimum, False),
    ("ReduceProd", 18, _product, False),
    ("ReduceSum", 13, _sum, False),
    ("ReduceSumSquare", 18, _sum_square, False),
)


def _declare_reduction(name: str, since: int, function: Callable[[Array, Axes], Array], through_float: bool) -> None:
    def reduced(x: Array, axes: Axes, keepdims: int) -> Array:
        work = x.astype(np.float64) if through_float and x.dtype.kind in "iu" else widened(x)
        result = function(work, axes).astype(x.dtype, copy=False)
        return result if keepdims else np.squeeze(result, axes)

    @op(name, since=1)
    def attribute_form(x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
        return reduced(x, normal_axes(name, axes or range(x.ndim), x.ndim), keepdims)

    @op(name, since=since)
    def body(x: Array, axes: Array | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
        chosen: Sequence[int] = [] if axes is None else integers(name, axes)
        if not chosen and not noop_with_empty_axes:
            chosen = range(x.ndim)
        return reduced(x, normal_axes(name, chosen, x.ndim), keepdims)


for _row in REDUCTIONS:
    _declare_reduction(*_row)


# -- the place of an extreme ----------------------------------------------------------------------------------------


def _declare_arg_extreme(name: str, find: Callable[..., Any]) -> None:
    @op(name, since=1)
    def body(x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
        axis = normal_axis(name, axis, x.ndim)
        if x.shape[axis] == 0:
            raise InvalidValue(f"{name}: axis {axis} has size 0", op=name)
        if select_last_index:
            found = x.shape[axis] - 1 - find(np.flip(x, axis), axis=axis)
        else:
            found = find(x, axis=axis)
        found = np.asarray(found, np.int64)
        return np.expand_dims(found, axis) if keepdims else found


_declare_arg_extreme("ArgMax", np.argmax)
_declare_arg_extreme("ArgMin", np.argmin)


# -- running totals -------------------------------------------------------------------------------------------------


def _declare_running(name: str, since: int, accumulate: Callable[..., Array], neutral: int) -> None:
    @op(name, since=since)
    def body(x: Array, axis: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
        along = normal_axis(name, whole_number(name, "axis", axis), x.ndim)
        # run along the first axis of a view, forwards or backwards
        terms = np.moveaxis(widened(x), along, 0)[:: -1 if reverse else 1]
        if exclusive:
            shifted = np.full_like(terms, neutral)
            shifted[1:] = terms[:-1]
            terms = shifted
        total = accumulate(terms, axis=0, dtype=terms.dtype)[:: -1 if reverse else 1]
        return np.ascontiguousarray(np.moveaxis(total, 0, along), x.dtype)


_declare_running("CumSum", 11, np.cumsum, neutral=0)
_declare_running("CumProd", 26, np.cumprod, neutral=1)


# -- normalisation of one axis to a distribution --------------------------------------------------------------------


def softmax(x: Array, axis: int) -> Array:
    """Exponentials along ``axis`` divided by their sum."""
    weights = np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-math.inf))
    return np.asarray(weights / np.sum(weights, axis=axis, keepdims=True))


def half_softmax(x: Array, axis: int) -> Array:
    """Softmax of float16 as the standard's function defines it: every step rounds to float16."""
    weights = np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-math.inf))
    total = np.sum(weights, axis=axis, keepdims=True, dtype=np.float32).astype(np.float16)
    return np.asarray(weights / total)


def log_softmax(x: Array, axis: int) -> Array:
    shifted = x - np.max(x, axis=axis, keepdims=True, initial=-math.inf)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)))


def hardmax(x: Array, axis: int) -> Array:
    """1 at the first maximum along ``axis``, 0 elsewhere."""
    result = np.zeros_like(x)
    if x.size:
        np.put_along_axis(result, np.argmax(x, axis=axis, keepdims=True), 1, axis)
    return result


def _declare_softmax(name: str, function: Callable[[Array, int], Array]) -> None:
    @in_float32
    def rounded_once(x: Array, *, axis: int) -> Array:
        return function(x, axis)

    @op(name, since=13)
    def body(x: Array, *, axis: int = -1) -> Array:
        axis = normal_axis(name, axis, x.ndim)
        if name == "Softmax" and x.dtype == np.float16:
            return half_softmax(x, axis)
        return np.asarray(rounded_once(x, axis=axis))

    @op(name, since=1)
    @in_float32
    def flattening_form(x: Array, *, axis: int = 1) -> Array:
        """Before opset 13 all dimensions from ``axis`` on are one."""
        split = axis if axis == x.ndim else normal_axis(name, axis, x.ndim)
        rows = x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))
        return function(rows, 1).reshape(x.shape)


_declare_softmax("Softmax", softmax)
_declare_softmax("LogSoftmax", log_softmax)
_declare_softmax("Hardmax", hardmax)


@op("LpNormalization", since=1)
@in_float32
def lp_normalization(x: Array, *, axis: int = -1, p: int = 2) -> Array:
    if p not in (1, 2):
        raise InvalidValue(f"LpNormalization: p must be 1 or 2, got {p}", op="LpNormalization")
    axes = (normal_axis("LpNormalization", axis, x.ndim),)
    norm = _l1(x, axes) if p == 1 else _l2(x, axes)
    return np.where(norm == 0, np.zeros((), x.dtype), x / norm)
