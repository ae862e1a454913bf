"""The error function."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath import coefficients as c
from ranvier.codegen.llvm.vmath.core import at_most, magnitude, with_sign
from ranvier.codegen.llvm.vmath.exponential import polynomial, small_expm1


def erf(f: Fn, x: Val, isa: Isa) -> Val:
    """1 - exp(-g(|x|)): g grows smoothly from 1.13·x to x², so one polynomial serves from 0 to where erf is 1."""
    size = at_most(f, magnitude(f, x), 4.0 if x.element == "float" else 6.0)
    # the first coefficient in two parts: its rounding would be an error of all small results
    minus_g = f.fma(size, c.ERF_FIRST[x.element][0], f.mul(size, polynomial(f, size, c.ERF)))
    return with_sign(f, small_expm1(f, minus_g), x)
