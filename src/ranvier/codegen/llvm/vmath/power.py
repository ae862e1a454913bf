"""x to the power of y."""

from __future__ import annotations

import math

from ranvier.codegen.llvm.builder import Fn, Val, mangled
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath import coefficients as c
from ranvier.codegen.llvm.vmath.core import (
    at_least,
    at_most,
    bits,
    exact_sum,
    exactly,
    flip_sign,
    from_bits,
    horner,
    layout,
    magnitude,
    near_integer,
    scaled,
)
from ranvier.codegen.llvm.vmath.exponential import exp, polynomial
from ranvier.codegen.llvm.vmath.logarithm import log, log_specials, split
from ranvier.codegen.llvm.vmath.rounding import rint

Pair = tuple[Val, Val]  # an unevaluated sum: the first is the rounded value, the second what it misses


def pow(f: Fn, x: Val, y: Val, isa: Isa) -> Val:
    """With the special cases of C: pow(1, NaN) and pow(x, 0) are 1, negative bases take integers only."""
    size = magnitude(f, x)
    if x.element == "float":
        wide = f.cast(size, "double")
        logarithm = log(f, wide, isa)
        product = f.mul(f.cast(y, "double"), logarithm)
        product = f.select(f.cmp("oeq", logarithm, 0.0), 0.0, product)  # 1 to any power, infinities and NaN too
        found = f.cast(exp(f, product, isa), "float")
    else:
        found = _pow_double(f, size, y, isa)
    half = f.mul(y, 0.5)
    whole = f.cmp("oeq", rint(f, y, isa), y)
    odd = f.and_(whole, f.cmp("une", rint(f, half, isa), half))
    form = layout(x)
    sign = f.and_(bits(f, x), form.sign)
    found = flip_sign(f, found, f.select(odd, sign, f.const(sign.type, 0)))
    rootless = f.and_(f.and_(f.cmp("olt", x, 0.0), f.cmp("ogt", x, -math.inf)), f.not_(whole))
    found = f.select(rootless, math.nan, found)
    return f.select(f.cmp("oeq", y, 0.0), 1.0, found)


def _pow_double(f: Fn, size: Val, y: Val, isa: Isa) -> Val:
    """exp(y·log(size)) with the logarithm and the product in twice the precision."""
    high, low = _precise_log(f, size, isa)
    one = f.cmp("oeq", size, 1.0)
    product, missed = _product(f, y, high, isa)
    product = f.select(one, 0.0, product)
    missed = f.fma(y, low, missed)
    within = f.cmp("olt", magnitude(f, product), 800.0)
    # outside, the product may be infinite and what it misses has no meaning
    missed = f.select(f.and_(within, f.not_(one)), missed, 0.0)
    product = at_most(f, at_least(f, product, -746.0), 710.5)
    n, n_bits = near_integer(f, product, c.LOG2E["double"][0])
    ln2_high, ln2_low = c.LN2["double"]
    r = f.add(f.fma(n, -ln2_low, f.fma(n, -ln2_high, product)), missed)
    p = f.fma(f.fma(polynomial(f, r, c.EXP), r, 1.0), r, 1.0)
    return scaled(f, p, n, n_bits, isa)


def _precise_log(f: Fn, x: Val, isa: Isa) -> Pair:
    """log(x) to about 2^-65, relatively: 2·atanh(s) + e·ln 2 with s = (m − 1)/(m + 1)."""
    e, m, _ = split(f, x, isa)
    t = exactly(f, "fsub", m, 1.0)
    below = exactly(f, "fadd", m, 1.0)
    below_low = exactly(f, "fsub", m, exactly(f, "fsub", below, 1.0))
    s = f.div(t, below)
    back, back_low = _product(f, s, below, isa)
    left = exactly(f, "fsub", exactly(f, "fsub", exactly(f, "fsub", t, back), back_low), f.mul(s, below_low))
    s_low = f.div(left, below)
    z, z_low = _product(f, s, s, isa)
    z_low = f.fma(f.add(s, s), s_low, z_low)
    # 2·atanh(s) = 2s + s·(2/3·z + z²·tail(z)): the tail is small enough for one double, its first term is not
    thirds, thirds_low = c.TWO_THIRDS["double"]
    w, w_low = _product(f, z, f.const(z.type, thirds), isa)
    w_low = f.fma(z, thirds_low, f.fma(z_low, thirds, w_low))
    w, w_low = _quick_sum(f, w, f.fma(f.mul(z, z), horner(f, z, c.LOG_TAIL["double"]), w_low))
    p, p_low = _product(f, s, w, isa)
    p_low = f.fma(s, w_low, f.fma(s_low, w, p_low))
    ln2_high, ln2_low = c.LN2["double"]
    total, total_low = exact_sum(f, exactly(f, "fmul", e, ln2_high), f.add(s, s))
    total_low = exactly(f, "fadd", total_low, f.fma(e, ln2_low, f.add(s_low, s_low)))
    total, more = exact_sum(f, total, p)
    total_low = exactly(f, "fadd", total_low, exactly(f, "fadd", more, p_low))
    high, low = _quick_sum(f, total, total_low)
    return log_specials(f, x, high), f.select(f.cmp("olt", magnitude(f, high), math.inf), low, 0.0)


def _product(f: Fn, a: Val, b: Val, isa: Isa) -> Pair:
    """a·b exactly."""
    p = exactly(f, "fmul", a, b)
    if isa.fma:
        return p, f.intrinsic(f"llvm.fma.{mangled(a.type)}", a.type, [a, b, f.neg(p)])
    a_high, b_high = (from_bits(f, f.and_(bits(f, v), -(1 << 27))) for v in (a, b))
    a_low, b_low = exactly(f, "fsub", a, a_high), exactly(f, "fsub", b, b_high)
    rest = exactly(f, "fsub", exactly(f, "fmul", a_high, b_high), p)
    rest = exactly(f, "fadd", rest, exactly(f, "fmul", a_high, b_low))
    rest = exactly(f, "fadd", rest, exactly(f, "fmul", a_low, b_high))
    return p, exactly(f, "fadd", rest, exactly(f, "fmul", a_low, b_low))


def _quick_sum(f: Fn, a: Val, b: Val) -> Pair:
    """a + b exactly where a is the larger one."""
    total = exactly(f, "fadd", a, b)
    return total, exactly(f, "fsub", b, exactly(f, "fsub", total, a))
