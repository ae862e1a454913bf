"""System memory for providers that run on the host: aligned, and kept for reuse up to a bound."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ranvier.errors import OutOfMemory
from ranvier.providers.base import AllocatorStats

Array = np.ndarray[Any, Any]
ALIGNMENT = 64


class SystemAllocator:
    """Hands out 64-byte aligned byte arrays; freed ones wait in a pool of at most ``keep`` bytes."""

    def __init__(self, keep: int = 1 << 28) -> None:
        self._keep = keep
        # re-entrant: a plan that is collected while the lock is held gives its arenas back here
        self._lock = threading.RLock()
        self._pool: dict[int, list[Array]] = {}
        self._active = self._peak = self._cached = 0

    def alloc(self, nbytes: int) -> Array:
        with self._lock:
            waiting = self._pool.get(nbytes)
            if waiting:
                self._cached -= nbytes
                self._grow(nbytes)
                return waiting.pop()
        try:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise OutOfMemory(f"cannot allocate {nbytes:,} bytes", requested=nbytes) from error
        shift = -raw.ctypes.data % ALIGNMENT
        with self._lock:
            self._grow(nbytes)
        return raw[shift : shift + nbytes]

    def _grow(self, nbytes: int) -> None:
        self._active += nbytes
        self._peak = max(self._peak, self._active)

    def free(self, buffer: Array) -> None:
        nbytes = buffer.nbytes
        with self._lock:
            self._active -= nbytes
            if self._cached + nbytes <= self._keep:
                self._pool.setdefault(nbytes, []).append(buffer)
                self._cached += nbytes

    def copy(self, source: Array, target: Array) -> None:
        np.copyto(target, source)

    def trim(self) -> int:
        """Give the pool back to the system; returns the bytes given back."""
        with self._lock:
            freed, self._cached = self._cached, 0
            self._pool.clear()
        return freed

    def stats(self) -> AllocatorStats:
        with self._lock:
            return AllocatorStats(self._active, self._peak, self._cached)
