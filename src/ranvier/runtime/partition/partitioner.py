"""Which provider runs which node, and why."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ranvier.errors import MissingOp, UnsupportedOp
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops import registry
from ranvier.providers.base import Decline, ExecutionProvider, Subgraph
from ranvier.providers.registry import REGISTRY
from ranvier.records import dataclass
from ranvier.runtime.partition.grouping import groups
from ranvier.runtime.transfer import HOST, space_of

if TYPE_CHECKING:
    from ranvier.runtime.predicted import Prediction


@dataclass(frozen=True)
class Placement:
    """One node: who runs it, and who was asked before and declined."""

    node: Node
    provider: str
    note: str = ""
    declined: tuple[tuple[str, str], ...] = ()  # (provider, reason)


@dataclass(frozen=True)
class Beside:
    """The place of a part that runs at the same time as others of the host: those of its wave in other lanes."""

    wave: int
    lane: int
    threads: int  # that the part may use


@dataclass(frozen=True)
class Part:
    """Nodes that one provider compiles together. The parts of a wave stand next to each other, lane by lane."""

    provider: ExecutionProvider
    subgraph: Subgraph
    beside: Beside | None = None


@dataclass
class Partitioning:
    """All parts in an order that runs, and the placement of every node."""

    parts: list[Part]
    placements: list[Placement]
    transfers: list[tuple[Value, str, str]] = field(default_factory=list)  # (value, from device, to device)
    predicted: Prediction | None = None  # where costs decided


Blocked = dict[tuple[str, int], str]  # (provider, identity of a node) -> why it does not get the node


class Partitioner:
    """Asks the providers in their order of preference; a node goes to the first that takes it."""

    def __init__(self, providers: Sequence[ExecutionProvider], blocked: Blocked | None = None) -> None:
        self.providers = list(providers)
        self.blocked = blocked or {}

    def partition(self, graph: Graph) -> Partitioning:
        """Assign every node of ``graph`` (not of nested graphs: whoever runs the outer node runs them)."""
        chosen, notes, declined = self._assign(graph)
        missing = [node for node in graph if id(node) not in chosen]
        if missing:
            raise UnsupportedOp(missing_ops(missing, declined))
        parts: list[Part] = []
        for provider, nodes in _groups(graph, chosen):
            parts.append(Part(provider, subgraph_of(graph, nodes)))
        placements = [
            Placement(n, chosen[id(n)].name, notes.get(id(n), ""), tuple(declined.get(id(n), ()))) for n in graph
        ]
        return Partitioning(parts, placements, _transfers(graph, chosen))

    def _assign(
        self, graph: Graph
    ) -> tuple[dict[int, ExecutionProvider], dict[int, str], dict[int, list[tuple[str, str]]]]:
        chosen: dict[int, ExecutionProvider] = {}
        notes: dict[int, str] = {}
        declined: dict[int, list[tuple[str, str]]] = {}
        for provider in self.providers:
            open_nodes = [node for node in graph if id(node) not in chosen]
            if not open_nodes:
                break
            for answer in REGISTRY.claims.claims(provider, graph, open_nodes):
                if isinstance(answer, Decline):
                    declined.setdefault(id(answer.node), []).append((provider.name, answer.reason))
                    continue
                for node in answer.nodes:
                    reason = self.blocked.get((provider.name, id(node)))
                    if reason is not None:
                        declined.setdefault(id(node), []).append((provider.name, reason))
                        continue
                    chosen[id(node)] = provider
                    notes[id(node)] = answer.note
        return chosen, notes, declined


def missing_ops(nodes: Iterable[Node], declined: dict[int, list[tuple[str, str]]]) -> list[MissingOp]:
    """The operators of ``nodes``, each once, with the nodes that use it and the reasons given."""
    found: dict[tuple[str, str, int], list[Node]] = {}
    for node in nodes:
        found.setdefault((node.domain, node.op, node.version), []).append(node)
    missing: list[MissingOp] = []
    for (domain, op, version), users in found.items():
        reasons = dict.fromkeys(f"{who}: {why}" for n in users for who, why in declined.get(id(n), ()))
        missing.append(MissingOp(domain, op, version, tuple(n.name or n.op for n in users), "; ".join(reasons)))
    return missing


def unsupported_ops(graph: Graph, providers: Sequence[ExecutionProvider]) -> list[MissingOp]:
    """Every operator in the graph and its subgraphs that no provider takes: found at load, all at once."""
    left: list[Node] = []
    reasons: dict[int, list[tuple[str, str]]] = {}
    for each in graph.all_graphs():
        # the last provider takes most, and is asked alone first: who would get a node is of no interest here
        taken, _, _ = Partitioner(providers[-1:])._assign(each)
        if len(taken) == len(each):
            continue
        chosen, _, declined = Partitioner(providers)._assign(each)
        reasons.update(declined)
        left.extend(node for node in each if id(node) not in chosen)
    return missing_ops(left, reasons)


def _groups(graph: Graph, chosen: dict[int, ExecutionProvider]) -> list[tuple[ExecutionProvider, list[Node]]]:
    """The parts, as few as can be; see :func:`grouping.groups`."""
    nodes = list(graph)
    providers = list(dict.fromkeys(chosen[id(node)] for node in nodes))
    index = {id(provider): k for k, provider in enumerate(providers)}
    owner = [index[id(chosen[id(node)])] for node in nodes]
    whole = [provider.capability().whole_parts for provider in providers]
    before = needs(nodes) if len(providers) > 1 else [set[int]() for _ in nodes]
    found = groups(before, owner, whole, [1.0] * len(providers))
    return [(providers[who], [nodes[k] for k in part]) for who, part in found]


def needs(nodes: Sequence[Node]) -> list[set[int]]:
    """For every node the positions of those that must run before it: makers of what it reads, earlier effects."""
    index = {id(node): k for k, node in enumerate(nodes)}
    found: list[set[int]] = []
    effects: int | None = None  # the last node that must not change places with others like it
    for k, node in enumerate(nodes):
        before = {index[id(v.producer)] for v in node.dependencies() if id(v.producer) in index}
        if has_effects(node):
            if effects is not None:
                before.add(effects)
            effects = k
        found.append(before)
    return found


def has_effects(node: Node) -> bool:
    """Does it matter when the node runs: has it effects, does it draw random numbers, or may a body of it?"""
    if node.has_subgraphs:
        return any(has_effects(inner) for body in node.subgraphs() for inner in body)
    definition = registry.find(node.domain, node.op, node.version)
    return definition is None or not definition.traits.isdisjoint(("impure", "random"))


def subgraph_of(graph: Graph, nodes: Sequence[Node]) -> Subgraph:
    """The part made of ``nodes``: what it reads from outside, and what others need of what it makes."""
    inside = {id(n) for n in nodes}
    made = {v for n in nodes for v in n.outputs}
    reads = dict.fromkeys(v for n in nodes for v in n.dependencies() if v not in made)
    outputs = set(graph.outputs)
    needed = [
        v for n in nodes for v in n.outputs if v in outputs or any(_outside(user, inside, graph) for user, _ in v.uses)
    ]
    return Subgraph(tuple(nodes), tuple(reads), tuple(needed), graph)


def narrowed(part: Subgraph, wanted: Container[Value]) -> Subgraph:
    """The nodes of the part that ``wanted`` depends on."""
    outputs = tuple(v for v in part.outputs if v in wanted)
    needed = set(outputs)
    nodes: list[Node] = []
    for node in reversed(part.nodes):
        if any(v in needed for v in node.outputs):
            needed.update(node.dependencies())
            nodes.append(node)
    return Subgraph(tuple(nodes[::-1]), tuple(v for v in part.inputs if v in needed), outputs, part.graph)


def _outside(user: Node, inside: set[int], graph: Graph) -> bool:
    """Is a user outside the part? A use inside a nested graph counts for the node that holds it."""
    node: Node | None = user
    while node is not None and node.graph is not graph:
        node = node.graph.parent if node.graph is not None else None
    return node is None or id(node) not in inside


def _transfers(graph: Graph, chosen: dict[int, ExecutionProvider]) -> list[tuple[Value, str, str]]:
    """Values that are needed in another memory than the one they are made in; inputs and outputs are on the host."""
    found: dict[tuple[Value, str, str], None] = {}
    spaces = {id(provider): space_of(provider) for provider in {id(p): p for p in chosen.values()}.values()}
    if all(space == HOST for space in spaces.values()):
        return []

    def made_in(value: Value) -> str:
        producer = value.producer
        return HOST if producer is None or id(producer) not in chosen else spaces[id(chosen[id(producer)])]

    for node in graph:
        target = spaces[id(chosen[id(node)])]
        for value in node.dependencies():
            if made_in(value) != target and (value.const is None or value.producer is not None):
                found[value, made_in(value), target] = None
    for value in graph.outputs:
        if made_in(value) != HOST:
            found[value, made_in(value), HOST] = None
    return list(found)
