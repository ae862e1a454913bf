"""Rows of tables by position, parts of tensors, and halves computed as float32: what fused operators are made of."""

from __future__ import annotations

from ranvier.codegen.definitions.defs import RowBody
from ranvier.codegen.definitions.exprs import HALVES, cast, clamp, const, mul, op
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.lower.views import sliced
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value

INT64, FLOAT = DType.int64, DType.float32


def no_other(b: Definitions, value: Value, low: int, high: int, message: str) -> None:
    """End the run with ``message`` where an integer is outside [low, high)."""
    if 0 in b.shape(value):
        return

    def outside(e: list[Expr]) -> RowBody:
        bad = op("not", between(Size(low), cast(e[0], INT64), Size(high)), dtype=DType.bool)
        return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

    (flag,) = b.rows([value], range(len(b.shape(value))), outside, [(DType.bool, False)], keepdims=False)
    b.check(flag, message)


# -- rotary embeddings ------------------------------------------------------------------------------------------------


def rows_at(n: NodeView, b: Definitions, table: Value, positions: Value) -> Value:
    """Rows of a table at positions [batch or 1, time]; a position outside it ends the run."""
    rows, width = b.shape(table)

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        source, places = views
        at = clamp(cast(nest.load(places, (*places.strides, 0)), INT64), const(0, INT64), Size(max(0, rows - 1)))
        return nest.load(source, (0, 0, source.strides[1]), at=mul(at, Size(source.strides[0])))

    return b.moved([table, positions], compute, b.dtype(table), (*b.shape(positions), width))


def looked_up(n: NodeView, b: Definitions, table: int, ids: Value) -> Value:
    """Rows of the table that is operand ``table``, by ids [batch, time]; one outside of it ends the run."""
    rows = n.shape(table)[0]
    no_other(b, ids, 0, rows, f"{n.op}: an index is outside [0, {rows})")
    return rows_at(n, b, n.input(table), ids)


def widened(b: Definitions, value: Value) -> Value:
    """Half precision is computed in float32."""
    if b.dtype(value) not in HALVES:
        return value
    return b.pointwise([value], lambda e: cast(e[0], FLOAT), FLOAT)


def rounded(b: Definitions, value: Value, dtype: DType, out: Value) -> None:
    """``out`` is ``value`` in its own type."""
    if b.dtype(value) is dtype:
        b.identity(value, out=out)
    else:
        b.pointwise([value], lambda e: cast(e[0], dtype), dtype, out=out)


def part(b: Definitions, x: Value, axis: int, start: int, size: int) -> Value:
    """A stretch of one axis: a view."""
    have = b.shape(x)
    shape = (*have[:axis], size, *have[axis + 1 :])
    starts = tuple(start if k == axis else 0 for k in range(len(have)))
    return b.alias(x, lambda view: sliced(view, starts, (1,) * len(have), shape), shape)


# -- masks ------------------------------------------------------------------------------------------------------------
