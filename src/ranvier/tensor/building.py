"""Expressions as a graph: what they need that exists comes in, what is wanted goes out."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.errors import TracingError
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.ops import NEWEST, registry
from ranvier.ops.proto import schema_of
from ranvier.tensor.expr import CUSTOM, INPUT, ITEM, STOP, Expr, line_of
from ranvier.tensor.stored import constant_of
from ranvier.tensor.tracing import user_line


def graph_of(leaves: Sequence[Expr], order: Sequence[Expr], outputs: Sequence[Expr]) -> Graph:
    """The graph that computes ``outputs`` from ``leaves``, through ``order``, which has operands first."""
    graph, values = lowered(leaves, order)
    graph.outputs = [values[expr] for expr in outputs]
    return graph


def lowered(
    leaves: Sequence[Expr], order: Sequence[Expr], constants: Sequence[Expr] = ()
) -> tuple[Graph, Mapping[Expr, Value]]:
    """A graph with a value for each expression; no outputs yet. ``constants`` are no inputs but part of it."""
    graph = Graph("tensors", opsets={"": NEWEST})
    values: dict[Expr, Value] = {}
    numbers_of: dict[Any, Value] = {}
    for k, leaf in enumerate(leaves):
        values[leaf] = graph.add_input(f"x{k}", TensorType(leaf.dtype, leaf.shape))
    for each in constants:
        values[each] = graph.add_constant(constant_of(each))
    for expr in order:
        assert expr.spec is not None
        op, attrs, fixed, count = expr.spec
        if op == INPUT:
            raise looked_at(expr)
        if op == ITEM:
            made = values[expr.inputs[0]].producer
            assert made is not None
            values[expr] = made.outputs[attrs[0][1]]
        else:
            operands: list[Value | None] = [values[x] for x in (expr.inputs[:1] if op == CUSTOM else expr.inputs)]
            for position, numbers in fixed:
                if numbers is not None and numbers not in numbers_of:
                    numbers_of[numbers] = graph.add_constant(ConstTensor.of(np.array(numbers, np.int64)))
                operands.insert(position, None if numbers is None else numbers_of[numbers])
            domain, _, name = ("", "", "Identity") if op in (STOP, CUSTOM) else op.rpartition("::")
            if domain:
                graph.opsets.setdefault(domain, 1)
            made = graph.add(name, operands, dict(attrs), count, domain=domain, version=version_of(name, domain))
            values[expr] = made.output
        values[expr].type = TensorType(expr.dtype, expr.shape)
    for node in graph:
        _complete_unused(node)
    return graph, values


def looked_at(placeholder: Expr) -> TracingError:
    """What is wrong where numbers are asked for that depend on those a jitted function will be given."""
    assert placeholder.spec is not None
    tracing = placeholder.spec[1][0][1]
    if tracing.active:
        return TracingError(
            f"{user_line()}: a value is looked at that is not known while the function is being compiled (by bool(), "
            "float(), numpy(), an index, or a function that NumPy computes); use where() instead of a branch, return "
            "what you want to see, or leave the function as it is without jit"
        )
    return TracingError(
        f"{user_line()}: a tensor from inside of a jitted function ({line_of(placeholder)}) is used outside of it, "
        "where it has no value; return it, or keep it in a State"
    )


def _complete_unused(node: Node) -> None:
    """Types of results that no expression stands for."""
    if any(value.type is None for value in node.outputs):
        from ranvier.ops import complete

        complete(node)


@functools.cache
def version_of(op: str, domain: str = "") -> int:
    """The newest version of an operator."""
    schema = schema_of(domain, op, NEWEST)
    if schema is not None:
        return int(schema.since_version)
    found = registry.find(domain, op)
    return found.since if found else 1


_OF_TENSORS = True
