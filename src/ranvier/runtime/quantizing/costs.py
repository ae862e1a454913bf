"""How long layers take, one by one: what choices between ways to compute them go by.

Times of kernels are those of one session, where a kernel may stand for several layers, and what a layer costs depends
on its neighbours. So they only say what is worth trying; whole models are compared in turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from ranvier.graph.ir import Graph, Node
from ranvier.graph.types import TensorType
from ranvier.ops.infer import TypeInference
from ranvier.runtime.narrowing.sample import type_of
from ranvier.runtime.quantizing.choice import BF16, FLOAT32, INT8, INT16
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.quantizing.sites import Site
from ranvier.runtime.session import Session

_MOVED = 8.0  # multiplications in the time it takes to write and read one number
_WIDER = 4e-10  # seconds to write and read two bytes more
_LEAST_RUNS = 3
_RATE = 1e-11  # seconds of a multiplication, where nothing was measured
ESTIMATED = {FLOAT32: 1.0, BF16: 0.5, INT16: 0.5, INT8: 0.25}  # parts of the time in float32


def work_of(site: Site, shape: Sequence[int]) -> float:
    """Of a layer that reads an array of this shape, in multiplications."""
    weights, read = site.numbers, float(math.prod(shape))
    if site.inner is not None:
        places = read / max(1, shape[-1])
    else:
        places = read / max(1, shape[1]) / math.prod(map(int, site.node.attrs.get("strides", [1])))
    return places * int(weights.size) + _MOVED * (read + places * int(weights.shape[site.outputs]))


def elements(graph: Graph, feed: Feed) -> dict[str, int]:
    """Of values in a run of this sample, as far as types tell."""
    inference = TypeInference()
    inference.run(graph, [type_of(value, feed.get(value.name)) for value in graph.inputs])
    found: dict[str, int] = {}
    for value, type_ in inference.types.items():
        shape = type_.shape if isinstance(type_, TensorType) else None
        if shape is not None and all(isinstance(size, int) for size in shape):
            found[value.name] = math.prod(size for size in shape if isinstance(size, int))
    return found


def seconds_wider(node: Node, sizes: Mapping[str, int]) -> float:
    """That it takes more to have results of a node in float32 than in bfloat16."""
    return _WIDER * sum(sizes.get(value.name, 0) for value in node.outputs)


def estimated(work: Mapping[str, float], kind: str) -> dict[str, float]:
    """Seconds of layers without asking the machine."""
    return {name: each * _RATE * ESTIMATED[kind] for name, each in work.items()}


def measured(
    session: Session, feed: Feed, work: Mapping[str, float], called: Mapping[str, str], seconds: float
) -> dict[str, float]:
    """Seconds of layers in a session, by its kernels. One that stands for several is shared out by their work, and one
    that stands for none, a conversion or what lies between layers, counts for the next that does. ``called``: layers by
    names that kernels may have in their place."""
    session.run(feed)
    best: list[tuple[str, float]] = []
    until, runs = time.perf_counter() + seconds, 0
    while runs < _LEAST_RUNS or time.perf_counter() < until:
        runs += 1
        with session.profile() as profiler:
            session.run(feed)
        records = [(record.label, record.seconds) for record in profiler.records()]
        same = [label for label, _ in records] == [label for label, _ in best]
        best = [(label, min(a, b)) for (label, a), (_, b) in zip(records, best)] if same else records
    found: dict[str, float] = {}
    between = 0.0
    for label, taken in best:
        names = dict.fromkeys(called.get(name, name) for name in label.split(" + "))
        those = [name for name in names if name in work]
        if not those:
            between += taken
            continue
        total = sum(work[name] for name in those)
        for name in those:
            found[name] = found.get(name, 0.0) + (taken + between) * work[name] / max(total, 1e-30)
        between = 0.0
    return found
