"""What is not coded in bfloat16: which nodes have to stay in float32 for that, on samples."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.runtime.narrowing.search import Names, Search
from ranvier.runtime.quantizing.report import Difference, difference
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.quantizing.worth import fastest
from ranvier.runtime.session import Session

_TRIALS, _FEWEST = 32, 20  # models made to find nodes; with fewer the search cannot come to an end
_SEARCHED = 0.9  # part of an error that nodes are kept for, so that codes have the rest
_SAMPLES = 8  # at least
_TIMED = 0.05  # seconds of runs after which it is known how long one takes


def narrower(
    graph: Graph,
    feeds: Sequence[Feed],
    expected: Sequence[Sequence[np.ndarray[Any, Any]]],
    config: SessionConfig,
    allowed: float,
    seconds: float,
    made: Callable[[SessionConfig], Graph] | None = None,
    shown: Callable[[Difference], float] = lambda found: found.error,
) -> SessionConfig:
    """Options for sessions that multiply in bfloat16 with at most this error; as given where that takes every node, or
    longer than there is time for. ``made``: the graph as such sessions are given it, where it is another one;
    ``shown``: what counts as the error."""
    narrow = config.updated(precision="bf16")

    def of(kept: Names) -> SessionConfig:
        return narrow.updated(keep_f32=(*config.keep_f32, *map(glob.escape, sorted(kept))))

    taken: dict[Names, float] = {}
    count = len(feeds)

    def error(kept: Names) -> float:
        running = of(kept)
        with Session(copied(made(running) if made else graph), running) as session:
            found = [[np.asarray(x) for x in session.run(feed).values()] for feed in feeds[:count]]
            (taken[kept],) = fastest([session], feeds[0], _TIMED)
        return shown(difference(found, expected[:count]))

    if error(frozenset()) <= allowed:  # what it takes to round weights belongs to no trial
        return narrow
    start = time.perf_counter()
    error(frozenset())
    once, runs = time.perf_counter() - start, count * taken[frozenset()]
    if once * _TRIALS > seconds:  # fewer samples, where those take the time
        count = max(min(_SAMPLES, count), int(count * (seconds / _TRIALS - once + runs) / runs))
        once += (count / len(feeds) - 1) * runs
    trials = min(_TRIALS, int(seconds / once))
    if trials < _FEWEST:
        return config
    with Session(copied(graph), narrow) as session:
        session.run(feeds[0])
        names = [node.name for node in session.report.nodes if node.precision not in ("", "f32")]
    kept = Search(error, allowed * _SEARCHED, trials, taken.__getitem__).run(names)
    return of(kept) if len(kept) < len(names) else config
