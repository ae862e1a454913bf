"""Inputs that have a default, taken for the constants that they are to whoever does not give them."""

from __future__ import annotations

from ranvier.graph.ir import Graph, Value
from ranvier.graph.types import TensorType


def can_settle(graph: Graph, value: Value) -> bool:
    """Whether an input's default is just what its type says. Where sizes have names, or the model contradicts itself,
    a run has to look at both."""
    default = graph.defaults.get(value.name)
    if default is None:
        return False
    return value.type is None or (isinstance(value.type, TensorType) and value.type == default.type)


def settle(graph: Graph, value: Value) -> Value:
    """The constant, with the same name, that takes the place of an input with a default."""
    tensor = graph.defaults.pop(value.name)
    graph.inputs.remove(value)
    constant = graph.add_constant(tensor, value.name)
    value.replace_by(constant)
    for body in graph.all_graphs():  # the result of a branch may be a value from outside
        if any(v is value for v in body.outputs):
            body.outputs = [constant if v is value else v for v in body.outputs]
    return constant


__all__ = ["can_settle", "settle"]
