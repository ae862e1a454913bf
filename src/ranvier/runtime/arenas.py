"""The memory of runs: an arena each, a few of which wait for the next run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ranvier.memory import NOTED_FROM
from ranvier.providers.base import BoundKernel, PooledAllocator, TensorAllocator
from ranvier.runtime.layout import Layout
from ranvier.runtime.program import Prepared

Array = np.ndarray[Any, Any]
_KEPT = 4


class Arena(NamedTuple):
    memory: Array
    start: int  # its address
    views: dict[int, Array]  # by slot
    kernels: list[Prepared | None]  # by step, with the address of their part of it


class Arenas:
    """Thread-safe, and without a lock where an arena waits. Nothing waits where ``secure``: what waits is not freed,
    and would not be zeroed."""

    def __init__(
        self, layout: Layout, bound: Sequence[BoundKernel | None], allocator: TensorAllocator, name: str, secure: bool
    ) -> None:
        self._layout, self._bound, self._allocator, self._name = layout, bound, allocator, name
        self._keep = 0 if secure else _KEPT
        self._lock = threading.Lock()
        self._free: list[Arena] = []
        self._untouched: set[int] = set()  # addresses of large arenas that no run has ended in
        self.there = 0  # those that wait and those that were taken

    @property
    def waiting(self) -> int:
        return len(self._free)

    def take(self) -> Arena:
        try:
            return self._free.pop()
        except IndexError:
            return self._made()

    def give(self, held: Arena) -> None:
        if self._untouched:
            self._settle(held)
        if len(self._free) < self._keep:  # one more now and then, where runs end at the same time
            self._free.append(held)
        else:
            self.drop(held)

    def drop(self, held: Arena) -> None:
        with self._lock:
            self.there -= 1
        self._allocator.free(held.memory)

    def close(self) -> None:
        """Gives back those that wait."""
        while self._free:
            try:
                held = self._free.pop()
            except IndexError:  # a run has taken it
                return
            self.drop(held)

    def _made(self) -> Arena:
        layout = self._layout
        nbytes = layout.memory.arena
        memory = self._allocator.alloc(nbytes, f"arena of {self._name!r}")
        views = {p.slot: memory[p.offset : p.offset + p.nbytes].view(p.dtype).reshape(p.shape) for p in layout.placed}
        start = memory.ctypes.data
        kernels = [
            None if bound is None else (bound, start + layout.workspaces.get(k, 0))
            for k, bound in enumerate(self._bound)
        ]
        with self._lock:
            self.there += 1
            if nbytes >= NOTED_FROM:
                self._untouched.add(start)
        return Arena(memory, start, views, kernels)

    def _settle(self, held: Arena) -> None:
        """After the first run in an arena the system counts it, and the allocator need not remember the promise."""
        with self._lock:
            if held.start not in self._untouched:
                return
            self._untouched.discard(held.start)
        if isinstance(self._allocator, PooledAllocator):
            self._allocator.touched(held.memory)


__all__ = ["Arena", "Arenas"]
