"""Pools, one axis after the other: a window of k × k costs 2 k passes over slices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.ops.nn.window import extents, output_sizes, per_axis, resolve_pads
from ranvier.providers.mlx.library import mx, to_mlx
from ranvier.providers.mlx.table import FLOATS, Call, lowers, only_first_result


class _Frame:
    """Where the windows lie along each axis."""

    def __init__(self, call: Call, x: Any) -> None:
        op = call.node.op
        self.spatial = tuple(x.shape[2:])
        rank = len(self.spatial)
        self.kernel = per_axis(call.attr("kernel_shape"), rank, "kernel_shape", op)
        self.strides = per_axis(call.attr("strides"), rank, "strides", op)
        self.dilations = per_axis(call.attr("dilations"), rank, "dilations", op)
        auto, ceil = call.attr("auto_pad", "NOTSET"), bool(call.attr("ceil_mode", 0))
        windows = (self.spatial, self.kernel, self.strides, self.dilations)
        self.pads = resolve_pads(auto, call.attr("pads"), *windows, op=op)
        self.counts = output_sizes(*windows, self.pads, ceil_mode=ceil, op=op)
        reach = [(n - 1) * s + e for n, s, e in zip(self.counts, self.strides, extents(self.kernel, self.dilations))]
        begins = self.pads[:rank]
        ends = [max(r - size - b, 0) for r, size, b in zip(reach, self.spatial, begins)]
        self.room = list(zip(begins, ends))

    def reduced(self, x: Any, combine: Any, empty: float) -> Any:
        y = mx.pad(x, [(0, 0), (0, 0), *self.room], constant_values=empty)
        for k, (size, stride, spread, count) in enumerate(zip(self.kernel, self.strides, self.dilations, self.counts)):
            length = (count - 1) * stride + 1
            ahead = (slice(None),) * (2 + k)
            total = y[(*ahead, slice(0, length, stride))]
            for tap in range(1, size):
                total = combine(total, y[(*ahead, slice(tap * spread, tap * spread + length, stride))])
            y = total
        return y

    def sizes(self, include_pads: bool) -> np.ndarray[Any, Any]:
        """How many elements each window covers, with the model's pads or without."""
        total: np.ndarray[Any, Any] = np.ones((), np.float32)
        for axis, size in enumerate(self.spatial):
            first = np.arange(self.counts[axis])[:, None] * self.strides[axis] - self.pads[axis]
            at = first + np.arange(self.kernel[axis]) * self.dilations[axis]
            low, high = 0, size
            if include_pads:
                low, high = -self.pads[axis], size + self.pads[axis + len(self.spatial)]
            total = total[..., None] * ((at >= low) & (at < high)).sum(axis=1).astype(np.float32)
        return total


@lowers("MaxPool", refuses=only_first_result, types=FLOATS)
def max_pool(call: Call, x: Any) -> Any:
    return _Frame(call, x).reduced(x, mx.maximum, -math.inf)


@lowers("AveragePool", wide=True)
def average_pool(call: Call, x: Any) -> Any:
    frame = _Frame(call, x)
    return frame.reduced(x, mx.add, 0.0) / to_mlx(frame.sizes(bool(call.attr("count_include_pad", 0))))


@lowers("LpPool", since=2, wide=True)
def lp_pool(call: Call, x: Any) -> Any:
    p = call.attr("p", 2)
    powers = mx.square(x) if p == 2 else mx.power(mx.abs(x), p)
    total = _Frame(call, x).reduced(powers, mx.add, 0.0)
    return mx.sqrt(total) if p == 2 else mx.power(total, 1 / p)


def _spatial(x: Any) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@lowers("GlobalAveragePool", wide=True)
def global_average_pool(call: Call, x: Any) -> Any:
    return mx.mean(x, axis=_spatial(x), keepdims=True)


@lowers("GlobalMaxPool")
def global_max_pool(call: Call, x: Any) -> Any:
    return mx.max(x, axis=_spatial(x), keepdims=True)
