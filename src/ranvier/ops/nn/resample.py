"""Resampling of images one axis at a time: Resize and Upsample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import wide
from ranvier.ops.allocation import checked_shape
from ranvier.ops.registry import Array, op
from ranvier.records import dataclass

Kernel = Callable[[Array], Array]  # distance to a sample -> its weight


def linear_kernel(distance: Array) -> Array:
    return np.asarray(np.maximum(1 - np.abs(distance), 0))


def cubic_kernel(a: float) -> Kernel:
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


def interpolation_dtype(dtype: np.dtype[Any], op: str) -> np.dtype[Any]:
    """The dtype to interpolate in."""
    if dtype.kind == "O":
        raise DTypeMismatch(f"{op}: strings can only be resampled in mode 'nearest'")
    return np.dtype(np.float64) if dtype.kind in "iub" else wide(dtype)


def rounded_to(y: Array, dtype: np.dtype[Any]) -> Array:
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
    factors = _checked_scales(scales, x.ndim, op)
    checked_shape(_scaled_sizes(x.shape, factors), x.dtype, op)
    for step in scaled_steps(x.shape, scales, mode, op):
        x = step.applied(x, op)
    return x


def scaled_steps(shape: Sequence[int], scales: Sequence[float], mode: str, op: str) -> list[AxisSampling]:
    """The forms before version 11, which knew one coordinate rule and left the rounding open.

    Rounding follows what the conformance data of that time holds: down when growing, up when shrinking.
    """
    if mode not in ("nearest", "linear", "bilinear"):
        raise InvalidValue(f"{op}: mode must be nearest or linear, got {mode!r}", op=op)
    factors = _checked_scales(scales, len(shape), op)
    steps: list[AxisSampling] = []
    for axis, (length, size, factor) in enumerate(zip(shape, _scaled_sizes(shape, factors), factors)):
        positions = np.arange(size, dtype=np.float32) / factor
        if mode == "nearest":
            steps.append(_nearest(axis, length, np.ceil(positions) if factor < 1 else np.floor(positions)))
        else:
            steps.append(_weighted(axis, length, positions.astype(np.float64), linear_kernel, 1, 1.0, False))
    return steps


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
    shape, steps = resize_steps(
        x.shape,
        roi,
        scales,
        sizes,
        antialias=antialias,
        axes=axes,
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        keep_aspect_ratio_policy=keep_aspect_ratio_policy,
        mode=mode,
        nearest_mode=nearest_mode,
    )
    checked_shape(shape, x.dtype, name)
    if 0 in x.shape and 0 not in shape:
        raise ShapeMismatch(f"{name}: nothing to sample in shape {list(x.shape)} for an output of {shape}")
    dtype = x.dtype
    source = x
    for step in steps:
        x = step.applied(x, name)
    outside = [step for step in steps if step.outside is not None and step.outside.any()]
    if outside:
        x = x.copy() if x is source else x
        for step in outside:
            x[(slice(None),) * step.axis + (step.outside,)] = extrapolation_value
    return rounded_to(x, dtype) if x.dtype != dtype else x


@dataclass(frozen=True)
class AxisSampling:
    """How one axis is resampled: element i of the result is the element ``index[i]``, or, where there are weights,
    the sum of the elements ``index[i, t]`` times ``weights[i, t]``. ``outside`` marks those that lie beyond a crop."""

    axis: int
    index: Array
    weights: Array | None = None
    outside: Array | None = None
    same: bool = False  # the axis stays as it is

    def applied(self, x: Array, op: str) -> Array:
        if self.same:
            return x
        if self.weights is None:
            return np.take(x, self.index, axis=self.axis)
        return _interpolate(x, self.axis, self.index, self.weights, op)


def resize_steps(
    shape: Sequence[int],
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> tuple[list[int], list[AxisSampling]]:
    """The shape of the result, and the axes to resample in the order to do it."""
    name = "Resize"
    if mode not in ("nearest", *_RADIUS):
        raise InvalidValue(f"{name}: mode must be nearest, linear or cubic, got {mode!r}", op=name)
    if nearest_mode not in _ROUNDING:
        raise InvalidValue(f"{name}: nearest_mode must be one of {list(_ROUNDING)}, got {nearest_mode!r}", op=name)
    chosen = _chosen_axes(axes, len(shape))
    lengths = [shape[a] for a in chosen]
    outputs, factors = _targets(lengths, scales, sizes, keep_aspect_ratio_policy)
    result = list(shape)
    for axis, size in zip(chosen, outputs):
        result[axis] = size
    checked_shape(result, np.uint8, name)  # before there are tables of positions
    crop = _crop(coordinate_transformation_mode, roi, len(chosen))
    kernel = linear_kernel if mode == "linear" else cubic_kernel(cubic_coeff_a)
    steps: list[AxisSampling] = []
    # the axes that shrink come first: the others then have less to do
    for k in sorted(range(len(chosen)), key=lambda k: factors[k]):
        axis, length, size, factor = chosen[k], lengths[k], outputs[k], factors[k]
        if factor == 1 and crop[k] == (0.0, 1.0):
            continue  # not even where a coordinate rule would shift it
        positions = _source_positions(coordinate_transformation_mode, length, size, factor, crop[k])
        outside: Array | None = None
        if coordinate_transformation_mode == "tf_crop_and_resize":
            outside = (positions < 0) | (positions > length - 1)
        if mode == "nearest":
            steps.append(_nearest(axis, length, _ROUNDING[nearest_mode](positions), outside))
        else:
            stretch = min(float(factor), 1.0) if antialias else 1.0
            positions = positions.astype(np.float64)
            steps.append(
                _weighted(axis, length, positions, kernel, _RADIUS[mode], stretch, bool(exclude_outside), outside)
            )
    return result, steps


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


def _nearest(axis: int, length: int, positions: Array, outside: Array | None = None) -> AxisSampling:
    """Elements at whole positions along one axis; beyond the ends, the last one."""
    index = np.clip(positions, 0, max(length - 1, 0)).astype(np.intp)
    return AxisSampling(axis, index, None, outside, len(index) == length and bool((index == np.arange(length)).all()))


def _weighted(
    axis: int,
    length: int,
    positions: Array,
    kernel: Kernel,
    radius: int,
    stretch: float,
    exclude: bool,
    outside: Array | None = None,
) -> AxisSampling:
    """Weighted sums of neighbours along one axis. ``stretch`` below 1 widens the kernel against aliasing."""
    same = len(positions) == length and bool((positions == np.arange(length)).all())
    first = math.floor(-radius / stretch) + 1
    offsets = np.arange(first, 2 - first)
    left = np.ceil(positions) - 1  # so that a position is always in (left, left + 1]
    weights = kernel((offsets - (positions - left)[:, None]) * stretch)
    index = left.astype(np.intp)[:, None] + offsets
    if exclude:
        weights = np.where((index < 0) | (index >= length), 0, weights)
    if exclude or stretch < 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return AxisSampling(axis, np.clip(index, 0, max(length - 1, 0)), weights, outside, same)


def _interpolate(x: Array, axis: int, index: Array, weights: Array, op: str) -> Array:
    """Weighted sums of neighbours along one axis."""
    length, size = x.shape[axis], len(index)
    arithmetic = interpolation_dtype(x.dtype, op)
    weights = weights.astype(np.float32 if arithmetic == np.float32 else np.float64)
    # [before, axis, after] serves every axis
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    lines = x.astype(arithmetic, copy=False).reshape(before, length, after)
    if index.shape[1] <= 4:
        y = _few_taps(lines, index, weights)
    else:
        matrix = np.zeros((size, length), weights.dtype)
        np.add.at(matrix, (np.arange(size)[:, None], index), weights)
        y = lines[:, :, 0] @ matrix.T if lines.shape[2] == 1 else matrix @ lines
    return y.reshape(*x.shape[:axis], size, *x.shape[axis + 1 :])


def _few_taps(lines: Array, index: Array, weights: Array) -> Array:
    """A gather per tap: for narrow kernels cheaper than a matrix that is mostly zeros."""
    y = np.take(lines, index[:, 0], axis=1)
    y *= weights[:, 0, None]
    for tap in range(1, index.shape[1]):
        term = np.take(lines, index[:, tap], axis=1)
        term *= weights[:, tap, None]
        y += term
    return y
