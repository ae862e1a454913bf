"""The nodes of a part as definitions, once all shapes are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.fits import fits
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.products import Products
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import Lowerings
from ranvier.errors import InvalidValue
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType, Type
from ranvier.ops.allocation import checked_shape

Array = np.ndarray[Any, Any]


def define(
    inputs: Sequence[Value],
    nodes: Sequence[Node],
    types: Mapping[Value, Type | None],
    known: Mapping[Value, Array],
    lowerings: Lowerings,
    products: Products,
) -> Definitions:
    """Lower every node of a part; Declined or NeedsValue where one cannot be."""
    definitions = Definitions(products)
    for value in inputs:
        definitions.types[value] = _static(value, types, "input")
    definitions.known = {v: a for v, a in known.items() if v in definitions.types}
    definitions.expand = lambda inner: _lower(inner, definitions, types, known, lowerings)
    _lower(nodes, definitions, types, known, lowerings)
    return definitions


def _lower(
    nodes: Iterable[Node],
    definitions: Definitions,
    types: Mapping[Value, Type | None],
    known: Mapping[Value, Array],
    lowerings: Lowerings,
) -> None:
    nodes = list(nodes)
    for node in nodes:
        for value in node.dependencies():
            if value not in definitions.types and value.const is not None:
                definitions.types[value] = _static(value, types, "constant")
        for value in node.outputs:
            found = definitions.types[value] = _static(value, types, node.name or node.op)
            if found.dtype is not None and found.shape is not None:
                checked_shape(found.shape, found.dtype.numpy, node.op)  # type: ignore[arg-type]
            if value in known:
                definitions.known[value] = known[value]
    for node in nodes:
        if all(v in definitions.known for v in node.outputs):
            continue
        lower_node(node, definitions, lowerings)


def lower_node(node: Node, definitions: Definitions, lowerings: Lowerings) -> None:
    """Define the results of a node, the types of whose values are there."""
    lowering = lowerings.find(node)
    if lowering is None:
        raise Declined(f"{node.op}: no lowering")
    definitions.label = node.name or node.op
    view = NodeView(node, definitions)
    if not fits(view):
        raise InvalidValue(f"{node.op}: operands that do not fit", op=node.op)
    lowering.lower(view, definitions)


def _static(value: Value, types: Mapping[Value, Type | None], where: str) -> TensorType:
    found = types.get(value)
    if found is None and value.const is not None:
        found = value.const.type
    if not isinstance(found, TensorType) or not found.is_static or found.dtype is None:
        if not value.uses and not value.is_graph_output and value.producer is not None:
            return TensorType(found.dtype if isinstance(found, TensorType) else None, (0,))  # nobody asks for it
        raise Declined(f"{where}: the shape of {value.name!r} is not known ({found})")
    return found
