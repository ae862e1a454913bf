"""Timing on a machine that others use too: short repetitions in turns, their minima, and whether to believe them.

A neighbour only ever adds time, so the shortest run counts, never a mean. A busy moment must not decide about one thing
alone, so everything gets its turn in every round. And where the minima of the rounds lie far apart, the machine was at
work all along: even the shortest run may be the neighbour's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Clock = Callable[[], float]
AT_WORK = 0.25  # by so much the rounds of an idle machine never differ
_LEAST_RUNS, _MOST_RUNS = 3, 200


class Timed:
    """Something to run, and the shortest time it took in every round."""

    def __init__(self, call: Callable[[], Any], clock: Clock = time.perf_counter) -> None:
        self.rounds: list[float] = []
        self._call = call
        self._clock = clock

    @property
    def best(self) -> float:
        return min(self.rounds, default=math.inf)

    @property
    def spread(self) -> float:
        """How far a usual round lies above the best one, as a share of it."""
        return statistics.median(self.rounds) / self.best - 1 if self.rounds and self.best > 0 else 0.0

    def run(self, seconds: float, end: float = math.inf) -> None:
        """A round: as many runs as ``seconds`` allow, and a few at least; one only where time is up at ``end``."""
        best, begin = math.inf, self._clock()
        until = begin + seconds
        for count in range(1, _MOST_RUNS + 1):
            self._call()
            now = self._clock()
            best = min(best, now - begin)
            if now >= end or (now >= until and count >= _LEAST_RUNS):
                break
            begin = now
        self.rounds.append(best)


def take_turns(all_of_them: Sequence[Timed], rounds: int, seconds: float, end: float, clock: Clock) -> None:
    """Rounds in which each gets ``seconds``; nothing is begun once it is ``end``."""
    for _ in range(rounds):
        for each in all_of_them:
            if clock() >= end:
                return
            each.run(seconds, end)


def disturbance(all_of_them: Sequence[Timed]) -> float:
    """The usual spread; endless where time was up before most had rounds to compare, as on a machine at work."""
    found = [each.spread for each in all_of_them if len(each.rounds) > 2]
    return statistics.median(found) if 2 * len(found) > len(all_of_them) else math.inf
