"""Values that a loop hands on unchanged are read from around it: in its body, constants are constants then."""

from __future__ import annotations

from typing import ClassVar

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.base import PassContext


class LoopInvariants:
    """What was carried is left to dead code: nobody reads it any more."""

    name: ClassVar[str] = "loop_invariants"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset()
    ensures: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in list(graph.all_graphs()):
            for node in each:
                for k, (outside, entering, leaving) in enumerate(_carried(node)):
                    if outside is not None and _handed_on(entering, leaving):
                        _read_outside(node.outputs[k], outside, entering, ctx)
        return ctx.changes > 0


def _carried(node: Node) -> list[tuple[Value | None, Value, Value]]:
    """Per state of a loop: what it starts as, what a step gets, and what a step hands on."""
    if node.domain or not node.has_subgraphs:
        return []
    if node.op == "Loop":
        body: Graph = node.attrs["body"]
        return list(zip(node.inputs[2:], body.inputs[2:], body.outputs[1:]))
    if node.op == "Scan" and node.version >= 9:
        body = node.attrs["body"]
        count = len(node.inputs) - int(node.attrs["num_scan_inputs"])
        return list(zip(node.inputs[:count], body.inputs[:count], body.outputs[:count]))
    return []


def _handed_on(entering: Value, leaving: Value) -> bool:
    if leaving is entering:
        return True
    node = leaving.producer
    return node is not None and node.op == "Identity" and not node.domain and node.inputs[0] is entering


def _read_outside(result: Value, outside: Value, entering: Value, ctx: PassContext) -> None:
    for user, position in list(entering.uses):
        user.set_input(position, outside)
        ctx.changed("read from around the loop")
    if result.uses and not result.is_graph_output:
        result.replace_by(outside)
        ctx.changed("result of a loop")
