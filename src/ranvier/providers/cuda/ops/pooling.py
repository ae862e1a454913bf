"""Pools: torch's own where the windows are plain, by way of unfolded windows where they are not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.ops.nn.window import extents, output_sizes, per_axis, resolve_pads
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.ops.convolution import padded
from ranvier.providers.cuda.table import CONTRIB, FLOATS, Call, lowers


class _Frame:
    """Where the windows lie along each axis."""

    def __init__(self, call: Call, x: Any) -> None:
        op = call.node.op
        self.spatial = tuple(x.shape[2:])
        rank = self.rank = len(self.spatial)
        self.kernel = per_axis(call.attr("kernel_shape"), rank, "kernel_shape", op)
        self.strides = per_axis(call.attr("strides"), rank, "strides", op)
        self.dilations = per_axis(call.attr("dilations"), rank, "dilations", op)
        auto, ceil = call.attr("auto_pad", "NOTSET"), call.flag("ceil_mode")
        windows = (self.spatial, self.kernel, self.strides, self.dilations)
        self.pads = resolve_pads(auto, call.attr("pads"), *windows, op=op)
        self.counts = output_sizes(*windows, self.pads, ceil_mode=ceil, op=op)
        reach = [(n - 1) * s + e for n, s, e in zip(self.counts, self.strides, extents(self.kernel, self.dilations))]
        self.begins = self.pads[:rank]
        self.ends = tuple(max(r - size - b, 0) for r, size, b in zip(reach, self.spatial, self.begins))

    @property
    def plain(self) -> bool:
        """Can torch's own pools do it: pads the same at both ends, and at most half a window."""
        same = self.begins == self.ends
        small = all(2 * pad <= size for pad, size in zip(self.begins, self.kernel))
        exact = all(
            (n + b + e - (k - 1) * d - 1) // s + 1 == count
            for n, b, e, k, d, s, count in zip(
                self.spatial, self.begins, self.ends, self.kernel, self.dilations, self.strides, self.counts
            )
        )
        return same and small and exact and self.rank <= 3

    def windows(self, x: Any, empty: Any) -> Any:
        """``[N, C, *counts, taps]``: a view where nothing is dilated and nothing padded."""
        y = padded(x, (*self.begins, *self.ends), empty)
        for k, (size, stride, spread, count) in enumerate(zip(self.kernel, self.strides, self.dilations, self.counts)):
            axis = 2 + k
            y = y.unfold(axis, (size - 1) * spread + 1, stride)
            y = y.narrow(axis, 0, count)[..., ::spread]
        return y.reshape(*y.shape[: 2 + self.rank], -1)

    def reduced(self, x: Any, combine: Any, empty: float) -> Any:
        """Axis after axis: a window of k × k costs 2 k passes over slices."""
        y = padded(x, (*self.begins, *self.ends), empty)
        for k, (size, stride, spread, count) in enumerate(zip(self.kernel, self.strides, self.dilations, self.counts)):
            length = (count - 1) * stride + 1
            ahead = (slice(None),) * (2 + k)
            total = y[(*ahead, slice(0, length, stride))]
            for tap in range(1, size):
                total = combine(total, y[(*ahead, slice(tap * spread, tap * spread + length, stride))])
            y = total
        return y

    def sizes(self, include_pads: bool) -> Array:
        """How many elements each window covers, with the model's pads or without."""
        total: Array = np.ones((), np.float32)
        for axis, size in enumerate(self.spatial):
            first = np.arange(self.counts[axis])[:, None] * self.strides[axis] - self.pads[axis]
            at = first + np.arange(self.kernel[axis]) * self.dilations[axis]
            low, high = 0, size
            if include_pads:
                low, high = -self.pads[axis], size + self.pads[axis + self.rank]
            total = total[..., None] * ((at >= low) & (at < high)).sum(axis=1).astype(np.float32)
        return total

    def places(self, column_major: bool) -> Array:
        """The flat index, within a channel, of every tap of every window; -1 for pads."""
        flat = np.zeros((1,) * (2 * self.rank), np.int64)
        outside = np.zeros((1,) * (2 * self.rank), bool)
        strides = [math.prod(self.spatial[k + 1 :]) for k in range(self.rank)]
        if column_major:
            strides = [math.prod(self.spatial[:k]) for k in range(self.rank)]
        for k, size in enumerate(self.spatial):
            at = np.arange(self.counts[k])[:, None] * self.strides[k] - self.pads[k]
            at = at + np.arange(self.kernel[k]) * self.dilations[k]
            shape = [1] * (2 * self.rank)
            shape[k], shape[k + self.rank] = self.counts[k], self.kernel[k]
            at = at.reshape(shape)
            flat = flat + at * strides[k]
            outside = outside | (at < 0) | (at >= size)
        return np.where(outside, -1, flat).reshape(*self.counts, -1)


@lowers("MaxPool", types=FLOATS | {DType.int8, DType.uint8, DType.int64})
def max_pool(call: Call, x: Any) -> Any:
    frame = _Frame(call, x)
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    if call.wants(1):
        return _with_places(call, frame, x, lowest)
    if frame.plain and x.dtype.is_floating_point:
        function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[frame.rank - 1]
        return function(x, frame.kernel, frame.strides, frame.begins, frame.dilations)
    return frame.reduced(x, torch.maximum, lowest)


@lowers("NhwcMaxPool", domain=CONTRIB, types=FLOATS | {DType.int8, DType.uint8})
def max_pool_channels_last(call: Call, x: Any) -> Any:
    return max_pool(call, x.movedim(-1, 1)).movedim(1, -1)


def _with_places(call: Call, frame: _Frame, x: Any, lowest: Any) -> Any:
    windows = frame.windows(x, lowest)
    taps = windows.shape[-1]
    best = windows.amax(dim=-1, keepdim=True)
    steps = torch.arange(taps, device=x.device)
    inside = call.constant(lambda: frame.places(bool(call.attr("storage_order", 0))))
    hit = torch.where((windows == best) & (inside >= 0), steps, taps).amin(dim=-1, keepdim=True).clamp(max=taps - 1)
    within = inside.expand(*windows.shape).gather(-1, hit).squeeze(-1)
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(*x.shape[:2], *[1] * frame.rank)
    return best.squeeze(-1), within + planes * math.prod(frame.spatial)


@lowers("AveragePool", wide=True)
def average_pool(call: Call, x: Any) -> Any:
    return averaged(call, x)


def averaged(call: Call, x: Any) -> Any:
    frame = _Frame(call, x)
    include = call.flag("count_include_pad")
    if frame.plain and all(d == 1 for d in frame.dilations):
        function = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[frame.rank - 1]
        return function(x, frame.kernel, frame.strides, frame.begins, False, include)
    return frame.reduced(x, torch.add, 0.0) / call.constant(lambda: frame.sizes(include))


@lowers("LpPool", wide=True)
def lp_pool(call: Call, x: Any) -> Any:
    p = call.attr("p", 2)
    powers = x * x if p == 2 else x.abs() ** p
    total = _Frame(call, x).reduced(powers, torch.add, 0.0)
    return total.sqrt() if p == 2 else total ** (1 / p)


def _axes(x: Any) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@lowers("GlobalAveragePool", wide=True)
def global_average_pool(call: Call, x: Any) -> Any:
    return x.mean(dim=_axes(x), keepdim=True)


@lowers("GlobalMaxPool")
def global_max_pool(call: Call, x: Any) -> Any:
    return x.amax(dim=_axes(x), keepdim=True)


@lowers("GlobalLpPool", wide=True)
def global_lp_pool(call: Call, x: Any) -> Any:
    p = call.attr("p", 2)
    total = (x.abs() ** p).sum(dim=_axes(x), keepdim=True)
    return total ** (1 / p)


@lowers("MaxUnpool", since=9, types=FLOATS | {DType.int64}, host=(2,))
def max_unpool(call: Call, x: Any, places: Any, output_shape: Array | None = None) -> Any:
    rank = x.ndim - 2
    kernel = per_axis(call.attr("kernel_shape"), rank, "kernel_shape", "MaxUnpool")
    strides = per_axis(call.attr("strides"), rank, "strides", "MaxUnpool")
    pads = call.attr("pads") or [0] * (2 * rank)
    natural = [
        (n - 1) * s - pads[k] - pads[k + rank] + size
        for k, (n, s, size) in enumerate(zip(x.shape[2:], strides, kernel))
    ]
    spatial = natural if output_shape is None else [int(v) for v in output_shape.reshape(-1)][2:]
    # places count in the natural shape; a larger one has room at the ends
    flat = places.reshape(-1)
    size = x.shape[0] * x.shape[1] * math.prod(natural)
    call.require(((flat >= 0) & (flat < size)).all(), f"a place is outside of {size}")
    y = x.new_zeros(size).scatter(0, flat.clamp(0, max(size - 1, 0)), x.reshape(-1))
    y = y.reshape(*x.shape[:2], *natural)
    grown = [0] * rank + [max(a - b, 0) for a, b in zip(spatial, natural)]
    return padded(y, grown)[(slice(None), slice(None), *[slice(0, n) for n in spatial])]
