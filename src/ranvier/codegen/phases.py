"""Where the time until a first result goes: seconds by what was being done, of this process so far.

A phase inside of another counts for itself only. What threads of their own do meanwhile belongs to no phase; waiting
for them does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_seconds: dict[str, float] = {}
_lock = threading.Lock()
_here = threading.local()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    outer: list[float] | None = getattr(_here, "inside", None)
    inside = [0.0]  # seconds of phases in this one
    _here.inside = inside
    start = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - start
        _here.inside = outer
        if outer is not None:
            outer[0] += took
        with _lock:
            _seconds[name] = _seconds.get(name, 0.0) + took - inside[0]


def taken() -> dict[str, float]:
    """Seconds of every phase so far."""
    with _lock:
        return dict(_seconds)


__all__ = ["phase", "taken"]
