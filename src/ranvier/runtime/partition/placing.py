"""Placing a graph by cost: pose the problem, solve it, let branches overlap where that is faster, cut the parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.errors import InvalidConfig, nearest
from ranvier.graph.ir import Graph
from ranvier.providers.base import ExecutionProvider
from ranvier.records import dataclass
from ranvier.runtime.partition.balance import balance
from ranvier.runtime.partition.costs import Claims, CostModel, Posed, pose
from ranvier.runtime.partition.explain import Explanation, explain
from ranvier.runtime.partition.issuing import order_of_issue
from ranvier.runtime.partition.optimise import by_priority, optimise
from ranvier.runtime.partition.partitioner import Beside, Part, Partitioning, Placement, subgraph_of
from ranvier.runtime.partition.pins import Rules
from ranvier.runtime.partition.problem import Cost
from ranvier.runtime.partition.schedule import Schedule, in_sequence
from ranvier.runtime.partition.waves import GAIN, Threads, in_waves

POLICIES = ("cost", "priority")


@dataclass(frozen=True)
class Placed:
    """The parts in an order that runs, one for every step of the schedule, and everything that led to them."""

    partitioning: Partitioning
    owner: tuple[int, ...]  # by node, positions among the providers
    cost: Cost  # run part after part
    schedule: Schedule
    issue: tuple[int, ...]  # the steps of the schedule in the order of the parts
    posed: Posed

    def explain(self) -> list[Explanation]:
        return explain(self.posed.problem, self.owner, self.posed.reasons)


def place(
    graph: Graph,
    providers: Sequence[ExecutionProvider],
    model: CostModel,
    policy: str = "cost",
    pins: Rules | None = None,
    overlap: bool = True,
    claims: Claims | None = None,
    threads: Callable[[Posed], Threads] | None = None,
) -> Placed:
    """Place ``graph``: by ``cost``, or by ``priority`` (each node to the first provider that may have it).

    Without ``overlap`` parts run one after the other, whatever could run at the same time. ``claims`` are what the
    providers said already; ``threads`` tells what the host's threads allow, and where it is not given, parts of the
    host do not overlap.
    """
    if policy not in POLICIES:
        raise InvalidConfig(f"unknown policy {policy!r}{nearest(policy, POLICIES)}")
    posed = pose(graph, providers, model, pins, claims)
    problem = posed.problem
    owner = (by_priority(problem) if policy == "priority" else optimise(problem)).owner
    if policy == "cost" and overlap:
        owner, schedule = balance(problem, owner)
        if threads is not None:
            waves = in_waves(problem, owner, threads(posed))
            if waves is not None and waves.seconds < (1 - GAIN) * schedule.seconds:
                schedule = waves
    else:
        schedule = in_sequence(problem, owner)
    nodes = posed.claims.nodes
    issue = order_of_issue(problem, schedule)
    parts = parts_of(graph, providers, posed, schedule, issue)
    placements = [
        Placement(
            node,
            providers[who].name,
            posed.claims.notes.get((k, who), ""),
            tuple((providers[p].name, posed.reasons[k, p]) for p in range(len(providers)) if (k, p) in posed.reasons),
        )
        for k, (node, who) in enumerate(zip(nodes, owner))
    ]
    transfers = []
    for value, flow in zip(posed.values, problem.flows):
        source, targets = problem.reached(flow, owner)
        transfers += [(value, posed.devices[source], posed.devices[target]) for target in targets]
    return Placed(Partitioning(parts, placements, transfers), owner, problem.cost(owner), schedule, tuple(issue), posed)


def parts_of(
    graph: Graph, providers: Sequence[ExecutionProvider], posed: Posed, schedule: Schedule, issue: Sequence[int]
) -> list[Part]:
    """The steps of a schedule as parts, in the order in which they are started."""
    nodes = posed.claims.nodes
    return [
        Part(
            providers[step.owner],
            subgraph_of(graph, [nodes[k] for k in step.nodes]),
            Beside(step.wave, step.lane, step.threads) if step.wave >= 0 else None,
        )
        for step in (schedule.steps[k] for k in issue)
    ]
