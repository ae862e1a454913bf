"""Operators that the standard itself defines by others: written out by its definition, their gradients follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward
from ranvier.ops.proto import attr_from_proto, node_to_proto, schema_of, type_to_proto

_HOLDS_A_BODY = "SequenceMap"  # repeated for each of a sequence's tensors where one of them is read (sequences.py)


def has_definition(node: Node) -> bool:
    if node.domain or node.op == _HOLDS_A_BODY:
        return False
    schema = schema_of("", node.op, node.version)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def written_out(b: Backward, node: Node) -> Sequence[Value]:
    """The results of a node by the standard's definition of its operator."""
    function = _definition(node)
    known: dict[str, Value | None] = dict(zip(function.input, node.inputs))
    opset = next((each.version for each in function.opset_import if not each.domain), node.version)
    for each in function.node:
        operands = [known.get(name) if name else None for name in each.input]
        attrs = _attributes(each.attribute, node)
        version = onnx.defs.get_schema(each.op_type, opset, each.domain).since_version
        made = b.node(each.op_type, operands, attrs, outputs=len(each.output), domain=each.domain, version=version)
        known.update(zip(each.output, made.outputs))
    results = [known.get(name) for name in function.output]
    return [value for value in results if value is not None]


def _definition(node: Node) -> FunctionProto:
    schema = schema_of("", node.op, node.version)
    if schema.has_function:
        found: FunctionProto = schema.function_body
        return found
    names = [f"i{k}" if v is not None else "" for k, v in enumerate(node.inputs)]
    proto = node_to_proto(node, names, [f"o{k}" for k in range(len(node.outputs))], _no_graph)
    types = [type_to_proto(v.type if v is not None else None).SerializeToString() for v in node.inputs]
    function = FunctionProto()
    function.ParseFromString(schema.get_context_dependent_function(proto.SerializeToString(), types))
    return function


def _attributes(given: Sequence[AttributeProto], node: Node) -> dict[str, Any]:
    """Attributes of a node of the definition; some are those of the operator it defines."""
    found: dict[str, Any] = {}
    schema = schema_of("", node.op, node.version)
    for each in given:
        if not each.ref_attr_name:
            found[each.name] = attr_from_proto(each, _no_graph)
        elif each.ref_attr_name in node.attrs:
            found[each.name] = node.attrs[each.ref_attr_name]
        elif each.ref_attr_name in schema.attributes:
            default = schema.attributes[each.ref_attr_name].default_value
            if default.type:
                found[each.name] = attr_from_proto(default, _no_graph)
    return found


def _no_graph(proto: Any) -> Any:
    raise NotImplementedError("a definition with control flow inside")
