"""Small convolutions and products of one tensor as one: detectors ask the same features for boxes, scores and more, a
few channels each, and every one of them alone leaves most lanes of a vector empty.

They become one layer with all their columns, and a Split. That pays where it takes fewer vectors of columns: layers
that fill theirs gain nothing by it (measured at 64 columns and more), and a product of a single row has nothing to
share. Wider products, such as the three projections of attention, are left to providers: the CPU's takes them as one
step without laying their results side by side (``providers/cpu/joining.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node
from ranvier.graph.rewrite import substitute
from ranvier.graph.types import TensorType
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder

_LANES = 16  # of the widest vectors, in float32
_MOST = 64  # columns of all together


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
        operands: list[Any] = [first.inputs[0], np.concatenate([_constant(n, 1) for n in nodes], _columns_axis(first))]
        if any(_has_bias(node) for node in nodes):
            operands.append(np.concatenate([_bias(node) for node in nodes]))
        joined = ops.node(first.op, operands, dict(first.attrs), version=first.version).output
        sizes = np.array([_columns(node) for node in nodes], np.int64)
        axis = 1 if first.op == "Conv" else -1
        parts = ops.node("Split", [joined, sizes], {"axis": axis}, outputs=len(nodes))
        for node, part in zip(nodes, parts.outputs):
            substitute(node.output, part, ops)
            assert node.graph is not None
            node.graph.remove(node)
        ctx.changed(f"{'convolutions' if first.op == 'Conv' else 'products'} of one tensor", len(nodes))


def _key(node: Node) -> Any:
    """What layers that can be joined have in common; None for what is none, or not small."""
    if node.domain or node.op not in ("Conv", "MatMul", "Gemm"):
        return None
    x, w = node.inputs[:2]
    if x is None or w is None or w.const is None or w.const.dtype.numpy != np.float32:
        return None
    takes = _takes_conv if node.op == "Conv" else _takes_product
    if not takes(node) or not 0 < _columns(node) <= _MOST // 2:
        return None
    inside = list(w.const.shape)
    del inside[_columns_axis(node)]
    attrs = tuple(sorted((name, repr(value)) for name, value in node.attrs.items()))
    return x, node.op, tuple(inside), attrs, node.version


def _takes_conv(node: Node) -> bool:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return node.attrs.get("group", 1) == 1 and (bias is None or bias.const is not None)


def _takes_product(node: Node) -> bool:
    """Matrices, not stacks of them; several rows, as far as that is known; a bias for every column, if any."""
    x, w = node.inputs[:2]
    assert x is not None and w is not None and w.const is not None
    if (
        len(w.const.shape) != 2
        or not isinstance(x.type, TensorType)
        or x.type.shape is None
        or node.attrs.get("transA", 0)
    ):
        return False
    rows = x.type.shape[:-1]
    if not rows or all(size == 1 for size in rows):
        return False
    if not _has_bias(node):
        return True
    bias = node.inputs[2]
    return bias is not None and bias.const is not None and bias.const.shape == (_columns(node),)


def _pays(nodes: Sequence[Node]) -> bool:
    counts = [_columns(node) for node in nodes]
    alone = sum(-(-count // _LANES) for count in counts)
    return len(nodes) > 1 and sum(counts) <= _MOST and -(-sum(counts) // _LANES) < alone


def _columns_axis(node: Node) -> int:
    """Of the weights: the axis of output channels or columns."""
    return 0 if node.op == "Conv" or node.attrs.get("transB", 0) else 1


def _columns(node: Node) -> int:
    weights = node.inputs[1]
    assert weights is not None and weights.const is not None
    return int(weights.const.shape[_columns_axis(node)])


def _has_bias(node: Node) -> bool:
    return len(node.inputs) > 2 and node.inputs[2] is not None


def _constant(node: Node, position: int) -> Any:
    value = node.inputs[position]
    assert value is not None and value.const is not None
    return value.const.numpy()


def _bias(node: Node) -> Any:
    return _constant(node, 2) if _has_bias(node) else np.zeros(_columns(node), np.float32)
