"""Element types of results: the array API's promotion, and what may be asked about types.

Where the standard leaves the result open: an integer with a float gives the float, and an integer that must become a
float becomes the default one, float32. Python's numbers have no type of their own and take that of the tensor.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput
from ranvier.records import dataclass

DEFAULT_FLOAT, DEFAULT_INT, DEFAULT_COMPLEX = DType.float32, DType.int64, DType.complex64
SIGNED = (DType.int8, DType.int16, DType.int32, DType.int64)
UNSIGNED = (DType.uint8, DType.uint16, DType.uint32, DType.uint64)
FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
COMPLEX = (DType.complex64, DType.complex128)
_PYTHON = {bool: 0, int: 1, float: 2, complex: 3}
_DEFAULTS = (DType.bool, DEFAULT_INT, DEFAULT_FLOAT, DEFAULT_COMPLEX)


@functools.cache
def kind_of(dtype: DType) -> int:
    """0 bool, 1 integer, 2 float, 3 complex."""
    if dtype is DType.bool:
        return 0
    return 1 if dtype.is_integer else 2 if dtype.is_float else 3


@functools.cache
def promoted(a: DType, b: DType) -> DType:
    """The type of a result of operands of these types."""
    if a is b:
        return a
    low, high = sorted((a, b), key=kind_of)
    kinds = kind_of(low), kind_of(high)
    if kinds[0] != kinds[1]:
        if kinds == (2, 3):
            return DType.complex128 if DType.float64 in (a, b) or DType.complex128 in (a, b) else DType.complex64
        return high
    if kinds[1] == 2 and {a, b} & {DType.float16, DType.bfloat16}:
        return DType.float64 if DType.float64 in (a, b) else DType.float32
    try:
        return dtypes.of(np.promote_types(a.numpy, b.numpy))
    except (TypeError, DTypeMismatch):
        raise DTypeMismatch(f"no common element type of {a} and {b}") from None


def with_number(dtype: DType, number: bool | int | float | complex) -> DType:
    """The type of a result of a tensor of this type and one of Python's numbers."""
    kind = _PYTHON.get(type(number))
    if kind is None:
        kind = _of_number(number)
    mine = kind_of(dtype)
    if kind <= mine:
        return dtype
    if kind == 3 and mine == 2:
        return DType.complex128 if dtype is DType.float64 else DType.complex64
    return _DEFAULTS[kind]


def _of_number(number: Any) -> int:
    for kind, rank in ((bool, 0), (int, 1), (float, 2), (complex, 3)):
        if isinstance(number, kind):
            return rank
    raise InvalidInput(f"not a number: {number!r}")


def of_python(number: bool | int | float | complex) -> DType:
    """The type a number has without a tensor beside it."""
    return _DEFAULTS[_of_number(number)]


def floating(dtype: DType) -> DType:
    """Itself, or the default float for what is not."""
    return dtype if kind_of(dtype) >= 2 else DEFAULT_FLOAT


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The type that results of these operands have: tensors, element types and numbers."""
    from ranvier.tensor.core import Tensor

    found: DType | None = None
    numbers: list[Any] = []
    for each in arrays_and_dtypes:
        if isinstance(each, bool | int | float | complex) and not isinstance(each, np.generic):
            numbers.append(each)
            continue
        one = each.dtype if isinstance(each, Tensor) else dtypes.of(each)
        found = one if found is None else promoted(found, one)
    if found is None and not numbers:
        raise InvalidInput("result_type needs at least one operand")
    if found is None:
        return max((of_python(n) for n in numbers), key=kind_of)
    for number in numbers:
        found = with_number(found, number)
    return found


def can_cast(from_: Any, to: Any, /) -> bool:
    """Whether the promotion of both is the second."""
    from ranvier.tensor.core import Tensor

    source = from_.dtype if isinstance(from_, Tensor) else dtypes.of(from_)
    target = dtypes.of(to)
    if kind_of(source) == 1 and kind_of(target) >= 2:
        return bool(np.can_cast(source.numpy, target.numpy))
    return promoted(source, target) is target


def isdtype(dtype: Any, kind: Any) -> bool:
    """Whether a type is one of a kind: a name of the array API, a type, or a tuple of these."""
    own = dtypes.of(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(own, each) for each in kind)
    if isinstance(kind, str):
        sets: dict[str, tuple[DType, ...]] = {
            "bool": (DType.bool,),
            "signed integer": SIGNED,
            "unsigned integer": UNSIGNED,
            "integral": SIGNED + UNSIGNED,
            "real floating": FLOATS,
            "complex floating": COMPLEX,
            "numeric": SIGNED + UNSIGNED + FLOATS + COMPLEX,
        }
        if kind not in sets:
            raise InvalidInput(f"unknown kind of element type {kind!r}: expected one of {', '.join(sets)}")
        return own in sets[kind]
    return own is dtypes.of(kind)


@dataclass(frozen=True, slots=True)
class FloatInfo:
    """The limits of a floating-point type."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True, slots=True)
class IntInfo:
    """The limits of an integer type."""

    bits: int
    max: int
    min: int
    dtype: DType


def finfo(type: Any, /) -> FloatInfo:
    """The limits of a floating-point type, or of the parts of a complex one."""
    own = _asked(type)
    real = {DType.complex64: DType.float32, DType.complex128: DType.float64}.get(own, own)
    if not real.is_float:
        raise DTypeMismatch(f"finfo is about floating-point types, got {own}")
    found = ml_dtypes.finfo(real.numpy)
    return FloatInfo(
        bits=int(found.bits),
        eps=float(found.eps),
        max=float(found.max),
        min=float(found.min),
        smallest_normal=float(found.smallest_normal),
        dtype=real,
    )


def iinfo(type: Any, /) -> IntInfo:
    """The limits of an integer type."""
    own = _asked(type)
    if not own.is_integer:
        raise DTypeMismatch(f"iinfo is about integer types, got {own}")
    found = ml_dtypes.iinfo(own.numpy)
    return IntInfo(int(found.bits), int(found.max), int(found.min), own)


def _asked(type: Any) -> DType:
    from ranvier.tensor.core import Tensor

    return type.dtype if isinstance(type, Tensor) else dtypes.of(type)


_OF_TENSORS = True
