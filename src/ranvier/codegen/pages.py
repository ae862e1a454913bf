"""Memory for packed weights: side by side in large pages.

A layer's weights are read once a run, panel after panel, and most layers have less than a few megabytes of them. In
pages of 4 KB the processor has to look up where each of them lies, because its table of recent ones never holds those
of a whole model. NumPy asks the system for large pages where an array has 4 MB or more, but does not start it at one:
of 4.4 MB half may lie outside. Small arrays are put together here, others start at a page of their own.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from ranvier.codegen.storage import aligned_empty

_PAGE = 2 << 20
_CHUNK = 16 * _PAGE  # what is asked for at a time; it is given back when no array in it is left
_LEAST, _MOST = 64 << 10, 8 << 20  # bytes of an array that shares pages with others
_LINE = 64
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # where the system has such a thing


def _pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Fresh memory, given back with the last array in it, and where in it a large page starts; what fills no large page
    at its end lies in small ones."""
    assert _ADVICE is not None
    try:
        memory = mmap.mmap(-1, nbytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {nbytes:,} bytes for weights: {error.strerror}") from error
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _PAGE
    memory.madvise(_ADVICE, start, nbytes // _PAGE * _PAGE)
    return memory, start


class _Chunk:
    """Arrays one behind the other, or where others were that are gone."""

    def __init__(self) -> None:
        self._memory, self._start = _pages(_CHUNK)
        self._free = [(0, _CHUNK)]  # spans that nobody has, in order

    def take(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        size = -(-nbytes // _LINE) * _LINE
        for k, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[k : k + 1] = [(start + size, end)] if end - start > size else []
                # a view of the memory by itself: what is made of it later keeps it, and with it its place
                found = np.frombuffer(self._memory, np.uint8, nbytes, self._start + start)
                weakref.finalize(found, self._left, start, start + size).atexit = False
                return found
        return None

    def _left(self, start: int, end: int) -> None:
        with _lock:
            k = bisect.bisect(self._free, (start, end))
            if k < len(self._free) and self._free[k][0] == end:
                end = self._free.pop(k)[1]
            if k and self._free[k - 1][1] == start:
                k -= 1
                start = self._free.pop(k)[0]
            self._free.insert(k, (start, end))


_lock = threading.RLock()  # an array may be given up while another is taken, in the same thread
_chunk: _Chunk | None = None


def _after_fork() -> None:
    """A child writes its own copies of pages: it begins with pages of its own."""
    global _lock, _chunk
    _lock, _chunk = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def packed_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Memory for weights that live as long as their model; its content is nobody's business yet."""
    global _chunk
    nbytes = math.prod(shape) * dtype.itemsize
    if _ADVICE is None or nbytes < _LEAST:
        return aligned_empty(shape, dtype)
    if nbytes >= _MOST:
        memory, start = _pages(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes, start).view(dtype).reshape(shape)
    with _lock:
        found = _chunk.take(nbytes) if _chunk is not None else None
        if found is None:
            _chunk = _Chunk()
            found = _chunk.take(nbytes)
    assert found is not None
    return found.view(dtype).reshape(shape)
