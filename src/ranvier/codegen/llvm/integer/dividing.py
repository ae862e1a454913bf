"""Division by a scale that is known, before codes are made of what results, by one multiplication less.

A quotient rounded correctly takes a product with the reciprocal and two corrections (``exprs.divided``). With the
reciprocal in two parts, the second what the first one is off by, a product and a fused multiply-add give the same for
nearly all divisors (Brisebarre, Muller and Raina, "Accelerating correctly rounded floating-point division when the
divisor is known in advance", 2004). Here it is enough that the same codes come out: of two ways that never decrease,
those that agree around every number at which a code becomes the next one agree everywhere.
"""

from __future__ import annotations

import functools

import numpy as np

from ranvier.codegen.llvm.builder import Fn, Val, mangled
from ranvier.codegen.llvm.code_forms import Codes, codes_of
from ranvier.codegen.llvm.integer.reach import Array, constant
from ranvier.codegen.loops.ir import Expr, Load, Op, Operand, substitute
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_FLOAT = np.float32
_BESIDE = 4  # units in the last place on both sides of where a code begins


def in_parts(value: Expr, operands: tuple[Operand, ...]) -> tuple[Expr, tuple[Operand, ...]] | None:
    """Codes whose number is a quotient by a scale, with both parts of its reciprocal in the place of scale and
    reciprocal; None where that is not the same, or nothing is divided."""
    codes = codes_of(value)
    number = None if codes is None else codes.number
    if codes is None or not isinstance(number, Op) or number.name != "quotient":
        return None
    scale = constant(number.args[1], operands, None)
    zero = None if codes.zero is None else _known_zero(codes, operands)
    if scale is None or scale.dtype != _FLOAT or (codes.zero is not None and zero is None):
        return None
    parts = parts_of(float(scale[0]), codes.low - (zero or 0), codes.high - (zero or 0))
    if parts is None:
        return None
    added = [Operand(View.constant(np.array([part], _FLOAT), DType.float32), (0, 0, 0)) for part in parts]
    loads = [Load(len(operands) + k, DType.float32) for k in range(len(parts))]
    return substitute(value, {number: Op("quotient", (number.args[0], *loads), DType.float32)}), (*operands, *added)


def _known_zero(codes: Codes, operands: tuple[Operand, ...]) -> int | None:
    assert isinstance(codes.zero, Op)
    found = constant(codes.zero.args[0], operands, None)
    return None if found is None else int(found[0])


@functools.lru_cache(4096)
def parts_of(scale: float, low: int, high: int) -> tuple[float, float] | None:
    """The reciprocal of a scale in two parts that give the codes from ``low`` to ``high``; None if they do not."""
    if not 2.0**-100 < scale < 2.0**100:
        return None
    first = float(_FLOAT(1.0 / scale))
    # what is left of one is exact: 24 bits times 24, less what they nearly are
    second = float(_FLOAT((1.0 - first * scale) / scale))
    beginnings = ((np.arange(low - 1, high + 1) + 0.5) * scale).astype(_FLOAT)
    numbers = beginnings[:, None] + np.arange(-_BESIDE, _BESIDE + 1) * np.spacing(np.abs(beginnings))[:, None]
    numbers = numbers.astype(_FLOAT)
    wanted = np.rint(numbers / _FLOAT(scale))
    found = np.rint(_in_parts(numbers, _FLOAT(first), _FLOAT(second)))
    around = (wanted[:, 0] < wanted[:, -1]).all()
    return (first, second) if around and np.array_equal(wanted, found) else None


def _in_parts(x: Array, first: np.float32, second: np.float32) -> Array:
    """What :func:`divided_in_parts` computes, rounded as often."""
    large, small = x.astype(np.float64) * np.float64(first), (x * second).astype(np.float64)
    total = large + small
    # what the sum is off by decides where it lies halfway between two float32 numbers
    back = total - large
    off = (large - (total - back)) + (small - back)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(off > 0, np.inf, -np.inf)
    found: Array = np.where((off != 0) & even, np.nextafter(total, towards), total).astype(_FLOAT)
    return found


def divided_in_parts(f: Fn, x: Val, first: Val, second: Val) -> Val:
    """``x`` times a reciprocal in two parts."""
    return f.intrinsic(f"llvm.fma.{mangled(x.type)}", x.type, [x, first, f.mul(x, second)])
