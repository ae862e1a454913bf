"""Resampling of images: Resize and Upsample, one axis at a time; GridSample and AffineGrid, at free positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import wide
from ranvier.ops.allocation import checked_shape
from ranvier.ops.registry import Array, op

Kernel = Callable[[Array], Array]  # distance to a sample -> its weight


def _linear_kernel(distance: Array) -> Array:
    return np.asarray(np.maximum(1 - np.abs(distance), 0))


def _cubic_kernel(a: float) -> Kernel:
    """Keys' cubic convolution with parameter ``a``."""

    def weight(distance: Array) -> Array:
        d = np.abs(distance)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0))

    return weight


_RADIUS = {"linear": 1, "cubic": 2}  # how far the kernel of a mode reaches

_ROUNDING: dict[str, Callable[[Array], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _arithmetic(dtype: np.dtype[Any], op: str) -> np.dtype[Any]:
    """The dtype to interpolate in."""
    if dtype.kind == "O":
        raise DTypeMismatch(f"{op}: strings can only be resampled in mode 'nearest'")
    return np.dtype(np.float64) if dtype.kind in "iub" else wide(dtype)


def _to_dtype(y: Array, dtype: np.dtype[Any]) -> Array:
    """Back to the operand's dtype. Integers are cut off, within their range; rounding noise must not cost a unit."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        y = np.clip(np.trunc(y + np.copysign(1e-9, y)), limits.min, limits.max)
    return y.astype(dtype, copy=False)


# -- Resize ---------------------------------------------------------------------------------------------------------


@op("Resize", since=10)
def resize_10(x: Array, scales: Array, *, mode: str = "nearest") -> Array:
    return _resize_by_scales(x, scales.reshape(-1).tolist(), mode, "Resize")


@op("Upsample", since=1)
def upsample_1(x: Array, *, height_scale: float, width_scale: float, mode: str = "nearest") -> Array:
    return _upsample(x, (1.0, 1.0, height_scale, width_scale), mode)


@op("Upsample", since=7)
def upsample_7(x: Array, *, scales: Sequence[float], mode: str = "nearest") -> Array:
    return _upsample(x, scales, mode)


@op("Upsample", since=9)
def upsample(x: Array, scales: Array, *, mode: str = "nearest") -> Array:
    return _upsample(x, scales.reshape(-1).tolist(), mode)


def _upsample(x: Array, scales: Sequence[float], mode: str) -> Array:
    if min(scales, default=1) < 1:
        raise InvalidValue(f"Upsample: scales must be at least 1, got {list(scales)}", op="Upsample")
    return _resize_by_scales(x, scales, mode, "Upsample")


def _resize_by_scales(x: Array, scales: Sequence[float], mode: str, op: str) -> Array:
    """The forms before version 11, which knew one coordinate rule and left the rounding open.

    Rounding follows what the conformance data of that time holds: down when growing, up when shrinking.
    """
    if mode not in ("nearest", "linear", "bilinear"):
        raise InvalidValue(f"{op}: mode must be nearest or linear, got {mode!r}", op=op)
    factors = _checked_scales(scales, x.ndim, op)
    sizes = _scaled_sizes(x.shape, factors)
    checked_shape(sizes, x.dtype, op)
    for axis, (size, factor) in enumerate(zip(sizes, factors)):
        positions = np.arange(size, dtype=np.float32) / factor
        if mode == "nearest":
            x = _take(x, axis, np.ceil(positions) if factor < 1 else np.floor(positions))
        else:
            x = _interpolate(x, axis, positions.astype(np.float64), _linear_kernel, 1, 1.0, False, op)
    return x


@op("Resize", since=11)
def resize(
    x: Array,
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Array:
    name = "Resize"
    if mode not in ("nearest", *_RADIUS):
        raise InvalidValue(f"{name}: mode must be nearest, linear or cubic, got {mode!r}", op=name)
    if nearest_mode not in _ROUNDING:
        raise InvalidValue(f"{name}: nearest_mode must be one of {list(_ROUNDING)}, got {nearest_mode!r}", op=name)
    chosen = _chosen_axes(axes, x.ndim)
    lengths = [x.shape[a] for a in chosen]
    outputs, factors = _targets(lengths, scales, sizes, keep_aspect_ratio_policy)
    shape = list(x.shape)
    for axis, size in zip(chosen, outputs):
        shape[axis] = size
    checked_shape(shape, x.dtype, name)
    if min(lengths, default=1) == 0 and math.prod(shape):
        raise ShapeMismatch(f"{name}: nothing to sample in shape {list(x.shape)} for an output of {shape}")
    crop = _crop(coordinate_transformation_mode, roi, len(chosen))
    dtype = x.dtype
    source = x
    outside: list[tuple[int, Array]] = []
    kernel = _linear_kernel if mode == "linear" else _cubic_kernel(cubic_coeff_a)
    # the axes that shrink come first: the others then have less to do
    for k in sorted(range(len(chosen)), key=lambda k: factors[k]):
        axis, length, size, factor = chosen[k], lengths[k], outputs[k], factors[k]
        if factor == 1 and crop[k] == (0.0, 1.0):
            continue  # not even where a coordinate rule would shift it
        positions = _source_positions(coordinate_transformation_mode, length, size, factor, crop[k])
        if coordinate_transformation_mode == "tf_crop_and_resize":
            outside.append((axis, (positions < 0) | (positions > length - 1)))
        if mode == "nearest":
            x = _take(x, axis, _ROUNDING[nearest_mode](positions))
        else:
            stretch = min(float(factor), 1.0) if antialias else 1.0
            positions = positions.astype(np.float64)
            x = _interpolate(x, axis, positions, kernel, _RADIUS[mode], stretch, bool(exclude_outside), name)
    if any(beyond.any() for _, beyond in outside):
        x = x.copy() if x is source else x
        for axis, beyond in outside:
            x[(slice(None),) * axis + (beyond,)] = extrapolation_value
    return _to_dtype(x, dtype) if x.dtype != dtype else x


def _chosen_axes(axes: Sequence[int] | None, rank: int) -> list[int]:
    if axes is None:
        return list(range(rank))
    if any(not -rank <= a < rank for a in axes) or len({a % rank for a in axes}) != len(axes):
        raise InvalidValue(f"Resize: axes {list(axes)} are not distinct axes of a tensor of rank {rank}", op="Resize")
    return [a % rank for a in axes]


def _checked_scales(scales: Sequence[float], count: int, op: str) -> list[np.float32]:
    if len(scales) != count:
        raise ShapeMismatch(f"{op}: needs {count} scales, got {len(scales)}")
    if not all(math.isfinite(s) and s > 0 for s in scales):
        raise InvalidValue(f"{op}: scales must be positive, got {list(scales)}", op=op)
    return [np.float32(s) for s in scales]


def _scaled_sizes(lengths: Sequence[int], scales: Sequence[np.float32]) -> list[int]:
    # in float32, as the standard's shape rule has it: 10 * 0.7 is 7 there
    sizes = [np.floor(np.float32(n) * s) for n, s in zip(lengths, scales)]
    if not np.isfinite(sizes).all():
        raise InvalidValue(f"Resize: scales {[float(s) for s in scales]} are too large for shape {list(lengths)}")
    return [int(size) for size in sizes]


def _targets(
    lengths: Sequence[int], scales: Array | None, sizes: Array | None, policy: str
) -> tuple[list[int], list[Any]]:
    """Output sizes and scales of the chosen axes, from whichever of the two was given (an empty one was not)."""
    by_scales = scales is not None and scales.size > 0
    by_sizes = sizes is not None and sizes.size > 0
    if by_scales == by_sizes:
        raise InvalidValue(f"Resize: give scales or sizes, {'not both' if by_scales else 'got neither'}", op="Resize")
    if scales is not None and by_scales:
        factors = _checked_scales(scales.reshape(-1).tolist(), len(lengths), "Resize")
        return _scaled_sizes(lengths, factors), factors
    wanted = [int(s) for s in (sizes.reshape(-1) if sizes is not None else ())]
    if len(wanted) != len(lengths):
        raise ShapeMismatch(f"Resize: needs {len(lengths)} sizes, got {len(wanted)}")
    ratios = [w / n if n else 1.0 for w, n in zip(wanted, lengths)]
    if policy == "stretch":
        return wanted, ratios
    if policy not in ("not_larger", "not_smaller"):
        raise InvalidValue(
            f"Resize: keep_aspect_ratio_policy must be stretch, not_larger or not_smaller, got {policy!r}", op="Resize"
        )
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(ratio * n + 0.5) for n in lengths], [ratio] * len(lengths)


def _crop(mode: str, roi: Array | None, count: int) -> list[tuple[float, float]]:
    """Start and end of the part to sample, per axis, in units of the axis."""
    if mode != "tf_crop_and_resize":
        return [(0.0, 1.0)] * count
    if roi is None or roi.size != 2 * count:
        got = "none" if roi is None else str(roi.size)
        raise ShapeMismatch(f"Resize: tf_crop_and_resize needs a roi of {2 * count} numbers, got {got}")
    flat = [float(r) for r in roi.reshape(-1)]
    return list(zip(flat[:count], flat[count:]))


def _source_positions(mode: str, length: int, size: int, scale: Any, crop: tuple[float, float]) -> Array:
    """Where in the input each output element lies, in the precision of ``scale``."""
    at: Array = np.arange(size, dtype=np.float32 if isinstance(scale, np.float32) else np.float64)
    exact_size = float(scale) * length  # before it was rounded down to whole elements
    if mode == "half_pixel":
        return np.asarray((at + 0.5) / scale - 0.5)
    if mode == "pytorch_half_pixel":
        return np.asarray((at + 0.5) / scale - 0.5) if size > 1 else np.zeros_like(at)
    if mode == "half_pixel_symmetric":
        offset = length / 2 * (1 - size / exact_size) if exact_size else 0.0
        return np.asarray((at + 0.5) / scale - 0.5 + offset)
    if mode == "asymmetric":
        return np.asarray(at / scale)
    if mode == "tf_half_pixel_for_nn":
        return np.asarray((at + 0.5) / scale)
    if mode == "align_corners":
        return np.asarray(at * ((length - 1) / (exact_size - 1))) if exact_size != 1 else np.zeros_like(at)
    if mode == "tf_crop_and_resize":
        start, end = crop
        if exact_size == 1:
            return np.full_like(at, (start + end) / 2 * (length - 1))
        return np.asarray(at * ((end - start) * (length - 1) / (exact_size - 1)) + start * (length - 1))
    raise InvalidValue(f"Resize: unknown coordinate_transformation_mode {mode!r}", op="Resize")


def _take(x: Array, axis: int, positions: Array) -> Array:
    """Elements at whole positions along one axis; beyond the ends, the last one."""
    length = x.shape[axis]
    index = np.clip(positions, 0, max(length - 1, 0)).astype(np.intp)
    if len(index) == length and (index == np.arange(length)).all():
        return x
    return np.take(x, index, axis=axis)


def _interpolate(
    x: Array, axis: int, positions: Array, kernel: Kernel, radius: int, stretch: float, exclude: bool, op: str
) -> Array:
    """Weighted sums of neighbours along one axis. ``stretch`` below 1 widens the kernel against aliasing."""
    length = x.shape[axis]
    if len(positions) == length and (positions == np.arange(length)).all():
        return x
    first = math.floor(-radius / stretch) + 1
    offsets = np.arange(first, 2 - first)
    left = np.ceil(positions) - 1  # so that a position is always in (left, left + 1]
    weights = kernel((offsets - (positions - left)[:, None]) * stretch)
    index = left.astype(np.intp)[:, None] + offsets
    if exclude:
        weights = np.where((index < 0) | (index >= length), 0, weights)
    if exclude or stretch < 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    arithmetic = _arithmetic(x.dtype, op)
    weights = weights.astype(np.float32 if arithmetic == np.float32 else np.float64)
    index = np.clip(index, 0, length - 1)
    # [before, axis, after] serves every axis
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    lines = x.astype(arithmetic, copy=False).reshape(before, length, after)
    if len(offsets) <= 4:
        y = _few_taps(lines, index, weights)
    else:
        matrix = np.zeros((len(positions), length), weights.dtype)
        np.add.at(matrix, (np.arange(len(positions))[:, None], index), weights)
        y = lines[:, :, 0] @ matrix.T if lines.shape[2] == 1 else matrix @ lines
    return y.reshape(*x.shape[:axis], len(positions), *x.shape[axis + 1 :])


def _few_taps(lines: Array, index: Array, weights: Array) -> Array:
    """A gather per tap: for narrow kernels cheaper than a matrix that is mostly zeros."""
    y = np.take(lines, index[:, 0], axis=1)
    y *= weights[:, 0, None]
    for tap in range(1, index.shape[1]):
        term = np.take(lines, index[:, tap], axis=1)
        term *= weights[:, tap, None]
        y += term
    return y


# -- GridSample and AffineGrid --------------------------------------------------------------------------------------


@op("GridSample", since=16)
def grid_sample_16(
    x: Array, grid: Array, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Array:
    return _grid_sample(x, grid, align_corners, mode, padding_mode)


@op("GridSample", since=20)
def grid_sample(
    x: Array, grid: Array, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Array:
    return _grid_sample(x, grid, align_corners, mode, padding_mode)


def _grid_sample(x: Array, grid: Array, align_corners: int, mode: str, padding: str) -> Array:
    name = "GridSample"
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    if method not in ("nearest", "linear", "cubic"):
        raise InvalidValue(f"{name}: mode must be nearest, linear or cubic, got {mode!r}", op=name)
    if padding not in ("zeros", "border", "reflection"):
        raise InvalidValue(f"{name}: padding_mode must be zeros, border or reflection, got {padding!r}", op=name)
    rank = x.ndim - 2
    if rank < 1 or grid.ndim != x.ndim or grid.shape[0] != x.shape[0] or grid.shape[-1] != rank:
        raise ShapeMismatch(
            f"{name}: needs X [N, C, spatial …] and grid [N, output …, {max(rank, 1)}], got {list(x.shape)} and "
            f"{list(grid.shape)}"
        )
    batch, channels = x.shape[:2]
    spatial: tuple[int, ...] = x.shape[2:]
    y_shape = checked_shape((batch, channels, *grid.shape[1:-1]), x.dtype, name)
    if 0 in spatial and 0 not in y_shape:
        raise ShapeMismatch(f"{name}: nothing to sample in shape {list(x.shape)}")
    # the grid names the last axis first
    points = grid.reshape(batch, math.prod(grid.shape[1:-1]), rank)[:, :, ::-1]
    points = np.moveaxis(points, -1, 0).astype(np.float64)
    taps = [_axis_taps(p, n, bool(align_corners), method, padding) for p, n in zip(points, spatial)]
    pixels = x.reshape(batch, channels, math.prod(spatial))
    if method == "nearest":
        index, inside, _ = _combined([axis_taps[0] for axis_taps in taps], spatial)
        found = np.take_along_axis(pixels, index[:, None], axis=2)
        blank = "" if x.dtype.kind == "O" else x.dtype.type(0)
        return np.where(inside[:, None], found, blank).astype(x.dtype, copy=False).reshape(y_shape)
    arithmetic = _arithmetic(x.dtype, name)
    source = pixels.astype(arithmetic, copy=False)
    total = np.zeros((batch, channels, points.shape[2]), arithmetic)
    for chosen in itertools.product(*taps):
        index, inside, weight = _combined(chosen, spatial)
        weight = np.where(inside, weight, 0).astype(np.float32 if arithmetic == np.float32 else np.float64)
        for n in range(batch):
            total[n] += source[n][:, index[n]] * weight[n]
    return _to_dtype(total, x.dtype).reshape(y_shape)


Tap = tuple[Array, Array, Array]  # along one axis: element, whether it exists, weight


def _axis_taps(points: Array, length: int, align: bool, method: str, padding: str) -> list[Tap]:
    """The elements one axis contributes to each point, whose coordinates run from -1 to 1."""
    low, high = (0.0, length - 1.0) if align else (-0.5, length - 0.5)
    at = (points + 1) / 2 * (high - low) + low
    at = np.where(np.isfinite(at), at, low - 2)  # a point that is nowhere lies outside
    if method == "nearest":
        at = np.rint(at)
    if padding == "border" and method != "cubic":  # a cubic only clamps the elements it reads, as PyTorch has it
        at = np.where((at < low) | (at > high), np.clip(at, 0, length - 1), at)
    elif padding == "reflection":
        at = _reflected(at, low, high)
    floor = np.floor(at)
    if method == "nearest":
        neighbours = [(at, np.ones_like(at))]
    else:
        first, kernel = (0, _linear_kernel) if method == "linear" else (-1, _cubic_kernel(-0.75))
        neighbours = [(floor + k, kernel(floor + k - at)) for k in range(first, 2 - first)]
    taps: list[Tap] = []
    for element, weight in neighbours:
        if padding == "reflection":
            element = np.trunc(_reflected(element, low, high))
        exists = (element >= 0) & (element < length) if padding == "zeros" else np.ones(at.shape, np.bool_)
        taps.append((np.clip(element, 0, length - 1).astype(np.intp), exists, weight))
    return taps


def _reflected(at: Array, low: float, high: float) -> Array:
    """Positions outside ``[low, high]`` thrown back and forth between the two until they lie inside."""
    span = high - low
    if span <= 0:
        return np.full_like(at, low)
    beyond = np.where(at < low, low - at, at - high)
    turns = np.floor(beyond / span)
    rest = beyond - turns * span
    from_low = (turns % 2 == 0) == (at < low)
    return np.where((at >= low) & (at <= high), at, np.where(from_low, low + rest, high - rest))


def _combined(taps: Sequence[Tap], spatial: Sequence[int]) -> Tap:
    """One tap per axis as a single one into the flattened image."""
    index, inside, weight = taps[0]
    for (element, exists, factor), length in zip(taps[1:], spatial[1:]):
        index, inside, weight = index * length + element, inside & exists, weight * factor
    return index, inside, weight


@op("AffineGrid", since=20)
def affine_grid(theta: Array, size: Array, *, align_corners: int = 0) -> Array:
    """The points of an output image, moved by one affine map per sample."""
    name = "AffineGrid"
    batch, _, *spatial = (int(s) for s in size) if size.size in (4, 5) else (0, 0)
    rank = len(spatial)
    if theta.shape != (batch, rank, rank + 1) or rank == 0:
        raise ShapeMismatch(
            f"{name}: size [N, C, spatial of 2 or 3 axes] and theta [N, axes, axes + 1] do not fit: "
            f"{size.tolist()} and {list(theta.shape)}"
        )
    checked_shape((batch, *spatial, rank), theta.dtype, name)
    lines = [
        np.linspace(-1, 1, n) if align_corners and n > 1 else (2 * np.arange(n) + 1) / max(n, 1) - 1 for n in spatial
    ]
    # homogeneous coordinates, the last axis first
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(spatial)], axis=-1)
    moved = points.reshape(1, -1, rank + 1) @ theta.astype(np.float64).swapaxes(1, 2)
    return np.asarray(moved).reshape(batch, *spatial, rank).astype(theta.dtype)
