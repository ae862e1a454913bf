"""Results that are as exact as what they are made of: products, and sums without a negative term.

A sum of numbers of either sign may come out much smaller than they are, and is only as exact as the largest of them. A
sum of numbers that are never negative cannot: where each is off by a part of itself, the sum is by no larger part. So
a power spectrum, and bands that are added up of one, may be rounded before a logarithm; a signal may not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ranvier.codegen.definitions.defs import Alias, Contraction, Def, Joined, Opaque, Pointwise, RowBody, Rows
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Const, Expr, Load, Op, Result, Size
from ranvier.dtypes import DType
from ranvier.graph.ir import Value

_PRODUCTS = frozenset({"mul", "div", "reciprocal", "sqrt", "rsqrt", "abs", "neg", "max", "min"})
_UPWARDS = frozenset({"abs", "sqrt", "rsqrt", "exp", "sigmoid", "softplus"})  # never negative, whatever they are of
_HARMLESS_POWER = 4.0


class Positive:
    """What can be told from definitions alone."""

    def __init__(self, defs: Iterable[Def], program: Definitions) -> None:
        self.program = program
        self.maker = {value: each for each in defs for value in each.outputs}
        self._known: dict[Value, bool] = {}

    def keeps(self, each: Def) -> bool:
        """Whether results are off by no larger part of themselves than operands are, or a few times that."""
        if isinstance(each, Alias | Joined):
            return True
        if isinstance(each, Contraction):
            return self._plain_product(each) and all(self.value(v) for v in each.sources)
        if isinstance(each, Pointwise):
            return self._keeps(each.compute(self._loads(each)), each.operands, ())
        if not isinstance(each, Rows) or each.gather is not None:
            return False
        body = each.build(self._loads(each))
        stages = tuple(reduce.value for reduce in body.reduces)
        folded = all(
            reduce.fold in ("max", "min")
            or (reduce.fold == "sum" and self._positive(reduce.value, each.operands, stages))
            for reduce in body.reduces
        )
        made = (*stages, *body.maps.values(), *body.finals.values())
        return folded and all(self._keeps(value, each.operands, stages) for value in made)

    def value(self, value: Value) -> bool:
        """Whether no element is negative (NaN counts as no number)."""
        found = self._known.get(value)
        if found is None:
            self._known[value] = False  # until it is known
            found = self._known[value] = self._value(value)
        return found

    def _value(self, value: Value) -> bool:
        array = value.const.raw() if value.const is not None else self.program.known.get(value)
        if array is not None:
            return bool(np.all(array >= 0))
        each = self.maker.get(value)
        if isinstance(each, Opaque):
            return each.positive
        if isinstance(each, Alias | Joined):
            return all(self.value(v) for v in each.operands)
        if isinstance(each, Contraction):
            return self._plain_product(each) and all(self.value(v) for v in each.sources)
        if isinstance(each, Pointwise):
            return self._positive(each.compute(self._loads(each)), each.operands, ())
        if not isinstance(each, Rows) or each.gather is not None:
            return False
        body = each.build(self._loads(each))
        number = each.outputs.index(value)
        made = body.maps.get(number, body.finals.get(number))
        stages = tuple(reduce.value for reduce in body.reduces)
        return _simple(body) and made is not None and self._positive(made, each.operands, stages)

    def _loads(self, each: Def) -> list[Expr]:
        """Operands of an expression; those that are one tensor are one."""
        return [Load(each.operands.index(v), self.program.dtype(v)) for v in each.operands]

    def _plain_product(self, each: Contraction) -> bool:
        """Of two tensors of float32, neither of which is codes of anything else."""
        return len(each.sources) == 2 and all(self.program.dtype(v) is DType.float32 for v in each.sources)

    def _positive(self, e: Expr, operands: tuple[Value, ...], stages: tuple[Expr, ...]) -> bool:
        """``stages``: what is folded, whose sums and extremes are as positive as it."""
        if isinstance(e, Const | Size):
            return float(e.value) >= 0.0
        if isinstance(e, Load):
            return self.value(operands[e.operand])
        if isinstance(e, Result):
            return self._positive(stages[e.stage], operands, stages[: e.stage])
        if not isinstance(e, Op):
            return False
        each = [self._positive(a, operands, stages) for a in e.args]
        if e.name in _UPWARDS:
            return True
        if e.name == "mul" and e.args[0] == e.args[1]:
            return True
        if e.name == "pow" and isinstance(e.args[1], Const) and float(e.args[1].value) % 2 == 0:
            return True
        if e.name == "max":
            return any(each)
        if e.name == "fma" and e.args[0] == e.args[1]:
            return each[2]
        return e.name in ("add", "mul", "div", "min", "fma", "reciprocal", "pow", "cast") and all(each)

    def _keeps(self, e: Expr, operands: tuple[Value, ...], stages: tuple[Expr, ...]) -> bool:
        if isinstance(e, Const | Size | Load | Result):
            return True
        if not isinstance(e, Op) or not all(self._keeps(a, operands, stages) for a in e.args):
            return False
        if e.name in ("add", "fma"):
            parts = e.args if e.name == "add" else (Op("mul", e.args[:2], e.dtype), e.args[2])
            return all(self._positive(a, operands, stages) for a in parts)
        if e.name == "pow":
            return isinstance(e.args[1], Const) and math.fabs(float(e.args[1].value)) <= _HARMLESS_POWER
        if e.name == "cast":
            return e.dtype.is_float
        return e.name in _PRODUCTS


def _simple(body: RowBody) -> bool:
    return all(reduce.fold in ("sum", "max", "min") for reduce in body.reduces)
