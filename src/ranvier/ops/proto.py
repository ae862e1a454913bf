"""Between the IR and the standard's protobuf messages: types, attributes, single nodes.

Both the type rules (which call ``onnx``'s own inference) and the ONNX writer need these, so they stand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, numpy_helper

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import InvalidModel
from ranvier.graph.ir import Graph, Node
from ranvier.graph.types import (
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    SparseTensorType,
    Symbol,
    TensorType,
    Type,
)
from ranvier.ops.allocation import MAX_RANK, checked_shape

MakeSymbol = Callable[[str], Symbol]


def type_to_proto(value_type: Type | None) -> TypeProto:
    """The message for a type; unknown parts are left out of it."""
    proto = TypeProto()
    if value_type is not None:
        _fill_type(proto, value_type)
    return proto


def _fill_type(proto: TypeProto, value_type: Type) -> None:
    if isinstance(value_type, TensorType):
        message = proto.sparse_tensor_type if isinstance(value_type, SparseTensorType) else proto.tensor_type
        message.elem_type = 0 if value_type.dtype is None else value_type.dtype.onnx
        if value_type.shape is not None:
            message.shape.SetInParent()
            for dim in value_type.shape:
                entry = message.shape.dim.add()
                if isinstance(dim, Symbol):
                    entry.dim_param = dim.name
                elif dim is not None:
                    entry.dim_value = dim
    elif isinstance(value_type, SequenceType):
        _fill_type(proto.sequence_type.elem_type, value_type.elem or TensorType(None))
    elif isinstance(value_type, OptionalType):
        _fill_type(proto.optional_type.elem_type, value_type.elem or TensorType(None))
    elif isinstance(value_type, MapType):
        proto.map_type.key_type = value_type.key.onnx
        _fill_type(proto.map_type.value_type, value_type.value or TensorType(None))


def type_from_proto(proto: TypeProto, symbol: MakeSymbol = Symbol) -> Type | None:
    """The type a message describes, or None where it describes nothing."""
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        message = getattr(proto, kind)
        dtype = dtypes.from_onnx(message.elem_type) if message.elem_type else None
        if len(message.shape.dim) > MAX_RANK:
            raise InvalidModel(f"{len(message.shape.dim)} dimensions; at most {MAX_RANK} are possible")
        shape = tuple(_dim(d, symbol) for d in message.shape.dim) if message.HasField("shape") else None
        return (TensorType if kind == "tensor_type" else SparseTensorType)(dtype, shape)
    if kind == "sequence_type":
        return SequenceType(type_from_proto(proto.sequence_type.elem_type, symbol))
    if kind == "optional_type":
        return OptionalType(type_from_proto(proto.optional_type.elem_type, symbol))
    if kind == "map_type":
        key = dtypes.from_onnx(proto.map_type.key_type)
        return MapType(key, type_from_proto(proto.map_type.value_type, symbol))
    return None


def _dim(entry: Any, symbol: MakeSymbol) -> Dim:
    if entry.HasField("dim_value"):
        return int(entry.dim_value) if entry.dim_value >= 0 else None
    # exporters write '?' or '' for "anything", more than once in one model: not a name that binds
    if any(c.isalnum() for c in entry.dim_param):
        return symbol(entry.dim_param)
    return None


# -- attributes -----------------------------------------------------------------------------------------------------


def attr_from_proto(attr: AttributeProto, graph: Callable[[Any], Graph], symbol: MakeSymbol = Symbol) -> Any:
    """An attribute as a plain Python value; ``graph`` turns a subgraph message into a Graph."""
    kind = attr.type
    if kind == AttributeProto.INT:
        return attr.i
    if kind == AttributeProto.FLOAT:
        return attr.f
    if kind == AttributeProto.STRING:
        return _text(attr.s)
    if kind == AttributeProto.INTS:
        return tuple(attr.ints)
    if kind == AttributeProto.FLOATS:
        return tuple(attr.floats)
    if kind == AttributeProto.STRINGS:
        return tuple(_text(s) for s in attr.strings)
    if kind == AttributeProto.TENSOR:
        return tensor_array(attr.t)
    if kind == AttributeProto.TENSORS:
        return tuple(tensor_array(t) for t in attr.tensors)
    if kind == AttributeProto.SPARSE_TENSOR:
        return sparse_array(attr.sparse_tensor)
    if kind == AttributeProto.GRAPH:
        return graph(attr.g)
    if kind == AttributeProto.GRAPHS:
        return [graph(g) for g in attr.graphs]
    if kind == AttributeProto.TYPE_PROTO:
        return type_from_proto(attr.tp, symbol)
    if kind == AttributeProto.TYPE_PROTOS:
        return tuple(type_from_proto(t, symbol) for t in attr.type_protos)
    raise InvalidModel(f"attribute {attr.name!r} has type {kind}, which is not supported")


def _text(data: bytes) -> str | bytes:
    """Text where it is text: a few operators keep raw bytes in a string attribute."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def tensor_array(tensor: TensorProto) -> np.ndarray[Any, Any]:
    """A tensor message as an array (strings as ``str``); InvalidModel where data and shape disagree."""
    if tensor.data_location == TensorProto.EXTERNAL:
        # only whoever knows the model's folder may open files
        raise InvalidModel(f"tensor {tensor.name!r}: external data is possible for initializers and constants only")
    try:
        array: np.ndarray[Any, Any] = numpy_helper.to_array(tensor)
    except Exception as error:
        raise InvalidModel(f"tensor {tensor.name!r} cannot be read: {error}") from error
    if array.dtype.kind in "SOU":
        flat = [s.decode("utf-8", "replace") if isinstance(s, bytes) else str(s) for s in array.ravel().tolist()]
        strings = np.empty(len(flat), dtype=object)
        strings[:] = flat
        array = strings.reshape(array.shape)
    return array


def sparse_array(sparse: Any) -> np.ndarray[Any, Any]:
    """A sparse tensor message as a dense array."""
    values = tensor_array(sparse.values)
    indices = tensor_array(sparse.indices)
    shape = checked_shape(sparse.dims, values.dtype, f"sparse tensor {sparse.values.name!r}")
    size = math.prod(shape)
    dense = np.zeros(size, values.dtype)
    if indices.ndim == 2 and indices.shape[1] == len(shape):
        inside = ((indices >= 0) & (indices < np.array(shape))).all()
        indices = np.ravel_multi_index(tuple(indices.T), shape) if inside else np.array([-1])
    if (
        values.ndim != 1
        or indices.shape != values.shape
        or (indices.size and not 0 <= indices.min() <= indices.max() < size)
    ):
        raise InvalidModel(f"sparse tensor {sparse.values.name!r}: indices do not fit shape {list(shape)}")
    dense[indices] = values
    return dense.reshape(shape)


def attr_to_proto(name: str, attr: Any, graph: Callable[[Graph], Any], kind: int | None = None) -> AttributeProto:
    """The message for a Python attribute. ``kind`` (an AttributeProto type) settles what an empty list means."""
    proto = AttributeProto(name=name)
    if isinstance(attr, bool | int | np.integer):
        if kind == AttributeProto.FLOAT:
            proto.type, proto.f = AttributeProto.FLOAT, float(attr)
        else:
            proto.type, proto.i = AttributeProto.INT, int(attr)
    elif isinstance(attr, float | np.floating):
        proto.type, proto.f = AttributeProto.FLOAT, float(attr)
    elif isinstance(attr, str | bytes):
        proto.type, proto.s = AttributeProto.STRING, attr.encode() if isinstance(attr, str) else attr
    elif isinstance(attr, np.ndarray):
        proto.type = AttributeProto.TENSOR
        proto.t.CopyFrom(array_tensor(attr))
    elif isinstance(attr, Graph):
        proto.type = AttributeProto.GRAPH
        proto.g.CopyFrom(graph(attr))
    elif isinstance(attr, Type):
        proto.type = AttributeProto.TYPE_PROTO
        proto.tp.CopyFrom(type_to_proto(attr))
    elif isinstance(attr, list | tuple):
        _fill_list(proto, attr, graph, kind)
    else:
        raise InvalidModel(f"attribute {name!r}: no ONNX form for {type(attr).__name__}")
    return proto


def _fill_list(proto: AttributeProto, items: Sequence[Any], graph: Callable[[Graph], Any], kind: int | None) -> None:
    first = items[0] if items else None
    if first is None:
        proto.type = kind if kind is not None else AttributeProto.INTS
    elif isinstance(first, str | bytes):
        proto.type = AttributeProto.STRINGS
        proto.strings.extend(s.encode() if isinstance(s, str) else s for s in items)
    elif isinstance(first, Graph):
        proto.type = AttributeProto.GRAPHS
        proto.graphs.extend(graph(g) for g in items)
    elif isinstance(first, np.ndarray):
        proto.type = AttributeProto.TENSORS
        proto.tensors.extend(array_tensor(a) for a in items)
    elif isinstance(first, Type):
        proto.type = AttributeProto.TYPE_PROTOS
        proto.type_protos.extend(type_to_proto(t) for t in items)
    elif kind == AttributeProto.FLOATS or any(isinstance(i, float | np.floating) for i in items):
        proto.type = AttributeProto.FLOATS
        proto.floats.extend(float(i) for i in items)
    else:
        proto.type = AttributeProto.INTS
        proto.ints.extend(int(i) for i in items)


def array_tensor(array: np.ndarray[Any, Any], name: str = "") -> TensorProto:
    """A tensor message with the data inside."""
    if dtypes.of(array) is DType.string:
        message = TensorProto(name=name, data_type=TensorProto.STRING, dims=array.shape)
        message.string_data.extend(s if isinstance(s, bytes) else str(s).encode() for s in array.ravel().tolist())
        return message
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


# -- nodes ----------------------------------------------------------------------------------------------------------

_SCHEMAS: dict[tuple[str, str, int], Any] = {}
onnx.defs.has("Identity")  # the first question makes onnx build its table: longer than to read a small model


def schema_of(domain: str, op: str, version: int) -> Any:
    """The standard's definition of an operator at an opset version, or None."""
    key = (domain, op, version)
    if key not in _SCHEMAS:
        try:
            _SCHEMAS[key] = onnx.defs.get_schema(op, version, domain)
        except onnx.defs.SchemaError:
            _SCHEMAS[key] = None
    return _SCHEMAS[key]


def attr_kind(schema: Any, name: str) -> int | None:
    """The type number the standard gives an attribute, or None."""
    entry = schema.attributes.get(name) if schema is not None else None
    return int(entry.type) if entry is not None else None


def node_to_proto(
    node: Node,
    inputs: Sequence[str],
    outputs: Sequence[str],
    graph: Callable[[Graph], Any],
    attrs: Mapping[str, Any] | None = None,
) -> NodeProto:
    """The message for a node whose operands and results have been given names."""
    proto = NodeProto(op_type=node.op, domain=node.domain, name=node.name, input=inputs, output=outputs)
    schema = schema_of(node.domain, node.op, node.version) if node.version else None
    for name, attr in (node.attrs if attrs is None else attrs).items():
        if attr is not None:
            proto.attribute.append(attr_to_proto(name, attr, graph, attr_kind(schema, name)))
    return proto
