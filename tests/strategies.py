"""Random valid graphs for property tests.

A tape shrinks well, and the same tape gives the same graph every time, so that a test can have an untouched copy.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from ranvier.dtypes import of
from ranvier.graph import Graph, Symbol, TensorType
from ranvier.ops import NEWEST, annotate
from tests.graph_builder import Builder, Known, Tape
from tests.graph_makers import MAKERS


def build(numbers: list[int]) -> tuple[Graph, list[np.ndarray], list[bool]]:
    """The graph of a tape, inputs for it, and per output whether its bits must not change."""
    tape = Tape(numbers)
    graph = Graph("random", opsets={"": NEWEST})
    rng = np.random.default_rng(tape.below(1000))
    feeds: list[np.ndarray] = []
    known: list[Known] = []
    symbolic = tape.chance(2)
    for name, shape in (("x", tape.pick([(2, 3, 4), (1, 3, 4), (2, 3, 1, 2), (4, 2)])), ("z", (3,))):
        array = (rng.integers(-12, 13, shape) / 4).astype(np.float32)
        dims = tuple(Symbol(f"{name}{k}") if symbolic and k % 2 == 0 else size for k, size in enumerate(shape))
        known.append(Known(graph.add_input(name, TensorType(of(array), dims)), array, True))
        feeds.append(array)
    builder = Builder(tape, graph, known)
    builder.known.append(builder.weights(3))
    while not tape.ended and len(graph) < 25:
        tape.pick(MAKERS)(builder)
    chosen = builder.outputs()
    annotate(graph)
    return graph, feeds, [k.exact for k in chosen]


def tapes() -> st.SearchStrategy[list[int]]:
    """Tapes for :func:`build`; most give five to twenty-five nodes."""
    numbers = st.integers(0, 999)
    return st.integers(20, 130).flatmap(lambda length: st.lists(numbers, min_size=length, max_size=length))
