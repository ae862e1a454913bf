"""Errors of many nodes by few questions: batches of them, taken apart where much of the error is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Names = frozenset[str]
_BATCHES = 12
_SMALL = 0.01  # part of an error, squared, that is not worth taking a batch apart for


def apart(
    nodes: Sequence[str],
    error: Callable[[Names], float],
    bound: float,
    until: float,
    step: Callable[[int, int], None],
) -> dict[str, float]:
    """The squared error that each of these nodes causes, in order; ``error`` is what some of them do together.

    Batches of neighbours are tried first. The one with the largest error is taken apart until none is left that is
    large beside the bound, or time is over; nodes of a batch that stays whole share its error.
    """
    size = -(-len(nodes) // _BATCHES) or 1
    starts = [tuple(nodes[k : k + size]) for k in range(0, len(nodes), size)]
    whole: dict[tuple[str, ...], float] = {}
    for k, batch in enumerate(starts):
        step(k, len(starts))
        whole[batch] = error(frozenset(batch)) ** 2
    small = _SMALL * bound * bound
    while time.perf_counter() < until:
        largest = max((batch for batch in whole if len(batch) > 1), key=whole.__getitem__, default=None)
        if largest is None or whole[largest] <= small:
            break
        step(sum(value <= small or len(batch) == 1 for batch, value in whole.items()), len(whole))
        del whole[largest]
        middle = len(largest) // 2
        for half in (largest[:middle], largest[middle:]):
            whole[half] = error(frozenset(half)) ** 2
    return {name: value / len(batch) for batch, value in whole.items() for name in batch}
