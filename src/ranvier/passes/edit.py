"""The few ways in which passes change a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps, remove_dead, substitute
from ranvier.graph.tensors import ConstTensor
from ranvier.ops import complete
from ranvier.passes.facts import is_removable


def builder(node: Node, origin: str) -> GraphOps:
    """Makes nodes before ``node``, with versions and types."""
    assert node.graph is not None
    return GraphOps(node.graph, node, origin, complete)


def bypass(node: Node, value: Value, origin: str) -> bool:
    """Let ``value`` take the place of the node's first output; the node goes unless another output is used.

    False, and nothing is changed, for an Identity that must stay: it gives a graph output a name of its own.
    """
    old = node.output
    if node.op == "Identity" and old.is_graph_output and not _can_be_output(value, node.graph):
        return False
    sharpen(value, old)
    substitute(old, value, builder(node, origin))
    assert node.graph is not None
    remove_dead(node.graph, [node])
    return True


def prune(values: Iterable[Value | None]) -> None:
    """Remove the producers of values that a rewrite stopped using, and what only they needed.

    A node that is dead still counts as a user, and would keep other rules from seeing that a value has one reader.
    """
    waiting = [v.producer for v in values if v is not None]
    while waiting:
        node = waiting.pop()
        if node is None or node.graph is None or any(v.uses or v.is_graph_output for v in node.outputs):
            continue
        if is_removable(node):
            operands = [v.producer for v in node.inputs if v is not None]
            node.graph.remove(node)
            waiting.extend(operands)


def sharpen(value: Value, other: Value) -> None:
    """Both are equal, so what is known of one type holds for the other; graph inputs stay as they are declared."""
    if value.producer is not None and other.type is not None:
        value.type = other.type if value.type is None else value.type.merge(other.type)


def into_constants(node: Node, results: Sequence[Any], origin: str) -> bool:
    """Put constants in the place of a node's results; a result of None is one that nobody reads.

    False, and nothing is changed, for an Identity that must stay: it gives a graph output a name of its own.
    """
    graph = node.graph
    assert graph is not None
    wanted = [(v, r) for v, r in zip(node.outputs, results) if v.uses or v.is_graph_output]
    if node.op == "Identity" and any(v.is_graph_output and v.name in graph.constants for v, _ in wanted):
        return False
    for value, array in wanted:
        constant = graph.add_constant(ConstTensor.of(array), value.name)
        if value.is_graph_output and constant.name != value.name:
            substitute(value, constant, builder(node, origin))
        else:
            value.replace_by(constant)
    graph.remove(node)
    return True


def _can_be_output(value: Value, graph: Graph | None) -> bool:
    """A node result of this graph that is not an output yet: it can take over an output's name."""
    return value.producer is not None and value.producer.graph is graph and not value.is_graph_output


def inline(body: Graph, node: Node) -> tuple[list[Node], list[Value]]:
    """Move the contents of a subgraph without inputs in front of its node; returns the nodes and the body's results."""
    graph = node.graph
    assert graph is not None and not body.inputs
    for value in list(body.constants.values()):
        del body.constants[value.name]
        if value.name in graph.constants:
            value.name = graph.unique_name(value.name)
        graph.constants[value.name] = value
        value.graph = graph
    nodes = list(body)
    for each in nodes:
        body.unlink(each)
    for each in nodes:
        graph.insert(each, node)
    results = list(body.outputs)
    body.outputs = []
    return nodes, results
