"""Operators that move elements, change their shape or their type, or make them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.providers.base import Array
from ranvier.providers.mlx.library import dtype_of, mx, to_mlx
from ranvier.providers.mlx.table import ALL, BOOL, FLOATS, INTEGERS, Call, lowers


def ints(array: Array) -> list[int]:
    """The numbers in an operand that models also write without an axis."""
    return [int(x) for x in array.reshape(-1)]


@lowers("Shape", "Size", types=ALL, numpy=True)
def _sizes(call: Call, x: Any) -> Any:
    raise AssertionError("sizes are read without mlx")


@lowers("Cast", since=6, types=ALL)
def cast(call: Call, x: Any) -> Any:
    return x.astype(dtype_of(dtypes.from_onnx(call.attr("to"))))


@lowers("CastLike", since=15, types=ALL)
def cast_like(call: Call, x: Any, like: Any) -> Any:
    return x.astype(like.dtype)


@lowers("Reshape", since=5, types=ALL, host=(1,))
def reshape(call: Call, x: Any, shape: Array) -> Any:
    sizes = ints(shape)
    if not call.attr("allowzero", 0):
        sizes = [x.shape[k] if size == 0 else size for k, size in enumerate(sizes)]
    return mx.reshape(x, sizes)


@lowers("Flatten", types=ALL)
def flatten(call: Call, x: Any) -> Any:
    axis = call.attr("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return mx.reshape(x, (math.prod(x.shape[:axis]), -1))


@lowers("Transpose", types=ALL)
def transpose(call: Call, x: Any) -> Any:
    return mx.transpose(x, call.attr("perm") or list(range(x.ndim))[::-1])


@lowers("Squeeze", types=ALL, host=(1,))
def squeeze(call: Call, x: Any, axes: Array | None = None) -> Any:
    chosen = call.attr("axes") if axes is None else ints(axes)
    return mx.squeeze(x) if chosen is None else mx.squeeze(x, tuple(chosen)) if chosen else x


@lowers("Unsqueeze", types=ALL, host=(1,))
def unsqueeze(call: Call, x: Any, axes: Array | None = None) -> Any:
    chosen = call.attr("axes") if axes is None else ints(axes)
    return mx.expand_dims(x, tuple(chosen))


@lowers("Expand", since=8, types=ALL, host=(1,))
def expand(call: Call, x: Any, shape: Array) -> Any:
    return mx.broadcast_to(x, np.broadcast_shapes(tuple(x.shape), tuple(ints(shape))))


@lowers("Tile", since=6, types=ALL, host=(1,))
def tile(call: Call, x: Any, repeats: Array) -> Any:
    return mx.tile(x, ints(repeats))


@lowers("Concat", since=4, types=ALL)
def concat(call: Call, *operands: Any) -> Any:
    return mx.concatenate(list(operands), axis=call.attr("axis"))


@lowers("Split", since=2, types=ALL, host=(1,))
def split(call: Call, x: Any, sizes: Array | None = None) -> Any:
    axis = call.attr("axis", 0)
    given = call.attr("split") if sizes is None else ints(sizes)
    if given is None:
        count = len(call.node.outputs)
        size = -(-x.shape[axis] // count)
        given = [size] * (count - 1) + [x.shape[axis] - size * (count - 1)]
    if len(given) != len(call.node.outputs) or sum(given) != x.shape[axis] or min(given) < 1:
        raise ValueError(f"{given} does not divide an axis of {x.shape[axis]}")
    return tuple(mx.split(x, np.cumsum(given)[:-1].tolist(), axis=axis))


@lowers("Slice", since=10, types=ALL, host=(1, 2, 3, 4))
def cut(call: Call, x: Any, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Any:
    chosen = range(len(starts)) if axes is None else ints(axes)
    strides = [1] * len(starts) if steps is None else ints(steps)
    index: list[Any] = [slice(None)] * x.ndim
    for axis, start, end, stride in zip(chosen, ints(starts), ints(ends), strides):
        first, last, stride = slice(start, end, stride).indices(x.shape[axis])
        if stride > 0:
            index[axis] = slice(first, last, stride)
        else:
            x = mx.take(x, to_mlx(np.arange(first, last, stride)), axis=axis)
    return x[tuple(index)] if index else x


@lowers("Slice", since=1, types=ALL)
def cut_by_attributes(call: Call, x: Any) -> Any:
    starts, ends, axes = (call.attr(name) for name in ("starts", "ends", "axes"))
    return cut(call, x, np.array(starts), np.array(ends), None if axes is None else np.array(axes))


@lowers("Pad", since=11, types=ALL, host=(1, 3))
def pad(call: Call, x: Any, pads: Array, value: Any = None, axes: Array | None = None) -> Any:
    chosen = range(x.ndim) if axes is None else ints(axes)
    half = len(pads) // 2
    widths = [(0, 0)] * x.ndim
    for axis, before, after in zip(chosen, ints(pads[:half]), ints(pads[half:])):
        widths[axis] = (before, after)
    if any(n < max(-b, 0) + max(-a, 0) for n, (b, a) in zip(x.shape, widths)):
        raise ValueError(f"pads {ints(pads)} cut off more than there is in {list(x.shape)}")
    mode = call.attr("mode", "constant")
    if mode == "constant":
        # what is cut off, first
        kept = tuple(slice(max(-b, 0), n - max(-a, 0)) for n, (b, a) in zip(x.shape, widths))
        widths = [(max(b, 0), max(a, 0)) for b, a in widths]
        return mx.pad(x[kept] if kept else x, widths, constant_values=0 if value is None else value.reshape(()))
    for axis, (before, after) in enumerate(widths):
        if before or after:
            within = np.arange(x.shape[axis])[max(-before, 0) : x.shape[axis] - max(-after, 0)]
            index = np.pad(within, (max(before, 0), max(after, 0)), mode=mode)
            x = mx.take(x, to_mlx(index), axis=axis)
    return x


def _within(call: Call, indices: Any, size: int) -> Any:
    """Indices that may count from the end as ones that do not, none of them outside: mlx would read whatever memory is
    there."""
    if size == 0:
        raise ValueError("nothing can be taken from an empty axis")
    if mx.issubdtype(indices.dtype, mx.unsignedinteger):
        call.require(mx.all(indices < size), f"an index is outside an axis of {size}")
        return mx.minimum(indices, size - 1)
    call.require(mx.all(mx.logical_and(indices >= -size, indices < size)), f"an index is outside an axis of {size}")
    return mx.clip(mx.where(indices < 0, indices + size, indices), 0, size - 1)


@lowers("Gather", types=ALL)
def gather(call: Call, x: Any, indices: Any) -> Any:
    axis = call.attr("axis", 0)
    return mx.take(x, _within(call, indices, x.shape[axis]), axis=axis)


@lowers("GatherElements", since=11, types=ALL)
def gather_elements(call: Call, x: Any, indices: Any) -> Any:
    axis = call.attr("axis", 0)
    others = [(a, b) for k, (a, b) in enumerate(zip(indices.shape, x.shape)) if k != axis % x.ndim]
    if any(a > b for a, b in others):
        raise ValueError(f"indices {list(indices.shape)} do not fit {list(x.shape)}")
    x = x[tuple(slice(None) if k == axis % x.ndim else slice(0, n) for k, n in enumerate(indices.shape))]
    return mx.take_along_axis(x, _within(call, indices, x.shape[axis]), axis=axis)


def _rows(call: Call, x: Any, indices: Any, batch: int = 0) -> tuple[Any, Any]:
    """``x`` as rows, and the rows that tuples of ``indices`` mean."""
    depth = indices.shape[-1]
    addressed = x.shape[batch : batch + depth]
    row = mx.zeros(indices.shape[:-1], dtype=mx.int64)
    for k, size in enumerate(addressed):
        row = row * size + _within(call, indices[..., k], size)
    if batch:
        lead = math.prod(x.shape[:batch])
        first = mx.reshape(mx.arange(lead), (*x.shape[:batch], *[1] * (row.ndim - batch)))
        row = row + first * math.prod(addressed)
    return mx.reshape(x, (-1, *x.shape[batch + depth :])), row


@lowers("GatherND", since=11, types=ALL)
def gather_nd(call: Call, x: Any, indices: Any) -> Any:
    rows, chosen = _rows(call, x, indices, call.attr("batch_dims", 0))
    return mx.take(rows, chosen, axis=0)


@lowers("ScatterND", since=11, types=ALL)
def scatter_nd(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    rows, chosen = _rows(call, x, indices)
    return mx.reshape(_scattered(call, rows, (chosen,), updates), x.shape)


@lowers("ScatterElements", since=11, types=ALL)
def scatter_elements(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    axis = call.attr("axis", 0) % x.ndim
    where = [mx.reshape(mx.arange(n), [n if j == k else 1 for j in range(x.ndim)]) for k, n in enumerate(indices.shape)]
    where[axis] = _within(call, indices, x.shape[axis])
    return _scattered(call, x, tuple(mx.broadcast_arrays(*where)), updates)


def _scattered(call: Call, x: Any, where: tuple[Any, ...], updates: Any) -> Any:
    place = x.at[where]
    reduction = call.attr("reduction", "none")
    if reduction == "none":
        fresh = mx.array(x)  # assignment changes the object
        fresh[where] = updates
        return fresh
    named = {"add": place.add, "mul": place.multiply, "max": place.maximum, "min": place.minimum}
    return named[reduction](updates)


@lowers("Trilu", since=14, types=ALL, host=(1,))
def trilu(call: Call, x: Any, k: Array | None = None) -> Any:
    offset = 0 if k is None else int(k.reshape(()))
    rows, columns = x.shape[-2:]
    # the upper triangle is what the lower one, less its diagonal, leaves
    keep = ~np.tri(rows, columns, offset - 1, bool) if call.attr("upper", 1) else np.tri(rows, columns, offset, bool)
    return mx.where(to_mlx(keep), x, mx.zeros_like(x))


@lowers("OneHot", since=11, types=ALL, host=(1,))
def one_hot(call: Call, indices: Any, depth: Array, values: Any) -> Any:
    count, axis = int(depth.reshape(())), call.attr("axis", -1)
    at = mx.where(indices < 0, indices + count, indices)
    hot = mx.expand_dims(at, axis) == mx.reshape(
        mx.arange(count), [count if k == axis % (at.ndim + 1) else 1 for k in range(at.ndim + 1)]
    )
    return mx.where(hot, values[1], values[0])


@lowers("ConstantOfShape", since=9, types=ALL, host=(0,))
def constant_of_shape(call: Call, shape: Array) -> Any:
    value = call.attr("value")
    filler = np.zeros(1, np.float32) if value is None else np.asarray(value)
    return mx.broadcast_to(mx.reshape(to_mlx(filler), ()), ints(shape))


@lowers("Range", since=11, types=FLOATS | INTEGERS, host=(0, 1, 2))
def span(call: Call, start: Array, limit: Array, delta: Array) -> Any:
    count = max(math.ceil((limit.item() - start.item()) / delta.item()), 0)
    return to_mlx(start.reshape(()) + np.arange(count).astype(start.dtype) * delta.reshape(()))


@lowers("DepthToSpace", types=ALL - BOOL)
def depth_to_space(call: Call, x: Any) -> Any:
    n, c, h, w = x.shape
    b = call.attr("blocksize")
    if call.attr("mode", "DCR") == "DCR":
        y = mx.transpose(mx.reshape(x, (n, b, b, c // (b * b), h, w)), (0, 3, 4, 1, 5, 2))
    else:
        y = mx.transpose(mx.reshape(x, (n, c // (b * b), b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return mx.reshape(y, (n, c // (b * b), h * b, w * b))


@lowers("SpaceToDepth", types=ALL - BOOL)
def space_to_depth(call: Call, x: Any) -> Any:
    n, c, h, w = x.shape
    b = call.attr("blocksize")
    order = (0, 3, 5, 1, 2, 4) if call.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    y = mx.transpose(mx.reshape(x, (n, c, h // b, b, w // b, b)), order)
    return mx.reshape(y, (n, c * b * b, h // b, w // b))
