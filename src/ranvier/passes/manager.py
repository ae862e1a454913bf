"""Runs the passes of a level in order, checks what they require, and reports what each one did."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

from ranvier.config import LEVELS, Level, SessionConfig
from ranvier.errors import InvalidConfig, InvalidGraph, nearest
from ranvier.graph.ir import Graph, Node
from ranvier.graph.verify import verify
from ranvier.logs import logger
from ranvier.ops.estimate import node_cost, seconds
from ranvier.passes.base import OptimizationPass, PassContext
from ranvier.records import dataclass

LOADED = frozenset({"types"})  # what holds for a graph fresh from a front end


@dataclass(frozen=True)
class PassReport:
    """One pass, once: time, what changed, nodes before and after, and the estimated seconds saved per run, where
    somebody asked for that."""

    name: str
    seconds: float
    changes: int
    nodes_before: int
    nodes_after: int
    gain: float
    notes: dict[str, int] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)


class PassManager:
    """An ordered list of passes; the list is checked once, against what each requires."""

    def __init__(self, passes: Sequence[OptimizationPass], *, check: bool = False) -> None:
        self.passes = list(passes)
        self.check = check  # verify the graph after every pass
        _check_order(self.passes)

    def run(self, graph: Graph, config: SessionConfig | None = None, *, estimated: bool = False) -> list[PassReport]:
        """Optimize in place; InvalidGraph names the pass that broke an invariant and those run before it.

        ``estimated``: with the gain of each pass, which takes about as long as the passes themselves.
        """
        config = config or SessionConfig()
        check = self.check or config.debug > 0
        reports: list[PassReport] = []
        estimate = _Estimate()
        before = estimate.seconds(graph) if estimated else 0.0
        for step in self.passes:
            ctx = PassContext(config)
            nodes = len(graph)
            started = time.perf_counter()
            changed = step.run(graph, ctx)
            elapsed = time.perf_counter() - started
            if check:
                self._verify(graph, step, reports)
            after = estimate.seconds(graph) if estimated and changed else before
            report = PassReport(
                step.name, elapsed, ctx.changes, nodes, len(graph), before - after, dict(ctx.notes), dict(ctx.declined)
            )
            reports.append(report)
            if config.debug > 0:
                logger.debug("pass %s: %d changes, %d → %d nodes", step.name, ctx.changes, nodes, len(graph))
            before = after
        return reports

    def _verify(self, graph: Graph, step: OptimizationPass, done: Iterable[PassReport]) -> None:
        try:
            verify(graph)
        except InvalidGraph as error:
            earlier = ", ".join(r.name for r in done) or "none"
            raise InvalidGraph(f"after pass {step.name!r} (before it: {earlier}): {error}") from error


class _Estimate:
    """Estimated seconds of a graph between passes: most nodes are as they were, and are not looked at again."""

    def __init__(self) -> None:
        self._known: dict[Node, tuple[list[int], list[Any], float]] = {}

    def seconds(self, graph: Graph) -> float:
        total = 0.0
        known: dict[Node, tuple[list[int], list[Any], float]] = {}
        for node in graph.all_nodes():
            # types are never changed in place, so the same objects (kept, that they stay these) mean the same sizes
            now: list[Any] = [v.type for v in node._inputs if v is not None]
            now += [v.type for v in node.outputs]
            now += node.attrs.values()
            marks = list(map(id, now))
            found = self._known.get(node)
            if found is None or found[0] != marks:
                found = (marks, now, seconds(node_cost(node)))
            known[node] = found
            total += found[2]
        self._known = known
        return total


def _check_order(passes: Iterable[OptimizationPass]) -> None:
    holds = set(LOADED)
    for step in passes:
        missing = step.requires - holds
        if missing:
            raise InvalidConfig(f"pass {step.name!r} requires {sorted(missing)}, which no earlier pass ensures")
        holds -= step.breaks
        holds |= step.ensures


def passes_for(level: Level, available: Sequence[OptimizationPass], disabled: Iterable[str] = ()) -> PassManager:
    """The passes of a level without the disabled ones, and without those that need what a disabled one ensures.

    An unknown name raises with the nearest one.
    """
    known = {p.name for p in available}
    off = set(disabled)
    for name in off - known:
        raise InvalidConfig(f"unknown pass {name!r}{nearest(name, known)}")
    if level == "none":
        return PassManager([])
    rank = LEVELS.index(level)
    chosen: list[OptimizationPass] = []
    holds = set(LOADED)
    for step in available:
        if LEVELS.index(step.level) > rank or step.name in off or (off and not step.requires <= holds):
            continue
        chosen.append(step)
        holds = (holds - step.breaks) | step.ensures
    return PassManager(chosen)
