"""8-bit codes that a loop nest stores, by fewer instructions where additions are cheaper than conversions.

A number is clipped first, to the bounds that the codes less their zero point have. Then adding 1.5 · 2²³ rounds it half
to even and leaves it in the low bits of the float, from which the byte is taken as it is. What is divided by a scale is
clipped before: it is finite then, and needs no care for what lies far beyond all codes.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Val, vector
from ranvier.codegen.llvm.code_forms import CodesAsNumbers, codes_of
from ranvier.codegen.llvm.exprs import ExprEmitter, Leaf, divided
from ranvier.codegen.llvm.vmath.core import WHOLE, exactly
from ranvier.codegen.loops.ir import Expr, Op
from ranvier.dtypes import DType


def short_codes(emitter: ExprEmitter, expr: Expr, leaf: Leaf) -> Val | None:
    """A vector of codes; None for other expressions, and where this is not the shorter way."""
    f, lanes = emitter.fn, emitter.lanes
    # elsewhere a conversion that rounds is one quick instruction
    if emitter.isa.triple != "aarch64" or lanes == 1:
        return None
    codes = codes_of(expr)
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
    # the bound is what comes out where the number is NaN
    clipped = f.number_min(f.number_max(emitter.vector(number, leaf), low), high)
    if divisor:
        clipped = divided(f, clipped, divisor[0], divisor[1])
    code = f.bitcast(exactly(f, "fadd", clipped, WHOLE), vector("i32", lanes))
    if zero is not None:
        code = code + f.splat(f.cast(zero, "i32"), lanes)
    return f.cast(code, "i8")
