"""What samples say of values: ranges, as scripts ask for them, and means of what layers read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.errors import InvalidInput
from ranvier.graph.ir import Graph
from ranvier.quantize import Entropy, MinMax, Observer, Percentile
from ranvier.quantize.observers import ChannelMean
from ranvier.runtime.ort.quantization.extra import StaticExtra
from ranvier.runtime.ort.quantization.kinds import CalibrationMethod
from ranvier.runtime.quantizing.rounding import groups_of, mean_of
from ranvier.runtime.quantizing.samples import Feed, visit
from ranvier.runtime.quantizing.sites import Site

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


def ranges_and_means(
    graph: Graph,
    sites: Sequence[Site],
    names: Iterable[str],
    feeds: Sequence[Feed],
    method: CalibrationMethod,
    extra: StaticExtra,
    config: SessionConfig,
) -> tuple[dict[str, Range], dict[str, Array]]:
    """The range of each named value, which holds zero; means of the channels that layers read, by names of layers."""
    readers: dict[str, list[tuple[Site, ChannelMean]]] = {}  # of one value: they may not take the same for channels
    for site in sites:
        readers.setdefault(site.data.name, []).append((site, mean_of(site)))
    watched = {name: _observer(method, extra) for name in dict.fromkeys((*names, *readers))}

    def look(name: str, x: Array) -> None:
        watched[name].update(x)
        for site, average in readers.get(name, ()):
            _check_channels(site, x)
            average.update(x)

    visit(graph, list(watched), feeds, config, look)
    ranges = {name: _widened(each.range(), extra) for name, each in watched.items()}
    return ranges, {site.name: average.mean for those in readers.values() for site, average in those}


def _check_channels(site: Site, x: Array) -> None:
    """An input may leave its channels open, and is looked at before anything is run."""
    axis = 1 if site.inner is None else site.inner
    wanted, found = site.numbers.shape[axis] * groups_of(site), x.shape[1:2] if site.inner is None else x.shape[-1:]
    if found != (wanted,):
        shape = list(x.shape)
        raise InvalidInput(f"node {site.name!r} reads {wanted} channels, a sample of {site.data.name!r} has {shape}")


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


__all__ = ["AveragedMinMax", "ranges_and_means"]
