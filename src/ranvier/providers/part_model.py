"""A part of a graph as an ONNX model: how other runtimes and other processes are told what to run."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.formats import onnx as onnx_format
from ranvier.graph.extract import extract
from ranvier.graph.ir import Node
from ranvier.graph.types import TensorType
from ranvier.ops import registry
from ranvier.providers.base import Subgraph


@dataclass(frozen=True)
class PartModel:
    """``positions`` of the part's inputs are those the model takes; the others are constants, which it holds."""

    data: bytes
    text: str
    positions: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constant_bytes: int


def part_model(part: Subgraph) -> PartModel:
    """The model of a part, in the oldest opsets that have its nodes: others may not know the newest yet. NotSupported
    where no one opset fits all of them."""
    taken = extract(part.nodes, part.inputs, part.outputs, name=part.label)
    for node in taken.all_nodes():
        taken.opsets[node.domain] = max(node.version, taken.opsets.get(node.domain, 1))
    return PartModel(
        onnx_format.to_proto(taken).SerializeToString(),
        str(taken),
        tuple(k for k, v in enumerate(part.inputs) if v.const is None or v.producer is not None),
        tuple(v.name for v in taken.inputs),
        tuple(v.name for v in taken.outputs),
        sum(v.const.nbytes for v in part.inputs if v.const is not None and v.producer is None),
    )


def reason_against_moving(node: Node) -> str | None:
    """Why a node cannot be run by somebody else from its model alone; None where it can.

    Random numbers and effects stay here: another runtime draws other numbers. Types must be known, because what comes
    back has to fit what was planned.
    """
    definition = registry.find(node.domain, node.op, node.version)
    if definition is None:
        return "no operator of this name is declared"
    if not definition.traits.isdisjoint(("impure", "random")):
        return "its result depends on more than its operands"
    for value in [*node.dependencies(), *node.outputs]:
        if value.type is None:
            if value.uses or value.is_graph_output:
                return f"the type of {value.name!r} is not known"
        elif not isinstance(value.type, TensorType):
            return f"{value.name!r} is a {value.type}"
        elif value.type.dtype is None or value.type.dtype.name == "string":
            return f"{value.name!r} is of {value.type.dtype or 'an unknown element type'}"
    return None
