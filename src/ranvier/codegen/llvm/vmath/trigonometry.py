"""Sine, cosine and tangent.

The angle is reduced to r within a quarter turn of a multiple of π, with the sign of the odd multiples put on r: then
sin(angle) = sin(r), one odd polynomial serves, and results near the zeros keep their relative accuracy. A cosine is
a sine reduced to odd multiples of π/2. Common angles take a few multiplications by parts of π; a vector with a larger
one (from 2·10⁵ in float and 1.3·10⁸ in double; 25·10³ and 5·10⁵ without fused multiply-add) calls a function that
multiplies by as many digits of 1/π as it takes, so that every finite angle is good to the last places.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath import coefficients as c
from ranvier.codegen.llvm.vmath.core import (
    any_lane,
    at_least,
    at_most,
    bits,
    exact_sum,
    exactly,
    flip_sign,
    from_bits,
    layout,
    magnitude,
    near_integer,
    with_sign,
)
from ranvier.codegen.llvm.vmath.exponential import polynomial
from ranvier.codegen.llvm.vmath.rounding import rint

# The largest angle whose number of half turns is small enough for the parts of π: with and without fused arithmetic.
_QUICK = {("float", True): 2e5, ("float", False): 25e3, ("double", True): 1.3e8, ("double", False): 5e5}
_FLOAT_PIECES = 9  # digits of 1/π, 24 bits each, that matter for the largest float


def _quickly_reduced(f: Fn, x: Val, isa: Isa, cosine: bool) -> Val:
    inverse = c.INVERSE_PI[x.element][0]
    if cosine:
        n, n_bits = near_integer(f, f.fma(x, inverse, -0.5))
        n, n_bits = exactly(f, "fadd", n, 0.5), f.add(n_bits, 1)
    else:
        n, n_bits = near_integer(f, x, inverse)
    r = _without_turns(f, x, n, isa)
    form = layout(x)
    return flip_sign(f, r, f.shl(n_bits, form.mantissa + form.exponent_bits))


def _without_turns(f: Fn, x: Val, n: Val, isa: Isa) -> Val:
    """x − n·π. Without fused multiply-add the differences are kept exact and rounded once at the end."""
    if isa.fma:
        for part in c.PI_FUSED[x.element]:
            x = f.fma(n, -part, x)
        return x
    first, *middle, last = c.PI_SHORT[x.element]
    r = exactly(f, "fadd", x, exactly(f, "fmul", n, -first))
    rest = exactly(f, "fmul", n, -last)
    for part in middle:
        r, missed = exact_sum(f, r, exactly(f, "fmul", n, -part))
        rest = exactly(f, "fadd", missed, rest)
    return f.select(f.cmp("oeq", rest, 0.0), r, exactly(f, "fadd", r, rest))  # adding nothing would lose -0


def _reduced(f: Fn, x: Val, isa: Isa, cosine: bool) -> Val:
    """r within about a quarter turn with sin(r) = sin(x), or cos(x) for a cosine."""
    found = f.var(x.type, _quickly_reduced(f, x, isa, cosine))
    huge = f.cmp("ogt", magnitude(f, x), _QUICK[x.element, isa.fma])
    with f.if_(any_lane(f, huge)):
        wide = f.cast(x, "double")
        turn = f.const("double", 0.5 if cosine else 0.0)
        pieces = f.i64(_FLOAT_PIECES if x.element == "float" else len(c.INVERSE_PI_DIGITS["double"]))
        called = f.call(_slow_reduction(f.module, x.lanes, isa), wide.type, [wide, turn, pieces])
        found.set(f.select(huge, f.cast(called, x.element), found.get()))
    return found.get()


def _slow_reduction(module: Module, lanes: int, isa: Isa) -> str:
    """The name of a function of the module that reduces any doubles: (angles, half turns to add, pieces of 1/π)."""
    name = f"reduce_huge_angles_{lanes}"
    if any(made.name == name for made in module.functions):
        return name
    kind = vector("double", lanes)
    digits = module.table(f"{name}_digits", "double", c.INVERSE_PI_DIGITS["double"])
    f = module.function(name, [(kind, "x"), ("double", "turn"), ("i64", "pieces")], kind, internal=True)
    # scaled like the digits, and in two halves so that products with 24 bits are exact
    x = exactly(f, "fmul", f.args["x"], 2.0**-200)
    high = from_bits(f, f.and_(bits(f, x), -(1 << 27)))
    low = exactly(f, "fsub", x, high)
    total = f.var(kind, f.splat(f.args["turn"], lanes))
    rest = f.var(kind, 0.0)
    with f.loop(0, f.args["pieces"]) as k:
        digit = f.splat(f.load("double", f.gep(Val(f, "ptr", digits), k, "double")), lanes)
        for half in (high, low):
            product = exactly(f, "fmul", half, digit)
            whole = rint(f, exactly(f, "fmul", product, 0.5), isa)
            term = exactly(f, "fsub", product, exactly(f, "fadd", whole, whole))  # modulo a full turn
            after, missed = exact_sum(f, total.get(), term)
            total.set(after)
            rest.set(exactly(f, "fadd", rest.get(), missed))
    n = rint(f, total.get(), isa)
    r = f.mul(exactly(f, "fadd", exactly(f, "fsub", total.get(), n), rest.get()), c.PI_FUSED["double"][0])
    half_n = exactly(f, "fmul", n, 0.5)
    even = f.cmp("oeq", rint(f, half_n, isa), half_n)
    f.ret(f.select(even, r, f.neg(r)))
    return name


def _sine(f: Fn, r: Val) -> Val:
    u = f.mul(r, r)
    found = f.fma(f.mul(u, r), polynomial(f, u, c.SIN), r)
    if r.element == "double":
        return found
    return at_most(f, at_least(f, found, -1.0), 1.0)  # rounding alone would reach 1.0000001 here and there


def sin(f: Fn, x: Val, isa: Isa) -> Val:
    r = _reduced(f, x, isa, cosine=False)
    return with_sign(f, _sine(f, r), r)  # the polynomial loses the sign of -0


def cos(f: Fn, x: Val, isa: Isa) -> Val:
    return _sine(f, _reduced(f, x, isa, cosine=True))


def tan(f: Fn, x: Val, isa: Isa) -> Val:
    return f.div(sin(f, x, isa), cos(f, x, isa))
