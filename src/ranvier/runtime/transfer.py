"""Values that move between memories: which steps a plan needs for that, and what such a step does.

A part whose provider has a memory of its own reads tensors that lie there. Whatever it reads and lies elsewhere is
brought in one step before it, all values together; results go back to the host where the host needs them. A value is
brought to a memory once, however many parts read it there. What was moved is counted for the whole session, by pair of
memories.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.providers.base import Array, ExecutionProvider, KernelStats, MemoryUsage
from ranvier.providers.own_memory import DeviceArray, OwnMemory
from ranvier.records import dataclass

HOST = "cpu"


def space_of(provider: ExecutionProvider) -> str:
    """The memory that a provider's kernels work in; all that work on arrays share the host's."""
    return str(provider.device) if isinstance(provider, OwnMemory) else HOST


@dataclass(frozen=True)
class TransferCount:
    """What went from one memory to another so far."""

    source: str
    target: str
    transfers: int  # each may carry several values
    values: int
    bytes: int
    seconds: float


class TransferCounts:
    """The transfers of a session by pair of memories; outlives the programs, which are dropped and made again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], tuple[int, int, int, float]] = {}

    def add(self, source: str, target: str, values: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            n, v, b, s = self._counts.get((source, target), (0, 0, 0, 0.0))
            self._counts[source, target] = (n + 1, v + values, b + nbytes, s + seconds)

    def snapshot(self) -> list[TransferCount]:
        with self._lock:
            return [TransferCount(a, b, n, v, nb, s) for (a, b), (n, v, nb, s) in self._counts.items()]


class TransferKernel:
    """A step that brings values to the memory of ``provider``, or from there to the host."""

    def __init__(self, provider: ExecutionProvider, *, inward: bool, counts: TransferCounts | None = None) -> None:
        assert isinstance(provider, OwnMemory)
        self.provider = provider.name
        self._memory: OwnMemory = provider
        self._inward = inward
        self.way = (HOST, space_of(provider)) if inward else (space_of(provider), HOST)
        self.label = " → ".join(self.way)
        self.source = f"copy {self.label}"
        self._counts = counts
        self._calls, self._seconds, self._bytes = 0, 0.0, 0

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        move = self._memory.upload if self._inward else self._memory.download
        moved = move(inputs)
        outputs[:] = moved
        seconds = time.perf_counter() - started
        sizes = self.sizes(inputs, moved)
        nbytes = sum(sizes)
        # counted without a lock: figures for people, and a lost update loses one call of thousands
        self._calls += 1
        self._seconds += seconds
        self._bytes += nbytes
        if self._counts is not None and sizes:
            self._counts.add(*self.way, len(sizes), nbytes, seconds)

    def sizes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[int]:
        """The bytes of each value that one call moved, told by the arrays on the host's side. What lies in the
        provider's memory already is handed on as it is."""
        return [x.nbytes for x in (inputs if self._inward else outputs) if not isinstance(x, DeviceArray)]

    def in_place(self, output: int, input: int) -> bool:
        return False

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage()

    def stats(self) -> KernelStats:
        return KernelStats(self._calls, self._seconds)

    @property
    def bytes_moved(self) -> int:
        return self._bytes
