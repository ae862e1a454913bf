"""Counts and times of one model's runs."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence

from ranvier.records import dataclass
from ranvier.runtime.transfer import TransferCount

WINDOW = 4096  # percentiles are those of the last so many runs


@dataclass(frozen=True)
class SessionMetrics:
    """What a model has done so far. Seconds are of runs that succeeded, waiting for a free slot not counted."""

    name: str
    loaded: bool
    active: int  # runs in progress
    runs: int  # that succeeded
    errors: int
    seconds_total: float
    seconds_mean: float
    seconds_p50: float
    seconds_p95: float
    seconds_p99: float
    last_error: str
    weight_bytes: int
    arena_bytes: int
    loads: int
    evictions: int
    transfers: tuple[TransferCount, ...] = ()  # between memories, since it was loaded


class Counters:
    """Collects them; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._runs = self._errors = self._loads = self._evictions = 0
        self._seconds = 0.0
        self._last_error = ""

    def ran(self, seconds: float) -> None:
        with self._lock:
            self._runs += 1
            self._seconds += seconds
            self._recent.append(seconds)

    def failed(self, error: BaseException) -> None:
        with self._lock:
            self._errors += 1
            self._last_error = f"{type(error).__name__}: {error}"

    def loaded(self) -> None:
        with self._lock:
            self._loads += 1

    def evicted(self) -> None:
        with self._lock:
            self._evictions += 1

    def snapshot(
        self,
        name: str,
        *,
        loaded: bool,
        active: int,
        weights: int,
        arenas: int,
        transfers: Sequence[TransferCount] = (),
    ) -> SessionMetrics:
        with self._lock:
            times = sorted(self._recent)
            return SessionMetrics(
                name=name,
                loaded=loaded,
                active=active,
                runs=self._runs,
                errors=self._errors,
                seconds_total=self._seconds,
                seconds_mean=self._seconds / self._runs if self._runs else 0.0,
                seconds_p50=percentile(times, 50),
                seconds_p95=percentile(times, 95),
                seconds_p99=percentile(times, 99),
                last_error=self._last_error,
                weight_bytes=weights,
                arena_bytes=arenas,
                loads=self._loads,
                evictions=self._evictions,
                transfers=tuple(transfers),
            )


def percentile(rising: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of them do not exceed; 0 of nothing.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([1.0, 2.0, 3.0, 4.0], 95)
    (2.0, 4.0)
    """
    return rising[max(0, math.ceil(len(rising) * percent / 100) - 1)] if rising else 0.0


__all__ = ["Counters", "SessionMetrics", "percentile"]
