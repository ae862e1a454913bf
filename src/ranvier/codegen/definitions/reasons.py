"""What nodes can be lowered, and what their shapes may depend on, before any shape is known."""

from __future__ import annotations

from collections.abc import Iterable

from ranvier.codegen.definitions.registry import Lowerings
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops.custom import is_replaced
from ranvier.ops.infer import SHAPE_MATH


def reason_against(node: Node, lowerings: Lowerings) -> str | None:
    """None where the node can be lowered once its shapes are known, otherwise why not."""
    lowering = lowerings.find(node)
    if lowering is None:
        return "no lowering"
    if not lowering.own and is_replaced(node.domain, node.op, node.version):
        return "a function of the user's own stands for this operator"
    if node.version < lowering.since:
        return f"lowered from version {lowering.since} on, this is {node.version}"
    for value in [*node.inputs, *node.outputs]:
        if value is None:
            continue
        if value.type is None:
            if value.uses or value.is_graph_output:
                return f"the type of {value.name!r} is not known"
            continue
        if not isinstance(value.type, TensorType):
            return f"{value.name!r} is a {value.type}"
        if value.type.dtype is None:
            return f"the element type of {value.name!r} is not known"
        if value.type.dtype not in lowering.dtypes:
            return f"element type {value.type.dtype} of {value.name!r}"
    if lowering.check is not None:
        reason = lowering.check(node)
        if reason is not None:
            return reason
    if lowering.inlines:
        for inner in (inner for graph in node.subgraphs() for inner in graph):
            reason = reason_against(inner, lowerings)
            if reason is not None:
                return f"{inner.op} in {lowering.inlines}: {reason}"
    for position in lowering.values:
        value = node.input(position)
        if value is not None and not _foreseeable(value, lowerings, 32):
            return f"operand {position} is computed from data, and a shape depends on it"
    return None


def _foreseeable(value: Value, lowerings: Lowerings, depth: int) -> bool:
    """Will the content be known before the run: constant, an input, or worked out from shapes?"""
    if value.const is not None or value.producer is None:
        return True
    node = value.producer
    if depth == 0 or node.domain or node.op not in SHAPE_MATH:
        # another provider's result is at hand when the partition is called
        return lowerings.find(node) is None
    if node.op in ("Shape", "Size"):
        return True
    return all(v is None or _foreseeable(v, lowerings, depth - 1) for v in node.inputs)


def shape_sources(nodes: Iterable[Node], lowerings: Lowerings) -> set[Value]:
    """Values that the content of operands which decide shapes is made from, branches included."""
    found: set[Value] = set()
    for node in nodes:
        lowering = lowerings.find(node)
        waiting = [node.input(k) for k in lowering.values] if lowering is not None else []
        while waiting:
            value = waiting.pop()
            if value is None or value in found:
                continue
            found.add(value)
            if value.producer is not None and value.producer.op not in ("Shape", "Size"):
                waiting += value.producer.inputs
        for graph in node.subgraphs():
            found |= shape_sources(graph, lowerings)
    return found
