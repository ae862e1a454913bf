"""Operations of the loop IR that take more than one of Triton's, as functions that printed kernels call.

Operands are values of their register type (see :mod:`ranvier.codegen.triton.types`), scalars or blocks. ``lib`` is
the vendor's library, or NumPy where kernels are interpreted.
"""
# Triton looks annotations up when it compiles a function, so what kernels call has none.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


INTERPRETED = not isinstance(largest, triton.runtime.JITFunction)
if INTERPRETED:
    from ranvier.codegen.triton import emulated as lib
else:
    from ranvier.codegen.triton import native as lib  # type: ignore[no-redef]


@triton.jit
def isnan(x):
    return x != x


@triton.jit
def isinf(x):
    return tl.abs(x) == float("inf")


@triton.jit
def divided(a, b):
    """Rounded correctly; a plain ``/`` of float32 is not."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def square_root(x):
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def reciprocal(x):
    return divided(tl.full((), 1.0, x.dtype), x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def one_plus_erf(x):
    return 1.0 + tl.erf(x)


@triton.jit
def softplus(x):
    """The larger part apart, so that nothing overflows; NaN stays NaN."""
    above = tl.where(x > 0, x, tl.where(x == x, tl.full((), 0.0, x.dtype), x))
    return above + lib.log1p(tl.exp(-tl.abs(x)))


@triton.jit
def sign(x):
    one = tl.full((), 1.0, x.dtype)
    return tl.where(x > 0, one, tl.where(x < 0, -one, x)) + 0.0


@triton.jit
def int_sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def float_mod(a, b):
    """Python's %: the remainder with the divisor's sign."""
    rest = lib.fmod(a, b)
    fixed = tl.where((rest < 0) != (b < 0), rest + b, rest)
    zero = tl.full((), 0.0, b.dtype)
    return tl.where(rest == 0, tl.where(b < 0, -zero, zero), fixed)


@triton.jit
def float_floordiv(a, b):
    return tl.floor(divided(a, b))


@triton.jit
def _safe_divisor(a, b):
    """A divisor that no division fails with: 1 where it is 0, and where the quotient would be out of range."""
    unsafe = b == 0
    if a.dtype.is_int_signed():
        unsafe = unsafe | ((b == -1) & (a == -a))
    return tl.where(unsafe, tl.full((), 1, b.dtype), b)


@triton.jit
def int_div(a, b):
    """Toward zero; 0 for a zero divisor, and the smallest number by -1 wraps."""
    return tl.where(b == 0, tl.full((), 0, a.dtype), a // _safe_divisor(a, b))


@triton.jit
def int_rem(a, b):
    divisor = _safe_divisor(a, b)
    rest = a - (a // divisor) * divisor
    return tl.where(b == 0, tl.full((), 0, a.dtype), rest)


@triton.jit
def int_mod(a, b):
    """With the divisor's sign."""
    rest = int_rem(a, b)
    opposite = (rest != 0) & ((rest ^ b) < 0)
    return tl.where(opposite, rest + b, rest)


@triton.jit
def int_floordiv(a, b):
    rest = int_rem(a, b)
    opposite = (rest != 0) & ((rest ^ b) < 0)
    return int_div(a, b) - opposite.to(a.dtype)


@triton.jit
def shift_left(a, b):
    """Shifts by the width or more leave nothing."""
    width: tl.constexpr = a.dtype.primitive_bitwidth
    inside = (b >= 0) & (b < width)
    zero = tl.full((), 0, b.dtype)
    return tl.where(inside, a << tl.where(inside, b, zero), tl.full((), 0, a.dtype))


@triton.jit
def shift_right(a, b):
    """Shifts by the width or more leave the sign."""
    width: tl.constexpr = a.dtype.primitive_bitwidth
    inside = (b >= 0) & (b < width)
    moved = a >> tl.where(inside, b, tl.full((), width - 1, b.dtype))
    if a.dtype.is_int_signed():
        return moved
    return tl.where(inside, moved, tl.full((), 0, a.dtype))


@triton.jit
def popcount(x):
    width: tl.constexpr = x.dtype.primitive_bitwidth
    if width == 64:
        wide = x.to(tl.uint64, bitcast=True)
        found = _ones((wide & 0xFFFFFFFF).to(tl.uint32)) + _ones((wide >> 32).to(tl.uint32))
    elif width == 32:
        found = _ones(x.to(tl.uint32, bitcast=True))
    elif width == 16:
        found = _ones(x.to(tl.uint16, bitcast=True).to(tl.uint32))
    else:
        found = _ones(x.to(tl.uint8, bitcast=True).to(tl.uint32))
    return found.to(x.dtype)


@triton.jit
def _ones(x):
    """By pairs, by fours, by bytes; then their sum."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
def int_pow(a, b):
    """By squaring, modulo the type's range; a negative exponent gives what 1 / a**-b truncates to."""
    a, b = tl.broadcast(a, b)
    power = a * 0 + 1
    base = a
    left = b
    if b.dtype.is_int_signed():
        left = tl.abs(b)
    for _ in range(a.dtype.primitive_bitwidth):
        power = tl.where((left & 1) != 0, power * base, power)
        base = base * base
        left = left >> 1
    if a.dtype.is_int_signed():
        unit = (a == 1) | (a == -1)
        power = tl.where((b < 0) & ~unit, tl.full((), 0, a.dtype), power)
    return power


@triton.jit
def saturated(x, low: tl.constexpr, high: tl.constexpr):
    """A float as the nearest int32 toward zero between two bounds; NaN gives 0."""
    number = tl.where(x == x, x, tl.full((), 0.0, x.dtype))
    return tl.minimum(tl.maximum(number, low), high).to(tl.int32)


@triton.jit
def saturated_wide(
    x, low: tl.constexpr, high: tl.constexpr, below: tl.constexpr, above: tl.constexpr, kind: tl.constexpr
):
    """As :func:`saturated` for integers whose bounds a float may not hold: ``above`` is the first one too large."""
    inside = (x > below) & (x < above)
    number = tl.where(inside, x, tl.full((), 0.0, x.dtype)).to(kind)
    number = tl.where(x >= above, tl.full((), high, kind), number)
    return tl.where(x <= below, tl.full((), low, kind), number)
