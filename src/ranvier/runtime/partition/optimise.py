"""Which provider for every node: exact on a stand-in for the launches, then refined under the exact cost."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.errors import InvalidConfig, OutOfMemory
from ranvier.memory.collector import collector_paused
from ranvier.records import dataclass
from ranvier.runtime.partition.problem import CANNOT, Cost, Problem

TABLE = 1 << 12  # entries a table may have; more variables are held instead
EFFORT = 40_000  # nodes the refinement may look at


@dataclass(frozen=True)
class Solution:
    """A placement and what it is predicted to cost."""

    owner: tuple[int, ...]
    cost: Cost
    method: str  # how it was found: "priority", "only choice", "dominant", "exact", or "parts held"


def optimise(problem: Problem, *, table: int = TABLE, effort: int = EFFORT) -> Solution:
    """The cheapest placement found; deterministic, ties go to the provider named first."""
    for node, allowed in enumerate(problem.allowed):
        if not allowed:
            raise InvalidConfig(f"no provider can run node {node}")
    obvious = _obvious(problem)
    if obvious is not None:
        return obvious
    from ranvier.runtime.partition.search import Search  # NumPy is not needed where nothing must be weighed

    with collector_paused():
        found = Search(problem, table, effort)
        owner, cost = found.run()
    overfull = problem.overfull(owner)
    if overfull:
        name, capacity, nbytes = overfull[0]
        raise OutOfMemory(
            f"no placement found in which the weights fit: {name} would hold {nbytes:,.0f} bytes of {capacity:,.0f}",
            requested=int(nbytes),
        )
    return Solution(tuple(owner), cost, "parts held" if found.held else "exact")


def by_priority(problem: Problem) -> Solution:
    """Every node to the first provider that can run it."""
    owner: list[int] = []
    for node, allowed in enumerate(problem.allowed):
        if not allowed:
            raise InvalidConfig(f"no provider can run node {node}")
        owner.append(allowed[0])
    return Solution(tuple(owner), problem.cost(owner), "priority")


def _obvious(problem: Problem) -> Solution | None:
    """The placement where there is nothing to weigh: no choice at all, or a host provider that is best everywhere."""
    allowed = problem.allowed
    owner: Sequence[int]
    if all(len(each) == 1 for each in allowed):
        owner = [each[0] for each in allowed]
        return None if problem.overfull(owner) else Solution(tuple(owner), problem.cost(owner), "only choice")
    for p, choice in enumerate(problem.choices):
        if choice.space == 0 and choice.whole_parts and choice.launch <= min(problem.launch):
            owner = [p] * problem.size
            if all(row[p] < CANNOT and row[p] <= min(row) for row in problem.seconds) and not problem.overfull(owner):
                return Solution(tuple(owner), problem.cost(owner), "dominant")
    return None
