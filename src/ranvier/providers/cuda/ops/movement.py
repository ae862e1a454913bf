"""Operators that change shapes and types, or make tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue
from ranvier.graph.ir import Node
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.table import ALL, ANY, COMPLEX, FLOATS, INTEGERS, Call, lowers

EVERYTHING = ANY | COMPLEX


def ints(array: Array) -> list[int]:
    """The numbers in an operand that models also write without an axis."""
    return [int(x) for x in np.asarray(array).reshape(-1)]


@lowers("Shape", "Size", types=EVERYTHING, numpy=True)
def _sizes(call: Call, x: Any) -> Any:
    raise AssertionError("sizes are read without torch")


@lowers("Constant", types=EVERYTHING, numpy=True)
def _constant(call: Call) -> Any:
    raise AssertionError("constants are made without torch")


@lowers("Reshape", since=5, types=EVERYTHING, host=(1,), moves=True)
def reshape(call: Call, x: Any, shape: Array) -> Any:
    sizes = ints(shape)
    if not call.flag("allowzero"):
        sizes = [x.shape[k] if size == 0 else size for k, size in enumerate(sizes)]
    if -1 in sizes and x.numel() == 0:  # torch cannot tell what a free size is where there is nothing
        others = math.prod(size for size in sizes if size != -1)
        sizes = [(0 if others == 0 else x.numel() // others) if size == -1 else size for size in sizes]
    return x.reshape(sizes)


@lowers("Reshape", since=1, types=EVERYTHING, moves=True)
def reshape_by_attribute(call: Call, x: Any) -> Any:
    return reshape(call, x, np.asarray(call.attr("shape", ()), np.int64))


@lowers("Flatten", types=EVERYTHING, moves=True)
def flatten(call: Call, x: Any) -> Any:
    axis = call.attr("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@lowers("Transpose", types=EVERYTHING, moves=True)
def transpose(call: Call, x: Any) -> Any:
    return x.permute(call.attr("perm") or list(range(x.ndim))[::-1])


@lowers("Squeeze", types=EVERYTHING, host=(1,), moves=True)
def squeeze(call: Call, x: Any, axes: Array | None = None) -> Any:
    chosen = call.attr("axes") if axes is None else ints(axes)
    if chosen is None:
        return x.squeeze()
    wrong = [axis for axis in chosen if x.shape[axis] != 1]
    if wrong:
        raise InvalidValue(f"Squeeze: axis {wrong[0]} of {list(x.shape)} is not of size 1", op="Squeeze")
    return x.squeeze(tuple(chosen)) if chosen else x


@lowers("Unsqueeze", types=EVERYTHING, host=(1,), moves=True)
def unsqueeze(call: Call, x: Any, axes: Array | None = None) -> Any:
    chosen = call.attr("axes") if axes is None else ints(axes)
    rank = x.ndim + len(chosen)
    for axis in sorted(a % rank for a in chosen):
        x = x.unsqueeze(axis)
    return x


@lowers("Expand", since=8, types=EVERYTHING, host=(1,), moves=True)
def expand(call: Call, x: Any, shape: Array) -> Any:
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(ints(shape))))


@lowers("Tile", since=6, types=EVERYTHING, host=(1,), moves=True)
def tile(call: Call, x: Any, repeats: Array) -> Any:
    return x.repeat(ints(repeats))


@lowers("Tile", since=1, types=EVERYTHING, host=(1, 2), moves=True)
def tile_one_axis(call: Call, x: Any, tiles: Array, axis: Array) -> Any:
    repeats = [1] * x.ndim
    repeats[int(axis.reshape(-1)[0])] = int(tiles.reshape(-1)[0])
    return x.repeat(repeats)


@lowers("Concat", types=EVERYTHING, moves=True)
def concat(call: Call, *operands: Any) -> Any:
    return torch.cat(operands, dim=call.attr("axis", 1 if call.version < 4 else 0))


@lowers("Split", types=EVERYTHING, host=(1,), moves=True)
def split(call: Call, x: Any, sizes: Array | None = None) -> Any:
    axis = call.attr("axis", 0)
    given = call.attr("split") if sizes is None else ints(sizes)
    if given is None:
        count = call.attr("num_outputs") or len(call.node.outputs)
        size = -(-x.shape[axis] // count)
        given = [max(min(size, x.shape[axis] - k * size), 0) for k in range(count)]
    if len(given) != len(call.node.outputs) or sum(given) != x.shape[axis]:
        raise InvalidValue(f"Split: {list(given)} does not divide an axis of {x.shape[axis]}", op="Split")
    return tuple(torch.split(x, list(given), dim=axis))


def _cut(x: Any, axis: int, start: int, end: int, step: int) -> Any:
    first, last, step = slice(start, end, step).indices(x.shape[axis])
    if step > 0:
        return x[(*[slice(None)] * (axis % x.ndim), slice(first, max(first, last), step))]
    count = max(0, -(-(first - last) // -step))
    # a slice that goes back is one that goes forward, turned around
    lowest = first + (count - 1) * step
    forward = x[(*[slice(None)] * (axis % x.ndim), slice(lowest, first + 1, -step) if count else slice(0, 0))]
    return forward.flip(axis)


@lowers("Slice", since=10, types=EVERYTHING, host=(1, 2, 3, 4), moves=True)
def cut(call: Call, x: Any, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Any:
    chosen = list(range(len(ints(starts)))) if axes is None else ints(axes)
    strides = [1] * len(chosen) if steps is None else ints(steps)
    for axis, start, end, step in zip(chosen, ints(starts), ints(ends), strides):
        x = _cut(x, axis % x.ndim, start, end, step)
    return x


@lowers("Slice", since=1, types=EVERYTHING, moves=True)
def cut_by_attributes(call: Call, x: Any) -> Any:
    starts, ends, axes = (call.attr(name) for name in ("starts", "ends", "axes"))
    return cut(call, x, np.asarray(starts), np.asarray(ends), None if axes is None else np.asarray(axes))


def _padded(x: Any, widths: list[tuple[int, int]], mode: str, value: Any, call: Call) -> Any:
    if mode == "constant":
        kept = tuple(slice(max(-b, 0), n - max(-a, 0)) for n, (b, a) in zip(x.shape, widths))
        grown = [(max(b, 0), max(a, 0)) for b, a in widths]
        x = x[kept] if kept else x
        if not any(b or a for b, a in grown):
            return x
        shape = [n + b + a for n, (b, a) in zip(x.shape, grown)]
        y = x.new_zeros(shape) if value is None else value.reshape(()).to(x.dtype).expand(shape).clone()
        y[tuple(slice(b, b + n) for n, (b, _) in zip(x.shape, grown))] = x
        return y
    for axis, (before, after) in enumerate(widths):
        if before or after:
            within = np.arange(x.shape[axis])[max(-before, 0) : x.shape[axis] - max(-after, 0)]
            index = np.pad(within, (max(before, 0), max(after, 0)), mode=mode)  # type: ignore[call-overload]
            x = x.index_select(axis, call.constant(lambda index=index: index.astype(np.int64)))  # type: ignore[misc]
    return x


@lowers("Pad", since=11, types=EVERYTHING, host=(1, 3), moves=True)
def pad(call: Call, x: Any, pads: Array, value: Any = None, axes: Array | None = None) -> Any:
    chosen = range(x.ndim) if axes is None else ints(axes)
    given = ints(pads)
    half = len(given) // 2
    widths = [(0, 0)] * x.ndim
    for axis, before, after in zip(chosen, given[:half], given[half:]):
        widths[axis] = (before, after)
    if any(n < max(-b, 0) + max(-a, 0) for n, (b, a) in zip(x.shape, widths)):
        raise InvalidValue(f"Pad: pads {given} cut off more than there is in {list(x.shape)}", op="Pad")
    return _padded(x, widths, call.attr("mode", "constant"), value, call)


@lowers("Pad", since=1)
def pad_by_attributes(call: Call, x: Any) -> Any:
    given = call.attr("pads") or call.attr("paddings")
    half = len(given) // 2
    widths = list(zip(given[:half], given[half:]))
    value = torch.full((), call.attr("value", 0.0), dtype=x.dtype, device=x.device)
    return _padded(x, widths, call.attr("mode", "constant"), value, call)


@lowers("CenterCropPad", since=18, types=EVERYTHING, host=(1,), moves=True)
def center_crop_pad(call: Call, x: Any, shape: Array) -> Any:
    axes = call.attr("axes")
    widths = [(0, 0)] * x.ndim
    for axis, size in zip(range(x.ndim) if axes is None else axes, ints(shape)):
        have = x.shape[axis]
        if size <= have:
            before = (have - size) // 2
            widths[axis] = (-before, -(have - size - before))
        else:
            before = (size - have) // 2
            widths[axis] = (before, size - have - before)
    return _padded(x, widths, "constant", None, call)


@lowers("Crop")
def crop(call: Call, x: Any) -> Any:
    left, top, right, bottom = call.attr("border")
    scale = call.attr("scale")
    if scale:
        return x[:, :, top : top + scale[0], left : left + scale[1]]
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


@lowers("Trilu", since=14, types=EVERYTHING, host=(1,), moves=True)
def trilu(call: Call, x: Any, k: Array | None = None) -> Any:
    offset = 0 if k is None else int(k.reshape(()))
    return x.triu(offset) if call.flag("upper", 1) else x.tril(offset)


@lowers("ConstantOfShape", since=9, types=EVERYTHING, host=(0,))
def constant_of_shape(call: Call, shape: Array) -> Any:
    value = call.attr("value")
    filler = (
        np.zeros(1, np.float32) if value is None else np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    )
    return call.constant(lambda: filler.reshape(())).expand(ints(shape))


@lowers("Range", since=11, types=FLOATS | INTEGERS, host=(0, 1, 2))
def span(call: Call, start: Array, limit: Array, delta: Array) -> Any:
    count = max(math.ceil((limit.item() - start.item()) / delta.item()), 0)
    return call.constant(lambda: start.reshape(()) + np.arange(count).astype(start.dtype) * delta.reshape(()))


@lowers("EyeLike", since=9, types=ALL)
def eye_like(call: Call, x: Any) -> Any:
    return call.constant(lambda: np.eye(x.shape[0], x.shape[1], k=call.attr("k", 0), dtype=np.float32))


@lowers("OneHot", since=11, types=ALL, host=(1,))
def one_hot(call: Call, indices: Any, depth: Array, values: Any) -> Any:
    count, axis = int(depth.reshape(-1)[0]), call.attr("axis", -1) % (indices.ndim + 1)
    at = indices.to(torch.int64)
    at = torch.where(at < 0, at + count, at).unsqueeze(axis)
    steps = torch.arange(count, device=at.device).reshape([count if k == axis else 1 for k in range(at.ndim)])
    return torch.where(at == steps, values[1], values[0])


@lowers("DepthToSpace", types=EVERYTHING, moves=True)
def depth_to_space(call: Call, x: Any) -> Any:
    n, c, h, w = x.shape
    b = call.attr("blocksize")
    if call.attr("mode", "DCR") == "DCR":
        y = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // (b * b), h * b, w * b)


@lowers("SpaceToDepth", types=EVERYTHING, moves=True)
def space_to_depth(call: Call, x: Any) -> Any:
    n, c, h, w = x.shape
    b = call.attr("blocksize")
    order = (0, 3, 5, 1, 2, 4) if call.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return x.reshape(n, c, h // b, b, w // b, b).permute(order).reshape(n, c * b * b, h // b, w // b)


# -- types ------------------------------------------------------------------------------------------------------------

_PLAIN = ALL | {DType.float8_e4m3fn, DType.float8_e5m2}


def _saturates(node: Node) -> str | None:
    result = node.outputs[0].type
    source = getattr(node.inputs[0], "type", None)
    to, of = getattr(result, "dtype", None), getattr(source, "dtype", None)
    if to in (DType.float8_e4m3fn, DType.float8_e5m2) and of is not None and not of.is_float:
        return "whole numbers to float8 are not lowered to torch"
    return None


def _converted(call: Call, x: Any) -> Any:
    to = call.dtype()
    if to in (DType.float8_e4m3fn, DType.float8_e5m2):
        return to_float8(x, to, saturate=call.flag("saturate", 1))
    if to is DType.bool:
        return x != 0
    if x.dtype.is_floating_point and to.is_integer:
        # beyond the range of the type, processors and GPUs differ: first into the widest, whose lowest bits stay
        return x.to(torch.float64).to(torch.int64) if to is not DType.int64 else x.to(torch.int64)
    return x


def to_float8(x: Any, to: DType, *, saturate: bool) -> Any:
    """Rounded to nearest even; beyond the range the largest number, or what the type has for too large ones."""
    name = getattr(torch, to.name)
    largest = torch.finfo(name).max
    x = x.to(torch.float32)
    y = x.clamp(-largest, largest).to(name)
    if saturate:
        return y
    # halfway to the number that would come next, and everything beyond it
    beyond = x.abs() >= (464.0 if to is DType.float8_e4m3fn else 61440.0)
    infinite = torch.full_like(x, math.nan if to is DType.float8_e4m3fn else math.inf).copysign(x).to(name)
    return torch.where(beyond, infinite.view(torch.uint8), y.view(torch.uint8)).view(name)


lowers("Cast", since=6, types=_PLAIN, refuses=_saturates)(_converted)


@lowers("CastLike", since=15, types=_PLAIN, refuses=_saturates)
def cast_like(call: Call, x: Any, like: Any) -> Any:
    return _converted(call, x)
