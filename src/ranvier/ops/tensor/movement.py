"""Operators that rearrange a tensor or change its extent: Reshape, Transpose, Concat, Slice, Pad, Tile and their kin.

Operators with the trait ``view`` only read the same elements with another shape. Transpose, Slice and Split return
strided arrays over their operand's memory; all others return memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.allocation import checked_shape
from ranvier.ops.operands import integers, normal_axes, normal_axis, same_dtype, scalar, whole_number
from ranvier.ops.registry import Array, Call, op

Ints = Sequence[int]


# -- the same elements in the same order ----------------------------------------------------------------------------


@op("Identity", since=1, traits=("elementwise", "view"))
def identity(x: Any) -> Any:
    """Any value: a tensor, a sequence or an optional."""
    return x


def _reshape(x: Array, shape: Sequence[int], allowzero: int) -> Array:
    """-1 stands for what is left, and 0 for the operand's own size at that place unless ``allowzero``."""
    copied = set() if allowzero else {k for k, size in enumerate(shape) if size == 0}
    if any(k >= x.ndim for k in copied):
        raise ShapeMismatch(f"Reshape: {list(shape)} copies a dimension that {list(x.shape)} does not have")
    if any(size < -1 for size in shape) or list(shape).count(-1) > 1:
        raise InvalidValue(f"Reshape: {list(shape)} is not a shape", op="Reshape")
    # What is copied stands on both sides; without it -1 has an answer even where a copied dimension is empty.
    available = math.prod(size for k, size in enumerate(x.shape) if k not in copied)
    filled = math.prod(size for k, size in enumerate(shape) if size != -1 and k not in copied)
    if -1 in shape:
        fits = filled > 0 and available % filled == 0
    else:
        fits = filled == available or x.size == 0 == filled * math.prod(x.shape[k] for k in copied)
    if not fits:
        raise ShapeMismatch(f"Reshape: {x.size} elements of shape {list(x.shape)} do not fill {list(shape)}")
    sizes = [x.shape[k] if k in copied else size for k, size in enumerate(shape)]
    return x.reshape([available // filled if size == -1 else size for size in sizes])


@op("Reshape", since=5, traits=("view",))
def reshape(x: Array, shape: Array, *, allowzero: int = 0) -> Array:
    return _reshape(x, integers("Reshape", shape), allowzero)


@op("Reshape", since=1, traits=("view",))
def reshape_attribute_form(x: Array, *, shape: Ints = (), consumed_inputs: Ints | None = None) -> Array:
    return _reshape(x, list(shape), 0)


@op("Flatten", since=1, traits=("view",))
def flatten(x: Array, *, axis: int = 1) -> Array:
    split = axis if axis == x.ndim else normal_axis("Flatten", axis, x.ndim)
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))


def _squeeze(x: Array, axes: Sequence[int] | None) -> Array:
    if axes is None:
        return x.reshape([size for size in x.shape if size != 1])
    chosen = normal_axes("Squeeze", axes, x.ndim)
    for axis in chosen:
        if x.shape[axis] != 1:
            raise ShapeMismatch(f"Squeeze: axis {axis} of shape {list(x.shape)} does not have size 1")
    return x.reshape([size for k, size in enumerate(x.shape) if k not in chosen])


@op("Squeeze", since=13, traits=("view",))
def squeeze(x: Array, axes: Array | None = None) -> Array:
    return _squeeze(x, None if axes is None else integers("Squeeze", axes))


@op("Squeeze", since=1, traits=("view",))
def squeeze_attribute_form(x: Array, *, axes: Ints | None = None) -> Array:
    return _squeeze(x, axes or None)


def _unsqueeze(x: Array, axes: Sequence[int]) -> Array:
    """New dimensions of size 1; ``axes`` count in the result."""
    chosen = normal_axes("Unsqueeze", axes, x.ndim + len(axes))
    sizes = iter(x.shape)
    return x.reshape([1 if k in chosen else next(sizes) for k in range(x.ndim + len(axes))])


@op("Unsqueeze", since=13, traits=("view",))
def unsqueeze(x: Array, axes: Array) -> Array:
    return _unsqueeze(x, integers("Unsqueeze", axes))


@op("Unsqueeze", since=1, traits=("view",))
def unsqueeze_attribute_form(x: Array, *, axes: Ints) -> Array:
    return _unsqueeze(x, axes)


# -- the same elements in another order -----------------------------------------------------------------------------


@op("Transpose", since=1)
def transpose(x: Array, *, perm: Ints | None = None) -> Array:
    """By default the order of the axes is reversed."""
    if not perm:
        return x.transpose()
    if sorted(perm) != list(range(x.ndim)):
        raise InvalidValue(f"Transpose: {list(perm)} is not a permutation of the axes of rank {x.ndim}", op="Transpose")
    return x.transpose(perm)


def _block_shape(name: str, x: Array, blocksize: int, mode: str) -> tuple[int, int, int, int]:
    if x.ndim != 4:
        raise ShapeMismatch(f"{name}: expected [N, C, H, W], got shape {list(x.shape)}")
    if blocksize < 1 or mode not in ("DCR", "CRD"):
        raise InvalidValue(f"{name}: blocksize {blocksize} with mode {mode!r} is not valid", op=name)
    n, c, h, w = x.shape
    return n, c, h, w


@op("DepthToSpace", since=1)
def depth_to_space(x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Channels become blocks of pixels; DCR has the block's place before the new channel, CRD after it."""
    n, c, h, w = _block_shape("DepthToSpace", x, blocksize, mode)
    b = blocksize
    if c % (b * b):
        raise ShapeMismatch(f"DepthToSpace: {c} channels do not fill blocks of {b} by {b}")
    depth = c // (b * b)
    if mode == "DCR":
        parts = x.reshape(n, b, b, depth, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, depth, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return parts.copy().reshape(n, depth, h * b, w * b)


@op("SpaceToDepth", since=1)
def space_to_depth(x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """The inverse of DepthToSpace with the same mode."""
    n, c, h, w = _block_shape("SpaceToDepth", x, blocksize, mode)
    b = blocksize
    if h % b or w % b:
        raise ShapeMismatch(f"SpaceToDepth: an image of {h} by {w} is not made of blocks of {b} by {b}")
    parts = x.reshape(n, c, h // b, b, w // b, b)
    parts = parts.transpose(0, 3, 5, 1, 2, 4) if mode == "DCR" else parts.transpose(0, 1, 3, 5, 2, 4)
    return parts.copy().reshape(n, c * b * b, h // b, w // b)


@op("ReverseSequence", since=10)
def reverse_sequence(x: Array, lengths: Array, *, batch_axis: int = 1, time_axis: int = 0) -> Array:
    """Turns the first ``lengths[b]`` steps of each sequence b around."""
    if {batch_axis, time_axis} != {0, 1}:
        raise InvalidValue(f"ReverseSequence: batch_axis {batch_axis} and time_axis {time_axis} must be 0 and 1")
    if x.ndim < 2:
        raise ShapeMismatch(f"ReverseSequence: rank 2 or more expected, got shape {list(x.shape)}")
    batch, steps = x.shape[batch_axis], x.shape[time_axis]
    if lengths.shape != (batch,):
        raise ShapeMismatch(f"ReverseSequence: {batch} lengths expected, got shape {list(lengths.shape)}")
    if batch and not 0 <= lengths.min() <= lengths.max() <= steps:
        raise InvalidValue(f"ReverseSequence: lengths must be in [0, {steps}], got {lengths.tolist()}")
    step = np.arange(steps)
    source = np.where(step < lengths[:, None], lengths[:, None] - 1 - step, step)  # [batch, time]
    rows = np.arange(batch)[:, None]
    return x[rows, source] if batch_axis == 0 else x[source.T, rows.T]


# -- joining and cutting --------------------------------------------------------------------------------------------


def _concat(tensors: Sequence[Array], axis: int) -> Array:
    if not tensors:
        raise InvalidValue("Concat: at least one tensor expected", op="Concat")
    same_dtype("Concat", *tensors)
    first = tensors[0]
    axis = normal_axis("Concat", axis, first.ndim)
    for other in tensors[1:]:
        if other.ndim != first.ndim or any(size != first.shape[k] for k, size in enumerate(other.shape) if k != axis):
            raise ShapeMismatch(f"Concat: shapes {list(first.shape)} and {list(other.shape)} differ beside axis {axis}")
    length = sum(t.shape[axis] for t in tensors)
    checked_shape((*tensors[0].shape[:axis], length, *tensors[0].shape[axis + 1 :]), tensors[0].dtype, "Concat")
    return np.concatenate(tensors, axis)


@op("Concat", since=4)
def concat(*tensors: Array, axis: int) -> Array:
    return _concat(tensors, axis)


@op("Concat", since=1)
def concat_1(*tensors: Array, axis: int = 1) -> Array:
    return _concat(tensors, axis)


def _cut(x: Array, sizes: Sequence[int], axis: int) -> tuple[Array, ...]:
    if min(sizes, default=0) < 0 or sum(sizes) != x.shape[axis]:
        raise InvalidValue(f"Split: sizes {list(sizes)} do not add up to {x.shape[axis]} at axis {axis}", op="Split")
    ends = np.cumsum(sizes)
    before = (slice(None),) * axis
    return tuple(x[(*before, slice(end - size, end))] for size, end in zip(sizes, ends))


def _equal_sizes(total: int, count: int) -> list[int]:
    if count < 1 or total % count:
        raise InvalidValue(f"Split: {total} elements cannot be cut into {count} equal parts", op="Split")
    return [total // count] * count


@op("Split", since=18)
def split(
    x: Array, sizes: Array | None = None, *, axis: int = 0, num_outputs: int | None = None, ctx: Call
) -> tuple[Array, ...]:
    """Parts of the given sizes, or ``num_outputs`` parts of which the last may be smaller."""
    axis = normal_axis("Split", axis, x.ndim)
    if sizes is not None:
        return _cut(x, integers("Split", sizes), axis)
    count, total = ctx.outputs if num_outputs is None else num_outputs, x.shape[axis]
    if not 1 <= count <= max(total, ctx.outputs):
        raise InvalidValue(f"Split: num_outputs {count} does not fit an axis of {total}", op="Split")
    part = -(-total // count)
    return _cut(x, [min(part, max(total - k * part, 0)) for k in range(count)], axis)


@op("Split", since=13)
def split_13(x: Array, sizes: Array | None = None, *, axis: int = 0, ctx: Call) -> tuple[Array, ...]:
    axis = normal_axis("Split", axis, x.ndim)
    return _cut(x, _equal_sizes(x.shape[axis], ctx.outputs) if sizes is None else integers("Split", sizes), axis)


@op("Split", since=1)
def split_attribute_form(
    x: Array, sizes: Array | None = None, *, axis: int = 0, split: Ints | None = None, ctx: Call
) -> tuple[Array, ...]:
    """Sizes as an attribute; version 1 allowed a (floating-point) input too."""
    axis = normal_axis("Split", axis, x.ndim)
    if sizes is not None:
        split = integers("Split", sizes.astype(np.int64))
    return _cut(x, split or _equal_sizes(x.shape[axis], ctx.outputs), axis)


def _slice_of(start: int, stop: int, step: int, size: int) -> slice:
    """The Python slice for one axis. The standard clamps where Python, stepping backwards, would find nothing."""
    if step == 0:
        raise InvalidValue("Slice: a step must not be 0", op="Slice")
    if step > 0 or size == 0:
        return slice(start, stop, step)
    first = min(max(start + size if start < 0 else start, 0), size - 1)
    last = min(max(stop + size if stop < 0 else stop, -1), size - 1)
    return slice(first, None if last < 0 else last, step)


def _slice(
    x: Array, starts: Sequence[int], stops: Sequence[int], axes: Sequence[int] | None, steps: Sequence[int] | None
) -> Array:
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(stops) == len(axes) == len(steps):
        lengths = [len(starts), len(stops), len(axes), len(steps)]
        raise ShapeMismatch(f"Slice: starts, ends, axes and steps must have one length, got {lengths}")
    window: list[Any] = [slice(None)] * x.ndim
    for axis, start, stop, step in zip(normal_axes("Slice", axes, x.ndim), starts, stops, steps):
        window[axis] = _slice_of(start, stop, step, x.shape[axis])
    return x[(*window, ...)]  # with the ellipsis even a scalar stays an array


@op("Slice", since=10)
def slice_(x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Array:
    def read(values: Array | None) -> list[int] | None:
        return None if values is None else integers("Slice", values)

    return _slice(x, integers("Slice", starts), integers("Slice", ends), read(axes), read(steps))


@op("Slice", since=1)
def slice_attribute_form(x: Array, *, starts: Ints, ends: Ints, axes: Ints | None = None) -> Array:
    return _slice(x, starts, ends, axes or None, None)


@op("Trilu", since=14)
def trilu(x: Array, k: Array | None = None, *, upper: int = 1) -> Array:
    if x.ndim < 2:
        raise ShapeMismatch(f"Trilu: rank 2 or more expected, got shape {list(x.shape)}")
    rows, columns = x.shape[-2:]
    diagonal = 0 if k is None else whole_number("Trilu", "k", k)
    diagonal = min(max(diagonal, -rows - 1), columns + 1)  # the rest is the same, and may overflow
    keep = np.tri(rows, columns, diagonal - 1 if upper else diagonal, dtype=bool)
    return np.where(keep != bool(upper), x, np.zeros((), x.dtype))


# -- growing --------------------------------------------------------------------------------------------------------


def _filler(dtype: np.dtype[Any]) -> Any:
    return "" if dtype.kind == "O" else np.zeros((), dtype)


def _pad(x: Array, pads: Sequence[int], mode: str, value: Any, axes: Sequence[int] | None) -> Array:
    """``pads`` lists what to add before each axis, then what to add after; negative amounts cut off."""
    chosen = range(x.ndim) if axes is None else normal_axes("Pad", axes, x.ndim)
    if len(pads) != 2 * len(chosen):
        raise ShapeMismatch(f"Pad: {2 * len(chosen)} amounts expected for {len(chosen)} axes, got {len(pads)}")
    widths = [(0, 0)] * x.ndim
    for k, axis in enumerate(chosen):
        widths[axis] = (pads[k], pads[k + len(chosen)])
    window: list[Any] = [
        slice(max(-before, 0), size - max(-after, 0)) for size, (before, after) in zip(x.shape, widths)
    ]
    if any(cut.start > cut.stop for cut in window):
        raise InvalidValue(f"Pad: {widths} cuts off more than shape {list(x.shape)} has", op="Pad")
    core = x[(*window, ...)]
    growth = [(max(before, 0), max(after, 0)) for before, after in widths]
    shape = checked_shape([a + size + b for size, (a, b) in zip(core.shape, growth)], x.dtype, "Pad")
    if mode == "constant":
        result = np.full(shape, value, x.dtype)
        result[tuple(slice(a, a + size) for size, (a, _) in zip(core.shape, growth))] = core
        return result
    if mode not in ("reflect", "edge", "wrap"):
        raise InvalidValue(f"Pad: mode must be constant, reflect, edge or wrap, got {mode!r}", op="Pad")
    for size, width in zip(core.shape, growth):
        if size == 0 and any(width):
            raise InvalidValue(f"Pad: mode {mode!r} has nothing to repeat in shape {list(core.shape)}", op="Pad")
    return np.pad(core, growth, mode=mode)  # type: ignore[call-overload,no-any-return]


@op("Pad", since=11)
def pad(
    x: Array, pads: Array, value: Array | None = None, axes: Array | None = None, *, mode: str = "constant"
) -> Array:
    if value is None:
        fill = _filler(x.dtype)
    else:
        same_dtype("Pad", x, value)
        fill = scalar("Pad", "constant_value", value)
    return _pad(x, integers("Pad", pads), mode, fill, None if axes is None else integers("Pad", axes))


@op("Pad", since=2)
def pad_attribute_form(x: Array, *, pads: Ints, mode: str = "constant", value: float = 0.0) -> Array:
    return _pad(x, pads, mode, value, None)


@op("Pad", since=1)
def pad_1(x: Array, *, paddings: Ints, mode: str = "constant", value: float = 0.0) -> Array:
    return _pad(x, paddings, mode, value, None)


@op("CenterCropPad", since=18)
def center_crop_pad(x: Array, shape: Array, *, axes: Ints | None = None) -> Array:
    sizes = integers("CenterCropPad", shape)
    chosen = normal_axes("CenterCropPad", range(x.ndim) if axes is None else axes, x.ndim)
    if len(sizes) != len(chosen):
        raise ShapeMismatch(f"CenterCropPad: {len(sizes)} sizes for {len(chosen)} axes")
    target = list(x.shape)
    for axis, size in zip(chosen, sizes):
        target[axis] = size
    result = np.full(checked_shape(target, x.dtype, "CenterCropPad"), _filler(x.dtype), x.dtype)
    source, place = [slice(None)] * x.ndim, [slice(None)] * x.ndim
    for axis in chosen:
        have, want = x.shape[axis], target[axis]
        kept = min(have, want)
        source[axis] = slice((have - kept) // 2, (have - kept) // 2 + kept)
        place[axis] = slice((want - kept) // 2, (want - kept) // 2 + kept)
    result[tuple(place)] = x[tuple(source)]
    return result


def _tile(x: Array, repeats: Sequence[int]) -> Array:
    if len(repeats) != x.ndim:
        raise ShapeMismatch(f"Tile: {x.ndim} repeats expected for shape {list(x.shape)}, got {len(repeats)}")
    checked_shape([size * times for size, times in zip(x.shape, repeats)], x.dtype, "Tile")
    return np.tile(x, repeats)


@op("Tile", since=6)
def tile(x: Array, repeats: Array) -> Array:
    return _tile(x, integers("Tile", repeats))


@op("Tile", since=1)
def tile_1(x: Array, tiles: Array, axis: Array) -> Array:
    """One axis is repeated; both numbers come in the operand's (floating-point) type."""
    repeats = [1] * x.ndim
    repeats[normal_axis("Tile", whole_number("Tile", "axis", axis), x.ndim)] = whole_number("Tile", "tiles", tiles)
    return _tile(x, repeats)


@op("Expand", since=8)
def expand(x: Array, shape: Array) -> Array:
    """Broadcasting both ways: a size of 1 in ``shape`` keeps the operand's own."""
    wanted = checked_shape(integers("Expand", shape), x.dtype, "Expand")
    try:
        common = np.broadcast_shapes(x.shape, wanted)
    except ValueError:
        raise ShapeMismatch(f"Expand: shapes {list(x.shape)} and {list(wanted)} do not broadcast") from None
    return np.broadcast_to(x, checked_shape(common, x.dtype, "Expand")).copy()
