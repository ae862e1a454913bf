"""What ran when: a recording of kernel calls, as a summary and as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ranvier.formats.files import write_files


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel call; times in nanoseconds of the process's monotonic clock."""

    name: str
    op: str
    provider: str
    start: int
    end: int
    thread: int
    shapes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpTime:
    """All calls of one operator."""

    op: str
    provider: str
    calls: int
    seconds: float
    share: float


class Profiler:
    """Collects events while it is active: ``with session.profile("trace.json"): session.run(...)``."""

    def __init__(self, session: Any, path: str | os.PathLike[str] | None = None) -> None:
        self._session = session
        self._path = path
        self._lock = threading.Lock()
        self.events: list[Event] = []

    def record(self, step: Any, start: int, end: int, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        shapes = tuple(_shape(x) for x in inputs)
        event = Event(step.label, step.op, step.provider, start, end, threading.get_ident(), shapes)
        with self._lock:
            self.events.append(event)

    def span(self, name: str, start: int, end: int) -> None:
        """An event around others: a whole run."""
        with self._lock:
            self.events.append(Event(name, "run", "session", start, end, threading.get_ident(), ()))

    def __enter__(self) -> Profiler:
        self._session._attach(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session._detach(self)
        if self._path is not None and kind is None:
            self.save(self._path)

    def summary(self) -> list[OpTime]:
        """Time by operator and provider, the longest first."""
        sums: dict[tuple[str, str], list[float]] = {}
        for event in self.events:
            if event.op != "run":
                entry = sums.setdefault((event.op, event.provider), [0, 0.0])
                entry[0] += 1
                entry[1] += (event.end - event.start) / 1e9
        total = sum(s for _, s in sums.values()) or 1.0
        rows = [OpTime(op, who, int(calls), s, s / total) for (op, who), (calls, s) in sums.items()]
        return sorted(rows, key=lambda row: -row.seconds)

    def trace(self) -> dict[str, Any]:
        """The recording in the Trace Event Format."""
        base = min((e.start for e in self.events), default=0)
        threads = {ident: k for k, ident in enumerate(dict.fromkeys(e.thread for e in self.events))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "ranvier"}}
        ]
        for event in self.events:
            events.append(
                {
                    "ph": "X",
                    "name": event.name or event.op,
                    "cat": event.op,
                    "pid": 1,
                    "tid": threads[event.thread],
                    "ts": (event.start - base) / 1e3,
                    "dur": (event.end - event.start) / 1e3,
                    "args": {"op": event.op, "provider": event.provider, "inputs": list(event.shapes)},
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace; open it in https://ui.perfetto.dev or chrome://tracing."""
        write_files({Path(path): [json.dumps(self.trace()).encode()]})


def _shape(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
