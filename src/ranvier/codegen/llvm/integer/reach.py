"""How large sums of codes can become, and what is shorter to compute of small ones.

Filters are known when code is chosen, and so is the largest sum that they can make of any codes. A whole number below
2²² lies in the low bits of a float32 once 1.5 · 2²³ is added to it: as an integer, together with the bias, or as a
float, which rounds it. Both are additions, where conversions between integers and floats keep one unit for two cycles.
And what surely fits 16 bits needs no bounds but those of the instruction that makes bytes of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.llvm.code_forms import codes_as_numbers, codes_of
from ranvier.codegen.llvm.vmath.core import WHOLE, WHOLE_BITS
from ranvier.codegen.loops.ir import Const, Expr, Load, Op, Operand, Result
from ranvier.codegen.loops.normalize import Rewriter
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]
_SMALL = 1 << 22
_NEAR = (1 << 15) - 256  # a number that fits 16 bits with any zero point
_WHOLE = 1 << 30  # and one that surely fits 32 when it is rounded
_BYTES = {DType.int8: 128.0, DType.uint8: 255.0}


def constant(load: Expr, operands: tuple[Operand, ...], columns: int | None) -> Array | None:
    """The numbers of an operand that are known already: one, or one for every column if it is known how many."""
    if isinstance(load, Const):
        return np.array([load.value], load.dtype.numpy)
    if not isinstance(load, Load):
        return None
    operand = operands[load.operand]
    array, dtype = operand.view.storage.array, operand.dtype.numpy
    if array is None or array.dtype != dtype or operand.at is not None or operand.guard is not None:
        return None
    if operand.strides[:2] != (0, 0) or operand.strides[2] not in (0, 1):
        return None
    start, count = operand.view.offset + operand.offset, columns if operand.strides[2] else 1
    if count is None:
        return None
    found: Array = array.reshape(-1)[start : start + count]
    return found if found.size == count else None


def largest(expr: Expr, operands: tuple[Operand, ...], sums: Array) -> Array | None:
    """The largest absolute value of an expression, of every column or of all of them; None if that is not known.

    ``sums`` has what ``Result(0)`` can reach, column by column.
    """
    if isinstance(expr, Result):
        return sums.astype(np.float64)
    if isinstance(expr, Const):
        return np.abs(np.array([expr.value], np.float64))
    if isinstance(expr, Load):
        known = constant(expr, operands, sums.size)
        return None if known is None else np.abs(known.astype(np.float64))
    if not isinstance(expr, Op):
        return None
    if codes_as_numbers(expr) is not None:
        return np.array([255.0])
    if expr.name == "cast" and expr.dtype is DType.float32:
        if expr.args[0].dtype in _BYTES:
            return np.array([_BYTES[expr.args[0].dtype]])
        return largest(expr.args[0], operands, sums) if expr.args[0].dtype is DType.int32 else None
    if expr.name == "quotient":
        scale, number = constant(expr.args[1], operands, sums.size), largest(expr.args[0], operands, sums)
        return None if scale is None or number is None or not scale.all() else number / np.abs(scale).min()
    if expr.name == "where":
        one, other = (largest(arg, operands, sums) for arg in expr.args[1:])
        return None if one is None or other is None else np.maximum(one, other)
    parts = [largest(arg, operands, sums) for arg in expr.args]
    known_parts = [part for part in parts if part is not None]
    if len(known_parts) < len(parts):
        return None
    match expr.name:
        case "add" | "sub":
            return known_parts[0] + known_parts[1]
        case "mul":
            return known_parts[0] * known_parts[1]
        case "fma":
            return known_parts[0] * known_parts[1] + known_parts[2]
        case "max" | "min":
            return np.maximum(*known_parts)
    return None


def stays_near(value: Expr, operands: tuple[Operand, ...], sums: Array) -> bool:
    """Whether the number that an expression makes codes of fits 16 bits, whatever the sums are."""
    codes = codes_of(value)
    size = None if codes is None else largest(codes.number, operands, sums)
    return size is not None and bool((size < _NEAR).all())


def fits_integers(value: Expr, operands: tuple[Operand, ...], sums: Array) -> bool:
    """Whether the number that an expression makes codes of fits 32 bits, and is one, whatever the sums are."""
    codes = codes_of(value)
    size = None if codes is None else largest(codes.number, operands, sums)
    return size is not None and bool((size < _WHOLE).all())


def by_additions(value: Expr, operands: tuple[Operand, ...], sums: Array) -> tuple[Expr, tuple[Operand, ...]]:
    """The same value with small sums made floats by additions."""
    more = list(operands)

    def change(expr: Op) -> Expr | None:
        if expr.name == "cast" and expr.dtype is DType.float32 and expr.args[0].dtype is DType.int32:
            return moved(expr.args[0])
        return None

    def moved(total: Expr) -> Expr | None:
        size = largest(total, operands, sums)
        if size is None or not (size < _SMALL).all():
            return None
        bias = constant(total.args[1], operands, sums.size) if isinstance(total, Op) and total.name == "add" else None
        if isinstance(total, Op) and bias is not None and bias.size == sums.size:
            # one addition for both
            both = View.constant(bias + np.int32(WHOLE_BITS), DType.int32)
            total = Op("add", (total.args[0], Load(len(more), DType.int32)), DType.int32)
            more.append(Operand(both, (0, 0, 1)))
        else:
            total = Op("add", (total, Const(WHOLE_BITS, DType.int32)), DType.int32)
        return Op("sub", (Op("bits", (total,), DType.float32), Const(WHOLE, DType.float32)), DType.float32)

    return Rewriter(before=change)(value), tuple(more)


def used(value: Expr, operands: tuple[Operand, ...]) -> tuple[Expr, tuple[Operand, ...]]:
    """An expression and the operands that it still has."""
    order: dict[int, int] = {}

    def renumbered(expr: Expr) -> Expr:
        if isinstance(expr, Load):
            return Load(order.setdefault(expr.operand, len(order)), expr.dtype)
        return expr

    value = Rewriter(renumbered)(value)
    return value, tuple(operands[k] for k in order)
