"""A part of a graph as a graph of its own: what a provider hands to another runtime, or sends to another process.

Nodes are copied, so the original keeps its use lists; tensors of constants are shared, not copied. Every value of the
part gets a name that is unique in it, because names are how the outside refers to inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.names import Names


def extract(
    nodes: Iterable[Node],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    name: str = "part",
    opsets: Mapping[str, int] | None = None,
) -> Graph:
    """A graph of copies of ``nodes``. Constants among ``inputs`` become its constants, the others its inputs, in order;
    ``outputs`` its outputs."""
    made = Graph(name, opsets=opsets)
    copies = _Copies()
    for value in inputs:
        if value.const is not None and value.producer is None:
            copies.map[value] = made.add_constant(value.const, copies.name(value))
        else:
            copies.map[value] = made.add_input(copies.name(value), value.type)
    copies.nodes(nodes, made)
    made.outputs = [copies.map[value] for value in outputs]
    return made


def copied(graph: Graph, more_outputs: Iterable[str] = ()) -> Graph:
    """A copy of a whole graph that shares the constants, with further values, by name, among its outputs."""
    values = {value.name: value for value in graph.values()} if more_outputs else {}
    outputs = list(graph.outputs)
    outputs += [values[name] for name in more_outputs if all(values[name] is not v for v in outputs)]
    made = extract(graph, [*graph.constants.values(), *graph.inputs], outputs, name=graph.name, opsets=graph.opsets)
    made.defaults = dict(graph.defaults)
    made.metadata = dict(graph.metadata)
    made.doc = graph.doc
    return made


class _Copies:
    """Which value of the copy stands for which of the original."""

    def __init__(self) -> None:
        self.map: dict[Value, Value] = {}
        self._names = Names()

    def name(self, value: Value) -> str:
        return self._names.unique(value.name)

    def nodes(self, nodes: Iterable[Node], target: Graph) -> None:
        for node in nodes:
            attrs = {key: self._attribute(attr) for key, attr in node.attrs.items()}
            results = [Value(self.name(v), v.type) for v in node.outputs]
            self.map.update(zip(node.outputs, results))
            operands = [None if v is None else self.map[v] for v in node.inputs]
            target.add(
                node.op,
                operands,
                attrs,
                results,
                domain=node.domain,
                version=node.version,
                name=node.name,
                origin=node.origin,
            )

    def _attribute(self, attr: Any) -> Any:
        if isinstance(attr, Graph):
            return self._body(attr)
        if isinstance(attr, list | tuple) and attr and isinstance(attr[0], Graph):
            return [self._body(each) for each in attr]
        return attr

    def _body(self, graph: Graph) -> Graph:
        """A nested graph; what it captures is in the map already, because the part reads it."""
        made = Graph(graph.name, opsets=graph.opsets)
        for value in graph.inputs:
            self.map[value] = made.add_input(self.name(value), value.type)
        for value in graph.constants.values():
            if value.const is not None:
                self.map[value] = made.add_constant(value.const, self.name(value))
        self.nodes(graph, made)
        made.outputs = [self.map[value] for value in graph.outputs]
        return made
