"""Python's search for cyclic garbage, put off while a model is set up.

Setting up makes many objects that stay and few that go; looking through them all again and again takes a tenth of the
time and finds nothing.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses: set[object] = set()
_resume = False  # was it on before the first pause?


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, no search begins by itself. For the process: the last of several that overlap ends the pause."""
    global _resume
    token = object()
    with _lock:
        if not _pauses:
            _resume = gc.isenabled()
            gc.disable()
        _pauses.add(token)
    try:
        yield
    finally:
        with _lock:
            was_last = _pauses == {token}
            _pauses.discard(token)
            if was_last and _resume:
                gc.enable()


def _after_fork() -> None:
    """Threads that paused it do not exist in the child, and nobody would end their pause."""
    global _lock
    _lock = threading.Lock()
    if _pauses and _resume:
        gc.enable()
    _pauses.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
