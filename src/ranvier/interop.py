"""Arrays from and to other libraries, without copies where the memory allows it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DeviceMismatch, DTypeMismatch, InvalidInput

Array = np.ndarray[Any, Any]
_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost


def to_array(x: Any, expected: DType | None = None) -> Array:
    """``x`` as a NumPy array: itself, a view through DLPack or ``__array__``, or a copy of a plain Python value.

    Plain Python numbers and lists have no element type of their own and take the ``expected`` one; anything that
    carries an element type keeps it.
    """
    if isinstance(x, np.ndarray):
        array = x
    elif hasattr(x, "__dlpack__") and not isinstance(x, np.generic):
        array = _from_dlpack(x)
    elif hasattr(x, "__array__"):
        array = np.asarray(x)
    elif isinstance(x, str | bytes | int | float | complex | bool | list | tuple):
        array = _from_python(x, expected)
    else:
        raise InvalidInput(f"cannot make a tensor of {type(x).__name__}")
    if array.dtype.kind in "USTO":
        return _strings(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _from_dlpack(x: Any) -> Array:
    kind = x.__dlpack_device__()[0] if hasattr(x, "__dlpack_device__") else 1
    if kind not in _CPU_DEVICES:
        raise DeviceMismatch(f"the tensor is on DLPack device {tuple(x.__dlpack_device__())}; move it to the CPU first")
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError):
        # types NumPy's DLPack does not know (bfloat16), or read-only exporters: the array protocol may still work
        if hasattr(x, "__array__"):
            try:
                return np.asarray(x)
            except (TypeError, ValueError, RuntimeError):
                pass
        return _dlpack_by_hand(x)


def _dlpack_by_hand(x: Any) -> Array:
    from ranvier.dlpack import array_from_capsule

    return array_from_capsule(x.__dlpack__())


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
