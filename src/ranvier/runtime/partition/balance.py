"""Move whole branches to other providers where they then run at the same time as the rest.

In a small problem every move is judged by the schedule of the whole. In a large one that takes too long, and most of
it does not change: there a branch is judged by the schedule of what lies between the node where it leaves the others
and the node where it meets them again. All such moves together are then judged by the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.memory.collector import collector_paused
from ranvier.runtime.partition.problem import CANNOT, Problem
from ranvier.runtime.partition.regions import Region
from ranvier.runtime.partition.schedule import Schedule, schedule

EFFORT = 40_000  # nodes that may be scheduled anew
LARGE = 400  # nodes of a problem whose branches are judged on their own first
WORTH = 1e-3  # share of the whole that a branch must take to be looked at
LOCAL_WORTH = 1e-5  # the same, where only what is around it is looked at
LONGEST = 2_000  # nodes between a fork and where its ways meet; what is longer is no branch to move
Ways = list[tuple[int, ...]]


def balance(problem: Problem, owner: Sequence[int], effort: int = EFFORT) -> tuple[tuple[int, ...], Schedule]:
    """The placement and its schedule; with branches moved where the predicted end comes sooner, else as given."""
    with collector_paused():
        best = tuple(owner)
        found = schedule(problem, best)
        if len({(choice.engine, p if choice.engine is None else -1) for p, choice in enumerate(problem.choices)}) < 2:
            return best, found
        known = forks(problem)
        if problem.size > LARGE:
            best, found = _locally(problem, best, found, known, effort // 4)
        if problem.size <= LONGEST:
            best, found = _globally(problem, best, found, known, effort - problem.size)
        return best, found


def _globally(
    problem: Problem, best: tuple[int, ...], found: Schedule, known: Sequence[Ways], effort: int
) -> tuple[tuple[int, ...], Schedule]:
    candidates = [way for way in dict.fromkeys(way for ways in known for way in ways) if len(way) < problem.size]
    worth = [sum(min(problem.seconds[node]) for node in nodes) for nodes in candidates]
    order = sorted(range(len(candidates)), key=lambda k: (-worth[k], k))
    improved = True
    while improved and effort > 0:
        improved = False
        for k in order:
            if worth[k] < WORTH * found.seconds:
                break
            for target in range(len(problem.choices)):
                moved = _moved(problem, best, candidates[k], target)
                if moved is None or effort <= 0:
                    continue
                effort -= problem.size
                again = schedule(problem, moved)
                if again.seconds < found.seconds * (1 - 1e-9):
                    best, found, improved = moved, again, True
    return best, found


def _locally(
    problem: Problem, best: tuple[int, ...], found: Schedule, known: Sequence[Ways], effort: int
) -> tuple[tuple[int, ...], Schedule]:
    """Move branches that end sooner within their own forks; those that gain most, where all together do not pay."""
    moves: list[tuple[float, tuple[int, ...], int]] = []
    owner = best
    for ways in _worthwhile(problem, known, LOCAL_WORTH * found.seconds):
        region = Region(problem, owner, [node for way in ways for node in way])
        seconds = schedule(region.problem, region.owner).seconds
        effort -= len(region.nodes)
        for way in ways:
            for target in range(len(problem.choices)):
                if effort <= 0 or any(problem.seconds[node][target] == CANNOT for node in way):
                    continue
                there = region.moved(way, target)
                if there == region.owner:
                    continue
                effort -= len(region.nodes)
                sooner = schedule(region.problem, there).seconds
                moved = _moved(problem, owner, way, target) if sooner < seconds * (1 - 1e-9) else None
                if moved is not None:
                    moves.append((seconds - sooner, way, target))
                    owner, region.owner, seconds = moved, there, sooner
        if effort <= 0:
            break
    moves.sort(key=lambda move: -move[0])
    while moves:
        owner = best
        for _, way, target in moves:
            owner = _moved(problem, owner, way, target) or owner
        again = schedule(problem, owner)
        if again.seconds < found.seconds:
            return owner, again
        moves = moves[: len(moves) // 4]
    return best, found


def _worthwhile(problem: Problem, known: Sequence[Ways], least: float) -> list[Ways]:
    """The forks at which overlapping could save most, as far as it is worth anything: all ways but the longest."""
    saved: list[tuple[float, int]] = []
    for k, ways in enumerate(known):
        worth = [sum([min(problem.seconds[node]) for node in way]) for way in ways]
        saved.append((sum(worth) - max(worth), k))
    return [known[k] for seconds, k in sorted(saved, key=lambda each: (-each[0], each[1])) if seconds >= least]


def branches(problem: Problem) -> Ways:
    """All ways of all forks, each once."""
    return [way for way in dict.fromkeys(way for ways in forks(problem) for way in ways) if len(way) < problem.size]


def forks(problem: Problem) -> list[Ways]:
    """What lies between a node where ways part and the node where all of them meet again, way by way.

    The start and the end of the whole graph count as such nodes too.
    """
    n = problem.size
    meet = _meeting(problem)
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    for fork in [-1, *range(n)]:
        starts = problem.after[fork] if fork >= 0 else [node for node in range(n) if not problem.before[node]]
        if len(starts) < 2:
            continue
        end = meet[fork] if fork >= 0 else _common(meet, starts)
        ways = _ways(problem, starts, end)
        if len(ways) > 1:
            found[tuple(ways)] = None
    return [list(ways) for ways in found]


def _ways(problem: Problem, starts: Sequence[int], end: int) -> list[tuple[int, ...]]:
    """The nodes from ``starts`` up to ``end``, in groups that are not joined before it."""
    group: dict[int, int] = {}
    merged: list[int] = []

    def find(k: int) -> int:
        while merged[k] != k:
            merged[k] = merged[merged[k]]
            k = merged[k]
        return k

    for start in starts:
        if start == end:
            continue
        merged.append(len(merged))
        todo = [start]
        while todo:
            if len(group) > LONGEST:
                return []
            node = todo.pop()
            mine = len(merged) - 1
            if node in group:
                merged[find(mine)] = find(group[node])
                continue
            group[node] = mine
            todo += [other for other in problem.after[node] if other != end]
    ways: dict[int, list[int]] = {}
    for node in sorted(group):
        ways.setdefault(find(group[node]), []).append(node)
    return [tuple(nodes) for nodes in ways.values()]


def _meeting(problem: Problem) -> list[int]:
    """For every node the first one that all ways from it lead through (its immediate postdominator); n is the end."""
    n = problem.size
    meet = [n] * n
    for node in reversed(range(n)):
        if problem.after[node]:
            meet[node] = _common(meet, problem.after[node])
    return meet


def _common(meet: Sequence[int], nodes: Sequence[int]) -> int:
    """The first node that all ways from any of ``nodes`` lead through, itself among them; nodes grow along a way."""
    found = nodes[0]
    for node in nodes[1:]:
        while found != node:
            if found < node:
                found = meet[found]
            else:
                node = meet[node]
    return found


def _moved(problem: Problem, owner: tuple[int, ...], nodes: Sequence[int], target: int) -> tuple[int, ...] | None:
    """The placement with ``nodes`` on ``target``; None where that cannot be or changes nothing."""
    if any(problem.seconds[node][target] == CANNOT for node in nodes):
        return None
    found = list(owner)
    for node in nodes:
        found[node] = target
    return None if tuple(found) == owner or problem.overfull(found) else tuple(found)
