"""Small convolutions of one tensor as one: detectors ask the same features for boxes, scores and more, a few channels
each, and every one of them alone leaves most lanes of a vector empty.

They become one convolution with all their channels, and a Split. That pays where it takes fewer vectors of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node
from ranvier.graph.rewrite import substitute
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder

_LANES = 16  # of the widest vectors, in float32
_MOST = 64  # channels of all together


class ParallelLayers:
    name: ClassVar[str] = "parallel_layers"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in list(graph.all_graphs()):
            alike: dict[Any, list[Node]] = {}
            for node in each:
                key = _key(node)
                if key is not None:
                    alike.setdefault(key, []).append(node)
            for nodes in alike.values():
                if _pays(nodes):
                    self._join(nodes, ctx)
        return ctx.changes > 0

    def _join(self, nodes: Sequence[Node], ctx: PassContext) -> None:
        first = nodes[0]
        ops = builder(first, self.name)
        weights = np.concatenate([_constant(node, 1) for node in nodes])
        operands: list[Any] = [first.inputs[0], weights]
        if any(len(node.inputs) > 2 and node.inputs[2] is not None for node in nodes):
            operands.append(np.concatenate([_bias(node) for node in nodes]))
        joined = ops.node("Conv", operands, dict(first.attrs), version=first.version).output
        sizes = np.array([len(_constant(node, 1)) for node in nodes], np.int64)
        parts = ops.node("Split", [joined, sizes], {"axis": 1}, outputs=len(nodes))
        for node, part in zip(nodes, parts.outputs):
            substitute(node.output, part, ops)
            assert node.graph is not None
            node.graph.remove(node)
        ctx.changed("convolutions of one tensor", len(nodes))


def _key(node: Node) -> Any:
    """What convolutions that can be joined have in common; None for what is none, or not small."""
    if node.op != "Conv" or node.domain or node.attrs.get("group", 1) != 1:
        return None
    x, w = node.inputs[:2]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or w is None or w.const is None or (bias is not None and bias.const is None):
        return None
    if w.const.dtype.numpy != np.float32 or w.const.shape[0] > _MOST // 2 or not w.const.shape[0]:
        return None
    attrs = tuple(sorted((name, repr(value)) for name, value in node.attrs.items()))
    return x, w.const.shape[1:], attrs, node.version


def _pays(nodes: Sequence[Node]) -> bool:
    counts = [node.inputs[1].const.shape[0] for node in nodes]  # type: ignore[union-attr]
    alone = sum(-(-count // _LANES) for count in counts)
    return len(nodes) > 1 and sum(counts) <= _MOST and -(-sum(counts) // _LANES) < alone


def _constant(node: Node, position: int) -> Any:
    value = node.inputs[position]
    assert value is not None and value.const is not None
    return value.const.numpy()


def _bias(node: Node) -> Any:
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return _constant(node, 2)
    return np.zeros(len(_constant(node, 1)), np.float32)
