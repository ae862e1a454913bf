"""What codes of every layer do to the results, of all layers by one run backwards.

The error that a layer's own codes add to what it computes is known where it stands: the layer of codes less the layer
of floats. How far results move with it is what gradients are for. Results are multiplied by signs that are drawn, and
summed; how far such a sum moves, squared, is on average how far the results move, squared, since the signs of
different results cancel. So a run forwards and backwards asks for all layers at once, where runs with switches ask for
one at a time. It is true to the first order, which errors of 8 bits are small enough for. Errors of several results are
added up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import of
from ranvier.errors import NotSupported
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.ops import annotate, complete
from ranvier.passes.differentiate import differentiate
from ranvier.passes.manager import PassManager
from ranvier.passes.modernise import Modernise
from ranvier.runtime.narrowing.sample import type_of
from ranvier.runtime.quantizing.range_inputs import Range, RangeInputs
from ranvier.runtime.quantizing.rounding import Rounding
from ranvier.runtime.quantizing.samples import Feed, as_array
from ranvier.runtime.quantizing.sites import Site, find_sites
from ranvier.runtime.quantizing.static import added_row, mean_loss
from ranvier.runtime.session import Session

ORIGIN = "slopes"
Array = np.ndarray[Any, Any]
_DRAWN = 48  # times that signs are drawn, at most: squares of single drawings differ by 1.4 times their mean
_FEWEST = 16  # ... and at least where ranges are chosen by them


class Slopes:
    """Judges layers of a model by gradients of its results. A context manager; NotSupported where there are none, where
    results of samples have different shapes, or where either is infinite."""

    def __init__(
        self,
        graph: Graph,
        names: Sequence[str],
        means: Mapping[str, Array],
        config: SessionConfig,
        feeds: Sequence[Feed],
        expected: Sequence[Sequence[Array]],
        *,
        signed: bool = False,
        rounding: Rounding | None = None,
    ) -> None:
        self.names = list(names)
        self._ranges = RangeInputs(signed)
        self._feeds = feeds
        self._of_numbers = [k for k, array in enumerate(expected[0]) if array.dtype.kind == "f"]
        self._rows = [expected[0][k] for k in self._of_numbers]
        self._sizes = [self._parts(expected, k) for k in self._of_numbers]
        self._session = Session(self._made(graph, means, rounding or Rounding()), config)

    def __enter__(self) -> Slopes:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _parts(self, expected: Sequence[Sequence[Array]], k: int) -> Array:
        """What a result of each sample is multiplied by, so that squares are parts of what a size of all is, or of one
        in which samples with large results count for less, whichever is more."""
        if any(row[k].shape != expected[0][k].shape for row in expected):
            raise NotSupported("results of samples have different shapes")
        sizes = np.array([np.square(row[k].astype(np.float64)).sum() for row in expected])
        if not np.isfinite(sizes).all():
            raise NotSupported("results are infinite, or no number")
        even = np.sqrt(sizes)
        least = np.finfo(np.float32).tiny
        own = np.maximum(1 / max(sizes.sum(), least), 1 / np.maximum(even * even.sum(), least))
        return np.asarray(np.sqrt(np.where(sizes > 0, own, 0.0)))

    def _made(self, graph: Graph, means: Mapping[str, Array], rounding: Rounding) -> Graph:
        made = copied(graph)
        for value in made.inputs:  # rules of gradients ask for sizes
            if value.name in self._feeds[0]:
                value.type = type_of(value, self._feeds[0][value.name])
        annotate(made)
        PassManager([Modernise()]).run(made, SessionConfig())
        sites = {site.name: site for site in find_sites(made)}
        if any(name not in sites for name in self.names):
            raise NotSupported("layers stand in bodies of branches or loops")
        results = [made.outputs[k] for k in self._of_numbers]
        seeds = [made.add_input(f"slopes.signs{k}", TensorType(of(row), row.shape)) for k, row in enumerate(self._rows)]
        outputs = {name: sites[name].node.output for name in self.names}
        ops = GraphOps(made, None, ORIGIN, complete)  # behind everything
        added = {name: self._added(ops, sites[name], k, means, rounding) for k, name in enumerate(self.names)}
        grads = differentiate(made, list(zip(results, seeds)), list(outputs.values()))
        scores = []
        for name, grad in zip(self.names, grads):
            zero = ops.constant(np.zeros((), np.float32))
            scores.append(zero if grad is None else ops.ReduceSum(ops.Mul(grad, added[name]), keepdims=0))
        row = [ops.Unsqueeze(score, np.array([0])) for score in scores]
        made.outputs = [ops.Concat(*row, axis=0)]
        made.sort()
        return made

    def _added(self, ops: GraphOps, site: Site, k: int, means: Mapping[str, Array], rounding: Rounding) -> Value:
        """What codes add to the result of a layer."""
        node = site.node
        lost, mean = rounding.codes(site)[2], means.get(site.name)
        row = None if mean is None else mean_loss(site, lost, mean).astype(np.float32)
        if node.op == "MatMul" and added_row(node, len(lost)) is None:  # there is no bias to take it back by
            row = None
        read = self._ranges.rounded(ops.graph, ops, site.data, f"slopes{k}")
        weights = np.ascontiguousarray(np.moveaxis(-lost, 0, site.outputs)).astype(np.float32) + site.numbers
        coded = ops.node(node.op, [read, weights, *node.inputs[2:]], dict(node.attrs), version=node.version).output
        if row is not None:
            coded = ops.Add(coded, row.reshape(-1, *[1] * (lost.ndim - 2)) if site.inner is None else row)
        return ops.Sub(coded, node.output)

    def errors(self, ranges: Mapping[str, Range], sample: int, drawing: int) -> Array:
        """Squared errors that each layer's codes cause in a sample, as parts of all results: by one drawing of signs,
        whose mean over many is what they are."""
        given: dict[str, Array] = {}
        rng = np.random.default_rng(drawing)
        for k, name in enumerate(self.names):
            given |= self._ranges.given(f"slopes{k}", ranges[name])
        for k, (row, sizes) in enumerate(zip(self._rows, self._sizes)):
            signs = rng.integers(0, 2, row.shape, np.int8) * 2 - 1
            given[f"slopes.signs{k}"] = (signs * sizes[sample]).astype(row.dtype)
        (found,) = self._session.run({**self._feeds[sample], **given}).values()
        moved = as_array(found).astype(np.float64)
        if not np.isfinite(moved).all():
            raise NotSupported("gradients are infinite, or no number")
        return np.square(moved)


def judge_by_slopes(
    slopes: Slopes,
    sites: Sequence[Site],
    ways: Sequence[Mapping[str, Range]],
    samples: int,
    seconds: float,
    step: Callable[[int, int], None],
) -> tuple[dict[str, float], dict[str, Range]]:
    """The squared error that every layer's codes cause alone, but for a factor that all of them have, and the ranges
    with which it is least, where there is time to find out. All ways are judged by the same signs."""

    def error(way: Mapping[str, Range], drawing: int) -> Array:
        return slopes.errors({site.name: way[site.data.name] for site in sites}, drawing % samples, drawing)

    error(ways[0], 0)  # compiles it
    start = time.perf_counter()
    error(ways[0], 0)
    once, samples = time.perf_counter() - start, min(samples, _DRAWN)
    if once * len(ways) * max(_FEWEST, samples) > seconds:
        ways = ways[:1]
    samples = max(1, min(samples, int(seconds / (once * len(ways)))))
    found = [np.zeros(len(sites)) for _ in ways]
    drawn, wanted = 0, _DRAWN // samples * samples
    while drawn < wanted:
        if drawn and drawn % samples == 0 and time.perf_counter() - start + once * len(ways) * samples > seconds:
            break  # all samples have been asked as often
        step(drawn, wanted)
        for sums, way in zip(found, ways):
            sums += error(way, drawn)
        drawn += 1
    readers: dict[str, list[int]] = {}
    for k, site in enumerate(sites):
        readers.setdefault(site.data.name, []).append(k)
    errors: dict[str, float] = {}
    ranges: dict[str, Range] = {}
    for data, those in readers.items():
        best = min(range(len(ways)), key=lambda way: found[way][those].sum())
        ranges[data] = ways[best][data]
        errors.update({sites[k].name: float(found[best][k]) * samples / drawn for k in those})
    return errors, ranges if len(ways) > 1 else {}
