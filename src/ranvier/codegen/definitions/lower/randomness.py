"""Random operators: numbers are drawn before the run, by the generator that the reference draws with, and
come into it like an input. What is made of them is generated code like everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import cast, compare, const, op
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import ALL, FLOATS
from ranvier.codegen.loops.ir import Expr, Reduce, Result
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.ops.seed import Ahead
from ranvier.ops.tensor import randomness as reference

FLOAT64, INT64, BOOL = DType.float64, DType.int64, DType.bool
_FEW = 256  # numbers that are drawn for many runs at once


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


def draws(n: NodeView, b: Definitions, shape: Sequence[int]) -> Value:
    seed, sizes = n.attr("seed"), tuple(shape)
    ahead = seed is None and 0 < math.prod(sizes) <= _FEW
    return b.drawn(Ahead(sizes) if ahead else lambda: reference.draws(sizes, seed), FLOAT64, sizes)


def anywhere(b: Definitions, x: Value, bad: str) -> Value:
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
        b.check(anywhere(b, chance, "no probability"), f"{n.op}: every input must be a probability in [0, 1]")
    drawn = draws(n, b, shape)
    b.pointwise([drawn, chance], lambda e: cast(compare("lt", *e), dtype), dtype, shape=shape, out=n.outputs[0])
