"""Layers whose codes save no time: measured on the whole model, because what a layer costs depends on its neighbours.

A convolution between two that stay in float brings two conversions with it, and takes a chain of layers apart that one
kernel would compute. So runs of neighbouring layers are put back, and stay so where the model is faster for it; last,
each run is tried with all others put back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from ranvier.config import SessionConfig
from ranvier.graph.ir import Graph
from ranvier.runtime.narrowing.search import Names
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.session import Session

_BATCHES = 12
_SECONDS = 0.2  # of turns for a comparison
_LESS = 1.0  # part of the time that counts as no slower: where it is even, float32 is nearer


def without_gain(
    layers: Sequence[str],
    kept: Names,
    made: Callable[[Names], Graph],
    feed: Feed,
    config: SessionConfig,
    until: float,
    step: Callable[[int, int], None],
) -> Names:
    """More of these layers, in order, to leave in float32 than ``kept``; one at least stays coded."""
    coded = [name for name in layers if name not in kept]
    size = max(1, -(-len(coded) // _BATCHES))
    batches = [frozenset(coded[k : k + size]) for k in range(0, len(coded), size)]
    found: Names = frozenset()
    best = Session(made(kept), config)

    def faster(other: Names) -> bool:
        """Whether the model is no slower with these layers in float32; the one that is stays."""
        nonlocal best
        session = Session(made(kept | other), config)
        now, then = fastest((best, session), feed, _SECONDS)
        better = then < now * _LESS
        if better:
            best, session = session, best
        session.close()
        return better

    try:
        for k, batch in enumerate(batches):
            step(k, len(batches))
            if time.perf_counter() > until or len(found) + len(batch) == len(coded):
                break
            if faster(found | batch):
                found |= batch
        # neighbours may pay for each other's codes and still be slower than none of them
        for batch in batches if len(batches) > 1 else ():
            alone = frozenset(coded) - batch
            if time.perf_counter() <= until and found != alone and faster(alone):
                found = alone
    finally:
        best.close()
    return found


def fastest(sessions: Sequence[Session], feed: Feed, seconds: float) -> list[float]:
    """Seconds of the fastest run of each, in turns."""
    found = [math.inf] * len(sessions)
    for session in sessions:
        session.run(feed)
    until, turns = time.perf_counter() + seconds, 0
    while time.perf_counter() < until or turns < 3:
        for k, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(feed)
            found[k] = min(found[k], time.perf_counter() - start)
        turns += 1
    return found
