"""Minimise a sum of small tables exactly, by eliminating one variable after the other (dynamic programming).

Neural networks are chains with residuals and branches: with a good order the tables stay small. Where they would not
(everything reads everything), single variables are held at a known solution and the rest is solved exactly, so that
the result is never worse than that solution.

The order depends on who meets whom alone, not on the numbers: an :class:`Elimination` is worked out once and may be run
with other numbers in tables of the same form, which takes a third of the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.records import dataclass

TOGETHER = 4  # how much larger the tables of variables may be that go along with the easiest one
Table = np.ndarray[Any, np.dtype[np.float64]]
Form = tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]  # an axis, the sizes of all, the axes of each table


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
    found = Elimination(tables, bound, first)
    return found.run(tables, known), found.held


@dataclass(frozen=True)
class _Hold:
    """A variable that stays as it is known: a cut along one axis through each of its tables."""

    variable: int
    cuts: list[tuple[int, int]]  # table, axis


@dataclass(frozen=True)
class _Group:
    """Variables that go at the same time by the same operations, each leaving one table over the others it met."""

    form: Form
    variables: list[int]
    others: list[tuple[int, ...]]
    tables: list[tuple[int, ...]]


class Elimination:
    """In which order the variables of tables go; ``held`` are those that cannot.

    Variables that do not meet are eliminated together, and those whose tables have the same form by the same few
    operations on arrays: a large network has few forms.
    """

    def __init__(self, tables: Tables, bound: int, first: int = 0) -> None:
        self.sizes = tables.sizes
        self.held: list[int] = []
        self._steps: list[_Hold | _Group] = []
        self._bound = bound
        self._first = first
        self._scopes: list[tuple[int, ...]] = list(tables.scopes)
        self._within: list[list[int]] = [[] for _ in self.sizes]  # the tables of a variable, gone ones among them
        self._meets: list[set[int]] = [set() for _ in self.sizes]
        within, meets = self._within, self._meets
        for index, scope in enumerate(self._scopes):
            for v in scope:
                within[v].append(index)
            if len(scope) > 1:
                for v in scope:
                    meets[v].update(scope)
        for v, others in enumerate(meets):
            others.discard(v)
        self._work_out()

    def run(self, tables: Tables, known: Sequence[int]) -> list[int]:
        """The labels with the least sum of ``tables``, which have the form of those it was worked out for."""
        own = list(tables.tables)
        chosen: list[tuple[_Group, Any]] = []
        labels: Any = np.zeros(len(self.sizes), np.intp)
        for step in self._steps:
            if isinstance(step, _Hold):
                labels[step.variable] = label = known[step.variable]
                for index, axis in step.cuts:
                    own[index] = np.asarray(own[index].take(label, axis))
            else:
                best, least = _summed(step, own)
                chosen.append((step, best))
                if least.ndim > 1:
                    own.extend(least)
        for group, best in reversed(chosen):
            others = np.array(group.others, np.intp).T
            labels[group.variables] = best[(np.arange(len(best)), *[labels[each] for each in others])]
        return [int(label) for label in labels]

    def _work_out(self) -> None:
        entries, meets = self._entries, self._meets
        free = [v for v, size in enumerate(self.sizes) if size > 1]
        waiting = [(entries(v), v) for v in free]
        heapq.heapify(waiting)
        open_ = set(free)
        while open_:
            size, chosen = self._chosen(waiting, open_)
            touched: set[int] = set()
            if size > self._bound:
                v = self._busiest(chosen[0])
                touched = meets[v]
                self._hold(v)
                open_.discard(v)
            else:
                for v in chosen:
                    touched |= meets[v]
                self._eliminate(chosen)
                open_.difference_update(chosen)
            for u in touched:
                heapq.heappush(waiting, (entries(u), u))

    def _chosen(self, waiting: list[tuple[int, int]], open_: set[int]) -> tuple[int, list[int]]:
        """The size of the easiest variable, and it with others about as easy that meet neither it nor each other."""
        entries, meets = self._entries, self._meets
        chosen: list[int] = []
        blocked: set[int] = set()  # all of them come back: they meet a variable that goes
        least, limit = 0, 0
        while waiting and (not chosen or waiting[0][0] <= limit):
            size, v = heapq.heappop(waiting)
            if v not in open_ or v in blocked or size != entries(v):
                continue
            if not chosen:
                least, limit = size, min(size * TOGETHER, self._bound) if size <= self._bound else 0
            chosen.append(v)
            blocked.add(v)
            blocked |= meets[v]
        return least, chosen

    def _entries(self, v: int) -> int:
        """The size of the table that eliminating ``v`` makes on the way; past the bound, how far does not matter."""
        sizes = self.sizes
        found = sizes[v]
        for u in self._meets[v]:
            found *= sizes[u]
            if found > self._bound:
                return self._bound + len(self._meets[v])
        return found

    def _busiest(self, v: int) -> int:
        """The variable to hold so that ``v`` gets easier: the one that meets most others."""
        return min(self._meets[v] | {v}, key=lambda u: (u >= self._first, -len(self._meets[u]), u))

    def _hold(self, v: int) -> None:
        cuts: list[tuple[int, int]] = []
        for index in self._within[v]:
            scope = self._scopes[index]
            if v in scope:
                axis = scope.index(v)
                cuts.append((index, axis))
                self._scopes[index] = scope[:axis] + scope[axis + 1 :]
        for u in self._meets[v]:
            self._meets[u].discard(v)
        self.held.append(v)
        self._steps.append(_Hold(v, cuts))

    def _eliminate(self, chosen: Sequence[int]) -> None:
        scopes, sizes, all_meets = self._scopes, self.sizes, self._meets
        groups: dict[Form, _Group] = {}
        for v in chosen:
            met = all_meets[v]
            full = sorted((*met, v))
            place = {u: axis for axis, u in enumerate(full)}
            own = sorted([(tuple([place[u] for u in scopes[i]]), i) for i in self._within[v] if scopes[i]])
            form = (place[v], tuple([sizes[u] for u in full]), tuple([axes for axes, _ in own]))
            group = groups.get(form)
            if group is None:
                group = groups[form] = _Group(form, [], [], [])
            full.remove(v)
            group.variables.append(v)
            group.others.append(tuple(full))
            group.tables.append(tuple([i for _, i in own]))
            for u in full:
                meets = all_meets[u]
                meets |= met
                meets.discard(u)
                meets.discard(v)
            for _, i in own:
                scopes[i] = ()  # gone
        for group in groups.values():
            self._steps.append(group)
            if group.others[0]:
                for others in group.others:
                    for u in others:
                        self._within[u].append(len(scopes))
                    scopes.append(others)


def _summed(group: _Group, tables: Sequence[Table]) -> tuple[Any, Any]:
    """For every variable of a group the sum of its tables: its best label for each entry of the others, and the sum
    with that label."""
    axis, shape, axes = group.form
    count = len(group.variables)
    whole = (count, *shape)
    total: Any = None
    for position, own in enumerate(axes):
        stacked = np.array([tables[indices[position]] for indices in group.tables])
        if len(own) != len(shape):
            stacked = stacked.reshape([count, *[size if k in own else 1 for k, size in enumerate(shape)]])
        total = stacked if total is None else total + stacked
    if total is None:
        total = np.zeros(whole)
    elif total.shape != whole:
        total = np.broadcast_to(total, whole)
    return total.argmin(axis + 1), total.min(axis + 1)
