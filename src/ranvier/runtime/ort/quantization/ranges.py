"""Ranges of values on samples, as scripts ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.graph.ir import Graph
from ranvier.quantize import Entropy, MinMax, Observer, Percentile
from ranvier.runtime.ort.quantization.extra import StaticExtra
from ranvier.runtime.ort.quantization.kinds import CalibrationMethod
from ranvier.runtime.quantizing.samples import Feed, visit

Range = tuple[float, float]
Array = np.ndarray[Any, Any]


class AveragedMinMax:
    """The mean of the ranges of runs; parts of them, where there are parts, come in with a weight."""

    def __init__(self, averaging: float, part: int) -> None:
        self._averaging, self._part = averaging, part
        self._found: list[Range] = []

    def update(self, array: Array) -> None:
        finite = array[np.isfinite(array)]
        if finite.size:
            self._found.append((float(finite.min()), float(finite.max())))

    def range(self) -> Range:
        size = self._part or len(self._found) or 1
        parts = [np.mean(self._found[k : k + size], axis=0) for k in range(0, len(self._found), size)]
        mean = parts[0] if parts else np.zeros(2)
        for each in parts[1:]:
            mean = mean + self._averaging * (each - mean)
        return min(0.0, float(mean[0])), max(0.0, float(mean[1]))


def ranges_of(
    graph: Graph,
    names: Iterable[str],
    feeds: Sequence[Feed],
    method: CalibrationMethod,
    extra: StaticExtra,
    config: SessionConfig,
) -> dict[str, Range]:
    """The range of each named value, which holds zero."""
    watched = {name: _observer(method, extra) for name in names}
    visit(graph, list(watched), feeds, config, lambda name, x: watched[name].update(x))
    return {name: _widened(each.range(), extra) for name, each in watched.items()}


def _observer(method: CalibrationMethod, extra: StaticExtra) -> Observer:
    if method is CalibrationMethod.Percentile:
        return Percentile(extra.percentile)
    if method is CalibrationMethod.Entropy:
        return Entropy()
    return AveragedMinMax(extra.averaging, extra.part) if extra.averaged else MinMax()


def _widened(bounds: Range, extra: StaticExtra) -> Range:
    low, high = bounds
    if extra.symmetric_ranges:
        low, high = min(low, -high), max(high, -low)
    return low, max(high, low + extra.least_range)


__all__ = ["AveragedMinMax", "ranges_of"]
