"""System memory for providers that run on the host: aligned, and kept for reuse up to a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ranvier.errors import OutOfMemory
from ranvier.providers.base import AllocatorStats

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
_SMALLEST = 4096


class _Current(threading.local):
    reserve: Callable[[int, str], None] | None = None  # counts bytes against the limit of the run in this thread


current = _Current()


@contextmanager
def counted(nbytes: int, where: str) -> Iterator[None]:
    """Within the block, memory that a kernel takes for itself counts for the run; ResourceLimit where it may not."""
    reserve = current.reserve
    if reserve is None or not nbytes:
        yield
        return
    reserve(nbytes, where)
    try:
        yield
    finally:
        reserve(-nbytes, where)


class SystemAllocator:
    """Hands out 64-byte aligned byte arrays; freed ones wait in a pool of at most ``keep`` bytes, the newest first.

    Blocks come in classes an eighth of a power of two apart, so that a run with slightly other sizes finds one that
    fits; what has waited longest goes when the pool is full.
    """

    def __init__(self, keep: int = 1 << 26) -> None:
        self._keep = keep
        # re-entrant: a plan that is collected while the lock is held gives its arenas back here
        self._lock = threading.RLock()
        self._pool: OrderedDict[int, Array] = OrderedDict()  # whole blocks by identity, the oldest first
        self._waiting: dict[int, list[int]] = {}  # identities by class
        self._active = self._peak = self._cached = 0

    def alloc(self, nbytes: int) -> Array:
        size = size_class(nbytes)
        with self._lock:
            waiting = self._waiting.get(size)
            block = self._pool.pop(waiting.pop()) if waiting else None
            if block is not None:
                self._cached -= size
        if block is None:
            try:
                block = np.empty(size + ALIGNMENT, np.uint8)
            except MemoryError as error:
                raise OutOfMemory(f"cannot allocate {nbytes:,} bytes", requested=nbytes) from error
        with self._lock:
            self._active += nbytes
            self._peak = max(self._peak, self._active)
        shift = -block.ctypes.data % ALIGNMENT
        return block[shift : shift + nbytes]

    def free(self, buffer: Array) -> None:
        block = buffer.base
        with self._lock:
            self._active -= buffer.nbytes
            if block is None or len(block) - ALIGNMENT > self._keep:
                return
            size = len(block) - ALIGNMENT
            self._pool[id(block)] = block
            self._waiting.setdefault(size, []).append(id(block))
            self._cached += size
            while self._cached > self._keep:
                oldest, dropped = self._pool.popitem(last=False)
                self._waiting[len(dropped) - ALIGNMENT].remove(oldest)
                self._cached -= len(dropped) - ALIGNMENT

    def copy(self, source: Array, target: Array) -> None:
        np.copyto(target, source)

    def trim(self) -> int:
        """Give the pool back to the system; returns the bytes given back."""
        with self._lock:
            freed, self._cached = self._cached, 0
            self._pool.clear()
            self._waiting.clear()
        return freed

    def stats(self) -> AllocatorStats:
        with self._lock:
            return AllocatorStats(self._active, self._peak, self._cached)


def size_class(nbytes: int) -> int:
    """The size of block that serves a request: at most an eighth larger, from 4 KB up."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step
