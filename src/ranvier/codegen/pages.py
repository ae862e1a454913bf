"""Memory for packed weights: side by side in large pages.

A layer's weights are read once a run, panel after panel, and most layers have less than a few megabytes of them. In
pages of 4 KB the processor has to look up where each of them lies, because its table of recent ones never holds those
of a whole model. NumPy asks the system for large pages where an array has 4 MB or more, but does not start it at one:
of 4.4 MB half may lie outside. Small arrays are put together here, others start at a page of their own.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from typing import Any

import numpy as np

from ranvier.codegen.storage import aligned_empty

_PAGE = 2 << 20
_CHUNK = 16 * _PAGE  # what is asked for at a time; it is given back when no array in it is left
_LEAST, _MOST = 64 << 10, 8 << 20  # bytes of an array that shares pages with others
_LINE = 64
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # where the system has such a thing


def _pages(nbytes: int) -> np.ndarray[Any, Any]:
    """Fresh memory from the start of a large page on, given back with the last array in it; what fills no large page
    at its end lies in small ones."""
    assert _ADVICE is not None
    try:
        memory = mmap.mmap(-1, nbytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {nbytes:,} bytes for weights: {error.strerror}") from error
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _PAGE
    memory.madvise(_ADVICE, start, nbytes // _PAGE * _PAGE)
    return whole[start : start + nbytes]


class _Chunk:
    def __init__(self) -> None:
        self._bytes = _pages(_CHUNK)
        self._used = 0

    def take(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        start = self._used
        if start + nbytes > _CHUNK:
            return None
        self._used += -(-nbytes // _LINE) * _LINE
        return self._bytes[start : start + nbytes]


_lock = threading.Lock()
_chunk: _Chunk | None = None


def _after_fork() -> None:
    """A child writes its own copies of pages: it begins with pages of its own."""
    global _lock, _chunk
    _lock, _chunk = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def packed_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Memory for weights that live as long as their model; its content is nobody's business yet."""
    global _chunk
    nbytes = math.prod(shape) * dtype.itemsize
    if _ADVICE is None or nbytes < _LEAST:
        return aligned_empty(shape, dtype)
    if nbytes >= _MOST:
        return _pages(nbytes).view(dtype).reshape(shape)
    with _lock:
        found = _chunk.take(nbytes) if _chunk is not None else None
        if found is None:
            _chunk = _Chunk()
            found = _chunk.take(nbytes)
    assert found is not None
    return found.view(dtype).reshape(shape)
