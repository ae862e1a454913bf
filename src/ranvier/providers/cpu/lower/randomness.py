"""Random operators: numbers are drawn before the native call, by the generator that the reference draws with, and
come into it like an input. What is made of them is generated code like everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import cast, compare, const, mul, op, sub
from ranvier.codegen.definitions.lower.views import sliced
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import ALL, FLOATS
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Scan
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.ops.tensor import randomness as reference
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser

FLOAT64, INT64, BOOL = DType.float64, DType.int64, DType.bool


@lowers("RandomNormal", "RandomNormalLike", dtypes=ALL)
def normal(n: NodeView, b: Definitions) -> None:
    mean, scale = float(n.attr("mean", 0.0)), float(n.attr("scale", 1.0))
    shape, dtype, seed = n.out_shape(), _drawable(n), n.attr("seed")
    drawn = b.drawn(lambda: reference.normal(n.op, shape, dtype, mean, scale, seed), dtype, shape)
    b.identity(drawn, out=n.outputs[0])


@lowers("RandomUniform", "RandomUniformLike", dtypes=ALL)
def uniform(n: NodeView, b: Definitions) -> None:
    low, high = float(n.attr("low", 0.0)), float(n.attr("high", 1.0))
    shape, dtype, seed = n.out_shape(), _drawable(n), n.attr("seed")
    drawn = b.drawn(lambda: reference.uniform(n.op, shape, dtype, low, high, seed), dtype, shape)
    b.identity(drawn, out=n.outputs[0])


def _drawable(n: NodeView) -> DType:
    dtype = n.out_dtype()
    if dtype not in FLOATS:
        raise Declined(f"{n.op}: numbers of type {dtype.name}")
    return dtype


def _draws(n: NodeView, b: Definitions, shape: Sequence[int]) -> Value:
    seed, sizes = n.attr("seed"), tuple(shape)
    return b.drawn(lambda: reference.draws(sizes, seed), FLOAT64, sizes)


def _any(b: Definitions, x: Value, bad: str) -> Value:
    """Whether ``bad`` is so anywhere: of a probability or of a total."""

    def build(e: list[Expr]) -> RowBody:
        low, high = compare("ge", e[0], const(0.0, FLOAT64)), compare("le", e[0], const(1.0, FLOAT64))
        fine = op("and", low, high, dtype=BOOL) if bad == "no probability" else compare("ge", e[0], const(1.0, FLOAT64))
        return RowBody([Reduce("or", op("not", fine, dtype=BOOL), BOOL)], finals={0: Result(0, BOOL)})

    return b.rows([x], range(len(b.shape(x))), build, [(BOOL, False)], keepdims=False)[0]


@lowers("Bernoulli", dtypes=ALL)
def bernoulli(n: NodeView, b: Definitions) -> None:
    if n.dtype(0) not in FLOATS:
        raise Declined(f"{n.op}: probabilities of type {n.dtype(0).name}")
    shape, dtype = n.shape(0), n.out_dtype()
    chance = b.pointwise([n.input(0)], lambda e: cast(e[0], FLOAT64), FLOAT64)
    if 0 not in shape:
        b.check(_any(b, chance, "no probability"), f"{n.op}: every input must be a probability in [0, 1]")
    drawn = _draws(n, b, shape)
    b.pointwise([drawn, chance], lambda e: cast(compare("lt", *e), dtype), dtype, shape=shape, out=n.outputs[0])


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
    b.check(_any(b, last, "no distribution"), f"{n.op}: {message}")
    drawn = _draws(n, b, (rows, samples))

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
