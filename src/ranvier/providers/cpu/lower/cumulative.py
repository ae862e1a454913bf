"""Running totals: CumSum, CumProd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.lower.reduction import wide_type
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import NUMERIC
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.loops.ir import Scan
from ranvier.codegen.storage import View
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser

_ROWS = 8  # from here on, turning a tensor round twice is cheaper than going along its rows


@lowers("CumSum", "CumProd", values=(1,), dtypes=NUMERIC)
def running(n: NodeView, b: Definitions) -> None:
    shape, rank, wide = n.shape(0), n.rank(0), wide_type(n.dtype(0))
    axis = n.ints(1)[0]
    if not -rank <= axis < rank:
        raise Declined(f"{n.op}: axis {axis} of a tensor of rank {rank}")
    fold: Literal["sum", "prod"] = "sum" if n.op == "CumSum" else "prod"
    exclusive, reverse = bool(n.attr("exclusive", 0)), bool(n.attr("reverse", 0))

    along = axis % rank

    def scan(r: Realiser, source: View, target: View) -> list[Launch]:
        nest = NestBuilder(shape, n.node.name or n.op)
        value = nest.load(source)
        stage = Scan(fold, value, nest.store(target), wide, exclusive, reverse)
        return nests.launches(nest.nest([stage], [along]), r.isa, r.threads)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        source, target = views[0], outs[0]
        if target.strides[along] != 1 or source.size < _ROWS * shape[along] or shape[along] < _ROWS:
            return scan(r, source, target)
        # rows side by side fill the lanes; where they lie end to end, they are turned for the time of the scan
        order = (along, *(a for a in range(rank) if a != along))
        turned = r.temporary(source.dtype, shape, order)
        r.copy(source, turned)
        r.add(scan(r, turned, turned))
        r.copy(turned, target)
        return []

    b.opaque([n.input(0)], realise, [(n.dtype(0), shape)], [n.outputs[0]], dense=False)
