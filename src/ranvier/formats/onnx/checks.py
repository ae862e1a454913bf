"""A node against the standard: counts of operands and results, attributes, the signatures of its bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import AttributeProto, NodeProto

from ranvier.dtypes import DType
from ranvier.errors import InvalidModel
from ranvier.graph.ir import Graph

_KNOWN = frozenset(dtype.onnx for dtype in DType)
_OPTIONAL = _KNOWN | {0}
# attributes that hold an element type, and what they may be
_ELEMENT_TYPES = {"to": _KNOWN, "dtype": _OPTIONAL, "output_dtype": _OPTIONAL, "output_datatype": _OPTIONAL}


class _Demands:
    """What a schema says about a node, as plain data: asking the schema itself copies it every time."""

    __slots__ = ("attributes", "inputs", "outputs", "required")

    def __init__(self, schema: Any) -> None:
        known = schema.attributes
        self.inputs = (schema.min_input, schema.max_input)
        self.outputs = (schema.min_output, schema.max_output)
        self.attributes = {name: int(entry.type) for name, entry in known.items()}
        self.required = [name for name, entry in known.items() if entry.required]


_DEMANDS: dict[tuple[str, str, int], _Demands] = {}


def check_node(node: NodeProto, schema: Any) -> None:
    """Counts of operands and results, and the attributes, against the standard's schema."""
    key = (schema.domain, schema.name, schema.since_version)
    demands = _DEMANDS.get(key)
    if demands is None:
        demands = _DEMANDS[key] = _Demands(schema)
    given = len(node.input)
    low, high = demands.inputs
    if not low <= given <= high:
        raise InvalidModel(f"{label_of(node)}: takes {_range(low, high)} inputs, got {given}")
    if "" in node.input:
        _check_left_out(node, schema)
    low, high = demands.outputs
    if not low <= len(node.output) <= high:
        wanted = _range(low, high)
        raise InvalidModel(f"{label_of(node)}: has {wanted} outputs, the model lists {len(node.output)}")
    for attr in node.attribute:
        kind = demands.attributes.get(attr.name)
        if kind is None:
            continue  # some exporters add notes of their own; the operator decides whether it can ignore them
        if kind != attr.type and not attr.ref_attr_name:
            wanted, got = (AttributeProto.AttributeType.Name(each) for each in (kind, attr.type))
            raise InvalidModel(f"{label_of(node)}: attribute {attr.name!r} must be {wanted}, got {got}")
        allowed = _ELEMENT_TYPES.get(attr.name)
        if allowed is not None and attr.type == AttributeProto.INT and attr.i not in allowed:
            raise InvalidModel(f"{label_of(node)}: attribute {attr.name!r} is {attr.i}, which is no element type")
    for name in demands.required:
        if not any(attr.name == name for attr in node.attribute):
            raise InvalidModel(f"{label_of(node)}: required attribute {name!r} is missing")


def _check_left_out(node: NodeProto, schema: Any) -> None:
    """An empty name stands for an optional input that is left out; others may not be."""
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    for name, formal in zip(node.input, schema.inputs):
        if not name and formal.option != optional and formal.min_arity > 0:
            raise InvalidModel(f"{label_of(node)}: input {formal.name!r} is required and has no name")


def _range(low: int, high: int) -> str:
    if low == high:
        return str(low)
    return f"{low} or more" if high > 1000 else f"{low} to {high}"


def check_bodies(node: NodeProto, version: int, attrs: Mapping[str, Any], inputs: int, outputs: int) -> None:
    """The graphs of a control-flow node take and give as many values as it hands them and expects."""
    takes: int | None = None
    gives = outputs
    if node.op_type == "If":
        takes = 0
    elif node.op_type == "Loop":  # step number, condition, carried values; condition, carried and collected values
        carried = max(inputs - 2, 0)
        takes, gives = 2 + carried, 1 + max(carried, outputs)
    elif node.op_type in ("Scan", "SequenceMap"):
        takes = inputs - 1 if version < 9 else inputs  # the first Scan has an operand that is not the body's
    if takes is None:
        return
    for name, body in attrs.items():
        if isinstance(body, Graph) and (len(body.inputs) != takes or len(body.outputs) < gives):
            raise InvalidModel(
                f"{label_of(node)}: {name!r} must take {takes} and give {gives} values, "
                f"it takes {len(body.inputs)} and gives {len(body.outputs)}"
            )


def label_of(node: NodeProto) -> str:
    domain = f"{node.domain}::" if node.domain else ""
    name = node.name or (node.output[0] if node.output else "")
    return f"node {name!r} ({domain}{node.op_type})"
