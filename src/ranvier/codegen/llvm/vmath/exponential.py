"""exp and what is made of it."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath import coefficients as c
from ranvier.codegen.llvm.vmath.core import (
    at_least,
    at_most,
    estrin,
    horner,
    magnitude,
    near_integer,
    power_of_two,
    scaled,
    with_sign,
)

# Beyond these exp is infinite, or zero after rounding; a little further out, so that the scaling decides.
_HIGHEST = {"float": 89.5, "double": 710.5}
_LOWEST = {"float": -104.5, "double": -746.0}


def polynomial(f: Fn, x: Val, table: c.Table) -> Val:
    """Horner's form where it is short; long ones would wait for themselves."""
    values = table[x.element]
    return horner(f, x, values) if len(values) <= 7 else estrin(f, x, values)


def reduced(f: Fn, x: Val) -> tuple[Val, Val, Val]:
    """n, the bits with n in their low part, and r with x = n·ln 2 + r and |r| at most half of ln 2."""
    n, n_bits = near_integer(f, x, c.LOG2E[x.element][0])
    high, low = c.LN2[x.element]
    return n, n_bits, f.fma(n, -low, f.fma(n, -high, x))


def _exp(f: Fn, x: Val, isa: Isa, halvings: int = 0) -> Val:
    """exp(x)/2^halvings for x within the clamped range."""
    n, n_bits, r = reduced(f, x)
    p = f.fma(f.fma(polynomial(f, r, c.EXP), r, 1.0), r, 1.0)
    if halvings:
        n, n_bits = f.sub(n, float(halvings)), f.sub(n_bits, halvings)
    return scaled(f, p, n, n_bits, isa)


def exp(f: Fn, x: Val, isa: Isa) -> Val:
    # what is zero is not computed: a result that underflows takes a hundred times as long, and masks are full of them
    there = f.cmp("uge", x, _LOWEST[x.element])
    bounded = f.select(there, at_most(f, x, _HIGHEST[x.element]), f.const(x.type, 0.0))
    return f.select(there, _exp(f, bounded, isa), f.const(x.type, 0.0))


def sigmoid(f: Fn, x: Val, isa: Isa) -> Val:
    """1/(1 + exp(-x)), accurate also where it is denormal: the exponential taken is never above 1."""
    e = _exp(f, at_least(f, f.neg(magnitude(f, x)), _LOWEST[x.element]), isa)
    above = f.select(f.cmp("olt", x, 0.0), e, 1.0)
    return f.div(above, f.add(e, 1.0))


def expm1(f: Fn, x: Val, isa: Isa) -> Val:
    """exp(x) - 1. One power of two is kept back so that the largest results do not overflow on the way."""
    lowest = -20.0 if x.element == "float" else -40.0  # the result has long been -1
    _, n_bits, r = reduced(f, at_most(f, at_least(f, x, lowest), 88.9 if x.element == "float" else 709.9))
    p = f.fma(polynomial(f, r, c.EXPM1), f.mul(r, r), r)
    half = power_of_two(f, f.sub(n_bits, 1))
    found = f.fma(half, p, f.sub(half, 0.5))
    return with_sign(f, f.add(found, found), x)


def tanh(f: Fn, x: Val, isa: Isa) -> Val:
    """t/(t + 2) with t = exp(2|x|) - 1: as good near 0 as near 1, and without two branches to choose from."""
    doubled = magnitude(f, x)
    doubled = at_most(f, f.add(doubled, doubled), 40.0)  # from 20 on the result is 1
    t = small_expm1(f, doubled)
    return with_sign(f, f.div(t, f.add(t, 2.0)), x)


def small_expm1(f: Fn, x: Val) -> Val:
    """exp(x) - 1 where 2 to the power of x/ln 2 is far from overflow and underflow."""
    _, n_bits, r = reduced(f, x)
    power = power_of_two(f, n_bits)
    return f.fma(power, f.fma(polynomial(f, r, c.EXPM1), f.mul(r, r), r), f.sub(power, 1.0))


def _half_exp(f: Fn, size: Val, isa: Isa) -> Val:
    """exp(size)/2, which is finite as long as sinh and cosh are."""
    return _exp(f, at_most(f, size, _HIGHEST[size.element] + 1.0), isa, halvings=1)


def cosh(f: Fn, x: Val, isa: Isa) -> Val:
    half = _half_exp(f, magnitude(f, x), isa)
    return f.add(half, f.div(f.const(x.type, 0.25), half))


def sinh(f: Fn, x: Val, isa: Isa) -> Val:
    size = magnitude(f, x)
    half = _half_exp(f, size, isa)
    far = f.sub(half, f.div(f.const(x.type, 0.25), half))
    u = f.mul(size, size)
    near = f.fma(f.mul(u, size), horner(f, u, c.SINH[x.element]), size)
    return with_sign(f, f.select(f.cmp("olt", size, 1.0), near, far), x)
