"""An ONNX model as a Graph.

Functions are inlined by the standard's inliner, constants become lazy tensors, every node gets the version of its
operator's definition, and the structure is checked: names defined once, operands defined, counts of operands and
attributes as the standard's schema has them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto

from ranvier.config import Limits
from ranvier.domains import normal_domain
from ranvier.errors import (
    DTypeMismatch,
    InvalidGraph,
    InvalidModel,
    InvalidValue,
    NotSupported,
    OutOfMemory,
    RanvierError,
    ResourceLimit,
)
from ranvier.formats.onnx.checks import check_bodies, check_node, label_of
from ranvier.formats.onnx.functions import inlined
from ranvier.formats.onnx.source import Source, open_source
from ranvier.formats.onnx.weights import Piece, constant_of
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Symbol, Type
from ranvier.ops import annotate
from ranvier.ops.allocation import tensor_limit
from ranvier.ops.proto import (
    attr_from_proto,
    schema_of,
    sparse_array,
    type_from_proto,
)

OVERRIDABLE_FROM = 4  # from this IR version on an initializer that is also an input may be overridden


def read(model: Any, *, limits: Limits | None = None, base_dir: str | os.PathLike[str] | None = None) -> Graph:
    """The graph of a model given as a path, bytes, a file object or a ``ModelProto`` (which is not changed)."""
    limits = limits or Limits()
    label = str(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    try:
        with tensor_limit(limits.tensor_bytes):
            source = open_source(model, limits, base_dir)
            graph = _Reader(source, limits).read()
            graph.metadata["problems"] = annotate(graph)
    except RanvierError:
        raise
    except MemoryError as error:
        raise OutOfMemory(f"model {label!r}: out of memory while it was read") from error
    except Exception as error:
        raise InvalidModel(f"model {label!r} cannot be read: {type(error).__name__}: {error}") from error
    return graph


class _Scope:
    """Names visible in one graph; lookups go outwards."""

    __slots__ = ("names", "outer")

    def __init__(self, outer: _Scope | None = None) -> None:
        self.names: dict[str, Value] = {}
        self.outer = outer

    def find(self, name: str) -> Value | None:
        scope: _Scope | None = self
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            scope = scope.outer
        return None


class _Reader:
    def __init__(self, source: Source, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        self.nodes = 0
        self.symbols: dict[str, Symbol] = {}
        self.opsets: dict[str, int] = {}

    def read(self) -> Graph:
        proto = self.source.proto
        if not proto.HasField("graph"):
            raise InvalidModel(f"model {self.source.label} holds no graph")
        self.opsets = _opsets(proto)
        tensors = self._initializers(proto.graph, self.source.cut)
        body = inlined(proto, self.limits).graph if proto.functions else proto.graph
        overridable = proto.ir_version >= OVERRIDABLE_FROM
        graph = self._graph(body, None, 0, tensors, overridable=overridable)
        graph.opsets = dict(self.opsets)
        graph.metadata.update(_model_facts(proto))
        graph.metadata["declared_outputs"] = {v.name: type_from_proto(v.type, self.symbol) for v in body.output}
        graph.metadata["denotations"] = _denotations(body)
        return graph

    def symbol(self, name: str) -> Symbol:
        found = self.symbols.get(name)
        if found is None:
            found = self.symbols[name] = Symbol(name)
        return found

    def _initializers(self, proto: GraphProto, cut: Mapping[int, Piece]) -> dict[str, ConstTensor]:
        limit = self.limits.tensor_bytes
        found: dict[str, ConstTensor] = {}
        for k, tensor in enumerate(proto.initializer):
            if not tensor.name:
                raise InvalidModel(f"graph {proto.name!r}: initializer {k} has no name")
            if tensor.name in found:
                raise InvalidModel(f"graph {proto.name!r}: two initializers are named {tensor.name!r}")
            label = f"initializer {tensor.name!r}"
            found[tensor.name] = constant_of(tensor, cut.get(k), self.source.files, limit, label)
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            if not name or name in found:
                raise InvalidModel(f"graph {proto.name!r}: sparse initializer {name!r} has no name of its own")
            found[name] = ConstTensor.of(sparse_array(sparse))
        return found

    def _graph(
        self,
        proto: GraphProto,
        outer: _Scope | None,
        depth: int,
        tensors: dict[str, ConstTensor] | None = None,
        *,
        overridable: bool = False,
    ) -> Graph:
        allowed = self.limits.graph_depth
        if allowed is not None and depth > allowed:
            raise ResourceLimit("graph_depth", allowed, depth, f"graph {proto.name!r}")
        graph = Graph(proto.name)
        graph.doc = proto.doc_string
        scope = _Scope(outer)
        tensors = self._initializers(proto, {}) if tensors is None else tensors

        for info in proto.input:
            if info.name in scope.names:
                raise InvalidModel(f"graph {proto.name!r}: two inputs are named {info.name!r}")
            if info.name in tensors and not overridable:
                continue
            if not info.name:
                raise InvalidModel(f"graph {proto.name!r}: an input has no name")
            value = graph.add_input(info.name, self._declared(info))
            scope.names[info.name] = value
            if info.name in tensors:
                graph.defaults[info.name] = tensors[info.name]
        for name, tensor in tensors.items():
            if name not in scope.names:
                scope.names[name] = graph.add_constant(tensor, name)

        self._nodes(graph, proto, scope, depth)
        self._outputs(graph, proto, scope)
        return graph

    def _nodes(self, graph: Graph, proto: GraphProto, scope: _Scope, depth: int) -> None:
        """All results are declared before operands are linked, so a model whose nodes are out of order still loads."""
        self.nodes += len(proto.node)
        allowed = self.limits.graph_nodes
        if allowed is not None and self.nodes > allowed:
            raise ResourceLimit("graph_nodes", allowed, self.nodes, f"graph {proto.name!r}")
        declared = {info.name: self._declared(info) for info in proto.value_info}
        results: list[list[Value]] = []
        for node in proto.node:
            if node.op_type == "Constant" and normal_domain(node.domain) == "" and len(node.output) == 1:
                value = graph.add_constant(self._constant(node), node.output[0])
                self._define(scope, node.output[0], value, node)
                results.append([])
                continue
            outputs = [Value(name, declared.get(name)) for name in node.output]
            for value in outputs:
                if value.name:
                    self._define(scope, value.name, value, node)
            results.append(outputs)
        ordered = True
        for node, outputs in zip(proto.node, results):
            if not outputs and node.op_type == "Constant":
                continue
            made = self._node(graph, node, outputs, scope, depth)
            ordered = ordered and all(v.owner is not None and v.producer is not made for v in made.dependencies())
        if not ordered:
            try:
                graph.sort()
            except InvalidGraph as error:
                raise InvalidModel(str(error)) from None

    def _declared(self, info: ValueInfoProto) -> Type | None:
        try:
            return type_from_proto(info.type, self.symbol)
        except (DTypeMismatch, InvalidModel) as error:
            raise InvalidModel(f"value {info.name!r}: {error}") from None

    def _define(self, scope: _Scope, name: str, value: Value, node: NodeProto) -> None:
        if name in scope.names:
            raise InvalidModel(f"{label_of(node)}: the name {name!r} is already taken by another value")
        scope.names[name] = value

    def _node(self, graph: Graph, proto: NodeProto, outputs: list[Value], scope: _Scope, depth: int) -> Node:
        domain = normal_domain(proto.domain)
        opset = self.opsets.get(domain, 1)
        schema = schema_of(domain, proto.op_type, opset)
        if schema is not None:
            check_node(proto, schema)
        inputs: list[Value | None] = []
        for name in proto.input:
            if not name:
                inputs.append(None)
                continue
            value = scope.find(name)
            if value is None:
                raise InvalidModel(f"{label_of(proto)}: input {name!r} is not defined")
            inputs.append(value)
        while inputs and inputs[-1] is None:
            inputs.pop()
        attrs: dict[str, Any] = {}
        for attr in proto.attribute:
            if attr.name in attrs:
                raise InvalidModel(f"{label_of(proto)}: attribute {attr.name!r} is given twice")
            if attr.ref_attr_name:
                raise InvalidModel(f"{label_of(proto)}: attribute {attr.name!r} refers to a function's attribute")
            try:
                attrs[attr.name] = attr_from_proto(attr, lambda g: self._graph(g, scope, depth + 1), self.symbol)
            except (InvalidModel, DTypeMismatch) as error:
                if attr.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
                    raise  # it names what is wrong in there
                raise InvalidModel(f"{label_of(proto)}: attribute {attr.name!r}: {error}") from error.__cause__
        if domain == "" and schema is not None:
            check_bodies(proto, schema.since_version, attrs, len(inputs), len(outputs))
        version = schema.since_version if schema is not None else opset
        name = proto.name or (proto.output[0] if proto.output else "")
        return graph.add(proto.op_type, inputs, attrs, outputs, domain=domain, version=version, name=name)

    def _constant(self, node: NodeProto) -> ConstTensor:
        from ranvier.ops.registry import evaluate

        if len(node.attribute) != 1:
            raise InvalidModel(f"{label_of(node)}: a Constant has one value, this has {len(node.attribute)}")
        attr = node.attribute[0]
        if attr.name == "value" and attr.type == AttributeProto.TENSOR:
            return constant_of(attr.t, None, self.source.files, self.limits.tensor_bytes, label_of(node))

        def refuse(graph: GraphProto) -> Graph:
            raise InvalidModel(f"{label_of(node)}: a graph is not a value")

        try:
            return ConstTensor.of(evaluate("Constant", **{attr.name: attr_from_proto(attr, refuse)}))
        except InvalidValue as error:
            raise InvalidModel(f"{label_of(node)}: {error}") from None

    def _outputs(self, graph: Graph, proto: GraphProto, scope: _Scope) -> None:
        names: set[str] = set()
        for info in proto.output:
            value = scope.names.get(info.name)
            if value is None:
                captured = scope.outer.find(info.name) if scope.outer is not None else None
                if captured is None:
                    raise InvalidModel(f"graph {proto.name!r}: output {info.name!r} is not defined")
                value = self._passed_through(graph, captured, info.name)
            elif info.name in names or value in graph.outputs:
                value = self._passed_through(graph, value, info.name)
            names.add(info.name)
            if value.type is None:
                value.type = self._declared(info)
            graph.outputs.append(value)

    def _passed_through(self, graph: Graph, value: Value, name: str) -> Value:
        """An output that is somebody else's value gets a node of its own: outputs are defined where they are listed."""
        version = schema_of("", "Identity", self.opsets.get("", 1)).since_version
        out = Value(name, value.type)
        return graph.add("Identity", [value], None, [out], version=version, name=f"{name}.output").output


def _opsets(proto: ModelProto) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = normal_domain(entry.domain)
        found[domain] = max(entry.version, found.get(domain, entry.version))
        if not -1 << 31 <= entry.version < 1 << 31:
            raise NotSupported(f"the model uses opset {entry.version} of domain {entry.domain!r}, which cannot be")
    if "" not in found and (not found or proto.ir_version < 3):
        found[""] = 1
    newest = onnx.defs.onnx_opset_version()
    version = found.get("", 1)
    if not 1 <= version <= newest:
        raise NotSupported(
            f"the model uses opset {version}; the installed onnx {onnx.__version__} knows 1 to {newest}. "
            "A newer onnx package may know it."
        )
    return found


def _denotations(proto: GraphProto) -> dict[str, list[tuple[str, int]]]:
    """Where the dims of the inputs stand that carry a standard meaning (DATA_BATCH …): (input, axis) by meaning."""
    found: dict[str, list[tuple[str, int]]] = {}
    for info in proto.input:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if dim.denotation:
                found.setdefault(dim.denotation, []).append((info.name, axis))
    return found


def _model_facts(proto: ModelProto) -> dict[str, Any]:
    return {
        "ir_version": proto.ir_version,
        "producer_name": proto.producer_name,
        "producer_version": proto.producer_version,
        "domain": proto.domain,
        "model_version": proto.model_version,
        "doc_string": proto.doc_string,
        "graph_name": proto.graph.name,
        "custom": {p.key: p.value for p in proto.metadata_props},
    }
