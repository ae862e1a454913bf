"""A session's options after a look at a sample: with the nodes that its precision has to leave alone."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Graph
from ranvier.graph.types import TensorType
from ranvier.providers.base import LARGEST_VALUES, ExecutionProvider, TellsPrecision
from ranvier.runtime.compiled import Compiled
from ranvier.runtime.control import RunControl
from ranvier.runtime.narrowing.ranges import largest_values
from ranvier.runtime.narrowing.search import Search
from ranvier.runtime.signature import Signature


def searched(graph: Graph, providers: Sequence[ExecutionProvider], config: SessionConfig) -> tuple[SessionConfig, str]:
    """The options with more in ``keep_f32`` where the sample asks for it, and what was found, for people."""
    trial = _Trial(graph, providers, config)
    if config.precision == "fp16":
        graph.metadata[LARGEST_VALUES] = largest_values(graph, dict(zip(trial.signature.inputs, trial.values)))
    search = Search(trial.error, config.max_error)
    before = search.error(frozenset())
    kept = search.run(trial.nodes)
    text = f"error on the sample {before:.2g}"
    if kept:
        text += f", {search.error(kept):.2g} with {len(kept)} of {len(trial.nodes)} nodes kept in float32"
    patterns = tuple(glob.escape(name) for name in trial.nodes if name in kept)
    return config.updated(keep_f32=(*config.keep_f32, *patterns)), text


class _Trial:
    """Runs of the sample, each compiled with other nodes kept in float32."""

    def __init__(self, graph: Graph, providers: Sequence[ExecutionProvider], config: SessionConfig) -> None:
        self.graph, self.providers, self.config = graph, providers, config
        self.signature = Signature(graph)
        self.values, self._dims = self.signature.bind(_sample(config.calibration))
        self.nodes: list[str] = []  # that multiply in 16 bits unless they are kept, in order
        self._expected = self._run(config.updated(precision="float32"))

    def error(self, kept: frozenset[str]) -> float:
        """The largest difference of an output from float32's, as a part of the largest value of that output."""
        patterns = tuple(map(glob.escape, sorted(kept)))
        found = self._run(self.config.updated(keep_f32=(*self.config.keep_f32, *patterns)))
        return max((_difference(a, b) for a, b in zip(found, self._expected)), default=0.0)

    def _run(self, config: SessionConfig) -> list[Any]:
        compiled = Compiled(self.graph, self.providers, config)
        try:
            types = [
                TensorType(dtypes.of(x), x.shape) if isinstance(x, np.ndarray) else v.type
                for v, x in zip(self.signature.inputs, self.values)
            ]
            shapes = tuple((x.dtype, x.shape) if isinstance(x, np.ndarray) else None for x in self.values)
            plan = compiled.plan(shapes, types, self._dims, tuple(v.name for v in self.graph.outputs))
            results = plan.run(self.values, RunControl(None, config.limits), None)
            if not self.nodes and config.precision != "float32":
                self.nodes = _narrow_nodes(compiled)
            return results
        finally:
            compiled.close()


def _narrow_nodes(compiled: Compiled) -> list[str]:
    kernels = [part.kernel for part in compiled.parts if isinstance(part.kernel, TellsPrecision)]
    return [name for k in kernels for name, p in k.precisions().items() if p.computes != "f32" or p.stores != "f32"]


def _sample(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    try:
        with np.load(given, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidConfig(f"calibration: {given!r} is no .npz file with inputs ({error})") from None


def _difference(found: Any, expected: Any) -> float:
    """Infinite where the types differ; what is not a float must be the same."""
    if not isinstance(found, np.ndarray) or not isinstance(expected, np.ndarray) or expected.dtype.kind != "f":
        return 0.0
    if found.shape != expected.shape:
        return float("inf")  # sizes that follow from data: another number of boxes
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(found)):
        return float("inf")
    gap = np.abs(found[finite].astype(np.float64) - expected[finite]).max(initial=0.0)
    return float(gap / max(np.abs(expected[finite]).max(initial=0.0), 1e-30))
