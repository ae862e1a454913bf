"""Memory that a kernel takes for itself counts for the run it belongs to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Current(threading.local):
    reserve: Callable[[int, str], None] | None = None  # counts bytes against the limit of the run in this thread


current = _Current()


@contextmanager
def counted(nbytes: int, where: str) -> Iterator[None]:
    """Within the block, memory that a kernel takes for itself counts for the run; MemoryLimit where it may not."""
    reserve = current.reserve
    if reserve is None or not nbytes:
        yield
        return
    reserve(nbytes, where)
    try:
        yield
    finally:
        reserve(-nbytes, where)
