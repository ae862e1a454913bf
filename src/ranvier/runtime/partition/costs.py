"""From a graph and providers to numbers: ask who takes what, ask a cost model how long, write it down as a Problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from typing import Protocol

from ranvier.devices import CPU
from ranvier.errors import UnsupportedOp
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.providers.base import Decline, ExecutionProvider
from ranvier.providers.registry import REGISTRY
from ranvier.records import dataclass
from ranvier.runtime.partition.partitioner import Blocked, has_effects, missing_ops
from ranvier.runtime.partition.pins import Rules, resolve_pins
from ranvier.runtime.partition.problem import CANNOT, OUTSIDE, Choice, Flow, Link, Problem


class CostModel(Protocol):
    """What the optimiser must know of a machine; a calibration provides it."""

    def node_seconds(self, node: Node, provider: ExecutionProvider) -> float | None:
        """How long a node takes there; None where nothing is known about it."""
        ...

    def nbytes(self, value: Value) -> float:
        """The size of a value, guessed where a dimension is not a number."""
        ...

    def transfer(self, source: str, target: str) -> Link:
        """The way between two memories."""
        ...

    def launch(self, provider: ExecutionProvider) -> float:
        """Seconds to start a part."""
        ...

    def capacity(self, provider: ExecutionProvider) -> float | None:
        """Bytes of weights a provider can hold; None where that is no concern."""
        ...

    def memory(self, provider: ExecutionProvider) -> str:
        """The memory a provider works in: its device, or a name of its own where handing values over takes time."""
        ...

    def engine(self, provider: ExecutionProvider) -> tuple[int | None, int]:
        """The engine a provider runs on (None: one of its own) and how many parts run at once there."""
        ...


@dataclass(frozen=True)
class Claims:
    """What the providers said about the nodes of a graph, all of them about all nodes."""

    nodes: Sequence[Node]
    notes: Mapping[tuple[int, int], str]  # (node, provider), by position: taken, with the provider's remark
    declined: Mapping[tuple[int, int], str]  # the reason


@dataclass(frozen=True)
class Posed:
    """A problem, with the words that belong to its numbers."""

    problem: Problem
    claims: Claims
    values: Sequence[Value]  # of the flows
    devices: Sequence[str]  # of the memory spaces
    reasons: Mapping[tuple[int, int], str] = field(default_factory=dict)  # why a provider cannot have a node
    unknown: frozenset[tuple[int, int]] = frozenset()  # (node, provider) whose time is a guess


def ask(graph: Graph, providers: Sequence[ExecutionProvider]) -> Claims:
    """Ask every provider about every node."""
    nodes = list(graph)
    index = {id(node): k for k, node in enumerate(nodes)}
    notes: dict[tuple[int, int], str] = {}
    declined: dict[tuple[int, int], str] = {}
    for p, provider in enumerate(providers):
        for answer in REGISTRY.claims.claims(provider, graph):
            if isinstance(answer, Decline):
                declined[index[id(answer.node)], p] = answer.reason
            else:
                notes.update({(index[id(node)], p): answer.note for node in answer.nodes})
    return Claims(nodes, notes, declined)


def restricted(claims: Claims, providers: Sequence[ExecutionProvider], blocked: Blocked) -> Claims:
    """Claims without nodes that are kept from a provider; one that is a last resort gets what nobody else takes."""
    notes = dict(claims.notes)
    declined = dict(claims.declined)
    for k, p in claims.notes:
        reason = blocked.get((providers[p].name, id(claims.nodes[k])))
        if reason is not None:
            del notes[k, p]
            declined[k, p] = reason
    last = {p for p, provider in enumerate(providers) if provider.capability().last_resort}
    taken = {k for k, p in notes if p not in last}
    for k, p in list(notes):
        if p in last and k in taken:
            del notes[k, p]
            declined[k, p] = "a last resort, and others take the node"
    return Claims(claims.nodes, notes, declined)


def pose(
    graph: Graph,
    providers: Sequence[ExecutionProvider],
    model: CostModel,
    pins: Rules | None = None,
    claims: Claims | None = None,
) -> Posed:
    """The problem of placing ``graph``; raises where nobody takes a node, or nobody a pin allows does."""
    claims = ask(graph, providers) if claims is None else claims
    nodes = claims.nodes
    pinned = resolve_pins(pins, nodes, providers) if pins else {}
    reasons = dict(claims.declined)
    for k, (allowed, rule) in pinned.items():
        for p in range(len(providers)):
            if p not in allowed and (k, p) in claims.notes:
                reasons[k, p] = f"pinned elsewhere by {rule!r}"
    open_ = [
        [p for p in range(len(providers)) if (k, p) in claims.notes and (k not in pinned or p in pinned[k][0])]
        for k in range(len(nodes))
    ]
    _check(nodes, open_, providers, reasons)
    seconds, unknown = _seconds(nodes, open_, providers, model)
    devices = list(dict.fromkeys([str(CPU), *(model.memory(provider) for provider in providers)]))
    choices = [_choice(provider, devices, model) for provider in providers]
    values, flows = _flows(graph, nodes, model)
    links = {
        (a, b): model.transfer(source, target)
        for a, source in enumerate(devices)
        for b, target in enumerate(devices)
        if a != b
    }
    effects = [k for k, node in enumerate(nodes) if has_effects(node)]
    problem = Problem(choices, seconds, flows, links, _weights(nodes), list(pairwise(effects)))
    return Posed(problem, claims, values, devices, reasons, frozenset(unknown))


def size_of(value: Value, dims: Mapping[str, int]) -> float:
    """Bytes of a value whose symbolic dimensions have these sizes; one for those that are not named."""
    kind = value.type.bind(dims) if value.type is not None else None
    if not isinstance(kind, TensorType) or kind.shape is None or kind.dtype is None:
        return 0.0
    count = 1
    for dim in kind.shape:
        count *= dim if isinstance(dim, int) else 1
    return float(kind.dtype.nbytes(count))


def _check(
    nodes: Sequence[Node],
    open_: Sequence[Sequence[int]],
    providers: Sequence[ExecutionProvider],
    reasons: Mapping[tuple[int, int], str],
) -> None:
    left = [k for k, allowed in enumerate(open_) if not allowed]
    if left:
        said = {
            id(nodes[k]): [(providers[p].name, reasons[k, p]) for p in range(len(providers)) if (k, p) in reasons]
            for k in left
        }
        raise UnsupportedOp(missing_ops([nodes[k] for k in left], said))


def _seconds(
    nodes: Sequence[Node], open_: Sequence[Sequence[int]], providers: Sequence[ExecutionProvider], model: CostModel
) -> tuple[list[list[float]], set[tuple[int, int]]]:
    """Times by node and provider; where the model knows none, the longest known of that node: a guess never wins."""
    found: list[list[float]] = []
    unknown: set[tuple[int, int]] = set()
    for k, (node, allowed) in enumerate(zip(nodes, open_)):
        row = [CANNOT] * len(providers)
        told = {p: model.node_seconds(node, providers[p]) for p in allowed}
        guess = max((seconds for seconds in told.values() if seconds is not None), default=0.0)
        for p, seconds in told.items():
            row[p] = guess if seconds is None else seconds
            if seconds is None:
                unknown.add((k, p))
        found.append(row)
    return found, unknown


def _choice(provider: ExecutionProvider, devices: Sequence[str], model: CostModel) -> Choice:
    engine, lanes = model.engine(provider)
    return Choice(
        provider.name,
        devices.index(model.memory(provider)),
        model.launch(provider),
        provider.capability().whole_parts,
        model.capacity(provider),
        engine,
        lanes,
    )


def _flows(graph: Graph, nodes: Sequence[Node], model: CostModel) -> tuple[list[Value], list[Flow]]:
    index = {id(node): k for k, node in enumerate(nodes)}
    readers: dict[Value, list[int]] = {}
    for k, node in enumerate(nodes):
        for value in dict.fromkeys(node.dependencies()):
            if value.const is None:
                readers.setdefault(value, []).append(k)
    outputs = dict.fromkeys(value for value in graph.outputs if value.const is None)
    values = list(dict.fromkeys([*readers, *outputs]))
    flows: list[Flow] = []
    for value in values:
        producer = index.get(id(value.producer), OUTSIDE) if value.producer is not None else OUTSIDE
        flows.append(Flow(producer, tuple(readers.get(value, ())), model.nbytes(value), value in outputs))
    return values, flows


def _weights(nodes: Sequence[Node]) -> list[float]:
    """Bytes of constants, each counted at the first node that reads it."""
    seen: set[int] = set()
    found: list[float] = []
    for node in nodes:
        total = 0.0
        for value in node.dependencies():
            if value.const is not None and id(value) not in seen:
                seen.add(id(value))
                total += value.const.nbytes
        found.append(total)
    return found
