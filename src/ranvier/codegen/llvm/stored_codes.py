"""Codes of 8 or 16 bits that are stored, by fewer instructions than rounding, adding a zero point and saturating take.

A number is clipped first, to the bounds that the codes less their zero point have. Then one conversion rounds it half
to even. Where additions are cheaper than conversions, adding 1.5 · 2²³ does that, and leaves the code in the low bits
of the float. What is divided by a scale is clipped before: it is finite then, and needs no care for what lies far
beyond all codes.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val, mangled, vector
from ranvier.codegen.llvm.code_forms import CODES, CodesAsNumbers, codes_of
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.exprs import ExprEmitter, Leaf, divided
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath.core import WHOLE, exactly
from ranvier.codegen.loops.ir import Expr, Op
from ranvier.dtypes import DType


def nearest(f: Fn, isa: Isa, numbers: Val) -> Val:
    """Numbers as the integers nearest to them. What no integer holds becomes the lowest one on x86; on NEON the one at
    its end, and zero where it is NaN."""
    kind = vector("i32", numbers.lanes)
    name = "llvm.aarch64.neon.fcvtns" if isa.triple == "aarch64" else "llvm.lrint"
    return f.intrinsic(f"{name}.{mangled(kind)}.{mangled(numbers.type)}", kind, [numbers])


def stored(emitter: ExprEmitter, expr: Expr, leaf: Leaf) -> Val:
    """A vector of what is stored."""
    return _codes(emitter, expr, leaf) or emitter.vector(expr, leaf)


def _codes(emitter: ExprEmitter, expr: Expr, leaf: Leaf) -> Val | None:
    """A vector of codes; None for other expressions."""
    f, isa, lanes = emitter.fn, emitter.isa, emitter.lanes
    codes = codes_of(expr, CODES) if lanes > 1 else None
    if codes is None or codes.number.dtype is not DType.float32:
        return None
    number, factors = codes.number, list[Val]()
    ends = emitter.ends(CodesAsNumbers(codes.rounded, codes.zero, codes.low, codes.high), leaf)
    if isinstance(number, Op) and number.name == "quotient":
        factors = [emitter.value(each, leaf) for each in number.args[1:]]
        number = number.args[0]
    zero = None if codes.zero is None else emitter.value(codes.zero, leaf)
    if any(each.lanes > 1 for each in (*ends, *factors, *([] if zero is None else [zero]))):
        return None
    if factors:
        ends = [f.mul(end, factors[0]) for end in ends]
    low, high, *divisor = (f.splat(each, lanes) for each in (*ends, *factors))
    x, by_addition = emitter.vector(number, leaf), isa.triple == "aarch64"
    # the lower bound is what comes out where the number is NaN
    if by_addition:
        clipped = f.number_min(f.number_max(x, low), high)
    else:
        clipped = f.quick_max(f.quick_min(high, x), low)
    if divisor:
        clipped = divided(f, clipped, *divisor) if isa.fma else f.div(clipped, divisor[0])
    if by_addition:
        code = f.bitcast(exactly(f, "fadd", clipped, WHOLE), vector("i32", lanes))
    else:
        code = nearest(f, isa, clipped)
    if zero is not None:
        code = code + f.splat(f.cast(zero, "i32"), lanes)
    return f.cast(code, register_type(expr.dtype))
