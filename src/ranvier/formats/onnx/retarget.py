"""A graph for an older opset: nodes under the version that opset has, where that version means the same.

Most versions of an operator differ by the types they take, or by an attribute whose default is what was before. A node
that uses what is new has no older form, and is named. So is one that is older than the opset: whoever brings nodes to
their newest forms left it, since it means something else there, which schemas need not tell.
"""

from __future__ import annotations

from typing import Any

import onnx

from ranvier.errors import NotSupported
from ranvier.graph.ir import Graph, Node
from ranvier.graph.types import TensorType
from ranvier.ops.proto import schema_of


def retarget(graph: Graph, opset: int) -> None:
    """Give standard nodes the versions they have in ``opset``; NotSupported, and no change, where one has none."""
    changes: list[tuple[Node, int]] = []
    for node in graph.all_nodes():
        if node.domain or not onnx.defs.has(node.op, ""):  # what the standard never had is not the opset's
            continue
        try:
            older = onnx.defs.get_schema(node.op, opset, "")
        except onnx.defs.SchemaError:
            raise NotSupported(f"opset {opset} has no operator {node.op}") from None
        if older.since_version == node.version:
            continue
        if older.since_version > node.version:
            why = f"it is of version {node.version}, and version {older.since_version} means something else"
        else:
            why = _differs(node, schema_of("", node.op, node.version), older)
        if why:
            raise NotSupported(f"node {node.name!r} ({node.op}) has no form in opset {opset}: {why}")
        changes.append((node, older.since_version))
    for node, version in changes:
        node.version = version
    for each in graph.all_graphs():
        each.opsets[""] = opset


def _differs(node: Node, newer: Any, older: Any) -> str:
    """Why the node does not mean the same under the older schema; empty where it does."""
    if len(node.inputs) > older.max_input or len(node.outputs) > older.max_output:
        return "it has more operands"
    if [p.name for p in newer.inputs][: len(node.inputs)] != [p.name for p in older.inputs][: len(node.inputs)]:
        return "its operands mean something else"
    for name, attribute in newer.attributes.items():
        before = older.attributes.get(name)
        if before is None and name in node.attrs and node.attrs[name] != _default(attribute):
            return f"it has the attribute {name}"
        if before is not None and name not in node.attrs and _default(before) != _default(attribute):
            return f"the default of {name} is another"
    if any(attribute.required for name, attribute in older.attributes.items() if name not in node.attrs):
        return "an attribute was an obligation"
    for value, parameter in zip(node.inputs, older.inputs):
        if value is not None and isinstance(value.type, TensorType) and value.type.dtype is not None:
            name = f"tensor({_NAMES.get(value.type.dtype.name, value.type.dtype.name)})"
            if name not in parameter.types:
                return f"{value.type.dtype} is no type of its operands"
    return ""


_NAMES = {
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "float8e4m3fn",
    "float8_e4m3fnuz": "float8e4m3fnuz",
    "float8_e5m2": "float8e5m2",
    "float8_e5m2fnuz": "float8e5m2fnuz",
    "float4_e2m1fn": "float4e2m1",
    "float8_e8m0fnu": "float8e8m0",
}


def _default(attribute: Any) -> Any:
    found = attribute.default_value
    return onnx.helper.get_attribute_value(found) if found.type else None
