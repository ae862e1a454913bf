"""Means over windows of quantized tensors: QLinearAveragePool."""

from __future__ import annotations

import functools
import math

from ranvier.codegen.definitions.defs import RowBody, Use
from ranvier.codegen.definitions.exprs import cast, div, mul, op, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.lower.pool import MICROSOFT, Windows
from ranvier.codegen.definitions.lower.qlinear import FLOAT, INT, QUANTIZED, Operands, bytes_first, sum_type
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.ops.nn.window import extents


@lowers("QLinearAveragePool", domain=MICROSOFT, dtypes=QUANTIZED, check=bytes_first)
def qlinear_average_pool(n: NodeView, b: Definitions) -> None:
    windows, target = Windows(n, last=bool(n.attr("channels_last", 0))), n.out_dtype()
    given = Operands(n, b)
    zero, factor, rounded = given.add(2, single=True), given.factor(1, step=3), given.rounded(4, target)
    size = math.prod(windows.kernel)
    whole = sum_type(size)
    counts = _counts(b, windows, with_pads=bool(n.attr("count_include_pad", 0)))
    if counts is not None:
        behind = len(windows.domain) - windows.first - windows.rank
        given.uses.append(Use(counts, (*windows.sizes, *(1,) * behind)))

    def build(e: list[Expr]) -> RowBody:
        # sums of codes are exact, and pads are zero points: real zeros
        total: Expr = Result(0, whole)
        if zero is not None:
            total = sub(total, mul(cast(e[zero], whole), cast(Size(size), whole)))
        count = cast(Size(size) if counts is None else e[-2], FLOAT)
        mean = div(cast(total, FLOAT), count)
        stage = Reduce("sum", cast(e[-1], whole), whole)
        return RowBody([stage], finals={0: rounded(e, mul(mean, factor(e)))})

    x = _padded(b, windows, n.input(0), n.input(2) if n.has(2) else None)
    b.rows(
        given.uses,
        windows.row,
        build,
        [(target, False)],
        domain=windows.domain,
        keepdims=False,
        results=[n.outputs[0]],
        sources=[x],
        gather=lambda nest, views: [windows.load(nest, views[0], 0, padded=True)],
    )


def _counts(b: Definitions, windows: Windows, *, with_pads: bool) -> Value | None:
    """How many positions of each window count; None where all do."""
    guard = windows.guard(with_pads=with_pads, alone=True)
    if guard is None:
        return None
    (counts,) = b.rows(
        [],
        range(windows.rank, 2 * windows.rank),
        lambda e: RowBody([Reduce("sum", cast(guard, INT), INT)], finals={0: Result(0, INT)}),
        [(INT, False)],
        domain=(*windows.sizes, *windows.kernel),
        keepdims=False,
    )
    return counts


def _padded(b: Definitions, windows: Windows, x: Value, zero: Value | None) -> Value:
    """``x`` with the pads around it, as far as windows reach: what reads it asks nothing and takes whole vectors."""
    if windows.guard() is None:
        return x
    shape, first = list(b.shape(x)), windows.first
    spans = extents(windows.kernel, windows.dilations)
    reach = [(c - 1) * s + span for c, s, span in zip(windows.sizes, windows.strides, spans)]
    shape[first : first + windows.rank] = reach

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        view = views[0]
        within = [
            between(Size(before), Index(first + axis), Size(before + size))
            for axis, (size, before) in enumerate(zip(windows.spatial, windows.pads))
        ]
        inside = functools.reduce(lambda a, c: op("and", a, c, dtype=DType.bool), within)
        offset = -sum(p * s for p, s in zip(windows.pads, view.strides[first : first + windows.rank]))
        code = nest.load(view, view.strides, offset=offset, guard=inside)
        if zero is None:
            return code
        return where(inside, code, nest.load(views[1].reshaped(()) or views[1], (0,) * len(shape)))

    return b.moved([x, *([zero] if zero is not None else [])], compute, b.dtype(x), shape)
