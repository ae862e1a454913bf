"""Minimise a sum of small tables exactly, by eliminating one variable after the other (dynamic programming).

Neural networks are chains with residuals and branches: with a good order the tables stay small. Where they would not
(everything reads everything), single variables are held at a known solution and the rest is solved exactly, so that
the result is never worse than that solution.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
Eliminated = tuple[int, tuple[int, ...], Any]  # variable, the others its best label depends on, that label


class Tables:
    """A function of many variables with few labels each: the sum of tables over some of them.

    Scopes are kept in ascending order, so that tables meet by reshaping alone, without being transposed.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.scopes: list[tuple[int, ...]] = []
        self.tables: list[Table] = []

    def variable(self, size: int) -> int:
        """Another variable."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def add(self, scope: Sequence[int], table: Table) -> None:
        """Add a table with one axis for every variable of ``scope``, which holds none twice."""
        sizes = self.sizes
        free = [v for v in scope if sizes[v] > 1]
        ordered = sorted(free)
        if ordered != free:
            table = table.transpose([axis for _, axis in sorted((v, axis) for axis, v in enumerate(scope))])
        if len(free) < len(scope):
            table = table.reshape([sizes[v] for v in ordered])
        self.scopes.append(tuple(ordered))
        self.tables.append(table)


def minimise(tables: Tables, known: Sequence[int], bound: int, first: int = 0) -> tuple[list[int], list[int]]:
    """Labels with the least sum, and the variables that were held at their ``known`` label to stay within ``bound``
    entries per table: with none held the result is the optimum. Variables below ``first`` are held rather than others.
    """
    return _Elimination(tables, known, bound, first).run()


class _Elimination:
    """One run: the tables that are left, and who meets whom in them."""

    def __init__(self, tables: Tables, known: Sequence[int], bound: int, first: int) -> None:
        self.sizes = tables.sizes
        self.known = known
        self.bound = bound
        self.first = first
        self.scopes: list[tuple[int, ...]] = list(tables.scopes)
        self.tables: list[Table] = list(tables.tables)
        self.within: list[set[int]] = [set() for _ in self.sizes]  # the tables of a variable
        self.meets: list[set[int]] = [set() for _ in self.sizes]
        for index, scope in enumerate(self.scopes):
            for v in scope:
                self.within[v].add(index)
                self.meets[v].update(scope)
        for v, others in enumerate(self.meets):
            others.discard(v)

    def run(self) -> tuple[list[int], list[int]]:
        labels = [0] * len(self.sizes)
        entries = self._entries
        free = [v for v, size in enumerate(self.sizes) if size > 1]
        waiting = [(entries(v), v) for v in free]
        heapq.heapify(waiting)
        open_ = set(free)
        done: list[Eliminated] = []
        held: list[int] = []
        while waiting:
            size, v = heapq.heappop(waiting)
            if v not in open_ or size != entries(v):
                continue
            if size > self.bound:
                v = self._busiest(v)
                labels[v] = self.known[v]
                touched: Sequence[int] = self._hold(v)
                held.append(v)
            else:
                scope = tuple(sorted(self.meets[v]))
                done.append((v, scope, self._eliminate(v, scope)))
                touched = scope
            open_.discard(v)
            for u in touched:
                heapq.heappush(waiting, (entries(u), u))
        for v, scope, best in reversed(done):
            labels[v] = int(best[tuple([labels[u] for u in scope])])
        return labels, held

    def _entries(self, v: int) -> int:
        """The size of the table that eliminating ``v`` makes on the way; past the bound, how far does not matter."""
        sizes = self.sizes
        found = sizes[v]
        for u in self.meets[v]:
            found *= sizes[u]
            if found > self.bound:
                return self.bound + len(self.meets[v])
        return found

    def _busiest(self, v: int) -> int:
        """The variable to hold so that ``v`` gets easier: the one that meets most others."""
        return min(self.meets[v] | {v}, key=lambda u: (u >= self.first, -len(self.meets[u]), u))

    def _hold(self, v: int) -> list[int]:
        label = self.known[v]
        for index in self.within[v]:
            scope = self.scopes[index]
            axis = scope.index(v)
            self.tables[index] = np.asarray(self.tables[index].take(label, axis))
            self.scopes[index] = scope[:axis] + scope[axis + 1 :]
        touched = sorted(self.meets[v])
        for u in touched:
            self.meets[u].discard(v)
        return touched

    def _eliminate(self, v: int, others: tuple[int, ...]) -> Any:
        """Replace all tables of ``v`` by one over ``others``; the best label of ``v`` for each of its entries."""
        full = tuple(sorted((*others, v)))
        sizes = self.sizes
        scopes = self.scopes
        total: Any = None
        for index in sorted(self.within[v]):
            scope = scopes[index]
            table = self.tables[index]
            if len(scope) != len(full):
                table = table.reshape([sizes[u] if u in scope else 1 for u in full])
            total = table if total is None else total + table
        axis = full.index(v)
        gone = self.within[v]
        for u in others:
            self.within[u] -= gone
            meets = self.meets[u]
            meets.update(others)
            meets.discard(u)
            meets.discard(v)
        if total is None:
            return np.zeros((), np.intp)
        best = total.argmin(axis)
        least = total.min(axis)
        if total.ndim < len(full) or total.shape != tuple([sizes[u] for u in full]):
            shape = tuple([sizes[u] for u in others])
            best, least = np.broadcast_to(best, shape), np.broadcast_to(least, shape)
        if others:
            index = len(self.tables)
            self.tables.append(least)
            self.scopes.append(others)
            for u in others:
                self.within[u].add(index)
        return best
