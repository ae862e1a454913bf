"""The search behind :func:`ranvier.runtime.partition.optimise.optimise`, for problems in which there is a choice."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from ranvier.runtime.partition.elimination import minimise
from ranvier.runtime.partition.factors import Extra, Factors, Labels, Prices, StandIn
from ranvier.runtime.partition.limits import Limits
from ranvier.runtime.partition.moving import Moving
from ranvier.runtime.partition.problem import CANNOT, Cost, Problem
from ranvier.runtime.partition.refine import Walk, refine

SMALL = 64  # nodes up to which all starts are tried
MEDIUM = 2000  # nodes up to which the order is taken from the parts found, and solved for again
REACH = 4  # steps around nodes that an elimination could not take, within which it is tried again
RAISES = 24  # of the price of memory, where weights do not fit
HALVINGS = 4  # of the last raise
KICKS = 24  # thrice as many where memory is short: there, good placements are further apart


class Search:
    """One problem, and the best placement seen so far."""

    def __init__(self, problem: Problem, table: int, effort: int) -> None:
        self.problem = problem
        self.table = table
        self.effort = effort
        self.labels = pruned(problem)
        self.prices = Prices(problem)
        self.homes = homes(problem)
        self.moving = Moving(problem)
        self.home = min(self.homes, key=self._without_launches)
        self.best: Walk | None = None
        self.seen: set[tuple[int, ...]] = set()
        self.known: dict[bytes, float] | None = {} if problem.size <= SMALL else None
        self.held = 0  # variables that an elimination could not take

    def _without_launches(self, owner: Sequence[int]) -> float:
        compute = sum(row[who] for row, who in zip(self.problem.seconds, owner))
        return compute + float(self.moving.seconds(owner).sum())

    def run(self) -> tuple[list[int], Cost]:
        """The best placement of several starts, refined, and its cost; overfull where none was found that fits."""
        problem = self.problem
        given = range(problem.size)
        factors = Factors(self.prices, self.labels)
        first = self._start(factors, StandIn(order=given))
        if problem.size <= SMALL:
            self._start(factors, StandIn(crossing=1.0))
            self._start(factors, StandIn(crossing=0.5))
            self._start(factors, StandIn())
            for home in self.homes:
                self._refine(home)
            for p in range(len(problem.choices)):
                without = [tuple([q for q in own if q != p]) or own for own in self.labels]
                if without != self.labels:
                    self._start(Factors(self.prices, without), StandIn(order=given))
        while self.best is not None and len(self.best.parts) > 1 and problem.size <= MEDIUM:
            order = [node for _, nodes in self.best.parts for node in nodes]
            total = self.best.total
            self._start(factors, StandIn(order=order))
            if self.best.total >= total:
                break
        if problem.size <= SMALL:
            self._kick()
        return (first, problem.cost(first)) if self.best is None else (self.best.owner, self.best.cost)

    def _kick(self) -> None:
        """Leave the best placement by a few changes drawn at random, refine again: small problems have small traps."""
        problem = self.problem
        draw = random.Random(problem.size)
        free = [node for node, own in enumerate(self.labels) if len(own) > 1]
        kicks = 0 if self.best is None or not free else 3 * KICKS if problem.limited else KICKS
        for _ in range(kicks):
            assert self.best is not None
            owner = list(self.best.owner)
            for node in draw.sample(free, min(len(free), draw.randint(2, max(4, len(free) // 2)))):
                owner[node] = draw.choice(self.labels[node])
            self._refine(owner)

    def _start(self, factors: Factors, stand_in: StandIn) -> list[int]:
        owner = self._solve(factors, stand_in)
        self._refine(owner)
        return owner

    def _refine(self, owner: Sequence[int]) -> None:
        problem = self.problem
        if problem.overfull(owner):
            for per_byte in (True, False):
                fitting = repaired(problem, owner, per_byte)
                if not problem.overfull(fitting):
                    self._refine(fitting)
            return
        key = tuple(owner)
        if key in self.seen:
            return
        self.seen.add(key)
        walk = refine(problem, owner, self.moving, self.effort, self.known)
        self.effort -= walk.effort
        if self.best is None or walk.total < self.best.total:
            self.best = walk

    def _solve(self, factors: Factors, stand_in: StandIn) -> list[int]:
        """Minimise the stand-in; where weights do not fit, raise the price of memory until they do, then lower it."""
        problem = self.problem
        if problem.limited and problem.size > SMALL:
            found = self._within_limits(factors, stand_in)
            if found is not None:
                return found
        owner = self._minimise(factors, stand_in, None)
        if not problem.overfull(owner):
            return owner
        self._fill(factors, stand_in, owner)
        weights = np.array(problem.weights, np.float64)
        names = {choice.name: p for p, choice in enumerate(problem.choices)}
        finite = [s for row in problem.seconds for s in row if s < CANNOT]
        step = sum(finite) / len(finite) * problem.size / float(weights.sum()) / 16
        price = np.zeros(len(problem.choices))
        before, fits = price, None
        many = problem.size > MEDIUM  # then each step is dear, and what is left over can be taken off node by node
        for _ in range(RAISES // 8 if many else RAISES):
            if problem.size <= SMALL:
                self._refine(owner)  # one that almost fits may be better than one that leaves much room
            before, price = price, price.copy()
            for name, _capacity, _nbytes in problem.overfull(owner):
                price[names[name]] = max(price[names[name]] * (8 if many else 2), step)
            owner = self._minimise(factors, stand_in, weights[:, None] * price)
            if not problem.overfull(owner):
                fits = owner
                break
        for _ in range(HALVINGS if fits is not None and not many else 0):
            middle = (before + price) / 2
            owner = self._minimise(factors, stand_in, weights[:, None] * middle)
            if problem.overfull(owner):
                before = middle
            else:
                self._refine(owner)
                price, fits = middle, owner
        return owner if fits is None else fits

    def _within_limits(self, factors: Factors, stand_in: StandIn) -> list[int] | None:
        """The best of several placements at some price of memory; None where memory needs none, or nothing fits."""
        limits = Limits(self.problem, self.moving, factors, stand_in, self.table)
        free = limits.placed(np.zeros(limits.seconds.shape), self.home)
        if limits.fits(free):
            return None
        self.held += len(limits.elimination.held)
        fitting = limits.fitting(free, self.home)
        for each in fitting:
            self._refine(each)
        return fitting[0] if fitting else None

    def _fill(self, factors: Factors, stand_in: StandIn, owner: Sequence[int]) -> None:
        """Let overfull providers have the first nodes they want, or the last, as far as there is room; solve again.

        So a long network is cut in few places; a price on memory would leave them all at once where nodes are alike.
        """
        problem = self.problem
        names = {choice.name: p for p, choice in enumerate(problem.choices)}
        for order in (range(problem.size), range(problem.size - 1, -1, -1)):
            room = {names[name]: capacity for name, capacity, _ in problem.overfull(owner)}
            labels = list(factors.labels)
            for node in order:
                if owner[node] in room:
                    room[owner[node]] -= problem.weights[node]
                gone = [p for p, left in room.items() if left < 0]
                if gone:
                    labels[node] = tuple([p for p in labels[node] if p not in gone]) or labels[node]
            self._refine(self._minimise(Factors(self.prices, labels), stand_in, None))

    def _minimise(self, factors: Factors, stand_in: StandIn, extra: Extra | None) -> list[int]:
        problem, labels = self.problem, factors.labels
        owner, held = self._eliminate(factors, stand_in, extra, self.home)
        if held:
            self.held += len(held)
            region = self._around(held)
            flows = [problem.flows[k] for k in sorted({k for node in region for k in problem.touching[node]})]
            for p in range(len(problem.choices)):
                two: list[Labels] = [(who,) for who in owner]
                for node in region:
                    two[node] = tuple([q for q in labels[node] if q in (owner[node], p)])
                owner, _ = self._eliminate(Factors(self.prices, two, flows), stand_in, extra, owner)
        return owner

    def _eliminate(
        self, factors: Factors, stand_in: StandIn, extra: Extra | None, known: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """The best placement within the labels of ``factors``, and the nodes that had to stay as in ``known``."""
        tables = factors.tables(stand_in, extra)
        known = [p if p in own else own[0] for own, p in zip(factors.labels, known)]
        found, held = minimise(tables, factors.extended(tables, known), self.table, self.problem.size)
        nodes: list[int] = []
        for v in held:
            nodes += factors.reached[v][0].consumers if v in factors.reached else (v,)
        return [own[k] for own, k in zip(factors.labels, found)], nodes

    def _around(self, nodes: Sequence[int]) -> set[int]:
        """Nodes a few steps away from any of ``nodes``."""
        problem = self.problem
        found = set(nodes)
        edge = found
        for _ in range(REACH):
            edge = {n for node in edge for n in (*problem.before[node], *problem.after[node])} - found
            found |= edge
        return found


def pruned(problem: Problem) -> list[Labels]:
    """The providers worth a look for each node.

    A provider goes when another one that shares its memory is faster by all the launches that a node of the other can
    bring: its own part, and the part it cuts in two. Where nodes are parts anyway, none is cut and one launch saved.
    """
    found: list[Labels] = []
    choices = problem.choices
    pairs = [
        (p, q, choices[p].launch + (choices[q].launch if choices[q].whole_parts else -choices[q].launch))
        for p in range(len(choices))
        for q in range(len(choices))
        if p != q and choices[p].space == choices[q].space and choices[p].capacity is None
    ]
    for allowed, row in zip(problem.allowed, problem.seconds):
        if len(allowed) > 1 and pairs:
            gone = {q for p, q, launches in pairs if row[p] + launches < row[q]}
            allowed = [p for p in allowed if p not in gone]
        found.append(tuple(allowed))
    return found


def repaired(problem: Problem, owner: Sequence[int], per_byte: bool) -> list[int]:
    """Take nodes off providers that are overfull: those first that lose least, in all or for the room they leave."""
    found = list(owner)
    choices = problem.choices
    room = [float("inf") if choice.capacity is None else choice.capacity for choice in choices]
    for node, who in enumerate(owner):
        room[who] -= problem.weights[node]
    moves: list[tuple[float, int, int]] = []
    for node, row in enumerate(problem.seconds):
        who, nbytes = owner[node], problem.weights[node]
        if not nbytes or room[who] >= 0:
            continue
        flows = [problem.flows[k] for k in problem.touching[node]]
        now = row[who] + sum(problem.flow_seconds(flow, found) for flow in flows)
        for target in problem.allowed[node]:
            if target != who:
                found[node] = target
                loss = row[target] + sum(problem.flow_seconds(flow, found) for flow in flows) - now
                moves.append((loss / nbytes if per_byte else loss, node, target))
        found[node] = who
    for _, node, target in sorted(moves):
        who, nbytes = owner[node], problem.weights[node]
        if found[node] == who and room[who] < 0 and room[target] >= nbytes:
            found[node] = target
            room[who] += nbytes
            room[target] -= nbytes
    return found


def homes(problem: Problem) -> list[list[int]]:
    """The cheapest provider of every node; and for every provider all nodes it can run, the others as before."""
    cheapest = [min(allowed, key=lambda p: (row[p], p)) for allowed, row in zip(problem.allowed, problem.seconds)]
    return [cheapest] + [
        [p if row[p] < CANNOT else other for row, other in zip(problem.seconds, cheapest)]
        for p in range(len(problem.choices))
    ]
