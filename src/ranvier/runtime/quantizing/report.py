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
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.records import dataclass
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.session import Session

Array = np.ndarray[Any, Any]
_SECONDS = 1.5


@dataclass(frozen=True)
class LayerReport:
    """``error``: of the layer's results on the samples, as a part of their size, all errors before it included."""

    name: str
    op: str
    scheme: str  # "float32" where it was left alone
    bytes_before: int
    bytes_after: int
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Difference:
    """Of results: the size of the error as a part of the size of the results, the cosine between the two, and how often
    the largest entry along the last axis is the same, or a whole number, in how many ``places``. ``most``: what
    the error of other samples may be, by how these differ."""

    error: float
    cosine: float
    agreement: float | None
    places: int = 0
    most: float = 0.0


@dataclass(frozen=True)
class QuantizationReport:
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

    @property
    def speedup(self) -> float:
        return self.seconds_before / self.seconds_after if self.seconds_after else float("inf")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup}


def difference(found: Sequence[Sequence[Array]], expected: Sequence[Sequence[Array]]) -> Difference:
    """Of all results of all samples; the worst of the outputs counts."""
    errors, cosines, agreements, most = [], [], [], [0.0]
    for a, b in zip(zip(*found), zip(*expected)):
        if any(x.shape != y.shape for x, y in zip(a, b)):
            continue
        if b[0].dtype.kind in "iub":
            same = np.concatenate([(p == q).reshape(-1) for p, q in zip(a, b)])
            agreements.append((float(same.mean()) if same.size else 1.0, same.size))
        if b[0].dtype.kind != "f":
            continue
        x = np.concatenate([each.reshape(-1) for each in a]).astype(np.float64)
        y = np.concatenate([each.reshape(-1) for each in b]).astype(np.float64)
        sizes = float(np.linalg.norm(x)), float(np.linalg.norm(y))
        errors.append(float(np.linalg.norm(x - y)) / max(sizes[1], 1e-30))
        most.append(_most(list(zip(a, b))))
        cosines.append(float(x @ y) / max(sizes[0] * sizes[1], 1e-30) if sizes[1] else 1.0)
        if b[0].ndim > 1 and b[0].shape[-1] > 1:
            same = np.concatenate([(np.argmax(p, -1) == np.argmax(q, -1)).reshape(-1) for p, q in zip(a, b)])
            agreements.append((float(same.mean()), same.size))
    agreement, places = min(agreements) if agreements else (None, 0)
    if not errors:  # nothing but whole numbers: the same part is their cosine, and the error what belongs to that
        part = 1.0 if agreement is None else agreement
        return Difference(math.sqrt(2 * (1.0 - part)), part, agreement, places)
    return Difference(max(errors), min(cosines), agreement, places, max(most))


def _most(pairs: Sequence[tuple[Array, Array]]) -> float:
    """An upper end of the error by how much it differs from sample to sample: two standard deviations of its square, a
    quotient of means."""
    off = np.array([np.square(p.astype(np.float64) - q).sum() for p, q in pairs])
    size = np.array([np.square(q.astype(np.float64)).sum() for _, q in pairs])
    count, total = len(pairs), max(float(size.sum()), 1e-60)
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
