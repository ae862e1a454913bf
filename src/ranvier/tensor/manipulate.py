"""Functions that move or convert elements. All sizes are known, so every target shape is part of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor, beside, call
from ranvier.tensor.expr import Shape, spec
from ranvier.tensor.host import hosted
from ranvier.tensor.shapes import (
    InvalidAxis,
    axes_of,
    axis_of,
    broadcast_shapes,
    check_sizes,
    count,
    resolved,
    shape_of,
)
from ranvier.tensor.types import COMPLEX, promoted


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """The elements in another type. What a type cannot hold becomes what NumPy makes of it."""
    own = x if type(x) is Tensor else as_tensor(x)
    kind = dtype if type(dtype) is DType else dtypes.of(dtype)
    if own._expr.dtype is kind:
        return own if device is None else own.to_device(device)
    if kind in COMPLEX or own.dtype in COMPLEX:
        found = hosted(np.ndarray.astype, own, dtype=kind.numpy)
    else:
        found = call(spec("Cast", (("to", kind.onnx),)), (own,), kind, own._expr.shape)
    return found if device is None else found.to_device(device)


def reshape(x: Any, /, shape: Any, *, copy: bool | None = None) -> Tensor:
    """The elements in another shape, in the same order; one size may be -1."""
    own = as_tensor(x)
    target = resolved(shape, own.size)
    return own if target == own.shape else reshaped(own, target)


def reshaped(x: Tensor, target: Shape) -> Tensor:
    """A shape that is known to fit."""
    if x.dtype in COMPLEX:
        return hosted(np.reshape, x, target)
    attrs = (("allowzero", 1),) if 0 in target else ()
    return call(spec("Reshape", attrs, ((1, target),)), (x,), x.dtype, target)


def flatten(x: Any) -> Tensor:
    return reshape(x, -1) if as_tensor(x).size else reshape(x, 0)


def expand_dims(x: Any, /, axis: int = 0) -> Tensor:
    """A new axis of size 1 at this position of the result."""
    own = as_tensor(x)
    rank = own.ndim + 1
    at = index(axis)
    if not -rank <= at < rank:
        raise InvalidAxis(f"axis {at} is out of range for {rank} dimensions")
    at %= rank
    return reshaped(own, (*own.shape[:at], 1, *own.shape[at:]))


def squeeze(x: Any, /, axis: int | Sequence[int] | None = None) -> Tensor:
    """Without these axes, which must have size 1; None: without all that have."""
    own = as_tensor(x)
    gone = tuple(k for k, d in enumerate(own.shape) if d == 1) if axis is None else axes_of(axis, own.ndim)
    for k in gone:
        if own.shape[k] != 1:
            raise ShapeMismatch(f"axis {k} of shape {list(own.shape)} has more than one element")
    return reshape(own, tuple(d for k, d in enumerate(own.shape) if k not in gone))


def permute_dims(x: Any, /, axes: Sequence[int]) -> Tensor:
    """The axes in another order."""
    own = as_tensor(x)
    order = axes_of(tuple(axes), own.ndim)
    if len(order) != own.ndim:
        raise ShapeMismatch(f"{own.ndim} axes are to be ordered, got {list(axes)}")
    if order == tuple(range(own.ndim)):
        return own
    if own.dtype in COMPLEX:
        return hosted(np.transpose, own, order)
    return call(spec("Transpose", (("perm", order),)), (own,), own.dtype, tuple(own.shape[k] for k in order))


def matrix_transpose(x: Any, /) -> Tensor:
    own = as_tensor(x)
    if own.ndim < 2:
        raise ShapeMismatch(f"a matrix has two dimensions or more, got shape {list(own.shape)}")
    return permute_dims(own, (*range(own.ndim - 2), own.ndim - 1, own.ndim - 2))


def moveaxis(x: Any, source: int | Sequence[int], destination: int | Sequence[int], /) -> Tensor:
    own = as_tensor(x)
    here, there = axes_of(source, own.ndim), axes_of(destination, own.ndim)
    if len(here) != len(there):
        raise ShapeMismatch(f"{len(here)} axes cannot go to {len(there)} places")
    order = [k for k in range(own.ndim) if k not in here]
    for target, k in sorted(zip(there, here)):
        order.insert(target, k)
    return permute_dims(own, order)


def swapaxes(x: Any, axis1: int, axis2: int) -> Tensor:
    own = as_tensor(x)
    a, b = axis_of(axis1, own.ndim), axis_of(axis2, own.ndim)
    order = list(range(own.ndim))
    order[a], order[b] = b, a
    return permute_dims(own, order)


def broadcast_to(x: Any, /, shape: Any) -> Tensor:
    """The elements repeated along axes of size 1 and new ones."""
    own = as_tensor(x)
    target = check_sizes(shape_of(shape))
    if own.shape == target:
        return own
    if broadcast_shapes(own.shape, target) != target:
        raise ShapeMismatch(f"shape {list(own.shape)} cannot be broadcast to {list(target)}")
    if own.dtype in COMPLEX:
        return hosted(np.broadcast_to, own, target)
    return call(spec("Expand", (), ((1, target),)), (own,), own.dtype, target)


def broadcast_arrays(*arrays: Any) -> list[Tensor]:
    own = [as_tensor(x) for x in arrays]
    target = broadcast_shapes(*(x.shape for x in own))
    return [broadcast_to(x, target) for x in own]


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Tensor:
    """One after the other along an axis; None: all elements in one row."""
    own = [as_tensor(x) for x in arrays]
    if not own:
        raise InvalidInput("nothing to put together")
    if axis is None:
        own, axis = [flatten(x) for x in own], 0
    dtype = own[0].dtype
    for x in own[1:]:
        dtype = promoted(dtype, x.dtype)
    own = [astype(x, dtype) for x in own]
    first = own[0].shape
    if not first:
        raise ShapeMismatch("tensors without dimensions have no axis to put together along; see stack")
    at = axis_of(axis, len(first))
    rest = (*first[:at], *first[at + 1 :])
    for x in own:
        if len(x.shape) != len(first) or (*x.shape[:at], *x.shape[at + 1 :]) != rest:
            raise ShapeMismatch(f"shapes {list(first)} and {list(x.shape)} differ beside axis {at}")
    if len(own) == 1:
        return own[0]
    if dtype in COMPLEX:
        return hosted(lambda *parts: np.concatenate(parts, axis=at), *own)
    shape = (*first[:at], sum(x.shape[at] for x in own), *first[at + 1 :])
    return call(spec("Concat", (("axis", at),)), tuple(own), dtype, shape)


def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Tensor:
    """One after the other along a new axis."""
    own = [as_tensor(x) for x in arrays]
    if len({x.shape for x in own}) != 1:
        raise ShapeMismatch(f"shapes differ: {[list(x.shape) for x in own]}")
    rank = own[0].ndim + 1
    if not -rank <= axis < rank:
        raise InvalidAxis(f"axis {axis} is out of range for {rank} dimensions")
    return concat([expand_dims(x, axis=axis % rank) for x in own], axis=axis % rank)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis, without it."""
    own = as_tensor(x)
    (at,) = axes_of(axis, own.ndim)
    return tuple(own[(slice(None),) * at + (k,)] for k in range(own.shape[at]))


def split(x: Any, sections: int | Sequence[int], *, axis: int = 0) -> tuple[Tensor, ...]:
    """As many equal parts, or parts of these sizes."""
    own = as_tensor(x)
    (at,) = axes_of(axis, own.ndim)
    size = own.shape[at]
    if isinstance(sections, int):
        if sections < 1 or size % sections:
            raise ShapeMismatch(f"{size} elements cannot be cut into {sections} equal parts")
        sizes = [size // sections] * sections
    else:
        sizes = [index(s) for s in sections]
        if sum(sizes) != size:
            raise ShapeMismatch(f"parts of {sizes} do not make up {size} elements")
    parts, start = [], 0
    for each in sizes:
        parts.append(own[(slice(None),) * at + (slice(start, start + each),)])
        start += each
    return tuple(parts)


def flip(x: Any, /, *, axis: int | Sequence[int] | None = None) -> Tensor:
    own = as_tensor(x)
    axes = axes_of(axis, own.ndim)
    return own[tuple(slice(None, None, -1) if k in axes else slice(None) for k in range(own.ndim))]


def roll(x: Any, /, shift: int | Sequence[int], *, axis: int | Sequence[int] | None = None) -> Tensor:
    """Elements moved along axes; those that fall out come in at the other end."""
    own = as_tensor(x)
    if axis is None:
        if not isinstance(shift, int):
            raise InvalidInput("without an axis there is one shift")
        return reshape(roll(flatten(own), shift, axis=0), own.shape)
    axes = tuple(axis) if isinstance(axis, tuple | list) else (index(axis),)  # type: ignore[arg-type]
    shifts = tuple(shift) if isinstance(shift, tuple | list) else (index(shift),) * len(axes)  # type: ignore[arg-type]
    if len(shifts) != len(axes):
        raise InvalidInput(f"{len(shifts)} shifts for {len(axes)} axes")
    for by, each in zip(shifts, axes):
        (at,) = axes_of(each, own.ndim)
        size = own.shape[at]
        cut = -by % size if size else 0
        if cut:
            lead = (slice(None),) * at
            own = concat([own[(*lead, slice(cut, None))], own[(*lead, slice(None, cut))]], axis=at)
    return own


def tile(x: Any, repetitions: Sequence[int], /) -> Tensor:
    own = as_tensor(x)
    times = tuple(index(r) for r in (repetitions if isinstance(repetitions, tuple | list) else (repetitions,)))
    rank = max(len(times), own.ndim)
    times = (1,) * (rank - len(times)) + times
    own = reshape(own, (1,) * (rank - own.ndim) + own.shape)
    if own.dtype in COMPLEX:
        return hosted(np.tile, own, times)
    shape = tuple(d * r for d, r in zip(own.shape, times))
    return own if shape == own.shape else call(spec("Tile", (), ((1, times),)), (own,), own.dtype, shape)


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    """Each element several times, one after the other."""
    own = as_tensor(x)
    if axis is None:
        own, axis = flatten(own), 0
    (at,) = axes_of(axis, own.ndim)
    times = repeats.numpy() if isinstance(repeats, Tensor) else np.asarray(repeats)
    try:
        places = np.repeat(np.arange(own.shape[at], dtype=np.int64), times)
    except ValueError as error:
        raise InvalidInput(f"repeats {times.tolist()}: {error}") from None
    return take(own, Tensor(places), axis=at)


def take(x: Any, indices: Any, /, *, axis: int | None = None) -> Tensor:
    """The elements at these places of an axis."""
    own = as_tensor(x)
    places = beside(as_tensor(indices), own)
    if axis is None:
        own, axis = flatten(own), 0
    (at,) = axes_of(axis, own.ndim)
    if own.dtype in COMPLEX:
        return hosted(np.take, own, places, axis=at)
    shape = (*own.shape[:at], *places.shape, *own.shape[at + 1 :])
    places = astype(places, DType.int64)
    return call(spec("Gather", (("axis", at),)), (own, places), own.dtype, shape)


def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Tensor:
    own = as_tensor(x)
    places = beside(as_tensor(indices), own)
    (at,) = axes_of(axis, own.ndim)
    if own.ndim != places.ndim:
        raise ShapeMismatch(f"shapes {list(own.shape)} and {list(places.shape)} differ in their number of dimensions")
    common = broadcast_shapes(
        (*own.shape[:at], 1, *own.shape[at + 1 :]), (*places.shape[:at], 1, *places.shape[at + 1 :])
    )
    own = broadcast_to(own, (*common[:at], own.shape[at], *common[at + 1 :]))
    shape = (*common[:at], places.shape[at], *common[at + 1 :])
    if own.dtype in COMPLEX:
        return hosted(np.take_along_axis, own, places, axis=at)
    places = broadcast_to(astype(places, DType.int64), shape)
    return call(spec("GatherElements", (("axis", at),)), (own, places), own.dtype, shape)


def pad(x: Any, width: Any, *, value: float = 0.0) -> Tensor:
    """A border of one number; ``width`` is a number, or a pair for each axis."""
    own = as_tensor(x)
    if isinstance(width, int):
        pairs = [(width, width)] * own.ndim
    elif len(width) == 2 and all(isinstance(w, int) for w in width):
        pairs = [(width[0], width[1])] * own.ndim
    else:
        pairs = [(index(a), index(b)) for a, b in width]
    if len(pairs) != own.ndim or any(n < 0 for pair in pairs for n in pair):
        raise ShapeMismatch(f"a border of {width} does not fit {own.ndim} dimensions")
    shape = tuple(d + a + b for d, (a, b) in zip(own.shape, pairs))
    pads = (*(a for a, _ in pairs), *(b for _, b in pairs))
    filling = astype(as_tensor(value, own), own.dtype)
    return call(spec("Pad", (), ((1, pads),)), (own, filling), own.dtype, shape)


def tril(x: Any, /, *, k: int = 0) -> Tensor:
    """What is on and below a diagonal; zeros above."""
    return _triangle(x, index(k), 0)


def triu(x: Any, /, *, k: int = 0) -> Tensor:
    """What is on and above a diagonal; zeros below."""
    return _triangle(x, index(k), 1)


def _triangle(x: Any, k: int, upper: int) -> Tensor:
    own = as_tensor(x)
    if own.ndim < 2:
        raise ShapeMismatch(f"a matrix has two dimensions or more, got shape {list(own.shape)}")
    if own.dtype in COMPLEX:
        return hosted(np.triu if upper else np.tril, own, k)
    return call(spec("Trilu", (("upper", upper),), ((1, k),)), (own,), own.dtype, own.shape)


def meshgrid(*arrays: Any, indexing: str = "xy") -> list[Tensor]:
    """Coordinates of a grid from those of its axes."""
    if indexing not in ("xy", "ij"):
        raise InvalidInput(f"indexing is 'xy' or 'ij', not {indexing!r}")
    own = [as_tensor(x) for x in arrays]
    if any(x.ndim > 1 for x in own):
        raise ShapeMismatch("the axes of a grid have one dimension each")
    rank = len(own)
    order = list(range(rank))
    if indexing == "xy" and rank > 1:
        order[:2] = 1, 0
    sizes = [count(x.shape) for x in own]
    shape = tuple(sizes[k] for k in order)
    return [
        broadcast_to(reshape(x, tuple(sizes[k] if order[j] == k else 1 for j in range(rank))), shape)
        for k, x in enumerate(own)
    ]


_OF_TENSORS = True
