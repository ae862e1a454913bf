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
    bits,
    exactly,
    exponent,
    fixup,
    from_bits,
    horner,
    layout,
    mantissa_around_one,
)

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
