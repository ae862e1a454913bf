"""Element types: one enum that knows its NumPy dtype, its size in bits and its ONNX number.

Types NumPy lacks (bfloat16, float8, int4 …) come from ml_dtypes, so every tensor at run time is an ordinary
``np.ndarray``. Strings are object arrays of ``str``.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.errors import DTypeMismatch


class DType(Enum):
    """An element type. ``value`` is its number in the ONNX standard (``TensorProto.DataType``)."""

    float32 = 1
    uint8 = 2
    int8 = 3
    uint16 = 4
    int16 = 5
    int32 = 6
    int64 = 7
    string = 8
    bool = 9
    float16 = 10
    float64 = 11
    uint32 = 12
    uint64 = 13
    complex64 = 14
    complex128 = 15
    bfloat16 = 16
    float8_e4m3fn = 17
    float8_e4m3fnuz = 18
    float8_e5m2 = 19
    float8_e5m2fnuz = 20
    uint4 = 21
    int4 = 22
    float4_e2m1fn = 23
    float8_e8m0fnu = 24
    uint2 = 25
    int2 = 26
    float6_e2m3fn = 27
    float6_e3m2fn = 28

    numpy: np.dtype[Any]
    bits: int

    __hash__ = object.__hash__  # members are compared by identity; Enum's own hash is a call in Python

    @property
    def onnx(self) -> int:
        return int(self.value)

    @property
    def is_float(self) -> bool_:
        return self in _FLOATS

    @property
    def is_integer(self) -> bool_:
        return self in _INTEGERS

    @property
    def is_complex(self) -> bool_:
        return self in (DType.complex64, DType.complex128)

    @property
    def is_packed(self) -> bool_:
        """True where files store several elements in one byte (int4, int2, float4 …)."""
        return self.bits < 8

    def nbytes(self, count: int) -> int:
        """Bytes that ``count`` elements take in memory (sub-byte types take one byte each once unpacked)."""
        return count * self.numpy.itemsize

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType.{self.name}"


bool_ = bool
_BY_NUMPY: dict[np.dtype[Any], DType] = {}
for _member in DType:
    if _member is DType.string:
        _member.numpy, _member.bits = np.dtype(object), 64
        continue
    _member.numpy = np.dtype(getattr(ml_dtypes, _member.name, None) or _member.name)
    _digits = "".join(c if c.isdigit() else " " for c in _member.name.split("_")[0]).split()
    _member.bits = int(_digits[-1]) if _digits else 8
    _BY_NUMPY[_member.numpy] = _member

_FLOATS = frozenset(d for d in DType if d.name.startswith(("float", "bfloat")))
_INTEGERS = frozenset(d for d in DType if d.name.startswith(("int", "uint")))
_BY_NAME = {d.name: d for d in DType} | {
    "float": DType.float32,
    "double": DType.float64,
    "half": DType.float16,
    "bf16": DType.bfloat16,
    "fp16": DType.float16,
    "f32": DType.float32,
    "fp32": DType.float32,
    "f64": DType.float64,
    "str": DType.string,
}


def of(x: Any) -> DType:
    """The DType of an array, NumPy dtype, ONNX number or name.

    >>> of(np.zeros(1, np.float32)), of("bfloat16"), of(7)
    (DType.float32, DType.bfloat16, DType.int64)
    """
    if isinstance(x, DType):
        return x
    if isinstance(x, int):
        return from_onnx(x)
    if isinstance(x, str) and x in _BY_NAME:
        return _BY_NAME[x]
    dtype = x.dtype if isinstance(x, np.ndarray | np.generic) else _as_numpy(x)
    found = _BY_NUMPY.get(dtype)
    if found is not None:
        return found
    if dtype.kind in "OUST":
        return DType.string
    if not dtype.isnative:
        return of(dtype.newbyteorder("="))
    for candidate, member in _BY_NUMPY.items():  # long, longlong and friends: equal, but hash apart
        if candidate == dtype:
            return member
    raise DTypeMismatch(f"no element type for {dtype!r}")


def from_onnx(number: int) -> DType:
    """The DType with this number in the ONNX standard."""
    try:
        return DType(number)
    except ValueError:
        raise DTypeMismatch(f"unknown ONNX element type {number}") from None


def _as_numpy(x: Any) -> np.dtype[Any]:
    if x is None:  # NumPy would take it for float64
        raise DTypeMismatch("no element type for None")
    try:
        found: np.dtype[Any] = np.dtype(x)
    except (TypeError, ValueError, SyntaxError):  # a name may be parsed as a list of fields
        raise DTypeMismatch(f"no element type for {x!r}") from None
    return found
