"""Expressions whose value is rounded to bfloat16 when it is stored, with functions that are no better than that.

Only where relative errors pass through as they are: the value itself, factors of it, and what is chosen. A sum may
cancel what is exact in its terms, so its terms are left alone; but ``1 + erf(x)`` and ``1 + tanh(x)``, which cancel by
themselves in every GELU, are functions of their own that do not.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.loops.ir import Const, Expr, Load, Op
from ranvier.dtypes import DType

F32 = DType.float32


def for_bfloat16(value: Expr) -> Expr:
    """``value`` with errors below those of rounding it to bfloat16."""
    if not isinstance(value, Op) or value.dtype is not F32:
        return value
    match value.name:
        case "sigmoid":
            return Op("short_sigmoid", value.args, F32)
        case "mul" | "neg" | "min" | "max":
            return _with(value, tuple(for_bfloat16(a) for a in value.args))
        case "quotient":
            return _quotient(for_bfloat16, *value.args)
        case "where":
            condition, *chosen = value.args
            return _with(value, (condition, *(for_bfloat16(a) for a in chosen)))
        case "add":
            return _one_plus(value)
    return value


def of_bfloat16(value: Expr) -> Expr:
    """``value``, made of sums of products of bfloat16 and kept as float32: what a division rounds otherwise is nothing
    beside the errors of its operands."""
    if isinstance(value, Op) and value.name == "quotient" and value.dtype is F32:
        return _quotient(of_bfloat16, *value.args)
    return value


def _quotient(inner: Callable[[Expr], Expr], dividend: Expr, divisor: Expr, reciprocal: Expr) -> Expr:
    """One multiplication instead of six instructions that round as a division does, or none: where what is divided has
    a factor that is cut off at both ends, as a hard swish has, that is made as much smaller before."""
    if isinstance(dividend, Op) and dividend.name == "mul" and isinstance(divisor, Const) and divisor.value > 0:
        for one, other in (dividend.args, dividend.args[::-1]):
            smaller = _clipped_sum(other, float(divisor.value), reciprocal)
            if smaller is not None:
                return Op("mul", (inner(one), smaller), F32)
    return Op("mul", (inner(dividend), reciprocal), F32)


def _clipped_sum(value: Expr, divisor: float, reciprocal: Expr) -> Expr | None:
    """``min(max(x + c, low), high)`` divided by a number: by one instruction with the sum. Terms of this sum were
    rounded to bfloat16, or are made of such numbers: beside that, what it loses is nothing."""
    match value:
        case Op("min", (Op("max", (Op("add", (x, Const() | Load() as c)), Const() as low)), Const() as high)):
            made: Expr = Op("fma", (x, reciprocal, Op("mul", (c, reciprocal), F32)), F32)
            for name, bound in (("max", low), ("min", high)):
                made = Op(name, (made, Const(float(bound.value) / divisor, F32)), F32)
            return made
    return None


def _with(value: Op, args: tuple[Expr, ...]) -> Op:
    """The operation on these; the same object where nothing is new, so that what is shared stays shared."""
    return value if all(a is b for a, b in zip(args, value.args)) else Op(value.name, args, value.dtype)


def _one_plus(value: Op) -> Expr:
    for one, other in (value.args, value.args[::-1]):
        if not (isinstance(one, Const) and one.value == 1.0 and isinstance(other, Op)):
            continue
        (x, *_) = other.args
        if other.name == "erf":
            return Op("short_one_plus_erf", (x,), F32)
        if other.name == "tanh":  # 2 / (1 + exp(-2 x))
            two = Const(2.0, F32)
            return Op("mul", (two, Op("short_sigmoid", (Op("mul", (two, x), F32),), F32)), F32)
    return value
