"""Applying rules: a work list over the graph, each node tried only with the rules whose last operator it is."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.patterns import Match, Rule, heads, heads_of
from ranvier.graph.tensors import ConstTensor
from ranvier.records import dataclass


class GraphOps:
    """``op.Add(a, b)`` adds a node before a given one and returns its first output.

    ``finish`` completes each new node (its version and result types); arrays and numbers become constants.
    Keywords are attributes; ``_outputs``, ``_domain``, ``_version`` and ``_name`` are our own.
    """

    def __init__(
        self, graph: Graph, before: Node | None, origin: str, finish: Callable[[Node], None] | None = None
    ) -> None:
        self.graph = graph
        self.before = before
        self.origin = origin
        self.finish = finish
        self.made: list[Node] = []

    def __getattr__(self, name: str) -> Callable[..., Value]:
        def make(
            *operands: Any, _outputs: int = 1, _domain: str = "", _version: int = 0, _name: str = "", **attrs: Any
        ) -> Value:
            return self.node(
                name, operands, attrs, outputs=_outputs, domain=_domain, version=_version, name=_name
            ).output

        return make

    def node(
        self,
        op: str,
        operands: Sequence[Any],
        attrs: dict[str, Any] | None = None,
        *,
        outputs: int = 1,
        domain: str = "",
        version: int = 0,
        name: str = "",
    ) -> Node:
        """Add a node and return it, for operators with several outputs. It keeps the name of the node it stands for."""
        values = [x if x is None or isinstance(x, Value) else self.constant(x) for x in operands]
        name = name or (self.before.name if self.before is not None else "")
        node = self.graph.add(
            op,
            values,
            attrs,
            outputs,
            domain=domain,
            version=version,
            name=name,
            origin=self.origin,
            before=self.before,
        )
        if self.finish is not None:
            self.finish(node)
        self.made.append(node)
        return node

    def constant(self, array: Any, name: str = "") -> Value:
        return self.graph.add_constant(array if isinstance(array, ConstTensor) else ConstTensor.of(array), name)


@dataclass
class RewriteStats:
    """What a run of rules did: rewrites by rule, and by rule the reasons why a match was left alone."""

    applied: Counter[str] = field(default_factory=Counter)
    declined: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        return sum(self.applied.values())


class RuleSet:
    """Rules indexed by the operator they end in, and by an operator that must feed it."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = list(rules)
        self._index: dict[tuple[str, str], dict[str, list[int]]] = {}  # -> head of an operand -> positions of rules
        for position, rule in enumerate(self.rules):
            for pattern in rule.patterns:
                by_head = self._index.setdefault((pattern.domain, pattern.op), {})
                for head in heads(pattern):
                    positions = by_head.setdefault(head, [])
                    if position not in positions:
                        positions.append(position)

    def apply(self, graph: Graph, finish: Callable[[Node], None] | None = None) -> RewriteStats:
        """Rewrite until no rule fits, in this graph and in nested ones."""
        stats = RewriteStats()
        for each in list(graph.all_graphs()):
            self._apply(each, finish, stats)
        return stats

    def _apply(self, graph: Graph, finish: Callable[[Node], None] | None, stats: RewriteStats) -> None:
        pending = deque(node for node in graph if (node.domain, node.op) in self._index)
        waiting = {id(node) for node in pending}
        while pending:
            node = pending.popleft()
            waiting.discard(id(node))
            if node.graph is not graph:
                continue
            for rule in self._candidates(node):
                made = self._try(rule, graph, node, finish, stats)
                if made is None:
                    continue
                # what was made, and whoever reads it, may now match something else
                readers = [user for n in made for v in n.outputs for user, _ in v.uses]
                for n in [*made, *readers]:
                    if n.graph is graph and (n.domain, n.op) in self._index and id(n) not in waiting:
                        pending.append(n)
                        waiting.add(id(n))
                break

    def _candidates(self, node: Node) -> Iterable[Rule]:
        by_head = self._index[node.domain, node.op]
        found = {position for head in heads_of(node) for position in by_head.get(head, ())}
        return [self.rules[position] for position in sorted(found)]

    def _try(
        self, rule: Rule, graph: Graph, node: Node, finish: Callable[[Node], None] | None, stats: RewriteStats
    ) -> list[Node] | None:
        match, reason = _first_sound(rule, node)
        if match is None:
            if reason is not None:
                stats.declined.setdefault(rule.name, Counter())[reason] += 1
            return None
        ops = GraphOps(graph, node, rule.name, finish)
        result = rule.rewrite(ops, match)
        if result is None:
            discard(graph, ops.made)
            return None
        results = [result] if isinstance(result, Value) else list(result)
        for old, new in zip(node.outputs, results):
            substitute(old, new, ops)
        remove_dead(graph, match.nodes)
        stats.applied[rule.name] += 1
        return ops.made or [n for v in results if (n := v.producer) is not None]


def _first_sound(rule: Rule, node: Node) -> tuple[Match | None, str | None]:
    """The first match that the rule's own check lets pass, else the first reason why none did."""
    reason: str | None = None
    for match in rule.matches(node):
        found = rule.check(match)
        if found is None:
            return match, None
        reason = reason or found
    return None, reason


def substitute(old: Value, new: Value, ops: GraphOps | None = None) -> None:
    """Let ``new`` take the place of ``old``.

    Where ``old`` is an output of its graph, its name is the caller's: a node result takes the name over; an input, a
    constant or a value that is an output already goes through an Identity.
    """
    if old.is_graph_output:
        owner = old.owner
        assert owner is not None
        taken = new.producer is None or new.producer.graph is not owner or new.is_graph_output
        if taken:
            builder = ops or GraphOps(owner, old.producer, "substitute")
            new = builder.Identity(new)
            new.type = new.type or old.type
        new.name = old.name
    elif new.producer is not None and ops is not None and new.producer in ops.made and not new.is_graph_output:
        new.name = old.name
    if new.type is None:
        new.type = old.type
    elif new.producer is not None:  # both are one value: what is known of either holds
        new.type = new.type.merge(old.type)
    old.replace_by(new)


def remove_dead(graph: Graph, nodes: Iterable[Node]) -> int:
    """Remove those of ``nodes`` whose results nobody needs, also once others of them are gone; returns how many."""
    removed = 0
    left = [node for node in nodes if node.graph is graph]
    while left:
        needed = [node for node in left if any(v.uses or v.is_graph_output for v in node.outputs)]
        if len(needed) == len(left):
            break
        for node in left:
            if node not in needed:
                graph.remove(node)
                removed += 1
        left = needed
    return removed


def discard(graph: Graph, made: Sequence[Node]) -> None:
    """Take back nodes that a rewrite made and then did not want."""
    remove_dead(graph, reversed(made))


__all__ = ["GraphOps", "Match", "RewriteStats", "RuleSet", "discard", "remove_dead", "substitute"]
