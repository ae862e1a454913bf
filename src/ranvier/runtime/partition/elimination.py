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

TOGETHER = 4  # how much larger the tables of variables may be that go along with the easiest one
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
        self._pairs: dict[tuple[int, ...], int] = {}  # the table of two variables

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

    def add_all(self, scopes: Sequence[tuple[int, ...]], tables: Table) -> None:
        """Add tables of one form, stacked: scopes ascend and hold only variables with a choice. What has the same
        two variables becomes one table."""
        pairs, own = self._pairs, self.tables
        if scopes and len(scopes[0]) == 2:
            for scope, table in zip(scopes, tables):
                index = pairs.get(scope)
                if index is None:
                    pairs[scope] = len(own)
                    self.scopes.append(scope)
                    own.append(table)
                else:
                    own[index] = own[index] + table
        else:
            self.scopes.extend(scopes)
            own.extend(tables)


def minimise(tables: Tables, known: Sequence[int], bound: int, first: int = 0) -> tuple[list[int], list[int]]:
    """Labels with the least sum, and the variables that were held at their ``known`` label to stay within ``bound``
    entries per table: with none held the result is the optimum. Variables below ``first`` are held rather than others.
    """
    return _Elimination(tables, known, bound, first).run()


class _Elimination:
    """One run: the tables that are left, and who meets whom in them.

    Variables that do not meet are eliminated together, and those whose tables have the same form by the same few
    operations on arrays: a large network has few forms.
    """

    def __init__(self, tables: Tables, known: Sequence[int], bound: int, first: int) -> None:
        self.sizes = tables.sizes
        self.known = known
        self.bound = bound
        self.first = first
        self.scopes: list[tuple[int, ...]] = list(tables.scopes)
        self.tables: list[Table] = list(tables.tables)
        self.within: list[list[int]] = [[] for _ in self.sizes]  # the tables of a variable, gone ones among them
        self.meets: list[set[int]] = [set() for _ in self.sizes]
        for index, scope in enumerate(self.scopes):
            if len(scope) == 1:
                self.within[scope[0]].append(index)
            else:
                for v in scope:
                    self.within[v].append(index)
                    self.meets[v].update(scope)
        for v, others in enumerate(self.meets):
            others.discard(v)

    def run(self) -> tuple[list[int], list[int]]:
        labels = [0] * len(self.sizes)
        entries = self._entries
        free = [v for v, size in enumerate(self.sizes) if size > 1]
        self.waiting = [(entries(v), v) for v in free]
        heapq.heapify(self.waiting)
        self.open = set(free)
        done: list[Eliminated] = []
        held: list[int] = []
        while self.open:
            size, chosen = self._chosen()
            if size > self.bound:
                v = self._busiest(chosen[0])
                labels[v] = self.known[v]
                touched = self.meets[v]
                self._hold(v)
                held.append(v)
                self.open.discard(v)
            else:
                self.open.difference_update(chosen)
                touched = set()
                for v in chosen:
                    touched |= self.meets[v]
                done += self._eliminate(chosen)
            for u in touched:
                heapq.heappush(self.waiting, (entries(u), u))
        for v, scope, best in reversed(done):
            labels[v] = int(best[tuple([labels[u] for u in scope])])
        return labels, held

    def _chosen(self) -> tuple[int, list[int]]:
        """The size of the easiest variable, and it with others about as easy that meet neither it nor each other."""
        waiting, open_, entries = self.waiting, self.open, self._entries
        chosen: list[int] = []
        blocked: set[int] = set()  # all of them come back: they meet a variable that goes
        least, limit = 0, 0
        while waiting and (not chosen or waiting[0][0] <= limit):
            size, v = heapq.heappop(waiting)
            if v not in open_ or v in blocked or size != entries(v):
                continue
            if not chosen:
                least, limit = size, min(size * TOGETHER, self.bound) if size <= self.bound else 0
            chosen.append(v)
            blocked.add(v)
            blocked |= self.meets[v]
        return least, chosen

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

    def _hold(self, v: int) -> None:
        label = self.known[v]
        for index in self.within[v]:
            scope = self.scopes[index]
            if v in scope:
                axis = scope.index(v)
                self.tables[index] = np.asarray(self.tables[index].take(label, axis))
                self.scopes[index] = scope[:axis] + scope[axis + 1 :]
        for u in self.meets[v]:
            self.meets[u].discard(v)

    def _eliminate(self, chosen: Sequence[int]) -> list[Eliminated]:
        """Replace all tables of each variable by one over those it met; its best label for each entry of that."""
        forms: dict[Any, list[tuple[int, tuple[int, ...], list[int]]]] = {}
        scopes, sizes = self.scopes, self.sizes
        for v in chosen:
            others = self.meets[v]
            full = sorted((*others, v))
            place = {u: axis for axis, u in enumerate(full)}
            own = sorted([(tuple([place[u] for u in scopes[i]]), i) for i in self.within[v] if scopes[i]])
            form = (place[v], tuple([sizes[u] for u in full]), tuple([axes for axes, _ in own]))
            full.remove(v)
            forms.setdefault(form, []).append((v, tuple(full), [i for _, i in own]))
            for u in others:
                meets = self.meets[u]
                meets |= others
                meets.discard(u)
                meets.discard(v)
            for _, i in own:
                scopes[i] = ()  # gone
        done: list[Eliminated] = []
        for (axis, shape, axes), members in forms.items():
            best, least = self._summed(axis, shape, axes, [indices for _, _, indices in members])
            for k, (v, others_, _) in enumerate(members):
                done.append((v, others_, best[k]))
                if others_:
                    for u in others_:
                        self.within[u].append(len(scopes))
                    scopes.append(others_)
                    self.tables.append(least[k])
        return done

    def _summed(
        self, axis: int, shape: tuple[int, ...], axes: Any, members: Sequence[Sequence[int]]
    ) -> tuple[Any, Any]:
        """For variables of one form, an axis before all others: the sums of their tables, the least along ``axis``."""
        tables = self.tables
        total: Any = None
        for position, own in enumerate(axes):
            stacked = np.array([tables[indices[position]] for indices in members])
            if len(own) != len(shape):
                stacked = stacked.reshape([len(members), *[size if k in own else 1 for k, size in enumerate(shape)]])
            total = stacked if total is None else total + stacked
        whole = (len(members), *shape)
        if total is None:
            total = np.zeros(whole)
        elif total.shape != whole:
            total = np.broadcast_to(total, whole)
        return total.argmin(axis + 1), total.min(axis + 1)
