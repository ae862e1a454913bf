"""A Graph as an ONNX model: ``to_proto`` in memory, ``save`` to a file, with weights beside it when they are large."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import EncodeError
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.formats.files import write_files
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.names import Names
from ranvier.graph.tensors import ConstTensor
from ranvier.ops.proto import array_tensor, node_to_proto, schema_of, type_to_proto

EXTERNAL_FROM = 1 << 30  # a model larger than this is saved with external data: protobuf ends at 2 GiB
_EXTERNAL_TENSOR_FROM = 1024
_ALIGN = 4096  # page-aligned weights can be mapped and used as they are


def to_proto(graph: Graph) -> ModelProto:
    """The model with all weights inside."""
    return _Writer(graph).model()


def save(graph: Graph, path: str | os.PathLike[str], *, external_data: bool | None = None) -> None:
    """Write the model to ``path``, wholly or not at all.

    Weights go to ``<name>.data`` beside it when ``external_data`` is true, or when it is None and they are large.
    """
    target = Path(path)
    weights = sum(v.const.nbytes for g in graph.all_graphs() for v in g.constants.values() if v.const is not None)
    external = weights > EXTERNAL_FROM if external_data is None else external_data
    if not external:
        write_files({target: [_serialised(to_proto(graph))]})
        return
    writer = _Writer(graph, external=f"{target.name}.data")
    model = writer.model()
    # the weights first: whoever sees the model file sees its weights too
    write_files({target.with_name(f"{target.name}.data"): writer.external_bytes(), target: [_serialised(model)]})


def _serialised(model: ModelProto) -> bytes:
    try:
        data: bytes = model.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise NotSupported(
            f"the model cannot be one protobuf message, which ends at 2 GiB: {error}; save it with external_data=True"
        ) from error
    return data


class _Writer:
    def __init__(self, graph: Graph, external: str | None = None) -> None:
        self.graph = graph
        self.external = external
        self.placed: list[tuple[int, ConstTensor]] = []  # (offset, tensor) in the external file
        self.end = 0
        self.names: dict[Value, str] = {}
        self._unique = Names()
        # interface names are the caller's: they are taken before any inner value may claim them
        for value in [*graph.inputs, *graph.outputs]:
            self.name(value)

    def model(self) -> ModelProto:
        facts = self.graph.metadata
        proto = helper.make_model(self._graph(self.graph), opset_imports=self._opset_imports())
        proto.ir_version = max(int(facts.get("ir_version") or 0), 10)
        proto.ir_version = min(proto.ir_version, onnx.IR_VERSION)
        if any(d.bits < 4 or d.name.startswith("float6_") for d in _dtypes(self.graph)):
            proto.ir_version = onnx.IR_VERSION
        for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
            if facts.get(name):
                setattr(proto, name, facts[name])
        for key, text in facts.get("custom", {}).items():
            proto.metadata_props.add(key=key, value=text)
        return proto

    def external_bytes(self) -> Iterator[bytes]:
        at = 0
        for offset, tensor in self.placed:
            yield b"\0" * (offset - at)
            data = array_tensor(tensor.numpy()).raw_data
            yield data
            at = offset + len(data)

    def name(self, value: Value) -> str:
        """The name of a value in the file, unique over the model: ONNX forbids shadowing in subgraphs."""
        found = self.names.get(value)
        if found is None:
            found = self.names[value] = self._unique.unique(value.name)
        return found

    def _graph(self, graph: Graph) -> GraphProto:
        proto = GraphProto(name=graph.name or "graph", doc_string=graph.doc)
        for value in graph.inputs:
            proto.input.append(self._info(value))
            default = graph.defaults.get(value.name)
            if default is not None:
                proto.initializer.append(self._tensor(default, self.name(value)))
        for value in graph.constants.values():
            if value.const is not None:
                proto.initializer.append(self._tensor(value.const, self.name(value)))
        called = _node_names(graph)
        for node in graph:
            inputs = ["" if v is None else self.name(v) for v in node.inputs]
            outputs = [self.name(v) for v in node.outputs]
            message = node_to_proto(node, inputs, outputs, self._graph)
            message.name = called.get(node, "")
            proto.node.append(message)
        proto.output.extend(self._info(value) for value in graph.outputs)
        return proto

    def _info(self, value: Value) -> ValueInfoProto:
        return ValueInfoProto(name=self.name(value), type=type_to_proto(value.type))

    def _tensor(self, tensor: ConstTensor, name: str) -> TensorProto:
        if self.external is None or tensor.nbytes < _EXTERNAL_TENSOR_FROM or tensor.dtype is DType.string:
            return array_tensor(tensor.numpy(), name)
        bits = tensor.dtype.bits if tensor.dtype.bits in (2, 4) else tensor.dtype.numpy.itemsize * 8
        length = (tensor.size * bits + 7) // 8
        offset = -(-self.end // _ALIGN) * _ALIGN
        self.placed.append((offset, tensor))
        self.end = offset + length
        proto = TensorProto(name=name, data_type=tensor.dtype.onnx, dims=tensor.shape)
        proto.data_location = TensorProto.EXTERNAL
        for key, content in (("location", self.external), ("offset", str(offset)), ("length", str(length))):
            proto.external_data.add(key=key, value=content)
        return proto

    def _opset_imports(self) -> list[Any]:
        nodes: dict[str, list[Node]] = {}
        for node in self.graph.all_nodes():
            nodes.setdefault(node.domain, []).append(node)
        domains = {**dict.fromkeys(nodes, 1), **self.graph.opsets}
        domains.setdefault("", onnx.defs.onnx_opset_version())
        return [
            helper.make_opsetid(domain, _opset_for(domain, wanted, nodes.get(domain, [])))
            for domain, wanted in domains.items()
        ]


def _node_names(graph: Graph) -> dict[Node, str]:
    """The name of each node that has one, no two of them the same, or other tools refuse the file; what a pass made may
    be called like the node it stands for, and gives way to those of the model."""
    names = Names()
    named = [node for node in graph if node.name]
    return {node: names.unique(node.name) for node in sorted(named, key=lambda node: bool(node.origin))}


def _opset_for(domain: str, wanted: int, nodes: list[Node]) -> int:
    """An opset in which every node has the meaning it has here: the model's own, or the newest that fits."""
    known = {(n.op, n.version) for n in nodes if schema_of(domain, n.op, n.version) is not None}
    newest = int(onnx.defs.onnx_opset_version()) if domain == "" else max([wanted, *(v for _, v in known)])
    candidates: list[int] = [wanted, *range(newest, 0, -1)]
    for candidate in candidates:
        there = (schema_of(domain, op, candidate) for op, _ in known)
        if all(found is not None and found.since_version == version for found, (_, version) in zip(there, known)):
            return candidate
    raise NotSupported(
        f"no single opset of domain {domain or 'ai.onnx'!r} has all operators of the graph as they are: "
        f"{', '.join(sorted({f'{op}-{version}' for op, version in known}))}"
    )


def _dtypes(graph: Graph) -> Iterator[DType]:
    for g in graph.all_graphs():
        for value in g.values():
            dtype = getattr(value.type, "dtype", None)
            if dtype is not None:
                yield dtype
