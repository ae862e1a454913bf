"""Memory that nobody has any more, given back to the system.

Arrays of up to 32 MB come from the heap of the C library, which keeps what is freed for whoever asks next: after a
model was read and packed, as much again as the model, in pieces that are never asked for. glibc gives them back when
it is told to.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable

_EVERY = 64 << 20  # bytes, after which it is worth the milliseconds
_lock = threading.Lock()
_gone = 0  # since the last time


def gone(nbytes: int) -> None:
    """Somebody has let go of so many bytes, in arrays that nobody makes anew soon."""
    global _gone
    with _lock:
        _gone += nbytes
        if _gone < _EVERY:
            return
        _gone = 0
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    if sys.platform == "linux":
        try:
            found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
            return found
        except (OSError, AttributeError):
            pass  # another C library, which has ways of its own
    return lambda pad: 0
