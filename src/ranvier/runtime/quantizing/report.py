"""What quantization did to a model: layer by layer, in size, in its results, in speed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, field
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import of
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.records import dataclass
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.session import Session

Array = np.ndarray[Any, Any]
_SECONDS = 1.5
_NOTHING = 1e-50  # a size of results that is none: smaller than any number of float32


@dataclass(frozen=True)
class LayerReport:
    """``error``: of the layer's results on ``QuantizationReport.layer_samples`` samples, as a part of their size, all
    errors before it included."""

    name: str
    op: str
    scheme: str  # "float32" where it was left alone
    bytes_before: int
    bytes_after: int
    error: float | None = None
    reason: str = ""  # why it was left alone, or coded otherwise than others


@dataclass(frozen=True)
class Difference:
    """Of results: the size of the error as a part of the size of the results, the cosine between the two, and how often
    the largest entry along the last axis is the same, or a whole number, in how many ``places``. ``turn``: the error
    that belongs to the cosine, without what one factor for all results would take off; ``even_turn``: where samples
    with large results count for less. ``most`` and ``most_turn``: what error and turn of other samples may be, by how
    these differ."""

    error: float
    cosine: float
    agreement: float | None
    places: int = 0
    most: float = 0.0
    turn: float = 0.0
    even_turn: float = 0.0
    most_turn: float = 0.0

    def worse(self, other: Difference) -> Difference:
        """What is true of both samples: the larger errors, the lower cosine and agreement."""
        agreements = [(d.agreement, d.places) for d in (self, other) if d.agreement is not None]
        agreement, places = min(agreements) if agreements else (None, 0)
        return Difference(
            max(self.error, other.error),
            min(self.cosine, other.cosine),
            agreement,
            places,
            max(self.most, other.most),
            max(self.turn, other.turn),
            max(self.even_turn, other.even_turn),
            max(self.most_turn, other.most_turn),
        )


@dataclass(frozen=True)
class QuantizationReport:
    """``held``: of the samples, how many had no part in what was made; results are those of both, whichever are worse.
    Where there are none, results are of samples that ranges, or weights, were made by. ``layer_samples``: how many the
    errors of layers are of, some of those held back where there are any."""

    scheme: str
    layers: tuple[LayerReport, ...]
    samples: int
    difference: Difference
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    problems: tuple[str, ...] = field(default=())
    precision: str = "float32"  # of sessions that run the result, for what is not coded
    keep_f32: tuple[str, ...] = ()  # what they leave in float32 all the same
    held: int = 0
    layer_samples: int = 0

    @property
    def speedup(self) -> float:
        return self.seconds_before / self.seconds_after if self.seconds_after else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """For files: what only samples tell is None where there were none."""
        found = {**asdict(self), "speedup": self.speedup}
        unknown = () if self.samples else ("difference", "seconds_before", "seconds_after", "speedup")
        return {**found, **dict.fromkeys(unknown)}


_LOST = Difference(math.inf, -1.0, None, 0, math.inf, math.inf, math.inf, math.inf)  # results that have no measure


def told_below(value: float, limit: float) -> str:
    """A number with as many digits, six at least, as show that it is below a limit."""
    texts = (f"{value:.{digits}f}" for digits in range(6, 18))
    return next((text for text in texts if float(text) < limit), str(value))


def difference(found: Sequence[Sequence[Array]], expected: Sequence[Sequence[Array]]) -> Difference:
    """Of all results of all samples; the worst of the outputs counts. Where the original's are infinite or no number,
    the same has to be found, and that is all that is asked of them."""
    errors, cosines, agreements, most, even, turned = [], [], [], [0.0], [0.0], [0.0]
    found, expected = ([[_of_numpy(each) for each in row] for row in rows] for rows in (found, expected))
    for a, b in zip(zip(*found), zip(*expected)):
        if any(x.shape != y.shape for x, y in zip(a, b)):
            if any(x.ndim != y.ndim for x, y in zip(a, b)):
                return _LOST
            continue  # how many there are depends on numbers, as of boxes that were found
        if b[0].dtype.kind in "iub":
            same = np.concatenate([(p == q).reshape(-1) for p, q in zip(a, b)])
            agreements.append((float(same.mean()) if same.size else 1.0, same.size))
        if b[0].dtype.kind != "f":
            continue
        x = np.concatenate([each.reshape(-1) for each in a]).astype(np.float64)
        y = np.concatenate([each.reshape(-1) for each in b]).astype(np.float64)
        sizes = float(np.linalg.norm(x)), float(np.linalg.norm(y))
        if not math.isfinite(sum(sizes)):
            if not _same_where_not_finite(x, y):
                return _LOST
            a = tuple(np.where(np.isfinite(q), p, 0) for p, q in zip(a, b))
            b = tuple(np.where(np.isfinite(q), q, 0) for q in b)
            x, y = _finite(x, y)
            sizes = float(np.linalg.norm(x)), float(np.linalg.norm(y))
        errors.append(float(np.linalg.norm(x - y)) / max(sizes[1], _NOTHING))
        nothing = sizes == (0.0, 0.0)  # zeros for zeros are as near as can be; anything else for them has no direction
        cosine = 1.0 if nothing else float(x @ y) / max(sizes[0] * sizes[1], _NOTHING**2)
        cosines.append(max(-1.0, min(1.0, cosine)))  # rounding may lead beyond
        factor = 1.0 if nothing else float(x @ y) / max(sizes[1] ** 2, _NOTHING**2)
        most.append(_Parts.of(a, b).most)
        parts = _Parts.of(a, b, factor)
        even.append(parts.even if factor > 0 else 2.0)
        turned.append(parts.most if factor > 0 else 2.0)
        if b[0].ndim > 1 and b[0].shape[-1] > 1:
            same = np.concatenate([(np.argmax(p, -1) == np.argmax(q, -1)).reshape(-1) for p, q in zip(a, b)])
            agreements.append((float(same.mean()) if same.size else 1.0, same.size))
    agreement, places = min(agreements) if agreements else (None, 0)
    if not errors:  # nothing but whole numbers: the same part is their cosine, and the error what belongs to that
        part = 1.0 if agreement is None else agreement
        off = chord(part)
        return Difference(off, part, agreement, places, turn=off, even_turn=off)
    turn = chord(min(cosines))
    return Difference(max(errors), min(cosines), agreement, places, max(most), turn, max(even), max(turn, *turned))


def _of_numpy(array: Array) -> Array:
    """Numbers of types that NumPy borrows, as bfloat16, in one of its own that has them all."""
    if array.dtype.kind != "V":
        return array
    return array.astype(np.float32 if of(array).is_float else np.int8)


def _same_where_not_finite(found: Array, expected: Array) -> bool:
    """Whether results are infinite, or no number, where the original's are and nowhere else."""
    odd = ~(np.isfinite(found) & np.isfinite(expected))
    return np.array_equal(found[odd], expected[odd], equal_nan=True)


def _finite(found: Array, expected: Array) -> tuple[Array, Array]:
    """Zeros where what was expected is infinite or no number."""
    finite = np.isfinite(expected)
    return np.where(finite, found, 0), np.where(finite, expected, 0)


class Off:
    """The error of one value, as that of :class:`Difference`, over samples that are seen one after the other."""

    def __init__(self) -> None:
        self._off = self._size = 0.0
        self._fits, self._seen = True, False

    def add(self, found: Array, expected: Array) -> None:
        self._seen = True
        if found.shape != expected.shape:
            self._fits = False
            return
        x, y = (_of_numpy(each).astype(np.float64) for each in (found, expected))
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            if not _same_where_not_finite(x, y):
                self._off = math.inf
                return
            x, y = _finite(x, y)
        self._off += float(np.square(x - y).sum())
        self._size += float(np.square(y).sum())

    @property
    def error(self) -> float | None:
        """None where the two have different shapes, or no sample reached it."""
        known = self._fits and self._seen
        return math.sqrt(self._off) / max(math.sqrt(self._size), _NOTHING) if known else None


def chord(cosine: float) -> float:
    """How far apart two arrays of size one are that have this cosine."""
    return math.sqrt(max(0.0, 2 * (1.0 - cosine)))


@dataclass(frozen=True)
class _Parts:
    """Squared errors of samples, and squared sizes of what was expected."""

    off: Array
    size: Array

    @classmethod
    def of(cls, found: Sequence[Array], expected: Sequence[Array], factor: float = 1.0) -> _Parts:
        """Errors from expected results times a factor."""
        off = [np.square(p.astype(np.float64) - factor * q).sum() for p, q in zip(found, expected)]
        return cls(np.array(off), np.array([np.square(factor * q.astype(np.float64)).sum() for q in expected]))

    @property
    def _even(self) -> tuple[Array, Array]:
        """Of results of very different size the largest few are nearly all that counts, and of other samples it may be
        others: so large ones count for less here."""
        even = np.sqrt(self.size)
        return self.off / np.maximum(even, _NOTHING), even

    @property
    def even(self) -> float:
        off, size = self._even
        return math.sqrt(float(off.sum()) / max(float(size.sum()), _NOTHING**2))

    @property
    def most(self) -> float:
        """An upper end of the error on other samples than these."""
        return max(_upper(self.off, self.size), _upper(*self._even))


def _upper(off: Array, size: Array) -> float:
    """Of the root of a quotient of sums, by how much parts differ: two standard deviations above it."""
    count, total = len(off), max(float(size.sum()), _NOTHING**2)
    part = float(off.sum()) / total
    if count < 2:
        return math.sqrt(part)
    spread = math.sqrt(count / (count - 1) * float(np.square(off - part * size).sum())) / total
    return math.sqrt(part + 2 * spread)


def timed(before: Graph, after: Graph, feed: Feed, configs: Sequence[SessionConfig]) -> tuple[float, float]:
    """Seconds of a run of each, in turns."""
    with Session(copied(before), configs[0]) as first, Session(copied(after), configs[1]) as second:
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(2):
            first.run(feed)
            second.run(feed)
        until = time.perf_counter() + _SECONDS
        while time.perf_counter() < until or len(seconds[0]) < 3:
            for session, found in ((first, seconds[0]), (second, seconds[1])):
                start = time.perf_counter()
                session.run(feed)
                found.append(time.perf_counter() - start)
        return statistics.median(seconds[0]), statistics.median(seconds[1])
