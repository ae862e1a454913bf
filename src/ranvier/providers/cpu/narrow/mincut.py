"""The cheapest of all ways to give every item one of two labels.

An item has a cost under either label, and an ordered pair of items a cost that is paid where the first has label 1 and
the second label 0. With costs of at least zero that is a minimum cut, which maximum flow finds exactly (Dinic).
"""

from __future__ import annotations

import math
from collections import deque

_SOURCE, _SINK = 0, 1


class Cut:
    """Collects costs; ``solve`` says which items have label 1 at the least total cost, the fewest where it is equal."""

    def __init__(self) -> None:
        self._heads: list[list[int]] = [
            [],
            [],
        ]  # of every node, its edges, which come in pairs: there and back
        self._to: list[int] = []
        self._room: list[float] = []

    def item(self, zero: float = 0.0, one: float = 0.0) -> int:
        """A new item with its cost under label 0 and under label 1."""
        self._heads.append([])
        made = len(self._heads) - 1
        self.cost(made, zero, one)
        return made

    def cost(self, item: int, zero: float = 0.0, one: float = 0.0) -> None:
        """More cost of an item under its labels; infinite where it must not have one."""
        if zero == one == math.inf:
            raise ValueError("an item must be allowed one label")
        if zero:
            self._edge(_SOURCE, item, zero)
        if one:
            self._edge(item, _SINK, one)

    def pair(self, one: int, zero: int, cost: float) -> None:
        """Paid where the first item has label 1 and the second label 0."""
        self._edge(one, zero, cost)

    def _edge(self, start: int, end: int, room: float) -> None:
        for a, b, r in ((start, end, room), (end, start, 0.0)):
            self._heads[a].append(len(self._to))
            self._to.append(b)
            self._room.append(r)

    def solve(self) -> set[int]:
        while True:
            levels = self._levels()
            if levels[_SINK] < 0:
                return {k for k, level in enumerate(levels) if level >= 0 and k != _SOURCE}
            tried = [0] * len(self._heads)
            while self._push(levels, tried):
                pass

    def _levels(self) -> list[int]:
        """How many edges with room lead from the source to each node; -1 where none do."""
        levels = [-1] * len(self._heads)
        levels[_SOURCE] = 0
        queue = deque([_SOURCE])
        while queue:
            here = queue.popleft()
            for edge in self._heads[here]:
                there = self._to[edge]
                if levels[there] < 0 and self._room[edge] > 1e-15:
                    levels[there] = levels[here] + 1
                    queue.append(there)
        return levels

    def _push(self, levels: list[int], tried: list[int]) -> bool:
        """Fill one shortest path; False where there is none left."""
        path: list[int] = []
        here = _SOURCE
        while here != _SINK:
            while tried[here] < len(self._heads[here]):
                edge = self._heads[here][tried[here]]
                if self._room[edge] > 1e-15 and levels[self._to[edge]] == levels[here] + 1:
                    break
                tried[here] += 1
            else:
                if not path:
                    return False
                here = self._to[path.pop() ^ 1]
                tried[here] += 1
                continue
            path.append(edge)
            here = self._to[edge]
        room = min(self._room[edge] for edge in path)
        if room == math.inf:
            raise ValueError("two items that exclude each other's only labels")
        for edge in path:
            self._room[edge] -= room
            self._room[edge ^ 1] += room
        return True
