"""Images sampled at free positions: GridSample, AffineGrid, DeformConv, RoiAlign."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node
from ranvier.ops.nn.window import output_sizes, per_axis, resolve_pads
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.table import FLOATS, Call, lowers

Tap = tuple[Any, Any, Any]  # along one axis: element, whether it exists, weight


@lowers("AffineGrid", since=20, types=FLOATS, host=(1,))
def affine_grid(call: Call, theta: Any, size: Array) -> Any:
    batch, _, *spatial = (int(s) for s in size.reshape(-1))
    rank = len(spatial)
    align = call.flag("align_corners")

    def points() -> Array:
        lines = [np.linspace(-1, 1, n) if align and n > 1 else (2 * np.arange(n) + 1) / max(n, 1) - 1 for n in spatial]
        found = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(spatial)], axis=-1)
        return found.reshape(1, -1, rank + 1)

    moved = torch.matmul(call.constant(points), theta.to(torch.float64).mT)
    return moved.reshape(batch, *spatial, rank)


def _grid_sample(call: Call, x: Any, grid: Any) -> Any:
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(call.attr("mode", "linear"), call.attr("mode", "linear"))
    padding, align = call.attr("padding_mode", "zeros"), call.flag("align_corners")
    rank = x.ndim - 2
    batch, channels = x.shape[:2]
    spatial = tuple(x.shape[2:])
    points = grid.reshape(batch, -1, rank).flip(-1).to(torch.float64)  # the grid names the last axis first
    taps = [_axis_taps(points[..., k], n, align, method, padding) for k, n in enumerate(spatial)]
    pixels = x.reshape(batch, channels, -1)
    shape = (batch, channels, *grid.shape[1:-1])
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    pixels = wide.reshape(batch, channels, -1)
    total = pixels.new_zeros(batch, channels, points.shape[1])
    for chosen in itertools.product(*taps):
        index, inside, weight = _combined(chosen, spatial)
        found = torch.gather(pixels, 2, index[:, None].expand(batch, channels, -1))
        factor = torch.where(inside, weight, torch.zeros_like(weight))[:, None].to(pixels.dtype)
        if method == "nearest":  # what is not a number stays one outside of the picture only
            found = torch.where(inside[:, None], found, torch.zeros_like(found))
            total = found
        else:
            total = total + found * factor
    return total.reshape(shape)


def _axis_taps(points: Any, length: int, align: bool, method: str, padding: str) -> list[Tap]:
    low, high = (0.0, length - 1.0) if align else (-0.5, length - 0.5)
    at = (points + 1) / 2 * (high - low) + low
    at = torch.where(torch.isfinite(at), at, low - 2)
    if method == "nearest":
        at = torch.round(at)
    if padding == "border" and method != "cubic":
        at = torch.where((at < low) | (at > high), at.clamp(0, length - 1), at)
    elif padding == "reflection":
        at = _reflected(at, low, high)
    floor = torch.floor(at)
    if method == "nearest":
        neighbours = [(at, torch.ones_like(at))]
    else:
        first, kernel = (0, _linear) if method == "linear" else (-1, _cubic)
        neighbours = [(floor + k, kernel(floor + k - at)) for k in range(first, 2 - first)]
    taps: list[Tap] = []
    for element, weight in neighbours:
        if padding == "reflection":
            element = torch.trunc(_reflected(element, low, high))
        exists = torch.ones_like(element, dtype=torch.bool)
        if padding == "zeros":
            exists = (element >= 0) & (element < length)
        taps.append((element.clamp(0, length - 1).to(torch.int64), exists, weight))
    return taps


def _linear(distance: Any) -> Any:
    return (1 - distance.abs()).clamp(min=0)


def _cubic(distance: Any, a: float = -0.75) -> Any:
    d = distance.abs()
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


def _reflected(at: Any, low: float, high: float) -> Any:
    span = high - low
    if span <= 0:
        return torch.full_like(at, low)
    beyond = torch.where(at < low, low - at, at - high)
    turns = torch.floor(beyond / span)
    rest = beyond - turns * span
    from_low = (turns % 2 == 0) == (at < low)
    return torch.where((at >= low) & (at <= high), at, torch.where(from_low, low + rest, high - rest))


def _combined(taps: Any, spatial: tuple[int, ...]) -> Tap:
    index, inside, weight = taps[0]
    for (element, exists, factor), length in zip(taps[1:], spatial[1:]):
        index, inside, weight = index * length + element, inside & exists, weight * factor
    return index, inside, weight


lowers("GridSample", since=16)(_grid_sample)


@lowers("DeformConv", since=19, wide=True)
def deform_conv(call: Call, x: Any, w: Any, offset: Any, bias: Any = None, mask: Any = None) -> Any:
    kernel = tuple(w.shape[2:])
    rank, count = len(kernel), math.prod(kernel)
    strides = per_axis(call.attr("strides"), rank, "strides", "DeformConv")
    dilations = per_axis(call.attr("dilations"), rank, "dilations", "DeformConv")
    spatial = tuple(x.shape[2:])
    pads = resolve_pads("NOTSET", call.attr("pads"), spatial, kernel, strides, dilations, op="DeformConv")
    counts = output_sizes(spatial, kernel, strides, dilations, pads, op="DeformConv")
    groups, parts = call.attr("group", 1), call.attr("offset_group", 1)
    batch, channels = x.shape[:2]

    def places() -> Array:
        found = np.empty((count, rank, *counts))
        for axis in range(rank):
            start = np.arange(counts[axis]) * strides[axis] - pads[axis]
            tap = np.indices(kernel)[axis].reshape(-1, 1) * dilations[axis]
            shape = [count] + [1] * rank
            shape[1 + axis] = counts[axis]
            found[:, axis] = (tap + start).reshape(shape)
        return found

    moved = call.constant(places) + offset.reshape(batch, parts, count, rank, *counts)
    flat = moved.reshape(batch, parts, count, rank, -1)
    image = x.reshape(batch, parts, channels // parts, -1)
    points = flat.shape[-1]
    low = torch.floor(flat)
    part = (flat - low).to(x.dtype)
    total = image.new_zeros(batch, parts, channels // parts, count, points)
    for corner in itertools.product((0, 1), repeat=rank):
        index = torch.zeros(batch, parts, count, points, dtype=torch.int64, device=x.device)
        weight = torch.ones(batch, parts, count, points, dtype=x.dtype, device=x.device)
        for axis, (side, size) in enumerate(zip(corner, spatial)):
            at = low[:, :, :, axis] + side
            inside = (at >= 0) & (at < size)
            fraction = part[:, :, :, axis] if side else 1 - part[:, :, :, axis]
            weight = weight * torch.where(inside, fraction, torch.zeros_like(fraction))
            index = index * size + torch.where(inside, at, torch.zeros_like(at)).to(torch.int64)
        where = index.reshape(batch, parts, 1, count * points).expand(-1, -1, channels // parts, -1)
        total = total + torch.gather(image, 3, where).reshape(total.shape) * weight[:, :, None]
    if mask is not None:
        total = total * mask.reshape(batch, parts, 1, count, points)
    columns = total.reshape(batch, groups, -1, points)
    y = torch.matmul(w.reshape(groups, w.shape[0] // groups, -1), columns)
    y = y.reshape(batch, w.shape[0], *counts)
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def _adaptive(node: Node) -> str | None:
    if not node.attrs.get("sampling_ratio", 0):
        return "a number of samples that follows from each region is not lowered to torch"
    return None


@lowers("RoiAlign", since=10, types=FLOATS | {DType.int64}, refuses=_adaptive, wide=True)
def roi_align(call: Call, x: Any, rois: Any, images: Any) -> Any:
    half_pixel = call.version >= 16 and call.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    bins = (call.attr("output_height", 1), call.attr("output_width", 1))
    ratio = call.attr("sampling_ratio")
    boxes = rois * call.attr("spatial_scale", 1.0)
    if half_pixel:
        boxes = boxes - 0.5
    call.require(((images >= 0) & (images < x.shape[0])).all(), f"an image is outside a batch of {x.shape[0]}")
    call.require(torch.isfinite(rois).all(), "a region is not finite")
    boxes = torch.nan_to_num(boxes, posinf=0.0, neginf=0.0)
    rows = _samples(boxes[:, 1], boxes[:, 3], bins[0], ratio, x.shape[2], half_pixel)
    columns = _samples(boxes[:, 0], boxes[:, 2], bins[1], ratio, x.shape[3], half_pixel)
    features = x[images.to(torch.int64).clamp(0, x.shape[0] - 1)]
    regions, channels = features.shape[:2]
    corners = []
    for row, row_weight in ((rows[0], rows[2]), (rows[1], rows[3])):
        for column, column_weight in ((columns[0], columns[2]), (columns[1], columns[3])):
            at = row.reshape(regions, -1, 1) * x.shape[3] + column.reshape(regions, 1, -1)
            weight = row_weight.reshape(regions, -1, 1) * column_weight.reshape(regions, 1, -1)
            flat = at.reshape(regions, 1, -1).expand(-1, channels, -1)
            found = torch.gather(features.reshape(regions, channels, -1), 2, flat).reshape(
                regions, channels, *at.shape[1:]
            )
            corners.append(found * weight[:, None])
    shape = (regions, channels, bins[0], ratio, bins[1], ratio)
    if call.attr("mode", "avg") == "avg":
        total = corners[0] + corners[1] + corners[2] + corners[3]
        return total.reshape(shape).mean(dim=(3, 5))
    best = torch.stack(corners).amax(dim=0)
    return best.reshape(shape).amax(dim=(3, 5))


def _samples(start: Any, end: Any, bins: int, ratio: int, length: int, half_pixel: bool) -> tuple[Any, Any, Any, Any]:
    extent = end - start if half_pixel else (end - start).clamp(min=1.0)
    steps = torch.arange(bins, device=start.device)[:, None] + (torch.arange(ratio, device=start.device) + 0.5) / ratio
    at = start[:, None, None] + steps * (extent / bins)[:, None, None]
    inside = (at >= -1) & (at <= length)
    at = at.clamp(0, length - 1)
    low = torch.floor(at)
    part = torch.where(inside, at - low, torch.zeros_like(at))
    rest = torch.where(inside, 1 - (at - low), torch.zeros_like(at))
    first = low.to(torch.int64)
    return first, (first + 1).clamp(max=length - 1), rest, part
