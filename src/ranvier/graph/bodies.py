"""Bodies of control flow again, in another graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranvier.graph.ir import Graph, Node, Value


def copy_body(
    graph: Graph, instead: Mapping[Value, Value], into: Graph, before: Node | None = None
) -> dict[Value, Value]:
    """The nodes of a body again in another graph, with values in place of its inputs; what it captures stays."""
    found = dict(instead)
    for value in graph.constants.values():
        assert value.const is not None
        found[value] = into.add_constant(value.const, value.name if value.name not in into.constants else "")
    for node in graph:
        attrs = {key: _attribute(attr, found) for key, attr in node.attrs.items()}
        results = [Value("", v.type) for v in node.outputs]
        operands = [None if v is None else found.get(v, v) for v in node.inputs]
        into.add(
            node.op, operands, attrs, results, domain=node.domain, version=node.version, name=node.name, before=before
        )
        found.update(zip(node.outputs, results))
    return found


def _attribute(attr: Any, found: dict[Value, Value]) -> Any:
    if not isinstance(attr, Graph):
        return attr
    made = Graph(attr.name, opsets=attr.opsets)
    inner = dict(found)
    for value in attr.inputs:
        inner[value] = made.add_input(value.name, value.type)
    inner.update(copy_body(attr, inner, made))
    made.outputs = [inner.get(value, value) for value in attr.outputs]
    return made
