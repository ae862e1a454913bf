"""A part of a graph as an ONNX model: how other runtimes and other processes are told what to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.errors import KernelError
from ranvier.formats import onnx as onnx_format
from ranvier.graph.extract import extract
from ranvier.graph.ir import Node
from ranvier.graph.types import Symbol, TensorType, Type
from ranvier.ops import registry
from ranvier.providers.base import Subgraph
from ranvier.records import dataclass

_PLAIN_OPSET = 13  # of a model without a node of the standard's main domain: it has to name one, which all know


@dataclass(frozen=True)
class PartModel:
    """``positions`` of the part's inputs are those the model takes; the others are constants, which it holds."""

    data: bytes
    text: str
    positions: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[Type | None, ...]  # of the outputs
    constant_bytes: int


def part_model(part: Subgraph) -> PartModel:
    """The model of a part, in the oldest opsets that have its nodes: others may not know the newest yet. NotSupported
    where no one opset fits all of them."""
    taken = extract(part.nodes, part.inputs, part.outputs, name=part.label)
    for node in taken.all_nodes():
        taken.opsets[node.domain] = max(node.version, taken.opsets.get(node.domain, 1))
    taken.opsets.setdefault("", _PLAIN_OPSET)
    return PartModel(
        onnx_format.to_proto(taken).SerializeToString(),
        str(taken),
        tuple(k for k, v in enumerate(part.inputs) if v.const is None or v.producer is not None),
        tuple(v.name for v in taken.inputs),
        tuple(v.name for v in taken.outputs),
        tuple(v.type for v in part.outputs),
        sum(v.const.nbytes for v in part.inputs if v.const is not None and v.producer is None),
    )


def check_results(types: Sequence[Type | None], results: Sequence[Any], dims: Mapping[str, int], provider: str) -> None:
    """Raise KernelError where somebody else's results are not what the graph says they are. Another runtime may mean
    something else by an operator, and others compute with what it returns: better they do it all themselves."""
    if len(results) != len(types):
        raise KernelError(f"{provider} returned {len(results)} results, not {len(types)}", provider=provider)
    for k, (kind, result) in enumerate(zip(types, results)):
        if not isinstance(kind, TensorType):
            continue
        wrong = kind.dtype is not None and result.dtype != kind.dtype.numpy
        if kind.shape is not None and not wrong:
            sizes = [dims.get(d.name) if isinstance(d, Symbol) else d for d in kind.shape]
            wrong = len(sizes) != result.ndim or any(a is not None and a != b for a, b in zip(sizes, result.shape))
        if wrong:
            found = f"{result.dtype}{list(result.shape)}"
            raise KernelError(f"{provider} returned {found} for result {k}, which is {kind}", provider=provider)


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
