"""A session compiled after a look at a sample: with the nodes left alone that its precision does too much harm to."""

from __future__ import annotations

import functools
import glob
from collections.abc import Callable, Sequence
from typing import Any

from ranvier.config import SessionConfig
from ranvier.graph.ir import Graph
from ranvier.ops import TypeInference
from ranvier.ops.estimate import node_cost
from ranvier.providers.base import LARGEST_VALUES, ExecutionProvider, NodePrecision, TellsPrecision
from ranvier.runtime.compiled import Compiled
from ranvier.runtime.narrowing import sample
from ranvier.runtime.narrowing.by_definition import worked_out
from ranvier.runtime.narrowing.fewest import Names, fewest, measured
from ranvier.runtime.narrowing.pieces import Pieces
from ranvier.runtime.program import kernels_of
from ranvier.runtime.signature import Signature

_MOVING = 2.0  # operations in the time that it takes to move a byte


def searched(
    graph: Graph,
    providers: Sequence[ExecutionProvider],
    config: SessionConfig,
    compile_graph: Callable[[SessionConfig], Compiled],
) -> tuple[Compiled, SessionConfig, str]:
    """The graph compiled, the options with more in ``keep_f32`` where the sample asks for it, and what was found, for
    people."""
    trials = _Trials(graph, config, compile_graph)
    try:
        text = _settled(trials, providers)
    except BaseException:
        trials.close()
        raise
    assert trials.compiled is not None
    return trials.compiled, trials.config(trials.kept), text


def _settled(trials: _Trials, providers: Sequence[ExecutionProvider]) -> str:
    config, bound = trials.given, trials.given.max_error
    before = trials.error(frozenset())
    if before > bound and trials.compare_with_float32():
        before = trials.error(frozenset())
    text = f"error on the sample {before:.2g}"
    if before <= bound or not trials.nodes:
        return text
    about = (trials.graph, providers, config, trials.values, trials.dims, trials.nodes, trials.stored)
    with Pieces(*about) as pieces:
        batches = measured(pieces, trials.work(), bound, before)
    kept = fewest(batches, functools.cache(trials.error), bound, before)
    error = trials.error(kept)
    if error > bound and len(kept) < len(trials.nodes):  # some are in no piece
        kept = frozenset(trials.nodes)
        error = trials.error(kept)
    return f"{text}, {error:.2g} with {len(kept)} of {len(trials.nodes)} nodes kept in float32"


class _Trials:
    """Runs of the sample, each compiled with other nodes kept in float32. What was compiled last stays."""

    def __init__(self, graph: Graph, config: SessionConfig, compile_graph: Callable[[SessionConfig], Compiled]) -> None:
        self.graph, self.given, self._compile = graph, config, compile_graph
        self.values, self.dims = Signature(graph).bind(sample.read(config.calibration))
        self.nodes: list[str] = []  # that multiply or are stored in 16 bits unless they are kept, in order
        self.stored: set[str] = set()  # of these, those whose results are stored so
        self.kept: Names = frozenset()
        self.compiled: Compiled | None = None
        self._found: list[Any] = []
        self._expected: list[Any] | None = None
        self._from_float32 = False  # where the expected results come from
        if config.precision == "fp16":
            found = worked_out(graph, dict(zip(graph.inputs, self.values)))
            graph.metadata[LARGEST_VALUES] = found.largest
            self._expected = found.outputs
        if self._expected is None:
            self.compare_with_float32()

    def compare_with_float32(self) -> bool:
        """Compare with what a session in float32 gives from now on: with codes of 8 bits, say, one rounding more or
        less shows, and is not what the precision did. Whether that is new."""
        if self._from_float32:
            return False
        compiled = self._compile(self.given.updated(precision="float32"))
        try:
            self._expected = self._run(compiled)
        finally:
            compiled.close()
        self._from_float32 = True
        return True

    def config(self, kept: Names) -> SessionConfig:
        patterns = tuple(glob.escape(name) for name in self.nodes if name in kept)
        return self.given.updated(keep_f32=(*self.given.keep_f32, *patterns))

    def error(self, kept: Names) -> float:
        """The largest difference of an output from float32's, as a part of the largest value of that output."""
        if self.compiled is None or kept != self.kept:
            self.close()
            self.compiled, self.kept = self._compile(self.config(kept)), kept
            self._found = self._run(self.compiled)
            if not kept:
                found = _precisions(self.compiled)
                self.nodes = [name for name, p in found.items() if p.computes != "f32" or p.stores != "f32"]
                self.stored = {name for name, p in found.items() if p.stores != "f32"}
        assert self._expected is not None
        return sample.largest_difference(self._found, self._expected)

    def work(self) -> dict[str, float]:
        """Of nodes, about as long as it takes: what there is to gain of 16 bits."""
        inference = TypeInference(self.dims, annotated=True)
        inference.run(self.graph, [sample.type_of(v, x) for v, x in zip(self.graph.inputs, self.values)])
        known = {v: t for v, t in inference.types.items() if t is not None}
        costs = {node.name: node_cost(node, known) for node in self.graph.all_nodes()}
        return {name: cost.flops + _MOVING * cost.bytes for name, cost in costs.items()}

    def _run(self, compiled: Compiled) -> list[Any]:
        return sample.results(compiled, self.values, self.dims, self.given.limits)

    def close(self) -> None:
        if self.compiled is not None:
            self.compiled.close()
            self.compiled = None


def _precisions(compiled: Compiled) -> dict[str, NodePrecision]:
    """By the names of nodes, in order, also of those in bodies."""
    kernels = [kernel for kernel in kernels_of(compiled.parts) if isinstance(kernel, TellsPrecision)]
    return {name: p for k in kernels for name, p in k.precisions().items()}
