"""Epilogues the micro-kernels know themselves: bias, an addend like the output, and a clamp."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType


@dataclass(frozen=True)
class Simple:
    """clamp(accumulator + bias + residual)."""

    bias: Operand | None = None
    residual: Operand | None = None
    low: float = -math.inf
    high: float = math.inf

    @property
    def clamps(self) -> bool:
        return self.low > -math.inf or self.high < math.inf


def simple(epilogue: Epilogue | None, out: View) -> Simple | None:
    """The epilogue in those terms, or None where it is more than that."""
    if epilogue is None:
        return Simple()
    value, low, high = _unclamped(epilogue.value)
    terms = _terms(value)
    if terms is None or out.dtype is not epilogue.value.dtype or value.dtype is not out.dtype:
        return None
    bias = residual = None
    for index in terms:
        operand = epilogue.operands[index]
        if operand.dtype is not out.dtype or operand.at is not None or operand.guard is not None:
            return None
        if operand.strides == (0, 0, 1) and bias is None:
            bias = operand
        elif operand.strides[2] == 1 and residual is None:
            residual = operand
        else:
            return None
    return Simple(bias, residual, low, high)


def _unclamped(value: Expr) -> tuple[Expr, float, float]:
    """What stands inside nested minima and maxima with constants, and the bounds they make.

    ``min(max(x, low), high)`` and the other order agree when low <= high; other nestings are left alone.
    """
    low, high = -math.inf, math.inf
    while isinstance(value, Op) and value.name in ("min", "max"):
        a, b = value.args
        if isinstance(a, Const):
            a, b = b, a
        if not isinstance(b, Const) or b.value != b.value:
            break
        bound = float(b.value)
        if value.name == "max" and low == -math.inf and bound <= high:
            low = bound
        elif value.name == "min" and high == math.inf and bound >= low:
            high = bound
        else:
            break
        value = a
    return value, low, high


def _terms(value: Expr) -> list[int] | None:
    """Operands that are added to the accumulator; None where the value is no such sum."""
    loads: list[int] = []
    seen = 0
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, Op) and each.name == "add":
            stack += each.args
        elif isinstance(each, Load):
            loads.append(each.operand)
        elif isinstance(each, Result):
            seen += 1
        else:
            return None
    if seen != 1:
        return None
    return loads if value.dtype in (DType.float32, DType.float64) else None
