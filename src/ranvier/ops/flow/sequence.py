"""Sequences and optionals: lists of tensors, and values that may be absent.

A sequence is a Python list, an empty optional is ``None``; the tensors inside are shared, never copied or changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.operands import normal_axis, same_dtype, scalar
from ranvier.ops.registry import Array, op


@op("SequenceConstruct", since=11)
def sequence_construct(*inputs: Array) -> list[Array]:
    if not inputs:
        raise InvalidValue("SequenceConstruct: expected at least one tensor, got none")
    same_dtype("SequenceConstruct", *inputs)
    return list(inputs)


@op("SequenceEmpty", since=11)
def sequence_empty(*, dtype: int = 1) -> list[Array]:
    # the element type lives in the value's static type; an empty list needs none
    return []


@op("SequenceAt", since=11)
def sequence_at(input_sequence: Sequence[Array], position: Array) -> Array:
    return input_sequence[_position("SequenceAt", position, len(input_sequence))]


@op("SequenceInsert", since=11)
def sequence_insert(input_sequence: Sequence[Array], tensor: Array, position: Array | None = None) -> list[Array]:
    same_dtype("SequenceInsert", *input_sequence[:1], tensor)
    length = len(input_sequence)
    at = length if position is None else _position("SequenceInsert", position, length, end_allowed=True)
    return [*input_sequence[:at], tensor, *input_sequence[at:]]


@op("SequenceErase", since=11)
def sequence_erase(input_sequence: Sequence[Array], position: Array | None = None) -> list[Array]:
    last = np.asarray(-1)
    at = _position("SequenceErase", last if position is None else position, len(input_sequence))
    return [*input_sequence[:at], *input_sequence[at + 1 :]]


@op("SequenceLength", since=11)
def sequence_length(input_sequence: Sequence[Array]) -> Array:
    return np.asarray(len(input_sequence), np.int64)


@op("ConcatFromSequence", since=11)
def concat_from_sequence(input_sequence: Sequence[Array], *, axis: int, new_axis: int = 0) -> Array:
    if not input_sequence:
        raise InvalidValue("ConcatFromSequence: expected at least one tensor, got an empty sequence")
    same_dtype("ConcatFromSequence", *input_sequence)
    first = input_sequence[0].shape
    rank = len(first) + (1 if new_axis else 0)
    at = normal_axis("ConcatFromSequence", axis, rank)
    for k, tensor in enumerate(input_sequence):
        same = tensor.shape == first if new_axis else _equal_but_for(at, tensor.shape, first)
        if not same:
            raise ShapeMismatch(
                f"ConcatFromSequence: tensor {k} has shape {list(tensor.shape)}, which does not fit {list(first)} "
                f"along {'a new ' if new_axis else ''}axis {axis}"
            )
    return np.stack(input_sequence, at) if new_axis else np.concatenate(input_sequence, at)


@op("SplitToSequence", since=11)
def split_to_sequence(input: Array, split: Array | None = None, *, axis: int = 0, keepdims: int = 1) -> list[Array]:
    at = normal_axis("SplitToSequence", axis, input.ndim)
    size = input.shape[at]
    if split is None:
        # only here `keepdims` counts: a given `split` always keeps the axis
        slices = _cut(input, at, range(size), range(1, size + 1))
        return slices if keepdims else [part.squeeze(at) for part in slices]
    if split.ndim > 1:
        raise ShapeMismatch(f"SplitToSequence: 'split' must be a scalar or 1-D, got shape {list(split.shape)}")
    if split.ndim == 0:
        chunk = int(split)
        if chunk <= 0:
            raise InvalidValue(f"SplitToSequence: 'split' must be positive, got {chunk}")
        starts = list(range(0, size, chunk))
        return _cut(input, at, starts, [min(start + chunk, size) for start in starts])
    lengths = [int(n) for n in split]
    if any(n < 0 for n in lengths):
        raise InvalidValue(f"SplitToSequence: 'split' holds a negative length: {lengths}")
    if sum(lengths) != size:
        raise InvalidValue(f"SplitToSequence: lengths {lengths} add up to {sum(lengths)}, but axis {axis} has {size}")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return _cut(input, at, [end - n for end, n in zip(ends, lengths)], ends)


@op("Optional", since=15)
def optional(input: Any = None, *, type: Any = None) -> Any:
    if input is None and type is None:
        raise InvalidValue("Optional: expected an input or the attribute 'type', got neither")
    return input


@op("OptionalHasElement", since=15)
def optional_has_element(input: Any = None) -> Array:
    return np.asarray(input is not None)


@op("OptionalGetElement", since=15)
def optional_get_element(input: Any) -> Any:
    if input is None:
        raise InvalidValue("OptionalGetElement: the optional is empty")
    return input


def _position(op_name: str, position: Array, length: int, *, end_allowed: bool = False) -> int:
    """A checked, non-negative position in a sequence of ``length`` tensors."""
    at = int(scalar(op_name, "'position'", position))
    stop = length + 1 if end_allowed else length
    if not -length <= at < stop:
        raise InvalidValue(f"{op_name}: position {at} is out of range for a sequence of {length}")
    return at + length if at < 0 else at


def _equal_but_for(axis: int, shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and shape[:axis] == other[:axis] and shape[axis + 1 :] == other[axis + 1 :]


def _cut(tensor: Array, axis: int, starts: Sequence[int], ends: Sequence[int]) -> list[Array]:
    before = (slice(None),) * axis
    return [tensor[(*before, slice(start, end))] for start, end in zip(starts, ends)]
