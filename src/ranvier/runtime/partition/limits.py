"""Placements of large graphs in which the weights fit: every byte on a provider that is short of memory has a price.

At the right price (the multiplier of the limit in Lagrange's relaxation) as much stays there as there is room for.
Where nodes are alike they all leave at the same price: no price fills the room, but the two placements around that
price cost nearly the same, and one of them up to some node and the other from there on costs little more than either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ranvier.runtime.partition.elimination import Elimination
from ranvier.runtime.partition.factors import Factors, StandIn
from ranvier.runtime.partition.moving import Moving
from ranvier.runtime.partition.problem import HOST, Problem

Array = np.ndarray[Any, Any]
PRICES = 6  # that are tried
BEST = 2  # placements that fit and are looked at more closely
STRETCHES = 8  # of other placements that may be put into one
STARTS = 16  # where such a stretch may begin
ROOM = 0.03  # share of a provider's memory that may stay empty
_GUESSES = 200  # prices that are tried for nodes on their own
_NO_MATTER = 1e-4
_LATER = 0.6  # by which changes of a price get smaller once the right one was passed


class Limits:
    """One problem with limits: the same tables for all prices, and an elimination that is worked out once."""

    def __init__(self, problem: Problem, moving: Moving, factors: Factors, stand_in: StandIn, table: int) -> None:
        self.problem = problem
        self.moving = moving
        self.factors = factors
        self.weights: Array = np.array(problem.weights, np.float64)
        self.seconds: Array = np.array(problem.seconds, np.float64)
        self.room: Array = np.array([np.inf if c.capacity is None else c.capacity for c in problem.choices])
        self.tables = factors.tables(stand_in)
        self._priced: list[tuple[slice, Any]] = []  # tables that hold prices, and whose: nodes with the same labels
        groups: dict[tuple[int, ...], list[int]] = {}
        for node, own in enumerate(factors.labels):
            if factors.free[node] and problem.weights[node]:
                groups.setdefault(own, []).append(node)
        for own, nodes in groups.items():
            begin = len(self.tables.tables)
            self.tables.add_all([(node,) for node in nodes], np.zeros((len(nodes), len(own))))
            self._priced.append((slice(begin, begin + len(nodes)), np.ix_(nodes, own)))
        self.elimination = Elimination(self.tables, table, problem.size)

    def placed(self, charges: Array, known: Sequence[int]) -> list[int]:
        """The cheapest placement where the weights of a node cost ``charges`` by provider beside what it takes; what
        must be held stays as ``known``."""
        for where, whose in self._priced:
            self.tables.tables[where] = list(charges[whose])
        labels = self.factors.labels
        known = [p if p in own else own[0] for own, p in zip(labels, known)]
        found = self.elimination.run(self.tables, self.factors.extended(self.tables, known))
        return [own[k] for own, k in zip(labels, found)]

    def used(self, owner: Sequence[int] | Array) -> Array:
        """Bytes by provider."""
        found: Array = np.bincount(owner, self.weights, len(self.room))
        return found

    def share(self, used: Array) -> Array:
        """Bytes by provider as a share of its room."""
        found: Array = used / np.maximum(self.room, 1.0)
        return found

    def fits(self, owner: Sequence[int]) -> bool:
        return bool((self.used(owner) <= self.room).all())

    def fitting(self, owner: list[int], known: Sequence[int]) -> list[list[int]]:
        """Placements within the limits, the cheapest first; ``owner`` is the best one without them."""
        bidding = _Bidding(self, self._first_prices())
        tried: list[list[int]] = []
        for _ in range(PRICES):
            tried.append(self.placed(self.weights[:, None] * bidding.price, known))
            if not bidding.goes_on(tried[-1]):
                break
        others = [*tried, self._in_order(owner, known)]
        fits = [each for each in others if self.fits(each)]
        fits += [each for each in (self._emptied(tried[-1]),) if self.fits(each)]
        known_others = [(each, self._each(each), self._running(each)) for each in others]
        found = [self._filled(each, known_others) for each in sorted(fits, key=self.cost)[:BEST]]
        return sorted(found, key=self.cost)

    def cost(self, owner: Sequence[int]) -> float:
        """Seconds without launches."""
        return float(self._each(owner).sum())

    def _in_order(self, owner: list[int], known: Sequence[int]) -> list[int]:
        """Providers have the first nodes that are wanted of them, as far as there is room: few places to hand over."""
        charges = np.zeros(self.seconds.shape)
        too_dear = float(self.seconds[np.isfinite(self.seconds)].sum())
        for _ in self.room:
            used = self.used(owner)
            over = np.flatnonzero(used > self.room)
            if not len(over):
                break
            running = self._running(owner)
            for p in over:
                charges[running[:, p] > self.room[p], p] = too_dear
            owner = self.placed(charges, known)
        return owner

    def _first_prices(self) -> Array:
        """Prices at which the weights would fit if every node went its own way, transfers aside: quick to see, and not
        far off. Limits that compete rise together, so all prices change at once, by less and less, and their mean
        counts (a subgradient method: where nodes are alike, single steps jump to and fro)."""
        scale = self.least / _NO_MATTER
        price, total = np.zeros(len(self.room)), np.zeros(len(self.room))
        begin = _GUESSES // 2
        for k in range(_GUESSES):
            used = self.used((self.seconds + self.weights[:, None] * price).argmin(1))
            price = np.maximum(price + scale / (4 + k / 4) * np.clip(self.share(used) - 1, -1, 1), 0.0)
            price[~np.isfinite(self.room)] = 0.0
            total += price if k >= begin else 0.0
        mean: Array = total / (_GUESSES - begin)
        return mean

    @cached_property
    def least(self) -> float:
        """A price per byte that no decision hangs on: next to nothing of what leaving costs the usual node."""
        kept = self.seconds[self.weights > 0]
        best = kept.min(1)
        others = np.where(np.isinf(self.room), kept, np.inf).min(1)
        loss = np.where(np.isfinite(others), others - best, best)
        return float(_NO_MATTER * max(loss.mean(), best.mean()) / self.weights[self.weights > 0].mean())

    def _each(self, owner: Sequence[int]) -> Array:
        """Seconds by node, transfers at the node that makes the value, or at the first one where none does."""
        found: Array = self.seconds[np.arange(len(owner)), np.asarray(owner)].copy()
        np.add.at(found, np.maximum(self.moving.producer, 0), self.moving.seconds(owner))
        return found

    def _filled(self, owner: list[int], others: Sequence[tuple[Sequence[int], Array, Array]]) -> list[int]:
        """A placement that fits, with stretches of others in which more is where it is wanted, while they fit."""
        cost = self.cost(owner)
        for _ in range(STRETCHES):
            each, running = self._each(owner), self._running(owner)
            left = self.room - self.used(owner)
            gain, begin, end, other = 0.0, 0, 0, owner
            for there, each_there, running_there in others:
                found = _stretch(running_there - running, np.cumsum(each - each_there), left)
                if found[0] > gain:
                    gain, begin, end, other = *found, list(there)
            mixed = [*owner[:begin], *other[begin:end], *owner[end:]]
            total = self.cost(mixed)
            if total >= cost:
                break
            owner, cost = mixed, total
        return owner

    def _running(self, owner: Sequence[int]) -> Array:
        """Bytes by provider, of the nodes so far."""
        each = np.zeros((len(owner), len(self.room)))
        each[np.arange(len(owner)), np.asarray(owner)] = self.weights
        found: Array = np.cumsum(each, 0)
        return found

    def _emptied(self, owner: Sequence[int]) -> list[int]:
        """All nodes with weights away from what has a limit, where another provider takes them."""
        found = list(owner)
        for node, row in enumerate(self.problem.seconds):
            if self.weights[node] and np.isfinite(self.room[found[node]]):
                free = [p for p in self.problem.allowed[node] if not np.isfinite(self.room[p])]
                if free:
                    found[node] = min(free, key=lambda p: (self.problem.space[p] != HOST, row[p]))
        return found


def _stretch(more: Array, saved: Array, left: Array) -> tuple[float, int, int]:
    """What the best stretch saves, its begin and end. By node, summed up: ``more`` bytes by provider, for which there
    is so much ``left``, and seconds ``saved``."""
    best = (0.0, 0, 0)
    for begin in range(0, len(saved), max(1, len(saved) // STARTS)):
        before = (more[begin - 1], saved[begin - 1]) if begin else (0.0, 0.0)
        gain = np.where((more[begin:] <= left + before[0]).all(1), saved[begin:], -np.inf)
        at = int(gain.argmax())
        if gain[at] - before[1] > best[0]:
            best = (float(gain[at] - before[1]), begin, begin + at + 1)
    return best


class _Bidding:
    """Prices that go up where too much is placed and down where there is room left: the further off, the more; by less
    and less once the right price was passed."""

    def __init__(self, limits: Limits, price: Array) -> None:
        self.limits = limits
        self.price = price
        self._power = np.full(len(price), 0.5)
        self._direction = np.zeros(len(price))

    def goes_on(self, owner: Sequence[int]) -> bool:
        """Change the prices after a placement; False where they are right."""
        room, least = self.limits.room, self.limits.least
        used = self.limits.used(owner)
        left = (self.price > least) & (used < (1 - ROOM) * room)
        wanted = np.where(used > room, 1.0, np.where(left, -1.0, 0.0))
        self._power = np.where(wanted * self._direction < 0, self._power * _LATER, self._power)
        self._direction = np.where(wanted != 0, wanted, self._direction)
        far = np.clip(np.abs(np.log2(np.maximum(self.limits.share(used), 1e-9))), 0.25, 3.0)
        price = np.where(wanted > 0, np.maximum(self.price, least), self.price)
        self.price = price * 2.0 ** (wanted * far * self._power)
        return bool(wanted.any())
