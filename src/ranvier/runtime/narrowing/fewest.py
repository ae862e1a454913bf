"""Which nodes stay in float32 for the error to stay below a bound: those with the least work.

Errors of single nodes hardly depend on each other, so their squares add up. What batches of nodes do is cheap to
measure in pieces of the graph, and batches that would be kept are taken apart. That orders them: those that do most
harm for their work are kept first. How many, is found by measuring the whole, which is dear: the sum of what is left
says where to begin, and each answer where to go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ranvier.records import dataclass

Names = frozenset[str]
_SPLIT = 24  # batches that are taken apart, at most
_TRIALS = 5  # of the whole, to find how many are enough
_THINNING = 5  # of the whole, to find what is not needed
_LITTLE = 0.02  # of all work
_MARGIN = 0.95  # of the bound: what sums of squares aim at
_FINEST = 64  # a batch with one part in so many of all work is small enough


@dataclass(frozen=True)
class Batch:
    """Some nodes of a piece, in order: their work, the square of the error that they make, and what part that is of
    the piece's."""

    piece: int
    names: tuple[str, ...]
    work: float
    harm: float
    share: float

    @property
    def density(self) -> float:
        return self.harm / max(self.work, 1e-30)


class Tried(Protocol):
    """Pieces of a graph, each by its number, with some of their nodes in 16 bits."""

    names: list[tuple[str, ...]]

    def made(self, k: int, narrow: Collection[str]) -> Any:
        """What a piece makes with these nodes in 16 bits."""
        ...

    def off(self, k: int, made: Any) -> float:
        """How far that is from what it should make, squared."""
        ...

    def error(self, k: int, made: Any) -> float:
        """How far the results of the graph are off where a piece makes that."""
        ...


def measured(pieces: Tried, work: Mapping[str, float], bound: float, whole: float) -> list[Batch]:
    """Batches of nodes, those that do most harm for their work first; ``whole`` is the error of all nodes together.

    What a piece does is seen in the results; how its nodes share in that, in what the piece itself makes.
    """
    found: list[Batch] = []
    off: dict[int, float] = {}
    for k, names in enumerate(pieces.names):
        if names:
            made = pieces.made(k, names)
            off[k] = pieces.off(k, made)
            found.append(Batch(k, names, _sum(names, work), pieces.error(k, made) ** 2, 1.0))
    smallest = sum(each.work for each in found) / _FINEST
    for _ in range(_SPLIT):
        found.sort(key=lambda each: -each.density)
        kept = [each for each in found[: enough(found, bound, _scale(found, whole))] if len(each.names) > 1]
        largest = max(kept, key=lambda each: each.work, default=None)
        if largest is None or largest.work <= smallest:
            break
        k, middle = largest.piece, len(largest.names) // 2
        halves = largest.names[:middle], largest.names[middle:]
        shares = [pieces.off(k, pieces.made(k, half)) / off[k] if off[k] else 0.0 for half in halves]
        # nodes that are in 16 bits only together with others, for the sake of conversions, do no harm alone
        more = 0 if shares[0] >= shares[1] else 1
        shares[more] = max(shares[more], largest.share - shares[1 - more])
        times = largest.harm / largest.share if largest.share else 0.0
        found.remove(largest)
        found += [Batch(k, half, _sum(half, work), share * times, share) for half, share in zip(halves, shares)]
    return sorted(found, key=lambda each: -each.density)


def _sum(names: Iterable[str], work: Mapping[str, float]) -> float:
    return sum(work.get(name, 0.0) for name in names)


def enough(batches: Sequence[Batch], bound: float, scale: float = 1.0) -> int:
    """How many of the batches have to be kept by what they do, times ``scale``."""
    left, count = 0.0, len(batches)
    while count and (left + batches[count - 1].harm) * scale <= (_MARGIN * bound) ** 2:
        count -= 1
        left += batches[count].harm
    return count


def fewest(batches: Sequence[Batch], error: Callable[[Names], float], bound: float, whole: float) -> Names:
    """The nodes to keep; ``error`` measures the whole with some kept, ``whole`` is what it is with none."""
    few, many = 0, len(batches)  # too few, and enough if any number is
    scale = _scale(batches, whole)
    for _ in range(_TRIALS):
        if many - few <= 1:
            break
        margin = max(1, (many - few) // 4)
        middle = min(max(enough(batches, bound, scale), few + margin), many - margin)
        left = sum(each.harm for each in batches[middle:])
        found = error(_names(batches[:middle]))
        few, many = (few, middle) if found <= bound else (middle, many)
        if left and math.isfinite(left) and math.isfinite(found):
            scale = max(found**2 / left, 1e-30)
    return _names(_thinned(batches[:many], error, bound, sum(each.work for each in batches) * _LITTLE))


def _thinned(kept: Sequence[Batch], error: Callable[[Names], float], bound: float, little: float) -> list[Batch]:
    """Without what is not needed, the least harmful first, half of all at once and then less; ``little``: work that is
    not worth a trial."""
    left = list(kept)
    middle = len(left) // 2
    queue = [left[middle:], left[:middle]]
    for _ in range(_THINNING):
        queue = [part for part in queue if sum(each.work for each in part) > little]
        if not queue:
            break
        part = queue.pop(0)
        without = [each for each in left if each not in part]
        if error(_names(without)) <= bound:
            left = without
        elif len(part) > 1:
            queue += [part[len(part) // 2 :], part[: len(part) // 2]]
    return left


def _scale(batches: Sequence[Batch], whole: float) -> float:
    """What harm is to be multiplied by to come to the square of the error of all."""
    total = sum(each.harm for each in batches if math.isfinite(each.harm))
    return whole**2 / total if total and math.isfinite(whole) else 1.0


def _names(batches: Sequence[Batch]) -> Names:
    return frozenset(name for each in batches for name in each.names)
