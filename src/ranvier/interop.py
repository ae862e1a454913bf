"""Arrays from other libraries, without copies where the memory allows it."""

from __future__ import annotations

from typing import Any

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
        if expected is None or expected is DType.string:
            return np.asarray(x)
        return np.asarray(x).astype(expected.numpy) if expected.bits < 8 else np.asarray(x, dtype=expected.numpy)
    except (ValueError, TypeError, OverflowError) as error:
        raise DTypeMismatch(f"cannot make a {expected} tensor of this {type(x).__name__}: {error}") from None


def _strings(array: Array) -> Array:
    """Object array of ``str``, whatever kind of string array came."""
    if array.dtype == object and all(type(s) is str for s in array.ravel()):
        return array
    flat = [s.decode("utf-8", "replace") if isinstance(s, bytes) else str(s) for s in array.ravel().tolist()]
    out = np.empty(len(flat), dtype=object)
    out[:] = flat
    return out.reshape(array.shape)


__all__ = ["to_array"]
