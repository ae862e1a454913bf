"""Regions of interest: pooling inside them (RoiAlign, MaxRoiPool) and choosing among them (NonMaxSuppression)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.pulse import pulse
from ranvier.ops.registry import Array, op


def _check_regions(x: Array, rois: Array, columns: int, images: Array, op: str) -> None:
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != columns or images.shape != rois.shape[:1]:
        raise ShapeMismatch(
            f"{op}: needs X [N, C, H, W] and rois [regions, {columns}] with an image for each, got {list(x.shape)}, "
            f"{list(rois.shape)} and {list(images.shape)} images"
        )
    if not np.isfinite(rois.astype(np.float32)).all():
        raise InvalidValue(f"{op}: a region is not finite", op=op)
    bad = images[(images < 0) | (images >= x.shape[0])]
    if bad.size:
        raise InvalidValue(f"{op}: image {bad[0]} is out of range for a batch of {x.shape[0]}", op=op)


@op("RoiAlign", since=10)
def roi_align_10(
    x: Array,
    rois: Array,
    batch_indices: Array,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    shape = (output_height, output_width)
    return _roi_align(x, rois, batch_indices, mode, shape, sampling_ratio, spatial_scale, half_pixel=False)


@op("RoiAlign", since=16)
def roi_align(
    x: Array,
    rois: Array,
    batch_indices: Array,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    if coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        raise InvalidValue(
            "RoiAlign: coordinate_transformation_mode must be half_pixel or output_half_pixel, got "
            f"{coordinate_transformation_mode!r}",
            op="RoiAlign",
        )
    half_pixel = coordinate_transformation_mode == "half_pixel"
    shape = (output_height, output_width)
    return _roi_align(x, rois, batch_indices, mode, shape, sampling_ratio, spatial_scale, half_pixel)


def _roi_align(
    x: Array,
    rois: Array,
    batch_indices: Array,
    mode: str,
    pooled: tuple[int, int],
    sampling_ratio: int,
    spatial_scale: float,
    half_pixel: bool,
) -> Array:
    name = "RoiAlign"
    _check_regions(x, rois, 4, batch_indices, name)
    if mode not in ("avg", "max"):
        raise InvalidValue(f"{name}: mode must be avg or max, got {mode!r}", op=name)
    if min(pooled) < 1 or sampling_ratio < 0:
        raise InvalidValue(
            f"{name}: output {list(pooled)} must be positive and sampling_ratio {sampling_ratio} not negative", op=name
        )
    features = widened(x)
    # x1, y1, x2, y2 in pixels of the feature map
    boxes = rois.astype(features.dtype) * features.dtype.type(spatial_scale)
    if half_pixel:
        boxes -= 0.5
    y = np.zeros(checked_shape((len(rois), x.shape[1], *pooled), features.dtype, name), features.dtype)
    pool = _average_samples if mode == "avg" else _max_samples
    for n, (box, image) in enumerate(zip(boxes, batch_indices)):
        rows = _samples(box[1], box[3], pooled[0], sampling_ratio, x.shape[2], half_pixel)
        columns = _samples(box[0], box[2], pooled[1], sampling_ratio, x.shape[3], half_pixel)
        if rows[0].size and columns[0].size:  # a region of no extent has no samples
            pool(features[image], rows, columns, y[n])
    return y.astype(x.dtype, copy=False)


Samples = tuple[Array, Array, Array, Array]  # per bin and sample: low and high element, and their weights


def _samples(start: float, end: float, bins: int, ratio: int, length: int, half_pixel: bool) -> Samples:
    """The points that stand for each bin along one axis, as weighted pairs of neighbouring elements."""
    extent = float(end - start) if half_pixel else max(float(end - start), 1.0)
    size = extent / bins
    per_bin = ratio if ratio > 0 else max(math.ceil(size), 0)
    checked_shape((bins, per_bin), np.float64, "RoiAlign")
    at = float(start) + (np.arange(bins)[:, None] + (np.arange(per_bin) + 0.5) / max(per_bin, 1)) * size
    inside = (at >= -1) & (at <= length)
    at = np.clip(at, 0, length - 1)
    low = np.floor(at).astype(np.intp)
    part = at - low
    return low, np.minimum(low + 1, length - 1), np.where(inside, 1 - part, 0), np.where(inside, part, 0)


def _average_samples(image: Array, rows: Samples, columns: Samples, y: Array) -> None:
    """Both axes are linear: one small matrix each, over the part of the image that the region touches."""
    (down, first_row), (across, first_column) = _averaging(rows), _averaging(columns)
    part = image[:, first_row : first_row + down.shape[1], first_column : first_column + across.shape[1]]
    y[...] = down.astype(image.dtype) @ part @ across.T.astype(image.dtype)


def _averaging(samples: Samples) -> tuple[Array, int]:
    """The matrix ``[bins, elements]`` that averages the samples of each bin, and the first element it reads."""
    low, high, low_weight, high_weight = samples
    first = int(low.min())
    matrix = np.zeros((len(low), int(high.max()) + 1 - first))
    bins = np.arange(len(low))[:, None]
    np.add.at(matrix, (bins, low - first), low_weight)
    np.add.at(matrix, (bins, high - first), high_weight)
    return matrix / low.shape[1], first


def _max_samples(image: Array, rows: Samples, columns: Samples, y: Array) -> None:
    """The largest weighted neighbour of any sample, which is what the standard's 'max' takes the maximum of."""
    best: Array | None = None
    for row, row_weight in ((rows[0], rows[2]), (rows[1], rows[3])):
        for column, column_weight in ((columns[0], columns[2]), (columns[1], columns[3])):
            values = image[:, row.reshape(-1)][:, :, column.reshape(-1)]
            values = values * np.outer(row_weight, column_weight).astype(image.dtype)
            best = values if best is None else np.maximum(best, values)
    assert best is not None
    y[...] = best.reshape(len(image), *row.shape, *column.shape).max(axis=(2, 4))


@op("MaxRoiPool")
def max_roi_pool(x: Array, rois: Array, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0) -> Array:
    name = "MaxRoiPool"
    if len(pooled_shape) != 2 or min(pooled_shape) < 1:
        raise InvalidValue(f"{name}: pooled_shape must be two positive sizes, got {list(pooled_shape)}", op=name)
    images = rois[:, 0] if rois.ndim == 2 and rois.shape[1] else rois
    _check_regions(x, rois, 5, images, name)
    boxes = rois[:, 1:].astype(np.float64) * spatial_scale
    boxes = np.floor(np.abs(boxes) + 0.5) * np.sign(boxes)  # halves away from zero
    y = np.zeros(checked_shape((len(rois), x.shape[1], *pooled_shape), x.dtype, name), x.dtype)
    for n, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        rows = _bins(y1, y2, pooled_shape[0], x.shape[2])
        columns = _bins(x1, x2, pooled_shape[1], x.shape[3])
        for i, row in enumerate(rows):
            if row.start >= row.stop:
                continue
            strip = x[int(images[n]), :, row].max(axis=1)
            for j, column in enumerate(columns):
                if column.start < column.stop:
                    y[n, :, i, j] = strip[:, column].max(axis=1)
    return y


def _bins(start: float, end: float, bins: int, length: int) -> list[slice]:
    """The elements of each bin of a region along one axis; a bin outside the image is empty."""
    size = max(end - start + 1, 1) / bins
    edges = np.arange(bins)
    first = np.clip(np.floor(edges * size) + start, 0, length).astype(int)
    stop = np.clip(np.ceil((edges + 1) * size) + start, 0, length).astype(int)
    return [slice(int(a), int(b)) for a, b in zip(first, stop)]


@op("NonMaxSuppression", since=10)
def non_max_suppression(
    boxes: Array,
    scores: Array,
    max_output_boxes_per_class: Array | None = None,
    iou_threshold: Array | None = None,
    score_threshold: Array | None = None,
    *,
    center_point_box: int = 0,
) -> Array:
    """``[image, class, box]`` of every box kept, best first within each class."""
    name = "NonMaxSuppression"
    if boxes.ndim != 3 or boxes.shape[2] != 4 or scores.ndim != 3 or boxes.shape[:2] != (len(scores), scores.shape[2]):
        raise ShapeMismatch(
            f"{name}: needs boxes [images, boxes, 4] and scores [images, classes, boxes], got {list(boxes.shape)} and "
            f"{list(scores.shape)}"
        )
    if center_point_box not in (0, 1):
        raise InvalidValue(f"{name}: center_point_box must be 0 or 1, got {center_point_box}", op=name)
    limit = 0 if max_output_boxes_per_class is None else int(max_output_boxes_per_class.reshape(-1)[0])
    overlap = np.float32(0 if iou_threshold is None else iou_threshold.reshape(-1)[0])
    if not 0 <= overlap <= 1:
        raise InvalidValue(f"{name}: iou_threshold must be in [0, 1], got {overlap}", op=name)
    least = None if score_threshold is None else score_threshold.reshape(-1)[0]
    kept: list[tuple[int, int, int]] = []
    if limit > 0:
        for image in range(len(boxes)):
            corners = _corners(boxes[image], bool(center_point_box))
            areas = (corners[2] - corners[0]) * (corners[3] - corners[1])
            for label in range(scores.shape[1]):
                order = _ranked(scores[image, label], least)
                kept.extend((image, label, k) for k in _greedy(corners, areas, order, limit, overlap))
    return np.array(kept, np.int64).reshape(-1, 3)


def _corners(boxes: Array, centered: bool) -> Array:
    """Top, left, bottom, right of each box, ``[4, boxes]``, whichever way its corners were given."""
    a, b, c, d = boxes.T
    if centered:  # x, y, width, height
        return np.stack([b - d / 2, a - c / 2, b + d / 2, a + c / 2])
    return np.stack([np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)])


def _ranked(scores: Array, least: float | None) -> Array:
    """Boxes above the threshold, best first, equal ones in their order."""
    order = np.argsort(-scores, kind="stable")
    return order if least is None else order[scores[order] > least]


def _greedy(corners: Array, areas: Array, order: Array, limit: int, overlap: np.float32) -> list[int]:
    """Take the best box, drop those it overlaps too much, and go on with the rest."""
    kept: list[int] = []
    while order.size and len(kept) < limit:
        pulse(f"box {len(kept)}")
        best, order = int(order[0]), order[1:]
        kept.append(best)
        top, left, bottom, right = corners[:, order]
        high = np.maximum(np.minimum(bottom, corners[2, best]) - np.maximum(top, corners[0, best]), 0)
        wide = np.maximum(np.minimum(right, corners[3, best]) - np.maximum(left, corners[1, best]), 0)
        shared = high * wide
        union = areas[order] + areas[best] - shared
        # boxes without area overlap nothing
        order = order[~((shared > 0) & (union > 0) & (shared > overlap * union))]
    return kept
