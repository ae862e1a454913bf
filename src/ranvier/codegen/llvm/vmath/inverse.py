"""Inverse trigonometric functions."""

from __future__ import annotations

import math

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath import coefficients as c
from ranvier.codegen.llvm.vmath.core import bits, flip_sign, layout, magnitude, with_sign
from ranvier.codegen.llvm.vmath.exponential import polynomial


def asin(f: Fn, x: Val, isa: Isa) -> Val:
    size = magnitude(f, x)
    far, p = _asin_parts(f, size)
    high, low = c.HALF_PI[x.element]
    # π/2 − 2·asin(sqrt((1 − size)/2))
    turned = f.sub(f.const(x.type, high), f.sub(f.add(p, p), low))
    return with_sign(f, f.select(far, turned, p), x)


def acos(f: Fn, x: Val, isa: Isa) -> Val:
    far, p = _asin_parts(f, magnitude(f, x))
    high, low = c.HALF_PI[x.element]
    negative = f.cmp("olt", x, 0.0)
    doubled = f.add(p, p)
    from_pi = f.sub(f.const(x.type, 2 * high), f.sub(doubled, 2 * low))
    signed = f.select(negative, f.neg(p), p)
    middle = f.sub(f.const(x.type, high), f.sub(signed, low))
    return f.select(far, f.select(negative, from_pi, doubled), middle)


def _asin_parts(f: Fn, size: Val) -> tuple[Val, Val]:
    """Whether size is above 1/2, and the arcsine of size, or of sqrt((1 − size)/2) there."""
    far = f.cmp("ogt", size, 0.5)
    u = f.select(far, f.fma(size, -0.5, 0.5), f.mul(size, size))
    r = f.select(far, f.unary("sqrt", u), size)
    return far, f.fma(f.mul(u, r), polynomial(f, u, c.ASIN), r)


def _atan_ratio(f: Fn, y: Val, x: Val) -> Val:
    """atan(y/x) for y and x that are not negative, with one division.

    Above tan(3π/8) as π/2 − atan(x/y), above tan(π/8) as π/4 + atan((y − x)/(y + x)), else directly.
    """
    steep = f.cmp("ogt", y, f.mul(x, 1 + math.sqrt(2)))
    middle = f.cmp("ogt", y, f.mul(x, math.sqrt(2) - 1))
    above = f.select(steep, f.neg(x), f.select(middle, f.sub(y, x), y))
    below = f.select(steep, y, f.select(middle, f.add(y, x), x))
    t = f.div(above, below)
    u = f.mul(t, t)
    p = f.fma(f.mul(u, t), polynomial(f, u, c.ATAN), t)
    half, quarter, zero = c.HALF_PI[y.element], c.QUARTER_PI[y.element], f.const(y.type, 0.0)
    high, low = (f.select(steep, half[k], f.select(middle, f.const(y.type, quarter[k]), zero)) for k in (0, 1))
    return f.add(high, f.add(p, low))


def atan(f: Fn, x: Val, isa: Isa) -> Val:
    return with_sign(f, _atan_ratio(f, magnitude(f, x), f.const(x.type, 1.0)), x)


def atan2(f: Fn, y: Val, x: Val, isa: Isa) -> Val:
    """The angle of the point (x, y), in all quadrants; signs of zeros and pairs of infinities as in C."""
    up, along = magnitude(f, y), magnitude(f, x)
    # two infinities are on the diagonal, and y = 0 on the axis whatever x; huge pairs would overflow in their sum
    both = f.and_(f.cmp("oeq", up, math.inf), f.cmp("oeq", along, math.inf))
    flat = f.and_(f.cmp("oeq", up, 0.0), f.cmp("oeq", along, 0.0))
    shrink = f.select(
        f.cmp("ogt", f.quick_max(up, along), 2.0**126 if y.element == "float" else 2.0**1022),
        0.25,
        f.const(y.type, 1.0),
    )
    up = f.select(both, 1.0, f.mul(up, shrink))
    along = f.select(f.or_(both, flat), 1.0, f.mul(along, shrink))
    angle = _atan_ratio(f, up, along)
    form = layout(y)
    sign_mask = f.const(bits(f, x).type, form.sign)
    behind = f.cmp("slt", bits(f, x), 0)
    high, low = c.HALF_PI[y.element]
    turned = f.sub(f.const(y.type, 2 * high), f.sub(angle, 2 * low))
    return flip_sign(f, f.select(behind, turned, angle), f.and_(bits(f, y), sign_mask))
