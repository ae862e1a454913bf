"""What the shapes inside a part may depend on, beside the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Iterable

from ranvier.graph.ir import Node, Value
from ranvier.providers.cpu.lower import registry


def shape_sources(nodes: Iterable[Node]) -> set[Value]:
    """Values that the content of operands which decide shapes is made from, branches included."""
    found: set[Value] = set()
    for node in nodes:
        lowering = registry.find(node)
        waiting = [node.input(k) for k in lowering.values] if lowering is not None else []
        while waiting:
            value = waiting.pop()
            if value is None or value in found:
                continue
            found.add(value)
            if value.producer is not None and value.producer.op not in ("Shape", "Size"):
                waiting += value.producer.inputs
        for graph in node.subgraphs():
            found |= shape_sources(graph)
    return found
