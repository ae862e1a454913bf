"""The largest of windows put back where they were: MaxUnpool."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import clamp, compare, const, op
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import scatter
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.ops.nn.window import per_axis, resolve_pads
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser

INT64 = DType.int64


@lowers("MaxUnpool", values=(2,), since=9)
def max_unpool(n: NodeView, b: Definitions) -> None:
    shape, dtype = n.shape(0), n.dtype(0)
    rank = len(shape) - 2
    try:
        kernel = per_axis(n.attr("kernel_shape"), rank, "kernel_shape", n.op)
        steps = per_axis(n.attr("strides"), rank, "strides", n.op)
        edges = resolve_pads("NOTSET", n.attr("pads"), shape[2:], kernel, steps, (1,) * rank, op=n.op)
    except RanvierError as error:
        raise Declined(str(error)) from None
    sizes = zip(shape[2:], steps, kernel)
    natural = (*shape[:2], *((d - 1) * s + k - edges[i] - edges[i + rank] for i, (d, s, k) in enumerate(sizes)))
    out, count, size = n.out_shape(), math.prod(shape), math.prod(natural)
    if n.shape(1) != shape or any(w < d for w, d in zip(out, natural)) or not size:
        raise Declined(f"MaxUnpool: X {list(shape)}, indices {list(n.shape(1))}, result {list(out)}")
    if count:

        def outside(e: list[Expr]) -> RowBody:
            bad = op("not", between(const(0, INT64), e[0], Size(size)), dtype=DType.bool)
            return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

        (flag,) = b.rows([n.input(1)], range(len(shape)), outside, [(DType.bool, False)], keepdims=False)
        b.check(flag, f"MaxUnpool: an index is out of range for an output of {size} elements")
    places = b.pointwise([n.input(1)], lambda e: clamp(e[0], const(0, INT64), Size(size - 1)), INT64)
    blank = b.moved([], lambda nest, views: const(0, dtype), dtype, natural)
    folded = (1, count, 1)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        r.copy(views[0], outs[0])
        return scatter.scatter_elements(outs[0], views[1], views[2], "none", r.isa)

    sources = [blank, b.reshape(places, folded), b.reshape(n.input(0), folded)]
    whole = natural == out
    (made,) = b.opaque(sources, realise, [(dtype, natural)], [n.outputs[0] if whole else None])
    if whole:
        return

    def grown(nest: NestBuilder, views: list[View]) -> Expr:
        inside: Expr | None = None
        for axis, (d, w) in enumerate(zip(natural, out)):
            if w > d:
                here = compare("lt", Index(axis), Size(d))
                inside = here if inside is None else op("and", inside, here, dtype=DType.bool)
        return nest.load(views[0], views[0].strides, guard=inside)

    b.moved([made], grown, dtype, out, n.outputs[0])
