"""What the functions share: constants by element type, bits, exact arithmetic, polynomials, and AVX-512's own helpers.

Values are vectors of ``float`` or ``double`` with any number of lanes, a scalar being one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.codegen.llvm.builder import Fn, Val, mangled, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass


@dataclass(frozen=True)
class Layout:
    """A binary floating-point format."""

    integer: str  # the integer type of the same size
    mantissa: int  # stored bits
    bias: int
    magic: float  # adding it leaves the nearest integer in the low bits of the sum

    @property
    def sign(self) -> int:
        return -(1 << (self.mantissa + self.exponent_bits))

    @property
    def exponent_bits(self) -> int:
        return (2 * self.bias + 1).bit_length()

    @property
    def one(self) -> int:
        """The bits of 1.0."""
        return self.bias << self.mantissa

    @property
    def magic_bits(self) -> int:
        """Adding an integer to it gives the bits of the magic number and that integer."""
        return (self.bias + self.mantissa << self.mantissa) + (1 << self.mantissa - 1)


LAYOUTS = {
    "float": Layout("i32", 23, 127, 1.5 * 2.0**23),
    "double": Layout("i64", 52, 1023, 1.5 * 2.0**52),
}
WHOLE = LAYOUTS["float"].magic  # for numbers smaller than 2²² …
WHOLE_BITS = LAYOUTS["float"].magic_bits  # … and for integers


def layout(x: Val) -> Layout:
    return LAYOUTS[x.element]


def bits(f: Fn, x: Val) -> Val:
    """The integer with the same bits."""
    return f.bitcast(x, vector(layout(x).integer, x.lanes))


def from_bits(f: Fn, k: Val) -> Val:
    return f.bitcast(k, vector("float" if k.element == "i32" else "double", k.lanes))


def exactly(f: Fn, op: str, a: Val, b: Val | float) -> Val:
    """An operation that is never contracted: for arithmetic whose rounding errors are part of the plan."""
    b = f.like(a, b)
    return f.emit(a.type, f"{op} {a.type} {a.name}, {b.name}")


def exact_sum(f: Fn, a: Val, b: Val) -> tuple[Val, Val]:
    """a + b rounded, and what the rounding missed."""
    total = exactly(f, "fadd", a, b)
    share = exactly(f, "fsub", total, a)
    missed = exactly(f, "fsub", a, exactly(f, "fsub", total, share))
    return total, exactly(f, "fadd", missed, exactly(f, "fsub", b, share))


def horner(f: Fn, x: Val, coefficients: Sequence[float]) -> Val:
    """The polynomial with these coefficients, the constant term first."""
    total = f.const(x.type, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = f.fma(total, x, c)
    return total


def estrin(f: Fn, x: Val, coefficients: Sequence[float]) -> Val:
    """The same with a shorter chain of dependences, for long polynomials."""
    terms: list[Val | float] = list(coefficients)
    power = x
    while len(terms) > 1:
        paired: list[Val | float] = [
            f.fma(terms[k + 1], power, terms[k]) if k + 1 < len(terms) else terms[k] for k in range(0, len(terms), 2)
        ]
        terms = paired
        if len(terms) > 1:
            power = f.mul(power, power)
    return f.like(x, terms[0])


def magnitude(f: Fn, x: Val) -> Val:
    return f.unary("fabs", x)


def with_sign(f: Fn, size: Val, sign: Val) -> Val:
    """``size`` with the sign of ``sign``."""
    return f.intrinsic(f"llvm.copysign.{mangled(size.type)}", size.type, [size, sign])


def flip_sign(f: Fn, x: Val, sign: Val) -> Val:
    """``x`` negated where the integer ``sign`` has its top bit set; its other bits must be zero."""
    return from_bits(f, f.xor(bits(f, x), sign))


def at_most(f: Fn, x: Val, limit: float) -> Val:
    """min(x, limit) that lets NaN through."""
    bound = f.const(x.type, limit)
    return f.min_(bound, x) if f.module.extremes else f.quick_min(bound, x)


def at_least(f: Fn, x: Val, limit: float) -> Val:
    bound = f.const(x.type, limit)
    return f.max_(bound, x) if f.module.extremes else f.quick_max(bound, x)


def any_lane(f: Fn, condition: Val) -> Val:
    """Whether the condition holds in some lane."""
    if condition.lanes == 1:
        return condition
    return f.intrinsic(f"llvm.vector.reduce.or.v{condition.lanes}i1", "i1", [condition])


def near_integer(f: Fn, x: Val, factor: float = 1.0) -> tuple[Val, Val]:
    """The nearest integer to a small x·factor, as a float and as bits whose low part is that integer.

    Zero comes out as +0 whatever the sign of x, so that ``x - n·c`` keeps the sign of a zero x.
    """
    magic = layout(x).magic
    shifted = exactly(f, "fadd", x, magic) if factor == 1.0 else f.fma(x, factor, magic)
    return exactly(f, "fsub", shifted, magic), bits(f, shifted)


def power_of_two(f: Fn, k: Val) -> Val:
    """2^k from the bits :func:`near_integer` gives; k in the range of normal exponents."""
    form = LAYOUTS["float" if k.element == "i32" else "double"]
    return from_bits(f, f.add(f.shl(k, form.mantissa), form.one))


def scaled(f: Fn, x: Val, n: Val, n_bits: Val, isa: Isa) -> Val:
    """x·2^n, rounded once, for n as :func:`near_integer` gives it, within twice the exponent range, and x near 1."""
    found = _wide(f, "scalef", isa, [x, n])
    if found is not None:
        return found
    # in two factors, each a normal number; the bits above n are even and fall off in the shift
    half = f.lshr(n_bits, 1)
    return f.mul(f.mul(x, power_of_two(f, half)), power_of_two(f, f.sub(n_bits, half)))


def has_avx512(isa: Isa) -> bool:
    return isa.masks and isa.triple == "x86_64"


def exponent(f: Fn, x: Val, isa: Isa) -> Val | None:
    """floor(log2 |x|), denormals included, where one instruction gives it."""
    return _wide(f, "getexp", isa, [x])


def mantissa_around_one(f: Fn, x: Val, isa: Isa) -> Val | None:
    """|x| scaled by a power of two into [3/4, 3/2), where one instruction gives it."""
    return _wide(f, "getmant", isa, [x], extra="i32 11, ")


def estimated_reciprocal(f: Fn, x: Val, isa: Isa) -> Val | None:
    """1/x with a relative error below 2^-14, where one instruction gives it; for normal x, and infinity."""
    if x.element != "float":
        return None

    def write(a: Sequence[Val], suffix: str, mask: str, _: str) -> Val:
        name, kind = f"llvm.x86.avx512.rcp14.{suffix}", a[0].type
        f.module.declare(name, kind, [kind, kind, mask])
        return f.emit(kind, f"call {kind} @{name}({kind} {a[0].name}, {kind} zeroinitializer, {mask} -1)")

    return _in_registers(f, isa, [x], write)


# Responses of ``fixup`` per class of input.
KEEP, QUIET, NAN, MINUS_INF, PLUS_INF = 0, 2, 3, 4, 5


def fixup(
    f: Fn, value: Val, x: Val, zero: int, one: int, minus_inf: int, plus_inf: int, negative: int, isa: Isa
) -> Val | None:
    """``value`` with the results for special classes of x put in, where one instruction does it; NaN stays NaN."""
    code = QUIET | QUIET << 4 | zero << 8 | one << 12 | minus_inf << 16 | plus_inf << 20 | negative << 24
    kind = layout(x).integer

    def write(a: Sequence[Val], suffix: str, mask: str, rounding: str) -> Val:
        table = f.const(vector(kind, a[0].lanes), code)
        name = f"llvm.x86.avx512.mask.fixupimm.{suffix}"
        given = (
            f"{a[0].type} {a[0].name}, {a[1].type} {a[1].name}, {table.type} {table.name}, i32 0, {mask} -1{rounding}"
        )
        types = f"{a[0].type}, {a[1].type}, {table.type}, i32, {mask}{', i32' if rounding else ''}"
        f.module.declared[name] = f"declare {a[0].type} @{name}({types})"
        return f.emit(a[0].type, f"call {a[0].type} @{name}({given})")

    return _in_registers(f, isa, [value, x], write)


def _wide(f: Fn, name: str, isa: Isa, args: Sequence[Val], extra: str = "") -> Val | None:
    """A masked AVX-512 intrinsic with an all-ones mask; None where there is no such instruction."""

    def write(a: Sequence[Val], suffix: str, mask: str, rounding: str) -> Val:
        full = f"llvm.x86.avx512.mask.{name}.{suffix}"
        kind = a[0].type
        given = f"{', '.join(f'{v.type} {v.name}' for v in a)}, {extra}{kind} zeroinitializer, {mask} -1{rounding}"
        types = [*(v.type for v in a), *(["i32"] if extra else []), kind, mask, *(["i32"] if rounding else [])]
        f.module.declare(full, kind, types)
        return f.emit(kind, f"call {kind} @{full}({given})")

    return _in_registers(f, isa, args, write)


def _in_registers(
    f: Fn, isa: Isa, args: Sequence[Val], write: Callable[[Sequence[Val], str, str, str], Val]
) -> Val | None:
    """``write`` applied per register: (operands, intrinsic suffix, mask type, rounding operand or nothing)."""
    if not has_avx512(isa):
        return None
    size, lanes = (4, args[0].lanes) if args[0].element == "float" else (8, args[0].lanes)
    width = min(64, lanes * size)
    if width not in (16, 32, 64) or lanes * size % width:
        return None
    per = width // size
    mask = "i16" if per == 16 else "i8"
    suffix = f"{'ps' if size == 4 else 'pd'}.{width * 8}"
    rounding = ", i32 4" if width == 64 else ""
    pieces = []
    for start in range(0, lanes, per):
        some = args if per == lanes else [f.shuffle(a, None, range(start, start + per)) for a in args]
        pieces.append(write(some, suffix, mask, rounding))
    while len(pieces) > 1:
        whole = range(2 * pieces[0].lanes)
        pieces = [f.shuffle(a, b, whole) for a, b in zip(pieces[::2], pieces[1::2])]
    return pieces[0]
