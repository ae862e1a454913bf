"""Improve a placement by moves under the exact cost: parts formed as the runtime forms them, memory limits kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ranvier.runtime.partition.grouping import Groups, launch_seconds
from ranvier.runtime.partition.moving import Moving
from ranvier.runtime.partition.problem import CANNOT, Cost, Problem

Move = Sequence[tuple[int, int]]  # (node, the provider it goes to)


class Walk:
    """A placement with its cost, changed move by move.

    What nodes and transfers cost changes only around the nodes that move; parts must be formed anew, which is the dear
    step: it is skipped where a move cannot pay however the parts fall. ``effort`` counts the nodes looked at. ``known``
    keeps what placements cost at least, for walks that pass by the same place.
    """

    def __init__(
        self, problem: Problem, owner: Sequence[int], moving: Moving, known: dict[bytes, float] | None
    ) -> None:
        self.problem = problem
        self.owner = list(owner)
        self.flows: list[float] = moving.seconds(owner).tolist()
        self.base = sum(row[who] for row, who in zip(problem.seconds, owner)) + sum(self.flows)
        self.counts = [0] * len(problem.choices)
        self.held = [0.0] * len(problem.choices)
        for node, who in enumerate(owner):
            self._count(node, who, 1)
        self.parts: Groups = problem.parts(self.owner)
        self.total = self.base + launch_seconds(self.parts, problem.launch)
        self.known = known
        self.effort = 0

    def try_move(self, move: Move) -> bool:
        """Make a move if it is allowed and the placement gets cheaper by it."""
        problem, owner = self.problem, self.owner
        moved = [(node, owner[node], target) for node, target in move if owner[node] != target]
        if not moved:
            return False
        delta = 0.0
        slack = 1e-12 * abs(self.total)
        for node, old, target in moved:
            row = problem.seconds[node]
            if row[target] == CANNOT:
                return False
            delta += row[target] - row[old]
        if problem.limited and not self._fits(moved):
            return False
        touched = dict.fromkeys([index for node, _, _ in moved for index in problem.touching[node]])
        launch = self._least_launch(moved)
        if self.base + delta - sum([self.flows[index] for index in touched]) + launch >= self.total - slack:
            return False  # not even without any transfer
        for node, _, target in moved:
            owner[node] = target
        self.effort += len(moved)
        key = bytes(owner) if self.known is not None else b""
        if self.known and self.known.get(key, 0.0) >= self.total - slack:
            for node, old, _ in moved:
                owner[node] = old
            return False
        changed: list[tuple[int, float]] = []
        for index in touched:
            seconds = problem.flow_seconds(problem.flows[index], owner)
            if seconds != self.flows[index]:
                changed.append((index, seconds))
                delta += seconds - self.flows[index]
        base = self.base + delta
        least = base + launch
        if least < self.total - slack:
            parts = problem.parts(owner)
            self.effort += len(owner)
            least = total = base + launch_seconds(parts, problem.launch)
            if total < self.total - slack:
                self.base, self.total, self.parts = base, total, parts
                for index, seconds in changed:
                    self.flows[index] = seconds
                for node, old, target in moved:
                    self._count(node, old, -1)
                    self._count(node, target, 1)
                return True
        if self.known is not None:
            self.known[key] = least
        for node, old, _ in moved:
            owner[node] = old
        return False

    @property
    def cost(self) -> Cost:
        compute = sum(row[who] for row, who in zip(self.problem.seconds, self.owner))
        return Cost(compute, sum(self.flows), launch_seconds(self.parts, self.problem.launch), len(self.parts))

    def _count(self, node: int, who: int, sign: int) -> None:
        self.counts[who] += sign
        if self.problem.weights:
            self.held[who] += sign * self.problem.weights[node]

    def _fits(self, moved: Iterable[tuple[int, int, int]]) -> bool:
        held = list(self.held)
        for node, old, target in moved:
            held[old] -= self.problem.weights[node]
            held[target] += self.problem.weights[node]
        return all(c.capacity is None or nbytes <= c.capacity for c, nbytes in zip(self.problem.choices, held))

    def _least_launch(self, moved: Iterable[tuple[int, int, int]]) -> float:
        """No less than this is paid for launches: one part of every provider in use, every node where it is no part."""
        counts = list(self.counts)
        for _, old, target in moved:
            counts[old] -= 1
            counts[target] += 1
        return sum(
            choice.launch * (min(count, 1) if choice.whole_parts else count)
            for count, choice in zip(counts, self.problem.choices)
        )


def refine(
    problem: Problem, owner: Sequence[int], moving: Moving, effort: int, known: dict[bytes, float] | None
) -> Walk:
    """Moves until none pays or ``effort`` nodes were seen: of parts, of their ends, of pairs, of single nodes."""
    walk = Walk(problem, owner, moving, known)
    improved = True
    while improved and walk.effort < effort:
        improved = False
        for move in _moves(walk):
            if walk.try_move(move):
                improved = True
            if walk.effort >= effort:
                break
    return walk


def _moves(walk: Walk) -> Iterator[Move]:
    """What to try, the large moves first; parts as they are when each kind of move begins."""
    problem, owner = walk.problem, walk.owner
    targets = range(len(problem.choices))
    if len(walk.parts) > 1:
        for target in targets:
            yield [(node, target) for node, row in enumerate(problem.seconds) if row[target] < CANNOT]
    for _, nodes in walk.parts:
        for target in targets:
            yield [(node, target) for node in nodes]
    parts = walk.parts
    for k in range(len(parts) - 1):
        both = parts[k][1] + parts[k + 1][1]
        for target in targets:
            yield [(node, target) for node in both]
    parts = walk.parts
    for k, (_, nodes) in enumerate(parts):
        for cut in range(1, len(nodes)):
            if k:
                yield [(node, parts[k - 1][0]) for node in nodes[:cut]]
            if k + 1 < len(parts):
                yield [(node, parts[k + 1][0]) for node in nodes[cut:]]
    for node in range(problem.size):
        for target in targets:
            yield [(node, target)]
    for node, followers in enumerate(problem.after):
        for follower in followers:
            for target in targets:
                yield [(node, target), (follower, target)]
    if problem.limited:  # the room one node leaves is room for another
        for a in range(problem.size):
            for b in range(a):
                if owner[a] != owner[b]:
                    yield [(a, owner[b]), (b, owner[a])]
