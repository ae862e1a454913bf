"""Expressions that make codes of float32 numbers, recognised: there are shorter ways to compute them.

Quantization is written as rounding, adding a zero point, and a cast that saturates. Where the code is turned into a
number again at once, it need not become a byte in between; where it is stored, the conversion can do the rounding.
"""

from __future__ import annotations

from typing import TypeGuard

from ranvier.codegen.loops.ir import Const, Expr, Op
from ranvier.dtypes import DType
from ranvier.records import dataclass

BYTES = (DType.int8, DType.uint8)
CODES = (*BYTES, DType.int16, DType.uint16)


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


def codes_of(value: Expr, types: tuple[DType, ...] = BYTES) -> Codes | None:
    """The parts of an expression that rounds a float32 number and saturates it to one of these types; None for other
    ones."""
    if value.dtype not in types:
        return None
    half, low = 1 << (value.dtype.bits - 1), 0
    unsigned = DType.uint8 if half == 1 << 7 else DType.uint16
    if value.dtype is not unsigned:
        # signed codes come by way of unsigned ones
        flipped = value.args[0] if _is(value, "bits", value.dtype) else value
        if not (_is(flipped, "bitxor", unsigned) and flipped.args[1] == Const(half, unsigned)):
            return None
        low = -half
        value = flipped.args[0]
    if not _is(value, "cast", unsigned):
        return None
    whole = value.args[0]
    if low < 0:
        if not (_is(whole, "add", DType.float32) and whole.args[1] == Const(float(half), DType.float32)):
            return None
        whole = whole.args[0]
    rounded, zero = whole, None
    if _is(whole, "add", DType.float32):
        rounded, zero = whole.args
        if not (isinstance(zero, Op) and zero.name == "cast" and zero.args[0].dtype in types):
            return None
    if not _is(rounded, "round", DType.float32):
        return None
    return Codes(whole, rounded, rounded.args[0], zero, low, low + 2 * half - 1)


@dataclass(frozen=True)
class CodesAsNumbers:
    """A whole float32 ``number`` between the codes ``low`` and ``high``, both less ``zero`` where there is one."""

    number: Expr
    zero: Expr | None
    low: int
    high: int


def codes_as_numbers(value: Expr) -> CodesAsNumbers | None:
    """The same for codes that are cast to float32, or for those less the zero point that they were made with."""
    if _is(value, "cast", DType.float32) and value.args[0].dtype in BYTES:
        codes = codes_of(value.args[0])
        return None if codes is None else CodesAsNumbers(codes.whole, None, codes.low, codes.high)
    if _is(value, "sub", DType.float32):
        made, zero = value.args
        if _is(made, "cast", DType.float32) and made.args[0].dtype in BYTES:
            codes = codes_of(made.args[0])
            if codes is not None and codes.zero == zero:
                return CodesAsNumbers(codes.rounded, zero, codes.low, codes.high)
    return None


def _is(value: Expr, name: str, dtype: DType) -> TypeGuard[Op]:
    return isinstance(value, Op) and value.name == name and value.dtype is dtype
