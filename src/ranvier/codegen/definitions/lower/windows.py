"""Windows put back into images (Col2Im), and window functions that are known before the run."""

from __future__ import annotations

import math

from ranvier import ops
from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import add, cast, compare, const, mul, op, sub
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import between, total
from ranvier.codegen.definitions.lower.reduction import wide_type
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import NUMERIC
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.ops.nn.window import output_sizes, per_axis, resolve_pads

INT64 = DType.int64


@lowers("HannWindow", "HammingWindow", "BlackmanWindow", values=(0,))
@lowers("MelWeightMatrix", values=(0, 1, 2, 3, 4))
def known_window(n: NodeView, b: Definitions) -> None:
    """All operands are numbers that decide the shape: the reference works it out once."""
    given = [n.need(k) for k in range(len(n.inputs))]
    try:
        made = ops.evaluate(n.op, *given, domain=n.node.domain, version=n.version, **n.attrs)
    except RanvierError as error:
        raise Declined(str(error)) from None
    b.identity(b.constant(made, n.out_dtype()), out=n.outputs[0])


@lowers("Col2Im", values=(1, 2), dtypes=NUMERIC, since=18)
def col2im(n: NodeView, b: Definitions) -> None:
    """Every pixel asks each place in a block which window, if any, has it there."""
    spatial, block, dtype = n.ints(1), n.ints(2), n.dtype(0)
    rank, wide = len(spatial), wide_type(n.dtype(0))
    try:
        steps = per_axis(n.attr("strides"), rank, "strides", n.op)
        spread = per_axis(n.attr("dilations"), rank, "dilations", n.op)
        edges = resolve_pads("NOTSET", n.attr("pads"), spatial, block, steps, spread, op=n.op)
        counts = output_sizes(spatial, block, steps, spread, edges, op=n.op)
    except RanvierError as error:
        raise Declined(str(error)) from None
    batch, deep, windows = n.shape(0)
    if len(block) != rank or deep % math.prod(block) or windows != math.prod(counts):
        raise Declined(f"Col2Im: columns {list(n.shape(0))} do not fit an image {list(spatial)}")
    columns = b.reshape(n.input(0), (batch, deep // math.prod(block), *block, *counts))

    def gather(nest: NestBuilder, views: list[View]) -> list[Expr]:
        view = views[0]
        parts: list[Expr] = []
        inside: Expr | None = None
        for axis in range(rank):
            place = mul(Index(2 + rank + axis), Size(spread[axis]))
            start = sub(add(Index(2 + axis), Size(edges[axis])), place)
            window = op("floordiv", start, Size(steps[axis]))
            whole = compare("eq", mul(window, Size(steps[axis])), start)
            here = op("and", whole, between(const(0, INT64), window, Size(counts[axis])), dtype=DType.bool)
            inside = here if inside is None else op("and", inside, here, dtype=DType.bool)
            parts.append(mul(window, Size(view.strides[2 + rank + axis])))
        strides = (*view.strides[:2], *(0 for _ in spatial), *view.strides[2 : 2 + rank])
        return [nest.load(view, strides, at=total(parts), guard=inside)]

    b.rows(
        [],
        range(2 + rank, 2 + 2 * rank),
        lambda e: RowBody([Reduce("sum", cast(e[0], wide), wide)], finals={0: cast(Result(0, wide), dtype)}),
        [(dtype, False)],
        domain=(batch, deep // math.prod(block), *spatial, *block),
        keepdims=False,
        results=[n.outputs[0]],
        sources=[columns],
        gather=gather,
    )
