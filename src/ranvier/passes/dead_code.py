"""Removes what nobody needs: nodes, constants, and results of control flow that are computed and then dropped."""

from __future__ import annotations

from typing import ClassVar

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.base import PassContext
from ranvier.passes.facts import is_removable

# Operators whose trailing results are optional, and whose other results do not depend on how many are listed.
# (Split counts its outputs; BatchNormalization before version 14 trains when it has more than one.)
OPTIONAL_RESULTS = frozenset(
    {"Attention", "Dropout", "GRU", "LayerNormalization", "LSTM", "MaxPool", "RNN", "SoftmaxCrossEntropyLoss", "Unique"}
)


class DeadCode:
    name: ClassVar[str] = "dead_code"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset()
    ensures: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        _sweep(graph, ctx)
        return ctx.changes > 0


def _sweep(graph: Graph, ctx: PassContext) -> None:
    """Users before producers, so that one walk removes whole chains."""
    needed = {id(v) for v in graph.outputs}
    for node in reversed(graph):
        if not any(v.uses or id(v) in needed for v in node.outputs):
            if is_removable(node):
                graph.remove(node)
                ctx.changed("node")
                continue
            ctx.left(node.op, "it has effects beside its results")
        if len(node.outputs) > 1 and node.op in OPTIONAL_RESULTS and not node.domain:
            _cut_outputs(node, needed, ctx)
        if node.attrs and node.has_subgraphs:
            _trim_control_flow(node, needed, ctx)
            for body in node.subgraphs():
                _sweep(body, ctx)
    for value in [v for v in graph.constants.values() if not v.uses and id(v) not in needed]:
        graph.remove_constant(value)
        ctx.changed("constant")


def _unused(value: Value, needed: set[int]) -> bool:
    return not value.uses and id(value) not in needed


def _cut_outputs(node: Node, needed: set[int], ctx: PassContext) -> None:
    while len(node.outputs) > 1 and _unused(node.outputs[-1], needed):
        node.outputs.pop().producer = None
        ctx.changed("optional result")


# -- control flow -----------------------------------------------------------------------------------------------------


def _trim_control_flow(node: Node, needed: set[int], ctx: PassContext) -> None:
    if node.domain:
        return
    if node.op == "If":
        bodies = [node.attrs["then_branch"], node.attrs["else_branch"]]
        _drop_results(node, bodies, [k for k, v in enumerate(node.outputs) if _unused(v, needed)], 0, ctx)
    elif node.op == "Loop":
        body: Graph = node.attrs["body"]
        carried = len(body.inputs) - 2
        stacked = [k for k in range(carried, len(node.outputs)) if _unused(node.outputs[k], needed)]
        _drop_results(node, [body], stacked, 1, ctx)
        _drop_carried(node, body, carried, needed, ctx)


def _drop_results(node: Node, bodies: list[Graph], positions: list[int], offset: int, ctx: PassContext) -> None:
    """Take results off a node and off its bodies, where they stand ``offset`` places further back.

    One result always stays: a node without any would be dead, and has been removed before.
    """
    for k in sorted(positions, reverse=True):
        if len(node.outputs) == 1:
            return
        node.outputs.pop(k).producer = None
        for body in bodies:
            body.outputs.pop(k + offset)
        ctx.changed(f"result of {node.op}")
    _renumber(node)


def _drop_carried(node: Node, body: Graph, carried: int, needed: set[int], ctx: PassContext) -> None:
    """A value carried through a loop that no step reads, other than to hand it on, and nobody reads at the end."""
    for k in range(carried - 1, -1, -1):
        entering, leaving = body.inputs[k + 2], body.outputs[k + 1]
        handed_on = [user for user, _ in entering.uses]
        own = [leaving.producer] if leaving.producer is not None and leaving.producer.op == "Identity" else []
        if len(node.outputs) == 1 or not _unused(node.outputs[k], needed) or handed_on not in ([], own):
            continue
        node.outputs.pop(k).producer = None
        body.outputs.pop(k + 1)
        if own and handed_on:
            body.remove(own[0])
        body.inputs.pop(k + 2)
        node.set_inputs([v for at, v in enumerate(node.inputs) if at != k + 2])
        ctx.changed("value carried by Loop")
    _renumber(node)


def _renumber(node: Node) -> None:
    for position, value in enumerate(node.outputs):
        value.index = position
