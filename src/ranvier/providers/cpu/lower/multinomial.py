"""Samples of distributions by running totals of their probabilities: Multinomial."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import cast, compare, const, mul, op, sub
from ranvier.codegen.definitions.lower.randomness import anywhere, draws
from ranvier.codegen.definitions.lower.views import sliced
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Scan
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser

FLOAT64, INT64, BOOL = DType.float64, DType.int64, DType.bool


@lowers("Multinomial", dtypes=FLOATS | {DType.int32, INT64})
def multinomial(n: NodeView, b: Definitions) -> None:
    if n.rank(0) != 2 or 0 in n.out_shape() or n.shape(0)[1] == 0 or n.dtype(0) not in FLOATS:
        raise Declined(f"{n.op}: operands of shape {n.shape(0)}")
    (rows, classes), samples, dtype = n.shape(0), n.out_shape()[1], n.out_dtype()
    logits = b.pointwise([n.input(0)], lambda e: cast(e[0], FLOAT64), FLOAT64)

    def relative(e: list[Expr]) -> RowBody:
        return RowBody([Reduce("max", e[0], FLOAT64)], maps={0: op("exp", sub(e[0], Result(0, FLOAT64)))})

    (chances,) = b.rows([logits], [1], relative, [(FLOAT64, True)])
    running = _running(b, chances)
    last = b.alias(running, lambda view: sliced(view, (0, classes - 1), (1, 1), (rows, 1)), (rows, 1))
    # the largest alone makes 1, and NaN and inf leave NaN
    message = "every row needs a finite largest log-probability, without NaN or inf"
    b.check(anywhere(b, last, "no distribution"), f"{n.op}: {message}")
    drawn = draws(n, b, (rows, samples))

    def passed(e: list[Expr]) -> RowBody:
        below = cast(compare("le", e[0], mul(e[1], e[2])), INT64)
        chosen = op("min", Result(0, INT64), const(classes - 1, INT64))
        return RowBody([Reduce("sum", below, INT64)], finals={0: cast(chosen, dtype)})

    uses = [Use(running, (rows, 1, classes)), Use(drawn, (rows, samples, 1)), Use(last, (rows, 1, 1))]
    domain = (rows, samples, classes)
    b.rows(uses, [2], passed, [(dtype, False)], domain=domain, keepdims=False, results=[n.outputs[0]])


def _running(b: Definitions, chances: Value) -> Value:
    shape = b.shape(chances)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        nest = NestBuilder(shape)
        value = nest.load(views[0])
        return nests.launches(nest.nest([Scan("sum", value, nest.store(outs[0]), FLOAT64)], [1]), r.isa, r.threads)

    return b.opaque([chances], realise, [(FLOAT64, shape)], dense=False)[0]
