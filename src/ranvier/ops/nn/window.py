"""Sliding windows: the padding arithmetic and the convolution that convolutions, pools and their inverses share.

Shapes follow the standard: ``x`` is ``[N, C, *spatial]``, pads are ``(begin of every axis …, end of every axis …)``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import exact_carrier, from_carrier
from ranvier.ops.allocation import checked_shape
from ranvier.ops.pulse import pulse
from ranvier.ops.registry import Array

Index = tuple[Any, ...]  # a NumPy index with one entry per axis

# The unfolded input of one matrix product stays below this, so that a large image costs no more memory than a small
# one; it is large enough that most layers are one product, since every product wakes BLAS's threads.
_COLUMN_BYTES = 16 << 20


def per_axis(values: Sequence[int] | None, rank: int, name: str, op: str, least: int = 1) -> tuple[int, ...]:
    """An attribute with one entry per spatial axis; all ones when it is left out."""
    if not values:
        return (1,) * rank
    sizes = tuple(int(v) for v in values)
    if len(sizes) != rank:
        raise ShapeMismatch(f"{op}: {name} needs {rank} entries, one per spatial axis, got {list(sizes)}")
    if min(sizes) < least:
        raise InvalidValue(f"{op}: {name} must be at least {least}, got {list(sizes)}", op=op)
    return sizes


def extents(kernel: Sequence[int], dilations: Sequence[int]) -> tuple[int, ...]:
    """How far one window reaches along each axis."""
    return tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations))


def resolve_pads(
    auto_pad: str,
    pads: Sequence[int] | None,
    spatial: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    *,
    op: str = "Conv",
) -> tuple[int, ...]:
    """Explicit pads for any ``auto_pad``: begins of all axes, then ends of all axes."""
    rank = len(spatial)
    if auto_pad in ("NOTSET", ""):
        if not pads:
            return (0,) * (2 * rank)
        if len(pads) != 2 * rank:
            raise ShapeMismatch(f"{op}: pads needs {2 * rank} entries for {rank} spatial axes, got {list(pads)}")
        if min(pads) < 0:
            raise InvalidValue(f"{op}: pads must not be negative, got {list(pads)}", op=op)
        return tuple(int(p) for p in pads)
    if auto_pad == "VALID":
        return (0,) * (2 * rank)
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise InvalidValue(f"{op}: auto_pad must be NOTSET, SAME_UPPER, SAME_LOWER or VALID, got {auto_pad!r}", op=op)
    totals = [
        max((-(-size // stride) - 1) * stride + extent - size, 0)
        for size, stride, extent in zip(spatial, strides, extents(kernel, dilations))
    ]
    begins = tuple(t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in totals)
    return begins + tuple(t - b for t, b in zip(totals, begins))


def output_sizes(
    spatial: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    *,
    ceil_mode: bool = False,
    op: str = "Conv",
) -> tuple[int, ...]:
    """Number of windows along each spatial axis."""
    rank = len(spatial)
    sizes = []
    for axis, (size, stride, extent) in enumerate(zip(spatial, strides, extents(kernel, dilations))):
        begin, end = pads[axis], pads[axis + rank]
        room = size + begin + end - extent
        if room < 0:
            raise ShapeMismatch(
                f"{op}: a window of {extent} does not fit spatial axis {axis} of size {size} padded by {begin}, {end}"
            )
        count = room // stride + 1
        # a window of the rounded-up kind must still start on data or on the leading pad
        if ceil_mode and room % stride and count * stride < size + begin:
            count += 1
        sizes.append(count)
    return tuple(sizes)


def pad_spatial(x: Array, pads: Sequence[int], value: Any = 0) -> Array:
    """``x`` with its spatial axes (the last ``len(pads) // 2``) extended by ``value``; ``x`` itself without pads."""
    if not any(pads):
        return x
    rank = len(pads) // 2
    lead = x.ndim - rank
    grown = [s + b + e for s, b, e in zip(x.shape[lead:], pads[:rank], pads[rank:])]
    padded = np.full(checked_shape((*x.shape[:lead], *grown), x.dtype, "padded input"), value, x.dtype)
    inner: Index = (..., *(slice(b, b + s) for b, s in zip(pads[:rank], x.shape[lead:])))
    padded[inner] = x
    return padded


def window_view(x: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Array:
    """All windows of a padded ``x`` as a read-only view ``[*lead, *kernel, *windows]``; nothing is copied."""
    rank = len(kernel)
    lead = x.ndim - rank
    counts = [
        (size - extent) // stride + 1
        for size, extent, stride in zip(x.shape[lead:], extents(kernel, dilations), strides)
    ]
    steps = x.strides[lead:]
    return np.lib.stride_tricks.as_strided(
        x,
        (*x.shape[:lead], *kernel, *counts),
        (
            *x.strides[:lead],
            *(step * d for step, d in zip(steps, dilations)),
            *(step * s for step, s in zip(steps, strides)),
        ),
        writeable=False,
    )


def taps(
    kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Index]]:
    """For every kernel position: its index, and the slice of the padded input it meets over all windows."""
    for tap in itertools.product(*map(range, kernel)):
        pulse("a window's elements")
        where = tuple(slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, s, n in zip(tap, dilations, strides, counts))
        yield tap, (..., *where)


def convolve(
    x: Array,
    w: Array,
    *,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    group: int,
    accumulate: np.dtype[Any],
    op: str = "Conv",
) -> Array:
    """Cross-correlation of ``x [N, C, *spatial]`` with ``w [M, C / group, *kernel]``, summed in ``accumulate``.

    Integer operands give the exact sum modulo the width of ``accumulate``. ``pads`` are resolved ones.
    """
    if x.ndim < 3 or w.ndim != x.ndim:
        raise ShapeMismatch(
            f"{op}: needs X [N, C, spatial …] and W of the same rank, got {list(x.shape)} and {list(w.shape)}"
        )
    if group < 1 or x.shape[1] != w.shape[1] * group or w.shape[0] % group:
        raise ShapeMismatch(
            f"{op}: X {list(x.shape)} and W {list(w.shape)} do not fit {group} group(s): W's second axis times the "
            "groups must be X's channels, and W's first axis a multiple of the groups"
        )
    kernel = w.shape[2:]
    counts = output_sizes(x.shape[2:], kernel, strides, dilations, pads, op=op)
    accumulate = np.dtype(accumulate)
    carrier = exact_carrier(x, w, math.prod(w.shape[1:])) if accumulate.kind in "iu" else accumulate
    padded = pad_spatial(x.astype(carrier, copy=False), pads)
    weights = w.astype(carrier, copy=False)
    checked_shape((x.shape[0], w.shape[0], *counts), carrier, op)
    if w.shape[1] == 1 and group > 1:
        y = _depthwise(padded, weights, strides, dilations, counts)
    else:
        y = _unfolded(padded, weights, strides, dilations, counts, group)
    return from_carrier(y, accumulate)


def _depthwise(x: Array, w: Array, strides: Sequence[int], dilations: Sequence[int], counts: tuple[int, ...]) -> Array:
    """One filter sees one channel: a matrix product would be a vector, so add up shifted inputs instead."""
    batch, channels = x.shape[:2]
    fan = w.shape[0] // channels
    filters = w.reshape(channels, fan, *w.shape[2:])
    y = np.zeros((batch, channels, fan, *counts), x.dtype)
    term = np.empty(y.shape[1:], x.dtype)
    flat = (1,) * len(counts)
    for tap, where in taps(w.shape[2:], strides, dilations, counts):
        at: Index = (slice(None), slice(None), *tap)
        weight = filters[at].reshape(channels, fan, *flat)
        for image, total in zip(x, y):
            np.multiply(image[where][:, None], weight, out=term)
            total += term
    return y.reshape(batch, channels * fan, *counts)


def _unfolded(
    x: Array, w: Array, strides: Sequence[int], dilations: Sequence[int], counts: tuple[int, ...], group: int
) -> Array:
    """Every window becomes a column and the convolution one matrix product, a block of rows at a time."""
    batch, kernel = x.shape[0], w.shape[2:]
    rank = len(kernel)
    depth = math.prod(w.shape[1:])
    filters = np.ascontiguousarray(w).reshape(group, w.shape[0] // group, depth)
    grouped = x.reshape(batch, group, w.shape[1], *x.shape[2:])
    columns = window_view(grouped, kernel, strides, dilations)
    y = np.empty((batch, group, filters.shape[1], math.prod(counts)), x.dtype)
    row = math.prod(counts[1:])
    block = max(1, _COLUMN_BYTES // max(1, group * depth * row * x.itemsize))
    for n in range(batch):
        for start in range(0, counts[0], block):
            pulse("rows of a convolution")
            stop = min(start + block, counts[0])
            part = columns[n][(slice(None),) * (2 + rank) + (slice(start, stop),)]
            unfolded = part.reshape(group, depth, (stop - start) * row)
            np.matmul(filters, unfolded, out=y[n, :, :, start * row : stop * row])
    return y.reshape(batch, w.shape[0], *counts)
