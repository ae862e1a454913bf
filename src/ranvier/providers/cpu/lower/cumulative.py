"""Running totals: CumSum, CumProd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.loops.ir import Scan
from ranvier.codegen.storage import View
from ranvier.providers.cpu.defs import Declined, Definitions, NodeView
from ranvier.providers.cpu.lower.reduction import wide_type
from ranvier.providers.cpu.lower.registry import NUMERIC, lowers
from ranvier.providers.cpu.nest_builder import NestBuilder
from ranvier.providers.cpu.realise import Realiser


@lowers("CumSum", "CumProd", values=(1,), dtypes=NUMERIC)
def running(n: NodeView, b: Definitions) -> None:
    shape, rank, wide = n.shape(0), n.rank(0), wide_type(n.dtype(0))
    axis = n.ints(1)[0]
    if not -rank <= axis < rank:
        raise Declined(f"{n.op}: axis {axis} of a tensor of rank {rank}")
    fold: Literal["sum", "prod"] = "sum" if n.op == "CumSum" else "prod"
    exclusive, reverse = bool(n.attr("exclusive", 0)), bool(n.attr("reverse", 0))

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        nest = NestBuilder(shape, n.node.name or n.op)
        value = nest.load(views[0])
        stage = Scan(fold, value, nest.store(outs[0]), wide, exclusive, reverse)
        return nests.launches(nest.nest([stage], [axis % rank]), r.isa, r.threads)

    b.opaque([n.input(0)], realise, [(n.dtype(0), shape)], [n.outputs[0]], dense=False)
