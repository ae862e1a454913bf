"""``x[key]`` and ``x[key] = value``, as NumPy has them.

Numbers in a key are inputs of the graph (a loop over ``x[i]`` compiles once), slices are part of the operator. What
is computed already, and of which no gradient is being made, is cut by a view. Masks have results of a size that only
their numbers tell: those are computed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput, InvalidValue, ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor, beside, call, wrapped
from ranvier.tensor.expr import known, spec
from ranvier.tensor.manipulate import astype, broadcast_to, permute_dims, reshape, take
from ranvier.tensor.shapes import broadcast_shapes, count
from ranvier.tensor.types import COMPLEX

_FARTHEST = -(2**62)  # an end before the beginning, for slices that run backwards


class InvalidIndex(InvalidValue, IndexError):
    """An index that does not fit the tensor."""


def get(x: Tensor, key: Any) -> Tensor:
    """The part of a tensor that a key names."""
    if (chosen := _single_truth(key)) is not None:
        return get(x, None)[: int(chosen)]
    expr = x._expr
    if expr.array is not None and expr.trace is None and _is_basic(key):
        return wrapped(known(_viewed(expr.array, key), expr.dtype, expr.device))
    if expr.dtype in COMPLEX:
        return _on_host(x, key)
    parts = _Parts(x.shape, key)
    found = _sliced(x, parts)
    if parts.arrays:
        found = _gathered(found, parts)
    return reshape(found, parts.final)


def put(x: Tensor, key: Any, value: Any) -> Tensor:
    """The tensor with another value where a key points."""
    given = as_tensor(value, x)
    if given.dtype is not x.dtype:
        from ranvier.tensor.types import promoted

        if promoted(given.dtype, x.dtype) is not x.dtype:
            raise DTypeMismatch(f"a tensor of {x.dtype} cannot hold {given.dtype}")
        given = astype(given, x.dtype)
    if x.dtype in COMPLEX:
        return _put_on_host(x, key, given)
    if isinstance(key, Tensor) and key.dtype is DType.bool and key.shape == x.shape and not given.shape:
        from ranvier.tensor.elementwise import where

        return where(key, given, x)
    places = beside(get(_numbered(x.shape), key), x)
    if places.size == 0:
        broadcast_shapes(places.shape, given.shape)
        return x
    if given.ndim > places.ndim:
        extra = given.ndim - places.ndim
        if any(d != 1 for d in given.shape[:extra]):
            raise ShapeMismatch(f"a value of shape {list(given.shape)} does not fit a part of {list(places.shape)}")
        given = reshape(given, given.shape[extra:])
    try:
        spread = broadcast_to(given, places.shape)
    except ShapeMismatch:
        raise ShapeMismatch(
            f"a value of shape {list(given.shape)} does not fit a part of {list(places.shape)}"
        ) from None
    flat, count_ = reshape(x, (x.size,)), places.size
    spots = reshape(places, (count_,))
    found = call(spec("ScatterElements", (("axis", 0),)), (flat, spots, reshape(spread, (count_,))), x.dtype, (x.size,))
    return reshape(found, x.shape)


class _Parts:
    """A key in pieces: a slice for every axis, then arrays of indices for some, then the shape the user expects."""

    __slots__ = ("arrays", "final", "joined", "slices")

    def __init__(self, shape: tuple[int, ...], key: Any) -> None:
        pieces = _expanded(key, len(shape))
        self.slices: list[range] = []
        self.arrays: list[tuple[int, Tensor]] = []  # axis and its indices
        layout: list[int | None] = []  # of what the user sees: an axis, or None for a new one
        where: list[int] = []  # positions in the layout at which an array stood
        axis = 0
        for piece in pieces:
            if piece is None:
                layout.append(None)
                continue
            if isinstance(piece, slice):
                self.slices.append(range(shape[axis])[_bounds(piece)])
                layout.append(axis)
            else:
                self.slices.append(range(shape[axis]))
                self.arrays.append((axis, _index(piece, shape[axis], axis)))
                where.append(len(layout))
                layout.append(-1)
            axis += 1
        sizes = [1 if k is None else len(self.slices[k]) if k >= 0 else 0 for k in layout]
        self.joined = self._adjacent(where)
        if not self.arrays:
            self.final = tuple(sizes)
            return
        common = broadcast_shapes(*(a.shape for _, a in self.arrays))
        rest = [size for size, k in zip(sizes, layout) if k != -1]
        # indices that stand together are replaced in place; otherwise their axes come first
        at = sum(1 for k in layout[: where[0]] if k != -1) if self.joined else 0
        self.final = (*rest[:at], *common, *rest[at:])

    def _adjacent(self, where: list[int]) -> bool:
        return not where or where[-1] - where[0] == len(where) - 1


def _expanded(key: Any, rank: int) -> list[Any]:
    """The pieces of a key, as many as there are axes, new ones beside them; masks as indices."""
    given = list(key) if isinstance(key, tuple) else [key]
    pieces: list[Any] = []
    for piece in given:
        if isinstance(piece, Tensor | np.ndarray | list | bool | np.bool_):
            array = as_tensor(piece if not isinstance(piece, list) or piece else np.zeros(0, np.int64))
            if array.dtype is DType.bool:
                if not array.shape:
                    raise InvalidInput("a single True or False is an index by itself only, not beside others")
                pieces += [_Masked(p, d) for p, d in zip(np.nonzero(array.numpy()), array.shape)]
                continue
            pieces.append(array)
        else:
            pieces.append(piece)
    used = sum(1 for p in pieces if p is not None and p is not Ellipsis)
    dots = sum(1 for p in pieces if p is Ellipsis)
    if used > rank:
        raise InvalidIndex(f"too many indices: {used} for {rank} dimensions")
    if dots > 1:
        raise InvalidIndex("an index has at most one ellipsis")
    fill = [slice(None)] * (rank - used)
    if dots:
        at = next(k for k, p in enumerate(pieces) if p is Ellipsis)
        pieces[at : at + 1] = fill
    else:
        pieces += fill
    return pieces


class _Masked:
    """Indices that a mask gave, and the size its axis must have."""

    __slots__ = ("places", "size")

    def __init__(self, places: Any, size: int) -> None:
        self.places, self.size = places, size


def _index(piece: Any, size: int, axis: int) -> Tensor:
    """Indices along an axis, as integers that may be negative."""
    if isinstance(piece, _Masked):
        if piece.size != size:
            raise InvalidIndex(f"a mask of {piece.size} elements does not fit axis {axis} of {size}")
        return Tensor(piece.places.astype(np.int64))
    if isinstance(piece, Tensor):
        if not piece.dtype.is_integer:
            raise DTypeMismatch(f"indices are integers or a mask, not {piece.dtype}")
        return astype(piece, DType.int64)
    try:
        number = index(piece)
    except TypeError:
        raise DTypeMismatch(f"not an index: {piece!r}") from None
    if not -size <= number < size:
        raise InvalidIndex(f"index {number} is out of range for axis {axis} of {size} elements")
    return Tensor(np.array(number + size if number < 0 else number, np.int64))


def _bounds(piece: slice) -> slice:
    def number(x: Any) -> int | None:
        return None if x is None else index(x)

    if piece.step is not None and index(piece.step) == 0:
        raise InvalidValue("the step of a slice cannot be 0")
    return slice(number(piece.start), number(piece.stop), number(piece.step))


def _sliced(x: Tensor, parts: _Parts) -> Tensor:
    axes = [k for k, r in enumerate(parts.slices) if r != range(x.shape[k])]
    if not axes:
        return x
    ranges = [parts.slices[k] for k in axes]
    starts = tuple(r.start if len(r) else 0 for r in ranges)
    ends = tuple((r.stop if r.stop >= 0 else _FARTHEST) if len(r) else 0 for r in ranges)
    steps = tuple(r.step if len(r) else 1 for r in ranges)
    shape = tuple(len(r) for r in parts.slices)
    fixed = ((1, starts), (2, ends), (3, tuple(axes)), (4, steps))
    return call(spec("Slice", (), fixed), (x,), x.dtype, shape)


def _gathered(x: Tensor, parts: _Parts) -> Tensor:
    axes = [axis for axis, _ in parts.arrays]
    if len(axes) == 1:
        found = take(x, parts.arrays[0][1], axis=axes[0])
        if parts.joined:
            return found
    common = broadcast_shapes(*(a.shape for _, a in parts.arrays))
    moved = permute_dims(x, (*axes, *(k for k in range(x.ndim) if k not in axes)))
    rest = moved.shape[len(axes) :]
    # the indexed axes as one, and one index into it
    sizes = moved.shape[: len(axes)]
    places: Tensor | None = None
    for (_, each), size in zip(parts.arrays, sizes):
        inside = beside(_from_front(each, size), x)
        places = inside if places is None else places * size + inside
    assert places is not None
    found = take(reshape(moved, (count(sizes), *rest)), broadcast_to(places, common), axis=0)
    if not parts.joined or axes[0] == 0:
        return found
    lead, width = axes[0], len(common)
    order = (*range(width, width + lead), *range(width), *range(width + lead, found.ndim))
    return permute_dims(found, order)


def _from_front(places: Tensor, size: int) -> Tensor:
    """Indices counted from the front; those that are known are looked at, the others where they are used."""
    known_already = places._expr.array
    if known_already is not None and places._expr.trace is None:
        if known_already.size and (known_already.min() < -size or known_already.max() >= size):
            raise InvalidIndex(f"an index is out of range for {size} elements")
        return Tensor(np.where(known_already < 0, known_already + size, known_already))
    from ranvier.tensor.elementwise import where

    return where(places < 0, places + size, places)


def _single_truth(key: Any) -> bool | None:
    """The value of a key that is one True or False: all of the tensor, or nothing of it, along a new axis."""
    if isinstance(key, bool | np.bool_):
        return bool(key)
    if isinstance(key, Tensor | np.ndarray) and not key.shape and as_tensor(key).dtype is DType.bool:
        return bool(key)
    return None


def _is_basic(key: Any) -> bool:
    pieces = key if isinstance(key, tuple) else (key,)
    return all(p is None or p is Ellipsis or (isinstance(p, slice | int) and not isinstance(p, bool)) for p in pieces)


def _viewed(array: Any, key: Any) -> Any:
    pieces = key if isinstance(key, tuple) else (key,)
    try:
        found = array[tuple(_bounds(p) if isinstance(p, slice) else p for p in pieces)]
    except IndexError as error:
        raise InvalidIndex(str(error)) from None
    if not isinstance(found, np.ndarray):
        found = np.asarray(found)
        found.flags.writeable = False
    return found


def _numbered(shape: Sequence[int]) -> Tensor:
    """The number of each element, counted row by row."""
    found = np.arange(count(tuple(shape)), dtype=np.int64).reshape(shape)
    found.flags.writeable = False
    return wrapped(known(found, DType.int64))


def _on_host(x: Tensor, key: Any) -> Tensor:
    from ranvier.tensor.host import hosted

    return hosted(lambda array: array[_arrays(key)], x)


def _put_on_host(x: Tensor, key: Any, value: Tensor) -> Tensor:
    from ranvier.tensor.host import hosted

    def change(array: Any, given: Any) -> Any:
        found = array.copy()
        found[_arrays(key)] = given
        return found

    return hosted(change, x, value)


def _arrays(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(_arrays(k) for k in key)
    return key.numpy() if isinstance(key, Tensor) else key


_OF_TENSORS = True
