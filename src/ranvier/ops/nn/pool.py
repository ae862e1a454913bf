"""Pooling over sliding windows and over whole images, and the inverse of MaxPool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType
from ranvier.ops.accumulate import widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.nn.window import extents, output_sizes, pad_spatial, per_axis, resolve_pads, taps
from ranvier.ops.pulse import pulse
from ranvier.ops.registry import Array, Call, TypeCall, op
from ranvier.records import dataclass

Ints = Sequence[int] | None


@dataclass(frozen=True, slots=True)
class _Frame:
    """A pool's geometry: windows, where they start, and how far the input must be padded for all of them to fit."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]  # as the model gives them
    counts: tuple[int, ...]
    room: tuple[int, ...]  # pads, the end ones grown or cut to exactly what the last window needs


def _frame(
    op: str, x: Array, kernel_shape: Ints, strides: Ints, dilations: Ints, pads: Ints, auto_pad: str, ceil_mode: int
) -> _Frame:
    rank = x.ndim - 2
    if rank < 1:
        raise ShapeMismatch(f"{op}: needs [N, C, spatial …], got shape {list(x.shape)}")
    if not kernel_shape:
        raise InvalidValue(f"{op}: kernel_shape is missing", op=op)
    kernel = per_axis(kernel_shape, rank, "kernel_shape", op)
    steps = per_axis(strides, rank, "strides", op)
    spread = per_axis(dilations, rank, "dilations", op)
    edges = resolve_pads(auto_pad, pads, x.shape[2:], kernel, steps, spread, op=op)
    counts = output_sizes(x.shape[2:], kernel, steps, spread, edges, ceil_mode=bool(ceil_mode), op=op)
    checked_shape((*x.shape[:2], *counts), x.dtype, op)
    reach = [(n - 1) * s + e for n, s, e in zip(counts, steps, extents(kernel, spread))]
    ends = tuple(max(r - s - b, 0) for r, s, b in zip(reach, x.shape[2:], edges))
    return _Frame(kernel, steps, spread, edges, counts, edges[:rank] + ends)


def _reduce_windows(x: Array, frame: _Frame, combine: np.ufunc, empty: Any) -> Array:
    """``combine`` over every window, one axis after the other: a k × k window costs 2 k passes, not k²."""
    y = pad_spatial(x, frame.room, empty)
    lead = x.ndim - len(frame.kernel)
    for axis, k in enumerate(frame.kernel):
        step, spread = frame.strides[axis], frame.dilations[axis]
        length = (frame.counts[axis] - 1) * step + 1
        ahead = (slice(None),) * (lead + axis)
        first = y[(*ahead, slice(0, length, step))]
        total = first.copy() if k > 1 else first
        for t in range(1, k):
            pulse("a window's elements")
            combine(total, y[(*ahead, slice(t * spread, t * spread + length, step))], out=total)
        y = total
    return np.ascontiguousarray(y)


def _lowest(dtype: np.dtype[Any]) -> Any:
    """What never wins a maximum."""
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


@op("MaxPool")
def max_pool(
    x: Array,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = None,
    pads: Ints = None,
    storage_order: int = 0,
    strides: Ints = None,
    ctx: Call,
) -> Array | tuple[Array, Array]:
    frame = _frame("MaxPool", x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    y = _reduce_windows(x, frame, np.maximum, _lowest(x.dtype))
    if not ctx.wants(1):
        return y
    return y, _argmax_windows(x, frame, column_major=bool(storage_order))


def _argmax_windows(x: Array, frame: _Frame, column_major: bool) -> Array:
    """Position of each window's first maximum, counted through the whole of ``x``."""
    spatial = x.shape[2:]
    # within one image: row-major, or with the first spatial axis fastest
    within = np.arange(math.prod(spatial), dtype=np.int64).reshape(spatial, order="F" if column_major else "C")
    outside = np.int64(-1)
    positions = pad_spatial(within, frame.room, outside)
    values = pad_spatial(x, frame.room, _lowest(x.dtype))
    best = np.full((*x.shape[:2], *frame.counts), _lowest(x.dtype), x.dtype)
    found: Array = np.full(best.shape, outside)
    for _, where in taps(frame.kernel, frame.strides, frame.dilations, frame.counts):
        value, position = values[where], positions[where]
        # the second case: a window of nothing but the lowest value still has a first element
        better = ((value > best) | (found == outside)) & (position != outside)
        np.copyto(best, value, where=better)
        np.copyto(found, np.broadcast_to(position, found.shape), where=better)
    planes: Array = np.arange(x.shape[0] * x.shape[1], dtype=np.int64).reshape(*x.shape[:2], *(1,) * len(spatial))
    found += planes * math.prod(spatial)
    return found


@op("AveragePool")
def average_pool(
    x: Array,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    frame = _frame("AveragePool", x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    total = _reduce_windows(widened(x), frame, np.add, 0)
    total /= _window_sizes(x.shape[2:], frame, bool(count_include_pad)).astype(total.dtype)
    return total.astype(x.dtype, copy=False)


def _window_sizes(spatial: Sequence[int], frame: _Frame, include_pads: bool) -> Array:
    """How many positions of each window count. What ``ceil_mode`` adds beyond the pads never does."""
    rank = len(spatial)
    sizes = np.ones((1,) * rank, np.int64)
    for axis, size in enumerate(spatial):
        begin, end = frame.pads[axis], frame.pads[axis + rank]
        starts = np.arange(frame.counts[axis])[:, None] * frame.strides[axis] - begin
        at = starts + np.arange(frame.kernel[axis]) * frame.dilations[axis]
        counted = (at < size + end) if include_pads else (at >= 0) & (at < size)
        shape = [1] * rank
        shape[axis] = -1
        sizes = sizes * counted.sum(axis=1).reshape(shape)
    return sizes


@op("LpPool")
def lp_pool(
    x: Array,
    *,
    kernel_shape: Ints = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = None,
    p: float = 2,
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    frame = _frame("LpPool", x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    total = _reduce_windows(_powered(x, p, "LpPool"), frame, np.add, 0)
    return _rooted(total, p).astype(x.dtype, copy=False)


def _powered(x: Array, p: float, op: str) -> Array:
    if p <= 0:
        raise InvalidValue(f"{op}: p must be positive, got {p}", op=op)
    wide = widened(x)
    return np.square(wide) if p == 2 else np.abs(wide) ** wide.dtype.type(p)


def _rooted(total: Array, p: float) -> Array:
    return np.sqrt(total) if p == 2 else total ** total.dtype.type(1 / p)


def _image_axes(x: Array, op: str) -> tuple[int, ...]:
    if x.ndim < 2:
        raise ShapeMismatch(f"{op}: needs [N, C, spatial …], got shape {list(x.shape)}")
    return tuple(range(2, x.ndim))


@op("GlobalAveragePool")
def global_average_pool(x: Array) -> Array:
    axes = _image_axes(x, "GlobalAveragePool")
    return np.asarray(widened(x).mean(axis=axes, keepdims=True)).astype(x.dtype, copy=False)


@op("GlobalMaxPool")
def global_max_pool(x: Array) -> Array:
    return np.asarray(x.max(axis=_image_axes(x, "GlobalMaxPool"), keepdims=True))


@op("GlobalLpPool")
def global_lp_pool(x: Array, *, p: float = 2) -> Array:
    axes = _image_axes(x, "GlobalLpPool")
    total = np.asarray(_powered(x, p, "GlobalLpPool").sum(axis=axes, keepdims=True))
    return _rooted(total, p).astype(x.dtype, copy=False)


@op("MaxUnpool", since=9)
def max_unpool(
    x: Array,
    indices: Array,
    output_shape: Array | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    name = "MaxUnpool"
    rank = x.ndim - 2
    if rank < 1 or indices.shape != x.shape:
        raise ShapeMismatch(
            f"{name}: X {list(x.shape)} and indices {list(indices.shape)} must be one [N, C, spatial …]"
        )
    kernel = per_axis(kernel_shape, rank, "kernel_shape", name)
    steps = per_axis(strides, rank, "strides", name)
    edges = resolve_pads("NOTSET", pads, x.shape[2:], kernel, steps, (1,) * rank, op=name)
    natural = (
        *x.shape[:2],
        *((n - 1) * s + k - edges[i] - edges[i + rank] for i, (n, s, k) in enumerate(zip(x.shape[2:], steps, kernel))),
    )
    y = np.zeros(math.prod(checked_shape(natural, x.dtype, name)), x.dtype)
    if indices.size and not (indices.min() >= 0 and indices.max() < y.size):
        bad = indices[(indices < 0) | (indices >= y.size)].flat[0]
        raise InvalidValue(f"{name}: index {bad} is out of range for an output of {y.size} elements", op=name)
    y[indices.reshape(-1)] = x.reshape(-1)
    if output_shape is None:
        return y.reshape(natural)
    # indices count through the natural output, and the shape asked for adds zeros behind it
    wanted = checked_shape(output_shape.tolist(), x.dtype, name)
    if len(wanted) != len(natural) or any(w < n for w, n in zip(wanted, natural)):
        raise ShapeMismatch(f"{name}: output_shape {list(wanted)} is smaller than the unpooled {list(natural)}")
    grown = np.zeros(wanted, x.dtype)
    grown[tuple(slice(n) for n in natural)] = y.reshape(natural)
    return grown


@max_unpool.infer
def _(call: TypeCall) -> list[TensorType]:
    x, wanted = call.type(0), call.value(2)
    if not isinstance(x, TensorType):
        return [TensorType(None)]
    if wanted is not None and np.all(wanted >= 0):
        return [TensorType(x.dtype, tuple(int(d) for d in wanted.reshape(-1)))]
    rank = len(x.shape) - 2 if x.shape is not None else 0
    kernel = call.attr("kernel_shape", ())
    steps, edges = call.attr("strides") or (1,) * rank, call.attr("pads") or (0,) * (2 * rank)
    if call.type(2) is not None or x.shape is None or (len(kernel), len(steps), len(edges)) != (rank, rank, 2 * rank):
        return [TensorType(x.dtype)]
    spatial = [
        (n - 1) * steps[k] + kernel[k] - edges[k] - edges[k + rank] if isinstance(n, int) else None
        for k, n in enumerate(x.shape[2:])
    ]
    return [TensorType(x.dtype, (*x.shape[:2], *spatial))]
