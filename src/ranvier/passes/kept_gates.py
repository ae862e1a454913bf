"""A layer that was asked twice, once for its results and once for its gates as well, is computed once.

The gradient of an LSTM asks for ``ranvier::LSTMTraining`` with the operands of the layer it is the gradient of. Where
both are in one graph, as in a compiled training step, the second stands for the first.
"""

from __future__ import annotations

from typing import ClassVar

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import substitute
from ranvier.ops.own.lstm import DOMAIN
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, sharpen

_SHARED = ("hidden_size", "direction")  # what LSTMTraining says of a layer; it has no other attributes
_Key = tuple[object, ...]


class KeptGates:
    name: ClassVar[str] = "kept_gates"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in graph.all_graphs():
            asked = [n for n in each if n.op == "LSTMTraining" and n.domain == DOMAIN]
            if not asked:
                continue
            layers = {key: n for n in each if (key := _key(n)) is not None}
            for node in asked:
                layer = layers.pop(_named(node), None)
                if layer is not None:
                    _join(layer, node)
                    ctx.changed("LSTM")
        return ctx.changes > 0


def _named(node: Node) -> _Key:
    operands: list[Value | None] = list(node.inputs)
    while operands and operands[-1] is None:
        operands.pop()
    attrs = (node.attrs.get("hidden_size"), node.attrs.get("direction", "forward"))
    return (*attrs, *(None if v is None else id(v) for v in operands))


def _key(node: Node) -> _Key | None:
    """What an LSTM is known by; None for other nodes, and for those whose gates nobody could ask for."""
    if node.op != "LSTM" or node.domain or any(node.attrs[name] for name in node.attrs if name not in _SHARED):
        return None
    return _named(node)


def _join(layer: Node, asked: Node) -> None:
    """Both as one node, where the layer stands: what reads its results may come before the gradient."""
    graph = layer.graph
    assert graph is not None
    ops = builder(layer, KeptGates.name)
    made = ops.node(
        asked.op,
        list(asked.inputs),
        dict(asked.attrs),
        outputs=len(asked.outputs),
        domain=DOMAIN,
        version=asked.version,
    )
    for node in (asked, layer):
        for old, new in zip(node.outputs, made.outputs):
            if old.uses or old.is_graph_output:
                sharpen(new, old)
                substitute(old, new, ops)
        graph.remove(node)
