"""As few nodes as possible that have to stay in float32 for the error to stay below a bound.

Errors of single nodes neither add up nor are independent, and every trial compiles the model and runs it once. So nodes
are tried in batches first, and ordered by how much their stay in float32 lowers the error. How many of them, the most
useful first, make the error low enough is found by halving. Then batches are taken apart, and what turns out not to be
needed is let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Names = frozenset[str]
_BATCHES = 12
_LEAST = 0.01  # part of a run's time that a difference counts for, at least


class Search:
    """``measure(kept)`` is the error with these nodes in float32; at most ``trials`` are measured. ``seconds(kept)``,
    asked after that, is what a run takes so: where it is known, those nodes stay that lower the error most for it."""

    def __init__(
        self,
        measure: Callable[[Names], float],
        bound: float,
        trials: int = 48,
        seconds: Callable[[Names], float] | None = None,
    ) -> None:
        self._measure = measure
        self._bound = bound
        self._seconds = seconds
        self._left = trials
        self._known: dict[Names, float] = {}

    def error(self, kept: Names) -> float:
        if kept not in self._known:
            self._left -= 1
            self._known[kept] = self._measure(kept)
        return self._known[kept]

    def run(self, nodes: Sequence[str]) -> Names:
        """Nodes to keep; all of them where fewer do not suffice."""
        nothing: Names = frozenset()
        if self.error(nothing) <= self._bound or not nodes:
            return nothing
        size = -(-len(nodes) // _BATCHES)
        batches = [frozenset(nodes[k : k + size]) for k in range(0, len(nodes), size)]
        batches.sort(key=self._order)
        few, enough = 0, len(batches)  # all of them are enough if any number is
        while enough - few > 1:
            middle = (few + enough) // 2
            if self.error(nothing.union(*batches[:middle])) <= self._bound:
                enough = middle
            else:
                few = middle
        return self._thinned(nothing.union(*batches[:enough]), batches[:enough], nodes)

    def _order(self, batch: Names) -> float:
        """The most useful batches have the least."""
        error, nothing = self.error(batch), frozenset[str]()
        if self._seconds is None:
            return error
        won, before = self.error(nothing) ** 2 - error**2, self._seconds(nothing)
        return -won / max(self._seconds(batch) - before, before * _LEAST)

    def _thinned(self, kept: Names, batches: list[Names], nodes: Sequence[str]) -> Names:
        """Without what is not needed: the least useful batches first, whole, then halves of them."""
        order = {name: k for k, name in enumerate(nodes)}
        queue = list(reversed(batches))
        while queue and self._left > 0:
            batch = queue.pop(0)
            without = kept - batch
            if self.error(without) <= self._bound:
                kept = without
            elif len(batch) > 1:
                halves = sorted(batch, key=order.__getitem__)
                middle = len(halves) // 2
                queue += [frozenset(halves[:middle]), frozenset(halves[middle:])]
        return kept
