"""Shorthand for writing expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.codegen.loops.ir import Const, Expr, Op, Scalar
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]
HALVES = (DType.float16, DType.bfloat16)


def op(name: str, *args: Expr, dtype: DType | None = None) -> Expr:
    """An operation; its type is that of the first operand unless given."""
    return Op(name, args, dtype or args[0].dtype)


def compare(name: str, a: Expr, b: Expr) -> Expr:
    return Op(name, (a, b), DType.bool)


def const(value: Scalar, like: Expr | DType) -> Expr:
    return Const(value, like if isinstance(like, DType) else like.dtype)


def add(a: Expr, b: Expr) -> Expr:
    return op("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return op("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return op("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return op("div", a, b)


def ratio(x: Expr, y: Expr, known: Array | None) -> Expr:
    """``x / y`` without a division where ``y`` is one number that is known, and an ordinary one.

    It is above zero too: those who make codes of the quotient clip ``x`` between the bounds of codes times ``y``.
    """
    ordinary = known is not None and known.size == 1 and 2.0**-60 < float(known.reshape(-1)[0]) < 2.0**60
    if not ordinary or x.dtype is not DType.float32 or y.dtype is not DType.float32:
        return div(x, y)
    if isinstance(y, Const) and math.frexp(float(y.value))[0] == 0.5:
        return mul(x, const(1 / float(y.value), y))
    return op("quotient", x, y, op("reciprocal", y))


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    return Op("where", (condition, a, b), a.dtype)


def cast(x: Expr, dtype: DType) -> Expr:
    return x if x.dtype is dtype else Op("cast", (x,), dtype)


def clamp(x: Expr, low: Expr, high: Expr) -> Expr:
    return op("min", op("max", x, low), high)


def wide(function: Callable[..., Expr]) -> Callable[..., Expr]:
    """Half-precision operands are computed in float32 and rounded once."""

    def computed(*args: Expr) -> Expr:
        dtype = args[0].dtype
        if dtype not in HALVES:
            return function(*args)
        return cast(function(*(cast(a, DType.float32) if a.dtype in HALVES else a for a in args)), dtype)

    return computed
