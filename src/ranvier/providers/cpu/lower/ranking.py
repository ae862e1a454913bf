"""The best of a row: TopK."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.exprs import const
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.topk import top_k as kernel
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.ops.tensor.top_k import in_heap_order
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser


@lowers("TopK", values=(1,))
def top_k(n: NodeView, b: Definitions) -> None:
    shape, rank, dtype = n.shape(0), n.rank(0), n.dtype(0)
    axis = int(n.attr("axis", -1)) % max(1, rank)
    k = n.ints(1)[0] if n.version >= 10 else int(n.attr("k"))
    if not rank or not 0 <= k <= shape[axis]:
        raise Declined(f"TopK: k is {k}, the shape {list(shape)}")
    results = [n.outputs[0], n.outputs[1] if len(n.outputs) > 1 else b.temp(DType.int64, n.out_shape())]
    if 0 in n.out_shape():
        b.moved([], lambda nest, views: const(0, dtype), dtype, n.out_shape(), results[0])
        b.moved([], lambda nest, views: const(0, DType.int64), DType.int64, n.out_shape(), results[1])
        return
    size = shape[axis]
    largest = bool(n.attr("largest", 1))
    in_order = bool(n.attr("sorted", 1)) or not in_heap_order(k, size)
    # rows are the last axis while they are searched
    turned = (*(a for a in range(rank) if a != axis), axis)
    back = [turned.index(a) for a in range(rank)]
    last = axis == rank - 1
    rows = math.prod(shape) // size
    source = n.input(0) if last else b.transpose(n.input(0), turned)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        return kernel(views[0], outs[0], outs[1], largest=largest, in_order=in_order)

    found = b.opaque([b.reshape(source, (rows, size))], realise, [(dtype, (rows, k)), (DType.int64, (rows, k))])
    for flat, result in zip(found, results):
        if last:
            b.reshape(flat, n.out_shape(), out=result)
        else:
            b.transpose(b.reshape(flat, [k if a == axis else shape[a] for a in turned]), back, out=result)
