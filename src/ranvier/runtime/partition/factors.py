"""The cost of a placement as a sum of small tables, for the elimination.

Nodes are variables, their allowed providers the labels. A value with one or two readers is one table over its producer
and its readers. A value with more gets a variable of its own: the set of providers it is brought to. Its cost depends
on that set and the producer; every reader must lie within it. So a transfer that several readers share is paid once,
and tables have few axes however many readers there are.

Starting parts has no such form, because parts depend on the order of everything: see :class:`StandIn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np

from ranvier.records import dataclass
from ranvier.runtime.partition.elimination import Table, Tables
from ranvier.runtime.partition.problem import HOST, OUTSIDE, Flow, Problem

DIRECT = 2  # readers up to which a value is one table
Triple = tuple[Table, Table, Table]  # latency, seconds per byte, launches
Labels = tuple[int, ...]
Extra = Sequence[Sequence[float]] | Table


@dataclass(frozen=True)
class StandIn:
    """What is charged instead of launches: ``crossing``, a share of a launch for a value that passes to another
    provider; or launches at neighbours in an ``order`` of the nodes, which is exact for parts cut from that order."""

    crossing: float = 0.0
    order: Sequence[int] = ()


class Prices:
    """What values and launches cost by provider, derived from a problem once; cuts of the tables are kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.all = range(len(problem.choices))
        self.start = [choice.launch if choice.whole_parts else 0.0 for choice in problem.choices]
        alone = np.array([0.0 if choice.whole_parts else choice.launch for choice in problem.choices])
        self.rows: Table = np.array(problem.seconds, np.float64).reshape(problem.size, len(self.all)) + alone
        self.sets = range(1, 1 << len(self.all))  # providers as bits
        self.direct = cache(self._direct)
        self.sharing = cache(self._sharing)
        self.step = cache(self._step)
        self._whole = cache(self._tables)

    def _direct(self, made: bool, output: bool, labels: tuple[Labels, ...]) -> Triple:
        """Of a value with few readers: axes are its producer, where a node made it, and the readers."""
        latency, per_byte, launches = self._whole(made, len(labels) - made, output)
        cut = np.ix_(*labels)
        return latency[cut], per_byte[cut], launches[cut]

    def _tables(self, made: bool, readers: int, output: bool) -> Triple:
        found = [
            self._price(point[0] if made else None, set(point[made:]), output)
            for point in product(self.all, repeat=made + readers)
        ]
        return _columns(found, (len(self.all),) * (made + readers))

    def _sharing(
        self, output: bool, source: Labels | None, readers: frozenset[Labels]
    ) -> tuple[list[int], Triple, Any]:
        """Of a value with many readers: the sets of providers it may reach, what reaching them costs (axes: the set,
        and the producer where a node made it), and for the labels of a reader a table that keeps it within the set."""
        reachable = sum(1 << p for p in {p for own in readers for p in own})
        fixed = sum(1 << p for p in {own[0] for own in readers if len(own) == 1})
        sets = [chosen for chosen in self.sets if not chosen & ~reachable and chosen & fixed == fixed]
        found = [
            self._price(p, {q for q in self.all if chosen >> q & 1}, output)
            for chosen in sets
            for p in (source if source is not None else (None,))
        ]
        inside = {own: np.array([[0.0 if s >> p & 1 else np.inf for p in own] for s in sets]) for own in readers}
        return sets, _columns(found, (len(sets), -1) if source is not None else (len(sets),)), inside

    def _step(self, a: Labels, b: Labels) -> Table:
        return np.array([[0.0 if p == q else self.start[q] for q in b] for p in a], np.float64)

    def _price(self, source: int | None, targets: set[int], output: bool) -> tuple[float, float, float]:
        """Latency, seconds per byte and launches of bringing a value from one provider (None: the host) to others."""
        problem = self.problem
        start = HOST if source is None else problem.space[source]
        spaces = {problem.space[p] for p in targets} | ({HOST} if output else set())
        ways = [problem.rate(start, space) for space in sorted(spaces - {start})]
        launches = 0.0 if source is None else sum(self.start[p] for p in sorted(targets - {source}))
        return sum(way[0] for way in ways), sum(way[1] for way in ways), launches


class Factors:
    """Makes :class:`Tables` of a problem; ``labels[node]`` are the providers to choose from.

    What has the same form, the same labels along the same axes, is computed in one go. ``flows`` are those that meet
    a choice; all of them where none are given.
    """

    def __init__(self, prices: Prices, labels: Sequence[Labels], flows: Sequence[Flow] | None = None) -> None:
        self.prices = prices
        self.labels = labels
        self.free = [len(own) > 1 for own in labels]
        self.reached: dict[int, tuple[Flow, list[int]]] = {}  # of a variable that is a set: its value, its labels
        self._direct: dict[tuple[bool, bool, tuple[Labels, ...]], list[tuple[tuple[int, ...], float]]] = {}
        self._shared: list[tuple[Flow, tuple[int, ...]]] = []
        for flow in prices.problem.flows if flows is None else flows:
            self._sort(flow)

    def _sort(self, flow: Flow) -> None:
        """Put a value with those of its form; one that meets no choice costs the same whatever is chosen."""
        free = self.free
        readers = tuple(sorted(set(flow.consumers)))
        made = flow.producer != OUTSIDE
        scope = (flow.producer, *readers) if made else readers  # ascending, as nodes are numbered
        for v in scope:
            if free[v]:
                break
        else:
            return
        if len(readers) > DIRECT:
            self._shared.append((flow, readers))
            return
        key = (made, flow.output, tuple([self.labels[v] for v in scope]))
        own = self._direct.get(key)
        if own is None:
            own = self._direct[key] = []
        own.append((scope, flow.nbytes))

    def tables(self, stand_in: StandIn, extra: Extra | None = None) -> Tables:
        """The sum to minimise; ``extra[node][provider]`` seconds are added to what the nodes take."""
        prices = self.prices
        found = Tables([len(each) for each in self.labels])
        self.reached = {}
        rows = prices.rows if extra is None else prices.rows + np.asarray(extra, np.float64)
        alone = list(self.free)  # nodes whose own time is in no table yet
        if stand_in.order:
            self._add_steps(found, stand_in.order, rows, alone)
        self._add_rows(found, rows, [v for v, left in enumerate(alone) if left])
        if prices.problem.size and (stand_in.crossing or stand_in.order):
            first = stand_in.order[0] if stand_in.order else 0
            if self.free[first]:
                found.add((first,), np.array([prices.start[p] for p in self.labels[first]], np.float64))
        for (made, output, labels), own in self._direct.items():
            latency, per_byte, launches = prices.direct(made, output, labels)
            nbytes = np.array([size for _, size in own]).reshape(-1, *[1] * latency.ndim)
            kept = [k for k, each in enumerate(labels) if len(each) > 1]
            block = (latency + stand_in.crossing * launches) + nbytes * per_byte
            block = block.reshape(-1, *[len(labels[k]) for k in kept])
            found.add_all([tuple([scope[k] for k in kept]) for scope, _ in own], block)
        for flow, readers in self._shared:
            self._add_shared(found, flow, readers, stand_in.crossing)
        return found

    def _add_rows(self, found: Tables, rows: Table, nodes: Sequence[int]) -> None:
        for own, members in self._by_labels(nodes, lambda v: self.labels[v]).items():
            found.add_all([(v,) for v in members], rows[np.ix_(members, own)])

    def _add_steps(self, found: Tables, order: Sequence[int], rows: Table, alone: list[bool]) -> None:
        """Launches between neighbours, and what the later of them takes."""
        labels, free = self.labels, self.free
        pairs = [(a, b) for a, b in pairwise(order) if free[a] or free[b]]
        for (one, two), members in self._by_labels(pairs, lambda pair: (labels[pair[0]], labels[pair[1]])).items():
            later = [b for _, b in members]
            block = self.prices.step(one, two) + rows[np.ix_(later, two)][:, None, :]
            if len(one) == 1:
                found.add_all([(b,) for b in later], block[:, 0, :])
            elif len(two) == 1:
                found.add_all([(a,) for a, _ in members], block[:, :, 0])
            else:
                for turned in (False, True):
                    some = [k for k, (a, b) in enumerate(members) if (a > b) == turned]
                    part = block[some].swapaxes(1, 2) if turned else block[some]
                    found.add_all([(min(members[k]), max(members[k])) for k in some], part)
            for b in later:
                alone[b] = False

    @staticmethod
    def _by_labels(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for item in items:
            form = key(item)
            if form in found:
                found[form].append(item)
            else:
                found[form] = [item]
        return found

    def _add_shared(self, found: Tables, flow: Flow, readers: Sequence[int], crossing: float) -> None:
        labels = self.labels
        made = flow.producer != OUTSIDE
        source = labels[flow.producer] if made else None
        sets, triple, inside = self.prices.sharing(flow.output, source, frozenset(labels[v] for v in readers))
        latency, per_byte, launches = triple
        variable = found.variable(len(sets))
        self.reached[variable] = (flow, sets)
        found.add(
            (variable, flow.producer) if made else (variable,), latency + flow.nbytes * per_byte + crossing * launches
        )
        for v in readers:
            if self.free[v]:
                found.add((variable, v), inside[labels[v]])

    def extended(self, found: Tables, owner: Sequence[int]) -> list[int]:
        """The labels of all variables for a placement: positions for nodes, and sets that hold just their readers."""
        known = [own.index(p) for own, p in zip(self.labels, owner)]
        known += [0] * (len(found.sizes) - len(known))
        for variable, (flow, sets) in self.reached.items():
            wanted = 0
            for consumer in flow.consumers:
                wanted |= 1 << owner[consumer]
            known[variable] = sets.index(wanted)
        return known


def _columns(found: Sequence[tuple[float, float, float]], shape: tuple[int, ...]) -> Triple:
    latency, per_byte, launches = (np.array(column, np.float64).reshape(shape) for column in zip(*found))
    return latency, per_byte, launches
