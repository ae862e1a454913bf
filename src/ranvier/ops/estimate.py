"""Estimated work of nodes and graphs: arithmetic and bytes, turned into seconds by nominal rates.

The rates only rank alternatives (is a fused node cheaper?); measured costs replace them where a machine is calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Type
from ranvier.ops import registry
from ranvier.ops.costs import dims, traffic
from ranvier.ops.registry import Cost, TypeCall

FLOPS_PER_SECOND = 5e10
BYTES_PER_SECOND = 1e10
SECONDS_PER_NODE = 5e-6  # dispatch
_IMMENSE = 1 << 62  # declared sizes may be absurd; beyond this they are all the same


def node_cost(node: Node, known: Mapping[Value, Type] | None = None) -> Cost:
    """The operator's own cost rule, or one operation per result element and every byte moved once.

    ``known`` holds types that are more precise than those in the graph: the real ones of a call.
    """
    known = known or {}
    call = TypeCall(
        types=[None if v is None else known.get(v, v.type) for v in node.inputs],
        values=[None if v is None or v.const is None or v.const.size > 64 else v.const.numpy() for v in node.inputs],
        attrs=node.attrs,
        outputs=len(node.outputs),
        version=node.version,
        node=node,
        result_types=[known.get(v, v.type) for v in node.outputs],
    )
    definition = registry.find(node.domain, node.op, node.version)
    if definition is not None and definition.cost_rule is not None:
        try:
            cost = definition.cost_rule(call)
        except Exception:  # operands that no run could compute with have no cost; the run says what is wrong
            return Cost(0.0, 0.0)
        return Cost(min(cost.flops, _IMMENSE), min(cost.bytes, _IMMENSE))
    if definition is not None and "view" in definition.traits:
        return Cost(0.0, 0.0)
    elements = 0.0
    for result in call.result_types:
        count = 1.0
        for size in dims(result):
            count *= size
        elements += count
    return Cost(min(elements, _IMMENSE), min(traffic(call), _IMMENSE))


def graph_cost(graph: Graph) -> Cost:
    """Sum over the nodes of a graph; each subgraph counts once."""
    total = Cost(0.0, 0.0)
    for node in graph.all_nodes():
        total = total + node_cost(node)
    return total


def seconds(cost: Cost, nodes: int = 1) -> float:
    """A nominal time for some work: whichever of arithmetic and traffic takes longer, plus dispatch."""
    return max(cost.flops / FLOPS_PER_SECOND, cost.bytes / BYTES_PER_SECOND) + nodes * SECONDS_PER_NODE
