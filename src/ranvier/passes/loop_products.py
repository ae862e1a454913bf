"""Products of a loop that need nothing of the step before: one product ahead of the loop for all its steps.

``Gather(x, i) @ w`` with ``x`` and ``w`` from around the loop is ``Gather(x @ w, i)``. Recurrent layers that were
exported as loops project their inputs like that; inside the loop, every step would read the whole weight again.
"""

from __future__ import annotations

from typing import ClassVar

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, prune


class LoopProducts:
    name: ClassVar[str] = "loop_products"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in list(graph.all_graphs()):
            for loop in each:
                if loop.op == "Loop" and not loop.domain:
                    for node in list(loop.attrs["body"]):
                        if node.op == "MatMul" and not node.domain:
                            self._hoist(node, loop, ctx)
        return ctx.changes > 0

    def _hoist(self, product: Node, loop: Node, ctx: PassContext) -> None:
        body: Graph = loop.attrs["body"]
        row, weight = product.inputs
        pick = None if row is None else row.producer
        if (
            row is None
            or weight is None
            or pick is None
            or pick.op != "Gather"
            or pick.domain
            or pick.graph is not body
        ):
            return
        rows, index = pick.inputs
        if rows is None or index is None or not (_outside(rows, body) and _outside(weight, body)):
            return
        if pick.attrs.get("axis", 0) != 0 or _rank(index) != 0 or _rank(weight) != 2 or (_rank(rows) or 0) < 2:
            ctx.left("MatMul in a loop", "not a step's row of a sequence times a matrix")
            return
        made = builder(loop, self.name).MatMul(rows, weight)
        picked = builder(product, self.name).Gather(made, index, axis=0)
        product.output.replace_by(picked)
        body.remove(product)
        prune([row])
        ctx.changed("product ahead of a loop")


def _rank(value: Value) -> int | None:
    known = value.type
    return len(known.shape) if isinstance(known, TensorType) and known.shape is not None else None


def _outside(value: Value, body: Graph) -> bool:
    """Is it there before the loop? A constant that the body holds for itself would have to be moved first."""
    return value.owner is not body and value.owner is not None
