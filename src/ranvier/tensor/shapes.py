"""Shapes of results, as NumPy has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import index
from typing import Any

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.expr import Shape


class InvalidAxis(ShapeMismatch, IndexError):
    """An axis that the tensor does not have; an IndexError too, as NumPy's is."""


@functools.lru_cache(maxsize=4096)
def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of a result of two operands."""
    if len(a) < len(b):
        a = (1,) * (len(b) - len(a)) + a
    elif len(b) < len(a):
        b = (1,) * (len(a) - len(b)) + b
    found = []
    for x, y in zip(a, b):
        if x != y and x != 1 and y != 1:
            raise ShapeMismatch(f"shapes {list(a)} and {list(b)} do not fit together")
        found.append(y if x == 1 else x)
    return tuple(found)


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The shape of a result of operands of these shapes."""
    return functools.reduce(broadcast, (tuple(s) for s in shapes), ())


def axis_of(axis: Any, rank: int) -> int:
    """An axis counted from the front."""
    found = index(axis)
    if not -max(rank, 1) <= found < max(rank, 1):
        raise InvalidAxis(f"axis {found} is out of range for {rank} dimensions")
    return found + rank if found < 0 else found


def axes_of(axis: int | Sequence[int] | None, rank: int) -> Shape:
    """Axes counted from the front, in order; None: all of them."""
    if axis is None:
        return tuple(range(rank))
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    found = []
    for each in given:
        one = index(each)
        if not -rank <= one < rank:
            raise InvalidAxis(f"axis {one} is out of range for {rank} dimensions")
        found.append(one + rank if one < 0 else one)
    if len(set(found)) != len(found):
        raise ShapeMismatch(f"an axis is given twice: {list(given)}")
    return tuple(found)


def shape_of(shape: Any) -> Shape:
    """A shape from what users write: a number or several."""
    if isinstance(shape, tuple | list):
        found = tuple(index(d) for d in shape)
    else:
        found = (index(shape),)
    return found


def resolved(shape: Any, size: int) -> Shape:
    """A shape with at most one size left open (-1), for ``size`` elements."""
    wanted = shape_of(shape)
    known = 1
    for d in wanted:
        known *= d if d != -1 else 1
    if wanted.count(-1) > 1 or any(d < -1 for d in wanted):
        raise ShapeMismatch(f"not a shape: {list(wanted)}")
    if -1 in wanted:
        if known == 0 or size % known:
            raise ShapeMismatch(f"{size} elements cannot have the shape {list(wanted)}")
        return tuple(size // known if d == -1 else d for d in wanted)
    if known != size:
        raise ShapeMismatch(f"{size} elements cannot have the shape {list(wanted)}")
    return wanted


def reduced(shape: Shape, axes: Shape, keepdims: bool) -> Shape:
    """The shape after a reduction."""
    if keepdims:
        return tuple(1 if k in axes else d for k, d in enumerate(shape))
    return tuple(d for k, d in enumerate(shape) if k not in axes)


def count(shape: Shape) -> int:
    total = 1
    for d in shape:
        total *= d
    return total


def check_sizes(shape: Shape) -> Shape:
    if any(d < 0 for d in shape):
        raise InvalidInput(f"a size is negative: {list(shape)}")
    return shape


_OF_TENSORS = True
