"""Samples of regions of images, and convolutions whose taps move, as products and gathers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, attribute, constant_ints, operand, text
from ranvier.ops.gradients.contraction import window_of
from ranvier.ops.gradients.parts import made_of
from ranvier.ops.gradients.sampling import Tap, combined


def _column(b: Backward, boxes: Value, k: int) -> Value:
    """One coordinate of all regions, [regions, 1]."""
    return b.Slice(boxes, b.whole(k), b.whole(k + 1), b.whole(1))


def _tent(b: Backward, at: Value, length: int) -> Value:
    """How much of each element a point between elements takes, along a new last axis."""
    places = b.constant(np.arange(length, dtype=b.dtype(at).numpy))
    away = b.Abs(b.Sub(b.Unsqueeze(at, b.whole(b.rank(at))), places))
    return b.Relu(b.Sub(b.number(1.0, away), away))


def _read_out(b: Backward, x: Value, images: Value, down: Value, across: Value) -> Value:
    """``down [regions, rows, H]`` and ``across [regions, columns, W]`` applied to each region's image.

    All images stand below each other for the first product, so that none is copied for each of its regions.
    """
    batch, channels, height, width = b.sizes(x)
    rows, columns = b.dims(down)[1], b.dims(across)[1]
    assert isinstance(rows, int) and isinstance(columns, int)
    if batch > 1:
        numbers = b.constant(np.arange(batch, dtype=np.int64))
        own = b.Equal(b.Unsqueeze(b.cast(images, DType.int64), b.whole(1)), numbers)
        wide = b.cast(b.Unsqueeze(own, b.whole(1, 3)), b.dtype(x))  # [regions, 1, batch, 1]
        down = b.Mul(b.Unsqueeze(down, b.whole(2)), wide)
    tall = b.Reshape(b.Transpose(x, perm=[0, 2, 1, 3]), b.whole(batch * height, channels * width))
    strips = b.MatMul(b.Reshape(down, b.whole(-1, batch * height)), tall)
    strips = b.Reshape(strips, b.whole(-1, rows * channels, width))
    found = b.MatMul(strips, b.Transpose(across, perm=[0, 2, 1]))
    return b.Transpose(b.Reshape(found, b.whole(-1, rows, channels, columns)), perm=[0, 2, 1, 3])


# -- RoiAlign ---------------------------------------------------------------------------------------------------------


class _Samples:
    """The points that stand for each bin of each region along one axis, [regions, bins, samples]."""

    def __init__(self, b: Backward, node: Node, start: Value, end: Value, bins: int, length: int) -> None:
        half = node.version >= 16 and text(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
        extent = b.Sub(end, start)
        extent = extent if half else b.Max(extent, b.number(1.0, extent))
        size = b.Unsqueeze(b.Div(extent, b.number(float(bins), extent)), b.whole(2))  # [regions, 1, 1]
        ratio = int(attribute(node, "sampling_ratio", 0))
        kind = b.dtype(size).numpy
        counted: Value | None = None
        if ratio > 0:
            count = b.number(float(ratio), size)
            steps = b.constant(np.arange(ratio, dtype=kind))
        else:  # as many as the region needs: as many as the largest does, of which the others use the first
            counted = b.Max(b.Ceil(size), b.number(0.0, size))
            count = b.Max(counted, b.number(1.0, size))
            most = b.Cast(b.ReduceMax(count, keepdims=0), to=DType.int64.onnx)
            zero, one = (b.constant(np.asarray(n, np.int64)) for n in (0, 1))
            steps = b.cast(b.node("Range", [zero, most, one], {}).output, b.dtype(size))
        inner = b.Div(b.Add(steps, b.number(0.5, steps)), count)
        numbers = b.constant(np.arange(bins, dtype=kind).reshape(1, bins, 1))
        at = b.Add(b.Mul(b.Add(inner, numbers), size), b.Unsqueeze(start, b.whole(2)))
        self.used = b.And(
            b.GreaterOrEqual(at, b.number(-1.0, at)),
            b.LessOrEqual(at, b.number(float(length), at)),
        )
        self.exists = None if counted is None else b.Less(steps, counted)
        self.at = b.Clip(at, b.number(0.0, at), b.number(length - 1.0, at))
        self.count, self.length, self.b = count, length, b

    def averaging(self) -> Value:
        """``[regions, bins, length]``: what the mean of a bin takes of each element."""
        b = self.b
        shares = b.where(b.Unsqueeze(self._counts(), b.whole(3)), _tent(b, self.at, self.length))
        return b.Div(b.ReduceSum(shares, b.whole(2), keepdims=0), self.count)

    def _counts(self) -> Value:
        return self.used if self.exists is None else self.b.And(self.used, self.exists)

    def neighbours(self) -> list[tuple[Value, Value]]:
        """Both elements beside each point with their weights, ``[regions, bins * samples]``."""
        b = self.b
        low = b.Floor(self.at)
        part = b.Sub(self.at, low)
        high = b.Min(b.Add(low, b.number(1.0, low)), b.number(self.length - 1.0, low))
        flat = b.whole(0, -1)
        return [
            (b.Reshape(b.Cast(place, to=DType.int64.onnx), flat), b.Reshape(b.where(self.used, weight), flat))
            for place, weight in ((low, b.Sub(b.number(1.0, part), part)), (high, part))
        ]


@made_of("RoiAlign")
def _roi_align(b: Backward, node: Node) -> Sequence[Value]:
    x, rois, images = node.inputs
    assert x is not None and rois is not None and images is not None
    _, _, height, width = b.sizes(x)
    boxes = b.Mul(b.cast(rois, b.dtype(x)), b.number(float(attribute(node, "spatial_scale", 1.0)), x))
    if node.version >= 16 and text(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel":
        boxes = b.Sub(boxes, b.number(0.5, boxes))
    bins = int(attribute(node, "output_height", 1)), int(attribute(node, "output_width", 1))
    rows = _Samples(b, node, _column(b, boxes, 1), _column(b, boxes, 3), bins[0], height)
    columns = _Samples(b, node, _column(b, boxes, 0), _column(b, boxes, 2), bins[1], width)
    if text(node, "mode", "avg") == "avg":
        return [_read_out(b, x, images, rows.averaging(), columns.averaging())]
    if not attribute(node, "sampling_ratio", 0):
        raise NotSupported("the gradient of RoiAlign's max is known with a sampling_ratio")
    return [_largest_samples(b, x, images, rows, columns, bins)]


def _largest_samples(
    b: Backward, x: Value, images: Value, rows: _Samples, columns: _Samples, bins: tuple[int, int]
) -> Value:
    """The largest weighted neighbour of any sample."""
    own = b.Gather(x, images, axis=0)
    _, channels, _, width = b.sizes(x)
    best: list[Value] = []
    for row, row_weight in rows.neighbours():
        lines = _picked(b, own, row, 2, width)
        for column, column_weight in columns.neighbours():
            values = _picked(b, lines, column, 3, b.sizes(row)[1])
            weights = b.Mul(b.Unsqueeze(row_weight, b.whole(1, 3)), b.Unsqueeze(column_weight, b.whole(1, 2)))
            best.append(b.Mul(values, weights))
    apart = b.Reshape(b.node("Max", best, {}).output, b.whole(0, channels, bins[0], -1, bins[1], _samples_of(columns)))
    return b.ReduceMax(apart, b.whole(3, 5), keepdims=0)


def _samples_of(samples: _Samples) -> int:
    return samples.b.sizes(samples.at)[2]


def _picked(b: Backward, x: Value, places: Value, axis: int, other: int) -> Value:
    """``x [regions, C, H, W]`` at each region's places along an axis."""
    _, channels, _, _ = b.dims(x)
    assert isinstance(channels, int)
    count = b.sizes(places)[1]
    wide = (channels, count, other) if axis == 2 else (channels, other, count)
    index = b.Unsqueeze(places, b.whole(1, 3) if axis == 2 else b.whole(1, 2))
    return b.GatherElements(x, b.Expand(index, b.whole(b.sizes(places)[0], *wide)), axis=axis)


# -- MaxRoiPool -------------------------------------------------------------------------------------------------------


@made_of("MaxRoiPool")
def _max_roi_pool(b: Backward, node: Node) -> Sequence[Value]:
    """The largest of each bin, first along one axis and then along the other; others count as less than anything."""
    x, rois = node.inputs
    assert x is not None and rois is not None
    _, _, height, width = b.sizes(x)
    bins = [int(n) for n in node.attrs["pooled_shape"]]
    scaled = b.Mul(rois, b.number(float(attribute(node, "spatial_scale", 1.0)), rois))
    boxes = b.Mul(b.Floor(b.Add(b.Abs(scaled), b.number(0.5, scaled))), b.Sign(scaled))  # halves away from zero
    rows = _bins(b, _column(b, boxes, 2), _column(b, boxes, 4), bins[0], height)
    columns = _bins(b, _column(b, boxes, 1), _column(b, boxes, 3), bins[1], width)
    images = b.Squeeze(b.Cast(_column(b, rois, 0), to=DType.int64.onnx), b.whole(1))
    own = b.Unsqueeze(b.Gather(x, images, axis=0), b.whole(2))  # [regions, C, 1, H, W]
    least = b.number(-math.inf, x)
    strips = b.ReduceMax(b.Where(b.Unsqueeze(rows, b.whole(1, 4)), own, least), b.whole(3), keepdims=0)
    wide = b.Unsqueeze(strips, b.whole(3))  # [regions, C, rows, 1, W]
    found = b.ReduceMax(b.Where(b.Unsqueeze(columns, b.whole(1, 2)), wide, least), b.whole(4), keepdims=0)
    return [b.where(b.Not(b.IsInf(found)), found)]  # an empty bin gives zero


def _bins(b: Backward, start: Value, end: Value, bins: int, length: int) -> Value:
    """Which elements belong to which bin, [regions, bins, length]."""
    one = b.number(1.0, start)
    size = b.Div(b.Max(b.Add(b.Sub(end, start), one), one), b.number(float(bins), start))
    kind = b.dtype(start).numpy
    edges = b.constant(np.arange(bins, dtype=kind))
    places = b.constant(np.arange(length, dtype=kind))
    begin = b.Add(b.Floor(b.Mul(edges, size)), start)
    stop = b.Add(b.Ceil(b.Mul(b.Add(edges, one), size)), start)
    return b.And(
        b.GreaterOrEqual(places, b.Unsqueeze(begin, b.whole(2))), b.Less(places, b.Unsqueeze(stop, b.whole(2)))
    )


# -- CropAndResize ----------------------------------------------------------------------------------------------------


@made_of("CropAndResize", domain="com.microsoft")
def _crop_and_resize(b: Backward, node: Node) -> Sequence[Value]:
    x, rois, images = node.inputs[:3]
    assert x is not None and rois is not None and images is not None
    size = constant_ints(node.inputs[3], "the crop_size of CropAndResize")
    nearest = text(node, "mode", "bilinear") == "nearest"
    boxes = b.cast(rois, b.dtype(x))
    found: list[tuple[Value, Value]] = []
    for k, (count, length) in enumerate(zip(size, b.sizes(x)[2:])):
        start, end = _column(b, boxes, k), _column(b, boxes, k + 2)
        shares = np.array([0.5]) if count == 1 else np.arange(count) / (count - 1)
        share = b.constant(shares.astype(b.dtype(x).numpy))
        reach = b.number(length - 1.0, boxes)
        at = b.Mul(b.Add(b.Mul(start, b.Sub(b.number(1.0, share), share)), b.Mul(end, share)), reach)
        inside = b.And(b.GreaterOrEqual(at, b.number(0.0, at)), b.LessOrEqual(at, reach))
        at = b.where(inside, at)
        at = b.Floor(b.Add(at, b.number(0.5, at))) if nearest else at
        found.append((_tent(b, at, length), inside))
    (down, rows), (across, columns) = found
    y = _read_out(b, x, images, down, across)
    inside = b.And(b.Unsqueeze(rows, b.whole(1, 3)), b.Unsqueeze(columns, b.whole(1, 2)))
    return [b.Where(inside, y, b.number(float(attribute(node, "extrapolation_value", 0.0)), y))]


# -- DeformConv -------------------------------------------------------------------------------------------------------


@made_of("DeformConv")
def _deform_conv(b: Backward, node: Node) -> Sequence[Value]:
    """Every tap's samples, gathered by its moved places, and a product with the weights."""
    x, w, offset = node.inputs[:3]
    assert x is not None and w is not None and offset is not None
    bias, mask = operand(node, 3), operand(node, 4)
    batch, channels, *spatial = b.sizes(x)
    filters, _, *kernel = b.sizes(w)
    rank, taps = len(kernel), math.prod(kernel)
    strides, dilations, pads, group = window_of(b, node, x, w)
    counts = b.sizes(offset)[2:]
    points, groups = math.prod(counts), int(attribute(node, "offset_group", 1))
    moved = b.Reshape(offset, b.whole(batch, groups, taps, rank, points))
    axes = []
    for axis in range(rank):
        starts = np.arange(counts[axis]) * strides[axis] - pads[axis]
        own = np.indices(kernel)[axis].reshape(-1, 1) * dilations[axis] + starts
        wide = own.reshape(taps, *(counts[k] if k == axis else 1 for k in range(rank)))
        places = np.broadcast_to(wide, (taps, *counts)).reshape(taps, points).astype(b.dtype(x).numpy)
        shift = b.Squeeze(b.Slice(moved, b.whole(axis), b.whole(axis + 1), b.whole(3)), b.whole(3))
        at = b.Reshape(b.Add(shift, b.constant(places)), b.whole(batch, groups, taps * points))
        axes.append(_beside(b, at, spatial[axis]))
    pixels = b.Reshape(x, b.whole(batch, groups, channels // groups, math.prod(spatial)))
    parts = []
    for chosen in itertools.product(*axes):
        index, exists, weight = combined(b, chosen, spatial)
        assert exists is not None and weight is not None
        every = b.whole(batch, groups, channels // groups, taps * points)
        sampled = b.GatherElements(pixels, b.Expand(b.Unsqueeze(index, b.whole(2)), every), axis=3)
        parts.append(b.Mul(sampled, b.Unsqueeze(b.where(exists, weight), b.whole(2))))
    sampled = b.add_all(parts)
    if mask is not None:
        sampled = b.Mul(sampled, b.Reshape(mask, b.whole(batch, groups, 1, taps * points)))
    columns = b.Reshape(sampled, b.whole(batch, group, channels // group * taps, points))
    y = b.MatMul(b.Reshape(w, b.whole(group, filters // group, channels // group * taps)), columns)
    y = b.Reshape(y, b.whole(batch, filters, *counts))
    return [y if bias is None else b.Add(y, b.Reshape(bias, b.whole(filters, *[1] * rank)))]


def _beside(b: Backward, at: Value, length: int) -> list[Tap]:
    """Both elements beside points along one axis; those outside do not exist."""
    low = b.Floor(at)
    part = b.Sub(at, low)
    found: list[Tap] = []
    for place, weight in ((low, b.Sub(b.number(1.0, part), part)), (b.Add(low, b.number(1.0, low)), part)):
        exists = b.And(b.GreaterOrEqual(place, b.number(0.0, at)), b.Less(place, b.number(float(length), at)))
        inside = b.Clip(place, b.number(0.0, at), b.number(length - 1.0, at))
        found.append((b.Cast(inside, to=DType.int64.onnx), exists, weight))
    return found
