"""Rounding to integers, remainders, and the reciprocal square root.

x86 has rounding instructions only from SSE 4.1 on, and LLVM calls libm without them: the machines that have fused
multiply-add all have them, the portable path adds and subtracts 2^mantissa instead.
"""

from __future__ import annotations

import math

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath.core import any_lane, bits, exactly, from_bits, layout, magnitude, with_sign


def _nearest_magnitude(f: Fn, size: Val) -> Val:
    """rint of a number that is not negative."""
    whole = 2.0 ** layout(size).mantissa  # from here on every number is an integer
    rounded = exactly(f, "fsub", exactly(f, "fadd", size, whole), whole)
    return f.select(f.cmp("olt", size, whole), rounded, size)


def rint(f: Fn, x: Val, isa: Isa) -> Val:
    """The nearest integer, halves to the even one."""
    if isa.fma:
        return f.unary("roundeven", x)
    return with_sign(f, _nearest_magnitude(f, magnitude(f, x)), x)


def floor(f: Fn, x: Val, isa: Isa) -> Val:
    if isa.fma:
        return f.unary("floor", x)
    nearest = rint(f, x, isa)
    return f.select(f.cmp("ogt", nearest, x), exactly(f, "fsub", nearest, 1.0), nearest)


def ceil(f: Fn, x: Val, isa: Isa) -> Val:
    if isa.fma:
        return f.unary("ceil", x)
    nearest = rint(f, x, isa)
    # the sign is put back because -0.7 goes to -0
    return with_sign(f, f.select(f.cmp("olt", nearest, x), exactly(f, "fadd", nearest, 1.0), nearest), x)


def trunc(f: Fn, x: Val, isa: Isa) -> Val:
    if isa.fma:
        return f.unary("trunc", x)
    size = magnitude(f, x)
    nearest = _nearest_magnitude(f, size)
    return with_sign(f, f.select(f.cmp("ogt", nearest, size), exactly(f, "fsub", nearest, 1.0), nearest), x)


def rsqrt(f: Fn, x: Val, isa: Isa) -> Val:
    return f.div(f.const(x.type, 1.0), f.unary("sqrt", x))


def fmod(f: Fn, x: Val, y: Val, isa: Isa) -> Val:
    """The exact remainder of x/y with the sign of x: long division, 26 bits of the quotient at a time.

    One round is enough while the quotient is below 2^26; the loop goes on for lanes with a larger one. A quotient
    that was rounded up leaves a small negative remainder, which later rounds or the final addition put right.
    """
    if x.element == "float":
        return f.cast(fmod(f, f.cast(x, "double"), f.cast(y, "double"), isa), "float")
    dividend, divisor = magnitude(f, x), magnitude(f, y)
    usable = f.and_(f.cmp("olt", dividend, math.inf), f.cmp("ogt", divisor, 0.0))
    left = f.var(x.type, f.select(usable, dividend, 0.0))
    infinite = f.cmp("oeq", divisor, math.inf)  # x itself is the remainder: put in at the end
    by = f.select(f.and_(usable, f.not_(infinite)), divisor, f.like(x, _LARGEST))
    with f.while_() as again:
        a = left.get()
        again.only(any_lane(f, f.cmp("oge", magnitude(f, a), by)))
        # where the quotient would overflow, multiples of a multiple of the divisor are taken away first
        far = exactly(f, "fmul", by, 2.0**800)
        farther = exactly(f, "fmul", far, 2.0**800)
        step = f.select(f.cmp("ogt", magnitude(f, a), far), far, by)
        step = f.select(f.cmp("ogt", magnitude(f, a), farther), farther, step)
        q = trunc(f, _leading(f, f.div(a, step), 27), isa)
        high = _leading(f, step, 27)
        low = exactly(f, "fsub", step, high)
        # all four operations are exact: the products have at most 53 bits, and so have the differences
        a = exactly(f, "fsub", a, exactly(f, "fmul", q, high))
        left.set(exactly(f, "fsub", a, exactly(f, "fmul", q, low)))
    a = left.get()
    a = f.select(f.cmp("olt", a, 0.0), exactly(f, "fadd", a, by), a)
    a = f.select(infinite, dividend, a)
    return with_sign(f, f.select(usable, a, math.nan), x)


_LARGEST = 1.7976931348623157e308


def _leading(f: Fn, x: Val, dropped: int) -> Val:
    """x with its lowest bits cleared."""
    return from_bits(f, f.and_(bits(f, x), -(1 << dropped)))
