"""What providers share that leave the computing to somebody else: another library, another process, another machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import ClassVar

from ranvier.graph.ir import Node
from ranvier.providers.base import Claim, Decline, GraphView, KernelStats, MemoryUsage
from ranvier.providers.memory import PoolAllocator
from ranvier.providers.part_model import reason_against_moving


class ForeignProvider:
    """Takes what can be moved and what :meth:`_refuses` has nothing against."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._allocator = PoolAllocator(name=self.name)

    def _refuses(self, node: Node) -> str | None:
        """Why the other side would not take a node that can be moved."""
        return None

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]:
        for node in view:
            reason = reason_against_moving(node) or self._refuses(node)
            yield Claim((node,)) if reason is None else Decline(node, reason)

    def allocator(self) -> PoolAllocator:
        return self._allocator

    def close(self) -> None:
        self._allocator.trim()


class ForeignKernel:
    """A part that runs elsewhere: results come in memory of their own, and calls are counted."""

    def __init__(self, constant_bytes: int) -> None:
        self._constant_bytes = constant_bytes
        self._counting = threading.Lock()
        self._calls, self._seconds = 0, 0.0

    def _count(self, started: float) -> None:
        """One more call, begun at ``started`` by ``time.perf_counter``."""
        with self._counting:
            self._calls += 1
            self._seconds += time.perf_counter() - started

    def in_place(self, output: int, input: int) -> bool:
        return False

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage(constants=self._constant_bytes)

    def stats(self) -> KernelStats:
        with self._counting:
            return KernelStats(self._calls, self._seconds)
