"""Blocks: how the elements of a tensor share their scales.

Every granularity is one of these: a block as large as the tensor, a row or a column, so many elements of a row, a
square. ``scales`` has one entry for each block; a block at the end may be smaller than the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from ranvier.errors import InvalidConfig, ShapeMismatch

Array = np.ndarray[Any, Any]
Block = tuple[int, ...]
Granularity = Literal["tensor", "channel", "token", "group", "block"]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "channel", "token", "group", "block")


def block_of(shape: Sequence[int], granularity: Granularity, axis: int, group: int | Sequence[int] = 0) -> Block:
    """The block of a tensor for a granularity.

    ``axis`` is the one that is summed over in a product: a channel (of weights) or a token (of activations) is
    everything along it, a group is so many elements of it.
    """
    if granularity == "tensor" or not shape:
        return tuple(max(1, d) for d in shape)
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        raise InvalidConfig(f"axis {axis!r} of a tensor of {len(shape)} axes")
    axis %= len(shape)
    if granularity == "block":
        sides = tuple(group) if isinstance(group, Sequence) else (group, group)
        whole = all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in sides)
        if len(shape) < 2 or len(sides) != 2 or not whole:
            raise InvalidConfig(f"blocks have two sides and need two axes, got {group!r} for shape {list(shape)}")
        return (*(1 for _ in shape[:-2]), *sides)
    if granularity == "group":
        if not isinstance(group, int) or group < 1:
            raise InvalidConfig(f"a group has at least one element, got {group!r}")
        return tuple(group if k == axis else 1 for k in range(len(shape)))
    return tuple(max(1, d) if k == axis else 1 for k, d in enumerate(shape))


def counts(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """How many blocks there are along each axis."""
    return tuple(-(-d // b) for d, b in zip(shape, block))


def expand(scales: Array, block: Block, shape: Sequence[int]) -> Array:
    """A number for each block as a number for each element; one along an axis is that of all."""
    if scales.ndim != len(shape) or any(k not in (1, n) for k, n in zip(scales.shape, counts(shape, block))):
        raise ShapeMismatch(f"{list(scales.shape)} numbers for blocks {list(block)} of {list(shape)} elements")
    for axis, (side, extent) in enumerate(zip(block, shape)):
        if scales.shape[axis] == 1:
            continue  # broadcasts
        if side > 1:
            scales = np.repeat(scales, side, axis)
        if scales.shape[axis] != extent:
            scales = np.take(scales, range(extent), axis)
    return np.broadcast_to(scales, tuple(shape))


def reduce(array: Array, block: Block, function: Callable[..., Array]) -> Array:
    """``function`` over each block, as one entry each; blocks at the end that are not full count what they have."""
    if 0 in array.shape:
        return np.zeros(counts(array.shape, block), array.dtype)
    split = apart(array, block)
    return function(split, axis=tuple(range(1, split.ndim, 2)))


def apart(array: Array, block: Block) -> Array:
    """Every axis as two, blocks and what is in them; those at the end are filled with an element of their own."""
    block = _no_larger(block, array.shape)
    number = counts(array.shape, block)
    padding = [(0, n * b - d) for n, b, d in zip(number, block, array.shape)]
    if any(after for _, after in padding):
        array = np.pad(array, padding, mode="edge")
    return array.reshape([x for n, b in zip(number, block) for x in (n, b)])


def real(shape: Sequence[int], block: Block) -> Array | None:
    """Of what ``apart`` makes of an array of this shape, which elements are the array's own; None where all are."""
    block = _no_larger(block, shape)
    number = counts(shape, block)
    padding = [(0, n * b - d) for n, b, d in zip(number, block, shape)]
    if not any(after for _, after in padding):
        return None
    filled = np.pad(np.ones(tuple(shape), bool), padding)
    return filled.reshape([x for n, b in zip(number, block) for x in (n, b)])


def _no_larger(block: Block, shape: Sequence[int]) -> Block:
    """A block that is larger than an array holds all of it, and need not be filled."""
    return tuple(min(b, max(1, d)) for b, d in zip(block, shape))


def elements(block: Block) -> int:
    return math.prod(block)
