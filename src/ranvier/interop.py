"""Arrays from other libraries, without copies where the memory allows it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ranvier.dlpack import from_dlpack
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput, RanvierError

Array = np.ndarray[Any, Any]


def to_array(x: Any, expected: DType | None = None) -> Array:
    """``x`` as a NumPy array: itself, a view of its memory, or a copy of a plain Python value.

    A view comes through DLPack, ``__array__``, ``__array_interface__`` or the buffer protocol, whichever ``x`` has.
    Plain Python numbers and lists have no element type of their own and take the ``expected`` one; anything that
    carries an element type keeps it.
    """
    if isinstance(x, np.ndarray):
        array = x
    elif isinstance(x, str | bytes | int | float | complex | bool | list | tuple):
        array = _from_python(x, expected)
    else:
        array = _from_protocol(x)
    if array.dtype.kind in "USTO":
        return _strings(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _from_protocol(x: Any) -> Array:
    """The view that the richest protocol of ``x`` gives."""
    refused: Exception | None = None
    if hasattr(x, "__dlpack__") and not isinstance(x, np.generic):
        try:
            return from_dlpack(x)
        except RanvierError:
            raise
        except Exception as error:  # the exporter's own words: a tensor that requires a gradient, a lazy one …
            refused = error
    if _has_array(x):
        try:
            return np.asarray(x)
        except Exception as error:
            refused = refused or error
    if refused is not None:
        raise InvalidInput(f"{type(x).__name__} does not hand out its data: {refused}") from refused
    raise InvalidInput(f"cannot make a tensor of {type(x).__name__}")


def _has_array(x: Any) -> bool:
    if any(hasattr(x, name) for name in ("__array__", "__array_interface__", "__array_struct__")):
        return True
    try:
        memoryview(x).release()
    except (TypeError, BufferError, ValueError):
        return False
    return True


def _from_python(x: Any, expected: DType | None) -> Array:
    try:
        natural = np.asarray(x)
        if expected is None or expected is DType.string:
            return natural
        if natural.size and natural.dtype != expected.numpy and _RANK[natural.dtype.kind] > _rank(expected):
            raise TypeError(f"it holds {natural.dtype}")  # 1.5 is no int, and "1.5" is no float
        if expected.bits < 8 and expected.is_integer:
            return _narrowed(natural, expected)
        return natural.astype(expected.numpy) if expected.bits < 8 else np.asarray(x, dtype=expected.numpy)
    except (ValueError, TypeError, OverflowError) as error:
        raise DTypeMismatch(f"cannot make a {expected} tensor of this {type(x).__name__}: {error}") from None


_RANK = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3, "V": 4, "O": 4, "U": 4, "S": 4, "M": 4, "m": 4, "T": 4}


def _rank(expected: DType) -> int:
    """Which Python numbers an element type takes without losing what they are: bool, int, float, complex."""
    if expected is DType.bool:
        return 0
    if expected.is_integer:
        return 1
    return 2 if expected.is_float else 3


def _narrowed(values: Array, expected: DType) -> Array:
    """Integers of less than a byte, checked: NumPy would let them wrap."""
    info = ml_dtypes.iinfo(expected.numpy)
    if values.size and not info.min <= values.min() <= values.max() <= info.max:
        raise OverflowError(f"values must be in [{info.min}, {info.max}]")
    return values.astype(expected.numpy)


def _strings(array: Array) -> Array:
    """Object array of ``str``, whatever kind of string array came."""
    if array.dtype == object and all(type(s) is str for s in array.ravel()):
        return array
    flat = [s.decode("utf-8", "replace") if isinstance(s, bytes) else str(s) for s in array.ravel().tolist()]
    out = np.empty(len(flat), dtype=object)
    out[:] = flat
    return out.reshape(array.shape)


__all__ = ["to_array"]
