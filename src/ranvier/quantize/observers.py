"""Ranges of activations from samples: all of it, all but the outliers, or what loses least.

Samples arrive batch by batch. Minimum and maximum are exact; the others work on a histogram that widens by doubling,
so no sample is kept.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ranvier.errors import InvalidConfig, nearest
from ranvier.quantize.blocks import Array
from ranvier.quantize.numbers import any_numbers
from ranvier.rules import Whole

_BINS = 2048
_TRIES = 100
_LEAST = 128  # bins of absolute values in a range, at least: a handful of codes is told apart from few bins by nothing
_CODE_BITS = Whole(2, 16)
_COUNTED = 1 << 16  # numbers of one array that are counted: more of them move no range


class Observer(Protocol):
    """Numbers that are infinite or NaN are left out."""

    def update(self, array: Array) -> None: ...

    def range(self) -> tuple[float, float]:
        """The range to cover; it holds zero."""
        ...


class MinMax:
    def __init__(self) -> None:
        self.low = self.high = 0.0

    def update(self, array: Array) -> None:
        finite = _finite(array)
        if finite.size:
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))

    def range(self) -> tuple[float, float]:
        return self.low, self.high


class ChannelMean:
    """The mean of every channel along an axis; places where a channel is infinite or NaN are left out."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.count = 0
        self.sum: Array = np.zeros(1)

    def update(self, array: Array) -> None:
        moved = np.moveaxis(np.asarray(array), self.axis, -1)
        rows = moved.reshape(-1, moved.shape[-1])
        finite = np.isfinite(rows).all(axis=1)
        rows = rows if finite.all() else rows[finite]
        self.count += len(rows)
        self.sum = self.sum + rows.sum(axis=0, dtype=np.float64)

    @property
    def mean(self) -> Array:
        return np.asarray(self.sum / max(1, self.count))


class Histogram:
    """Counts of values in even bins around zero."""

    def __init__(self) -> None:
        self.reach = 0.0
        self.counts = np.zeros(_BINS, np.int64)
        self.low = self.high = 0.0

    def update(self, array: Array) -> None:
        finite = _finite(array)
        if not finite.size:
            return
        self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        most = max(-self.low, self.high)
        if self.reach == 0.0:
            self.reach = most
        while self.reach < most:  # two neighbours become one; the outer quarters are new
            halves = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.zeros(_BINS, np.int64)
            self.counts[_BINS // 4 : _BINS // 4 * 3] = halves
            self.reach *= 2
        some = finite[:: -(-finite.size // _COUNTED) | 1]  # an odd stride meets all columns of even rows
        if self.reach == 0:
            self.counts[_BINS // 2] += some.size  # zeros are there however far others will reach
        else:
            # as float64: bins of the smallest numbers, and a reach beyond the largest, are none of float32
            self.counts += np.histogram(some.astype(np.float64), _BINS, (-self.reach, self.reach))[0]

    @property
    def centres(self) -> Array:
        edges = np.linspace(-self.reach, self.reach, _BINS + 1)
        return (edges[1:] + edges[:-1]) / 2


class Percentile(Histogram):
    """All but the outermost numbers: ``percent`` of them lie inside."""

    def __init__(self, percent: float = 99.99) -> None:
        super().__init__()
        if not isinstance(percent, int | float) or not 50.0 < percent <= 100.0:
            raise InvalidConfig(f"a percentile must lie between 50 and 100, got {percent!r}")
        self.percent = percent

    def range(self) -> tuple[float, float]:
        total = int(self.counts.sum())
        if not total:
            return 0.0, 0.0
        outside = total * (1.0 - self.percent / 100.0) / 2
        below = np.cumsum(self.counts)
        edges = np.linspace(-self.reach, self.reach, _BINS + 1)
        low = edges[int(np.searchsorted(below, outside, side="right"))]
        high = edges[int(np.searchsorted(below, total - outside, side="left")) + 1]
        return min(0.0, max(float(low), self.low)), max(0.0, min(float(high), self.high))


class MeanSquare(Histogram):
    """The range in which 8-bit codes have the least squared error."""

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        self.levels = (1 << _CODE_BITS("MeanSquare", "bits", bits)) - 1

    def range(self) -> tuple[float, float]:
        if not self.counts.any():
            return 0.0, 0.0
        best, kept = np.inf, (self.low, self.high)
        centres = self.centres
        for part in np.linspace(1.0, 0.1, _TRIES):
            low, high = self.low * part, self.high * part
            step = (high - low) / self.levels
            if step <= 0:
                continue
            back = np.clip(np.rint((centres - low) / step), 0, self.levels) * step + low
            error = float((self.counts * (back - centres) ** 2).sum())
            if error < best:
                best, kept = error, (low, high)
        return min(0.0, kept[0]), max(0.0, kept[1])


class Entropy(Histogram):
    """The range whose codes tell most about the numbers: least divergence of the distribution of what the codes read
    back as from the true one (after Migacz, "8-bit inference with TensorRT", 2017)."""

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        self.levels = 1 << (_CODE_BITS("Entropy", "bits", bits) - 1)

    def range(self) -> tuple[float, float]:
        if not self.counts.any():
            return 0.0, 0.0
        half = _BINS // 2
        counts = self.counts[half:] + self.counts[:half][::-1]  # of absolute values
        # every range reads zero back as zero: those that an activation leaves are no reason to cut one
        counts[0] = min(counts[0], counts[1])
        best, kept = np.inf, half
        least = max(self.levels, _LEAST)
        for stop in range(least, half + 1, max(1, (half - least) // _TRIES)):
            divergence = _divergence(counts.astype(np.float64), stop, self.levels)
            if divergence < best:
                best, kept = divergence, stop
        reach = self.reach * kept / half
        return max(self.low, -reach), min(self.high, reach)


def _divergence(counts: Array, stop: int, levels: int) -> float:
    """Of the first ``stop`` bins, with the rest in the last of them, against the same put into ``levels`` codes."""
    true = counts[:stop].copy()
    true[-1] += counts[stop:].sum()
    edges = np.linspace(0, stop, levels + 1).astype(np.int64)
    sums = np.add.reduceat(counts[:stop], edges[:-1])
    filled = np.add.reduceat((counts[:stop] > 0).astype(np.float64), edges[:-1])
    level = np.where(filled > 0, sums / np.maximum(filled, 1), 0.0)
    coded = np.repeat(level, np.diff(edges)) * (counts[:stop] > 0)
    if coded.sum() == 0:
        return float("inf")
    p, q = true / true.sum(), coded / coded.sum()
    q = np.where(q > 0, q, 1e-12)  # the last bin may hold nothing but outliers
    seen = p > 0
    return float((p[seen] * np.log(p[seen] / q[seen])).sum())


OBSERVERS = {"minmax": MinMax, "percentile": Percentile, "mse": MeanSquare, "entropy": Entropy}


def observer(name: str) -> Observer:
    if not isinstance(name, str) or name not in OBSERVERS:
        raise InvalidConfig(f"unknown way to find a range {name!r}{nearest(str(name), OBSERVERS)}")
    made: Observer = OBSERVERS[name]()
    return made


def _finite(array: Array) -> Array:
    given, _ = any_numbers(array)
    with np.errstate(over="ignore"):
        values = np.asarray(given, np.float32).reshape(-1)
    if values.size and np.isfinite(values.min()) and np.isfinite(values.max()):  # both are NaN where anything is
        return values
    return values[np.isfinite(values)]
