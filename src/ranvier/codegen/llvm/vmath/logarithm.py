"""log and what is made of it."""

from __future__ import annotations

import math

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath import coefficients as c
from ranvier.codegen.llvm.vmath.core import (
    KEEP,
    MINUS_INF,
    NAN,
    PLUS_INF,
    at_least,
    bits,
    exactly,
    exponent,
    fixup,
    from_bits,
    horner,
    layout,
    magnitude,
    mantissa_around_one,
    near_integer,
    power_of_two,
    with_sign,
)
from ranvier.codegen.llvm.vmath.exponential import exp

_SQRT_HALF_BITS = {"float": 0x3F3504F3, "double": 0x3FE6A09E667F3BCD}
_SMALLEST_NORMAL = {"float": 2.0**-126, "double": 2.0**-1022}


def split(f: Fn, x: Val, isa: Isa) -> tuple[Val, Val, c.Table]:
    """e, m and the polynomial for the range of m; x = m·2^e for a positive finite x, denormal or not."""
    native, around_one = exponent(f, x, isa), mantissa_around_one(f, x, isa)
    if native is not None and around_one is not None:
        below_one = exponent(f, around_one, isa)
        assert below_one is not None
        return f.sub(native, below_one), around_one, c.LOG_WIDE
    form = layout(x)
    denormal = f.cmp("olt", x, _SMALLEST_NORMAL[x.element])
    lift = form.mantissa + 1
    normal = f.select(denormal, f.mul(x, 2.0**lift), x)
    offset = _SQRT_HALF_BITS[x.element]
    shifted = f.add(bits(f, normal), form.one - offset)
    # the exponent as the low bits of the magic number: a conversion that every machine has for both sizes
    magic = f.bitcast(f.const(x.type, form.magic), shifted.type)
    raw = from_bits(f, f.add(f.lshr(shifted, form.mantissa), magic))
    base = f.select(denormal, f.const(x.type, form.magic + form.bias + lift), f.const(x.type, form.magic + form.bias))
    m = from_bits(f, f.add(f.and_(shifted, (1 << form.mantissa) - 1), offset))
    return exactly(f, "fsub", raw, base), m, c.LOG


def of_split(f: Fn, e: Val, t: Val, table: c.Table) -> Val:
    """e·ln 2 + log(1 + t) for a small t."""
    high, low = c.LN2[t.element]
    if t.element == "float":
        u = f.mul(t, t)
        p = f.mul(f.mul(horner(f, t, table["float"]), t), u)
        p = f.fma(e, low, p)
        p = f.fma(u, -0.5, p)
        return f.fma(e, high, f.add(t, p))
    # s = t/(2+t): log(1+t) = 2·atanh(s) = t − (t²/2 − s·(t²/2 + R(s²)))
    s = f.div(t, f.add(t, 2.0))
    z = f.mul(s, s)
    half = f.mul(f.mul(t, t), 0.5)
    rest = f.mul(z, horner(f, z, c.LOG_ATANH["double"]))
    inner = f.fma(s, f.add(half, rest), f.mul(e, low))
    return f.fma(e, high, f.sub(t, f.sub(half, inner)))


def log(f: Fn, x: Val, isa: Isa) -> Val:
    e, m, table = split(f, x, isa)
    found = of_split(f, e, f.sub(m, 1.0), table)
    fixed = fixup(f, found, x, MINUS_INF, KEEP, NAN, PLUS_INF, NAN, isa)
    return fixed if fixed is not None else log_specials(f, x, found)


def log_specials(f: Fn, x: Val, found: Val) -> Val:
    """log's results for zero, negative numbers, infinity and NaN."""
    found = f.select(f.cmp("olt", x, math.inf), found, x)
    found = f.select(f.cmp("olt", x, 0.0), math.nan, found)
    return f.select(f.cmp("oeq", x, 0.0), -math.inf, found)


def log1p(f: Fn, x: Val, isa: Isa) -> Val:
    """log(1 + x): the rounding error of the sum is carried along into the mantissa."""
    u = exactly(f, "fadd", x, 1.0)
    lost = _lost_in_sum(f, x, u)
    e, m, table = split(f, u, isa)
    _, minus_bits = near_integer(f, at_least(f, f.neg(e), -100.0))  # what was lost beside 2^100 does not matter
    t = f.fma(lost, power_of_two(f, minus_bits), exactly(f, "fsub", m, 1.0))
    found = log_specials(f, u, of_split(f, e, t, table))
    return with_sign(f, found, x)


def _lost_in_sum(f: Fn, x: Val, total: Val) -> Val:
    """(1 + x) − total, exactly."""
    rest = exactly(f, "fsub", total, 1.0)
    back = exactly(f, "fsub", total, rest)
    one = f.const(x.type, 1.0)
    return exactly(f, "fadd", exactly(f, "fsub", one, back), exactly(f, "fsub", x, rest))


def softplus(f: Fn, x: Val, isa: Isa) -> Val:
    """log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|))."""
    e = exp(f, f.neg(magnitude(f, x)), isa)
    # 1 + e is at most 2: halved where it would leave the polynomial's range
    high = f.cmp("ogt", e, math.sqrt(2) - 1)
    t = f.select(high, f.fma(e, 0.5, -0.5), e)
    shift = f.select(high, f.const(x.type, 1.0), f.const(x.type, 0.0))
    return f.add(at_least(f, x, 0.0), of_split(f, shift, t, c.LOG))


_LARGE = {"float": 2.0**14, "double": 2.0**28}  # from here on x² + 1 is x²


def asinh(f: Fn, x: Val, isa: Isa) -> Val:
    """log(a + sqrt(a² + 1)) of a = |x|, as log1p; log(2a) for large ones."""
    a = magnitude(f, x)
    large = f.cmp("ogt", a, _LARGE[x.element])
    square = f.mul(a, a)
    near = f.add(a, f.div(square, f.add(f.unary("sqrt", f.add(square, 1.0)), 1.0)))
    return with_sign(f, _log1p_or_double(f, a, near, large, isa), x)


def acosh(f: Fn, x: Val, isa: Isa) -> Val:
    t = f.sub(x, 1.0)
    near = f.add(t, f.unary("sqrt", f.fma(t, t, f.add(t, t))))
    found = _log1p_or_double(f, x, near, f.cmp("ogt", x, _LARGE[x.element]), isa)
    return f.select(f.cmp("olt", x, 1.0), math.nan, found)


def _log1p_or_double(f: Fn, a: Val, near: Val, large: Val, isa: Isa) -> Val:
    """log(2a) where a is large, else log1p(near)."""
    found = log1p(f, f.select(large, f.sub(a, 1.0), near), isa)
    return f.select(large, f.add(found, math.log(2)), found)


def atanh(f: Fn, x: Val, isa: Isa) -> Val:
    a = magnitude(f, x)
    found = log1p(f, f.div(f.add(a, a), f.sub(f.const(x.type, 1.0), a)), isa)
    return with_sign(f, f.mul(found, 0.5), x)
