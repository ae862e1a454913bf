"""Reading operands: axes, sizes and scalars that arrive as tensors or attributes, and shapes that must agree.

Each helper takes the operator's name first, so that its error names the operator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import wide, widened
from ranvier.ops.registry import Array, Body


def normal_axis(op: str, axis: int, rank: int) -> int:
    """``axis`` counted from the front, or InvalidValue when it is outside [-rank, rank-1]."""
    if not -rank <= axis < rank:
        raise InvalidValue(f"{op}: axis {axis} is out of range for rank {rank}", op=op)
    return axis + rank if axis < 0 else axis


def normal_axes(op: str, axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Every axis counted from the front; one that comes twice is an error."""
    normal = tuple(normal_axis(op, axis, rank) for axis in axes)
    if len(set(normal)) != len(normal):
        raise InvalidValue(f"{op}: an axis is repeated in {list(normal)}", op=op)
    return normal


def clipped(at: Any, size: Any) -> Any:
    """Where a slice with a step of 1 that says ``at`` begins or ends, in [0, size]."""
    if at < 0:
        return 0 if at < -size else at + size
    return size if at > size else at


def integers(op: str, values: Any) -> list[int]:
    """The integers in an attribute list, a 1-D tensor or a scalar tensor."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise DTypeMismatch(f"{op}: expected integers, got {array.dtype}")
    return [int(v) for v in array.ravel()]


def scalar(op: str, what: str, value: Array) -> Any:
    """The single element of a tensor, as a Python value."""
    if value.size != 1:
        raise ShapeMismatch(f"{op}: {what} must be a scalar, got shape {list(value.shape)}")
    return value.reshape(()).item()


def whole_number(op: str, what: str, value: Array) -> int:
    """The single element of a tensor as an integer; a fraction, where the standard allows one, is cut."""
    number = scalar(op, what, value)
    if isinstance(number, float) and not math.isfinite(number):
        raise InvalidValue(f"{op}: {what} must be a number, got {number}", op=op)
    return int(number)


def index_array(op: str, indices: Array) -> Array:
    """``indices`` when its elements can be indices."""
    if indices.dtype.kind not in "iu":
        raise DTypeMismatch(f"{op}: indices must be integers, got {indices.dtype}")
    return indices


def same_dtype(op: str, *operands: Array) -> None:
    """Raise DTypeMismatch unless all operands have one element type: NumPy would promote silently."""
    first = operands[0].dtype
    for other in operands[1:]:
        if other.dtype != first:
            raise DTypeMismatch(f"{op}: operands of one element type expected, got {first} and {other.dtype}")


def common_shape(op: str, *operands: Array) -> tuple[int, ...]:
    """The shape that the operands broadcast to."""
    shape: tuple[int, ...] = operands[0].shape
    if all(other.shape == shape for other in operands[1:]):
        return shape
    try:
        return np.broadcast_shapes(*(other.shape for other in operands))
    except ValueError:
        shapes = " and ".join(str(list(other.shape)) for other in operands)
        raise ShapeMismatch(f"{op}: shapes {shapes} do not broadcast") from None


def in_float32(body: Body) -> Body:
    """Run a body on float32 copies of half-precision operands, and round its result once."""

    @functools.wraps(body)
    def run(x: Array, *others: Array, **attrs: Any) -> Any:
        if wide(x.dtype) == x.dtype:
            return body(x, *others, **attrs)
        return body(widened(x), *map(widened, others), **attrs).astype(x.dtype)

    return run
