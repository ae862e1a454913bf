"""Expressions that make 8-bit codes of float32 numbers, recognised: there are shorter ways to compute them.

Quantization is written as rounding, adding a zero point, and a cast that saturates. Where the code is turned into a
number again at once, it need not become a byte in between; where it is stored, the conversion can do the rounding.
"""

from __future__ import annotations

from typing import TypeGuard

from ranvier.codegen.loops.ir import Const, Expr, Op
from ranvier.dtypes import DType
from ranvier.records import dataclass

_BYTES = (DType.int8, DType.uint8)


@dataclass(frozen=True)
class Codes:
    """``rounded + zero`` between ``low`` and ``high``; NaN is the lowest. ``whole`` is what is clipped, ``number``
    what was rounded."""

    whole: Expr
    rounded: Expr
    number: Expr
    zero: Expr | None  # a whole float32 number
    low: int
    high: int


def codes_of(value: Expr) -> Codes | None:
    """The parts of an expression that rounds a float32 number and saturates it to 8 bits; None for other ones."""
    low, high = 0, 255
    if _is(value, "bits", DType.int8):
        # signed codes come by way of unsigned ones
        flipped = value.args[0]
        if not (_is(flipped, "bitxor", DType.uint8) and flipped.args[1] == Const(128, DType.uint8)):
            return None
        low, high = -128, 127
        value = flipped.args[0]
    if not _is(value, "cast", DType.uint8):
        return None
    whole = value.args[0]
    if low < 0:
        if not (_is(whole, "add", DType.float32) and whole.args[1] == Const(128.0, DType.float32)):
            return None
        whole = whole.args[0]
    rounded, zero = whole, None
    if _is(whole, "add", DType.float32):
        rounded, zero = whole.args
        if not (isinstance(zero, Op) and zero.name == "cast" and zero.args[0].dtype in _BYTES):
            return None
    return Codes(whole, rounded, rounded.args[0], zero, low, high) if _is(rounded, "round", DType.float32) else None


@dataclass(frozen=True)
class CodesAsNumbers:
    """A whole float32 ``number`` between the codes ``low`` and ``high``, both less ``zero`` where there is one."""

    number: Expr
    zero: Expr | None
    low: int
    high: int


def codes_as_numbers(value: Expr) -> CodesAsNumbers | None:
    """The same for codes that are cast to float32, or for those less the zero point that they were made with."""
    if _is(value, "cast", DType.float32) and value.args[0].dtype in _BYTES:
        codes = codes_of(value.args[0])
        return None if codes is None else CodesAsNumbers(codes.whole, None, codes.low, codes.high)
    if _is(value, "sub", DType.float32):
        made, zero = value.args
        if _is(made, "cast", DType.float32) and made.args[0].dtype in _BYTES:
            codes = codes_of(made.args[0])
            if codes is not None and codes.zero == zero:
                return CodesAsNumbers(codes.rounded, zero, codes.low, codes.high)
    return None


def _is(value: Expr, name: str, dtype: DType) -> TypeGuard[Op]:
    return isinstance(value, Op) and value.name == name and value.dtype is dtype
