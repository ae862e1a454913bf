"""What is not coded in bfloat16: which nodes have to stay in float32 for that, on samples."""

from __future__ import annotations

import glob
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.runtime.narrowing.search import Names, Search
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.samples import Feed, results
from ranvier.runtime.session import Session

_TRIALS, _FEWEST = 32, 20  # models made to find nodes; with fewer the search cannot come to an end
_SEARCHED = 0.7  # part of an error that nodes are kept for, so that codes have the rest


def narrower(
    graph: Graph,
    feeds: Sequence[Feed],
    expected: Sequence[Sequence[np.ndarray[Any, Any]]],
    config: SessionConfig,
    allowed: float,
    seconds: float,
) -> SessionConfig:
    """Options for sessions that multiply in bfloat16 with at most this error; as given where that takes every node, or
    longer than there is time for."""
    narrow = config.updated(precision="bf16")

    def of(kept: Names) -> SessionConfig:
        return narrow.updated(keep_f32=(*config.keep_f32, *map(glob.escape, sorted(kept))))

    def error(kept: Names) -> float:
        return difference(list(results(graph, feeds, of(kept))), expected).error

    start = time.perf_counter()
    if error(frozenset()) <= allowed:
        return narrow
    trials = min(_TRIALS, int(seconds / (time.perf_counter() - start)))
    if trials < _FEWEST:
        return config
    with Session(copied(graph), narrow) as session:
        session.run(feeds[0])
        names = [node.name for node in session.report.nodes if node.precision not in ("", "f32")]
    kept = Search(error, allowed * _SEARCHED, trials).run(names)
    return of(kept) if len(kept) < len(names) else config
