"""The few ways in which passes change a graph."""

from __future__ import annotations

from typing import Any

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps, remove_dead, substitute
from ranvier.graph.tensors import ConstTensor
from ranvier.ops import complete


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


def sharpen(value: Value, other: Value) -> None:
    """``value`` equals ``other``: what is known of the one's type holds for the other. Graph inputs stay as declared."""
    if value.producer is not None and other.type is not None:
        value.type = other.type if value.type is None else value.type.merge(other.type)


def into_constant(value: Value, array: Any, origin: str) -> bool:
    """Turn a node's result into a constant of the same name; False where the name is taken and has to be kept."""
    node = value.producer
    assert node is not None and node.graph is not None
    graph = node.graph
    leaves = value.is_graph_output
    if leaves and value.name in graph.constants and node.op == "Identity":
        return False
    constant = graph.add_constant(ConstTensor.of(array), value.name)
    if leaves and constant.name != value.name:
        substitute(value, constant, builder(node, origin))
    else:
        value.replace_by(constant)
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
