"""Why every node is where it is: what each provider would have cost, or why it could not have the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranvier.records import dataclass
from ranvier.runtime.partition.problem import CANNOT, Problem


@dataclass(frozen=True)
class Option:
    """One provider for one node, all other nodes staying where they are."""

    provider: str
    seconds: float | None  # of the node alone; None: it cannot have the node
    transfer: float | None  # more (or less) for transfers than with the chosen provider
    total: float | None  # more (or less) altogether, launches apart
    reason: str  # "chosen", why it cannot, or why it is not better


@dataclass(frozen=True)
class Explanation:
    """One node: where it runs, and what the alternatives were."""

    node: int
    chosen: str
    options: tuple[Option, ...]


def explain(
    problem: Problem, owner: Sequence[int], reasons: Mapping[tuple[int, int], str] | None = None
) -> list[Explanation]:
    """For every node all providers in their order; ``reasons`` (node, provider) say why one cannot have a node."""
    placed = list(owner)
    flows = [problem.flow_seconds(flow, placed) for flow in problem.flows]
    said = reasons or {}
    found: list[Explanation] = []
    for node, who in enumerate(owner):
        options = tuple(
            _option(problem, placed, flows, node, p, said.get((node, p), "not supported"))
            for p in range(len(problem.choices))
        )
        found.append(Explanation(node, problem.choices[who].name, options))
    return found


def _option(problem: Problem, owner: list[int], flows: Sequence[float], node: int, p: int, cannot: str) -> Option:
    name, who = problem.choices[p].name, owner[node]
    seconds = problem.seconds[node][p]
    if seconds == CANNOT:
        return Option(name, None, None, None, cannot)
    if p == who:
        return Option(name, seconds, 0.0, 0.0, "chosen")
    owner[node] = p
    transfer = sum(problem.flow_seconds(problem.flows[k], owner) - flows[k] for k in problem.touching[node])
    overfull = problem.overfull(owner)
    owner[node] = who
    slower = seconds - problem.seconds[node][who]
    if any(full == name for full, _, _ in overfull):
        reason = "its weights do not fit"
    elif slower + transfer <= 0:
        reason = "costs another launch, or no less"
    elif slower > 0 and transfer > 0:
        reason = "slower, and more to transfer"
    else:
        reason = "slower" if slower > 0 else "transfers cost more than it saves"
    return Option(name, seconds, transfer, slower + transfer, reason)
