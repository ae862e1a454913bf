"""Epilogues that a library computes inside of its product: GELU by the hyperbolic tangent, after a bias.

Graphs spell it out in many ways, with constants that were rounded to 16 bits. So it is known by its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View

_CLOSE = 2e-4  # the error function's GELU is further away than that, rounded constants are not
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "quotient": lambda a, b, _: a / b,
    "reciprocal": np.reciprocal,
    "pow": np.power,
    "neg": np.negative,
    "tanh": np.tanh,
    "fma": lambda a, b, c: a * b + c,
}
_SUMS = np.linspace(-9.0, 9.0, 145)


class _Other(Exception):
    """An expression that this is not."""


def biased_gelu(epilogue: Epilogue | None, out: View) -> Operand | None:
    """The row that is added before GELU, where an epilogue is that and nothing else."""
    if epilogue is None:
        return None
    numbers = [_number(each) for each in epilogue.operands]
    rows = [each for each, known in zip(epilogue.operands, numbers) if known is None]
    if len(rows) != 1:
        return None
    (bias,) = rows
    plain = bias.at is None and bias.guard is None and not bias.offset and bias.dtype is out.dtype
    if not plain or bias.strides != (0, 0, 1) or bias.view.size != out.shape[2]:
        return None
    try:
        with np.errstate(all="ignore"):
            for added in (0.0, 1.25, -2.5):  # it must not matter what comes from where
                loaded = [added if known is None else known for known in numbers]
                found = _value(epilogue.value, _SUMS - added, loaded)
                if not float(np.max(np.abs(found - _gelu(_SUMS)))) <= _CLOSE:
                    return None
    except _Other:
        return None
    return bias


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _number(operand: Operand) -> float | None:
    """An operand that is one number in every run."""
    array = operand.view.storage.array
    if array is None or array.size != 1 or operand.at is not None or operand.guard is not None:
        return None
    return float(array.reshape(-1)[0])


def _value(e: Expr, result: Any, loaded: Sequence[float]) -> Any:
    """An expression in float64; what is rounded in between is not what makes it another function."""
    if isinstance(e, Const):
        return float(e.value)
    if isinstance(e, Result):
        return result
    if isinstance(e, Load):
        return loaded[e.operand]
    if isinstance(e, Op) and e.name == "cast" and e.dtype.is_float:
        return _value(e.args[0], result, loaded)
    if isinstance(e, Op) and e.name in _FUNCTIONS:
        return _FUNCTIONS[e.name](*(_value(arg, result, loaded) for arg in e.args))
    raise _Other


__all__ = ["biased_gelu"]
