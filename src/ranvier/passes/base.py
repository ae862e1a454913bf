"""What a pass is, and what it may use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import field
from typing import ClassVar, Protocol

from ranvier.config import Level, SessionConfig
from ranvier.graph.ir import Graph
from ranvier.graph.patterns import Rule
from ranvier.graph.rewrite import RuleSet
from ranvier.ops import complete
from ranvier.records import dataclass


@dataclass
class PassContext:
    """Options, and a place for a pass to say what it did and what it left alone."""

    config: SessionConfig = field(default_factory=SessionConfig)
    changes: int = 0
    notes: Counter[str] = field(default_factory=Counter)  # "rule or step" -> how often
    declined: Counter[str] = field(default_factory=Counter)  # "rule: reason" -> how often

    def changed(self, what: str, times: int = 1) -> None:
        self.changes += times
        self.notes[what] += times

    def left(self, what: str, reason: str) -> None:
        self.declined[f"{what}: {reason}"] += 1


class OptimizationPass(Protocol):
    """One step of optimization, in place.

    ``requires`` and ``ensures`` name properties of the graph (``types``: every value carries what is known of its
    type; ``modern``: operators stand in their newest form where that is possible; ``folded``: no operator has only
    constant operands). ``breaks`` names those that may no longer hold afterwards.
    """

    name: ClassVar[str]
    level: ClassVar[Level]  # the lowest level that runs it
    requires: ClassVar[frozenset[str]]
    ensures: ClassVar[frozenset[str]]
    breaks: ClassVar[frozenset[str]]

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Change the graph; True when something changed."""
        ...


class RulePass:
    """A pass made of rewrite rules."""

    name: ClassVar[str] = ""
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()
    rules: ClassVar[Iterable[type[Rule]]] = ()
    _sets: ClassVar[dict[type, RuleSet]] = {}

    @classmethod
    def rule_set(cls) -> RuleSet:
        found = cls._sets.get(cls)
        if found is None:
            found = cls._sets[cls] = RuleSet([rule() for rule in cls.rules])
        return found

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        stats = self.rule_set().apply(graph, complete)
        for rule, count in stats.applied.items():
            ctx.changed(rule, count)
        for rule, reasons in stats.declined.items():
            for reason, count in reasons.items():
                ctx.declined[f"{rule}: {reason}"] += count
        return stats.changes > 0
