"""Values that move between memories: which steps a plan needs for that, and what such a step does.

A part whose provider has a memory of its own reads tensors that lie there. Whatever it reads and lies elsewhere is
brought in one step before it, all values together; results go back to the host where the host needs them. A value is
brought to a memory once, however many parts read it there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.providers.base import Array, ExecutionProvider, KernelStats, MemoryUsage, OwnMemory

HOST = "cpu"


def space_of(provider: ExecutionProvider) -> str:
    """The memory that a provider's kernels work in; all that work on arrays share the host's."""
    return str(provider.device) if isinstance(provider, OwnMemory) else HOST


class TransferKernel:
    """A step that brings values to the memory of ``provider``, or from there to the host."""

    def __init__(self, provider: ExecutionProvider, *, inward: bool) -> None:
        assert isinstance(provider, OwnMemory)
        self.provider = provider.name
        self._memory: OwnMemory = provider
        self._inward = inward
        way = (HOST, space_of(provider)) if inward else (space_of(provider), HOST)
        self.label = " → ".join(way)
        self.source = f"copy {self.label}"
        self._calls, self._seconds, self._bytes = 0, 0.0, 0

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        move = self._memory.upload if self._inward else self._memory.download
        moved = move(inputs)
        outputs[:] = moved
        # counted without a lock: figures for people, and a lost update loses one call of thousands
        self._calls += 1
        self._seconds += time.perf_counter() - started
        self._bytes += sum(x.nbytes for x in (inputs if self._inward else moved))

    def in_place(self, output: int, input: int) -> bool:
        return False

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage()

    def stats(self) -> KernelStats:
        return KernelStats(self._calls, self._seconds)

    @property
    def bytes_moved(self) -> int:
        return self._bytes
