"""Operators that make a tensor: constants, ranges, identity matrices, and the shape of another tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import wide
from ranvier.ops.allocation import checked_shape
from ranvier.ops.operands import integers, same_dtype, scalar
from ranvier.ops.registry import Array, op

Text = str | bytes


@op("Constant", since=1)
def constant(
    *,
    value: Array | None = None,
    sparse_value: Array | None = None,
    value_float: float | None = None,
    value_floats: Sequence[float] | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
    value_string: Text | None = None,
    value_strings: Sequence[Text] | None = None,
) -> Array:
    """The one attribute that is given, as a tensor; a sparse one arrives dense."""
    numbers: list[tuple[Any, Any]] = [
        (value, None),
        (sparse_value, None),
        (value_float, np.float32),
        (value_floats, np.float32),
        (value_int, np.int64),
        (value_ints, np.int64),
    ]
    given = [np.asarray(content, dtype) for content, dtype in numbers if content is not None]
    if value_string is not None:
        given.append(np.asarray(_text(value_string), dtype=object))
    if value_strings is not None:
        given.append(np.asarray([_text(item) for item in value_strings], dtype=object))
    if len(given) != 1:
        raise InvalidValue(f"Constant: exactly one value attribute expected, got {len(given)}", op="Constant")
    return given[0]


def _text(content: Text) -> str:
    return content.decode("utf-8", "replace") if isinstance(content, bytes) else content


@op("ConstantOfShape", since=9)
def constant_of_shape(shape: Array, *, value: Array | None = None) -> Array:
    fill = np.zeros(1, np.float32) if value is None else value
    if fill.size != 1:
        raise ShapeMismatch(f"ConstantOfShape: value must hold one element, got shape {list(fill.shape)}")
    sizes = checked_shape(integers("ConstantOfShape", shape), fill.dtype, "ConstantOfShape")
    return np.full(sizes, fill.reshape(()), fill.dtype)


@op("Range", since=11)
def range_(start: Array, limit: Array, delta: Array, *, stash_type: int = 1) -> Array:
    """``start + i * delta`` up to ``limit``, which is left out; half precision is computed in ``stash_type``."""
    same_dtype("Range", start, limit, delta)
    dtype = start.dtype
    work = dtype if wide(dtype) == dtype else dtypes.of(stash_type).numpy
    for what, operand in (("start", start), ("limit", limit), ("delta", delta)):
        scalar("Range", what, operand)
    first, last, step = (operand.reshape(()).astype(work) for operand in (start, limit, delta))
    if step == 0:
        raise InvalidValue("Range: delta must not be 0", op="Range")
    if dtype.kind in "iu":
        count = -((int(first) - int(last)) // int(step))
    else:
        steps = float(last - first) / float(step)
        if not math.isfinite(steps):
            raise InvalidValue(f"Range: {first} to {last} by {step} has no end", op="Range")
        count = math.ceil(steps)
    sizes = checked_shape([max(count, 0)], dtype, "Range")
    return np.asarray(np.arange(*sizes).astype(work) * step + first).astype(dtype, copy=False)


@op("EyeLike", since=9)
def eye_like(x: Array, *, dtype: int | None = None, k: int = 0) -> Array:
    """A matrix of the operand's shape with ones on its ``k``-th diagonal."""
    if x.ndim != 2:
        raise ShapeMismatch(f"EyeLike: a matrix expected, got shape {list(x.shape)}")
    rows, columns = x.shape
    diagonal = min(max(k, -rows), columns)
    return np.eye(rows, columns, diagonal, dtype=x.dtype if dtype is None else dtypes.of(dtype).numpy)


@op("Shape", since=1)
def shape(x: Array, *, start: int = 0, end: int | None = None) -> Array:
    """The sizes from dimension ``start`` to ``end``, with both clamped as Python clamps slices."""
    return np.asarray(x.shape[start:end], np.int64)


@op("Size", since=1)
def size(x: Array) -> Array:
    return np.asarray(x.size, np.int64)
