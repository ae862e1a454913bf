"""What providers share that leave the computing to somebody else: another library, another process, another machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
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


# -- libraries with a function for each node ------------------------------------------------------------------------


class Lowering(Protocol):
    """What is asked of an entry of a provider's table."""

    @property
    def host(self) -> tuple[int, ...]:
        """Operands whose content shapes the result."""
        ...

    @property
    def numpy(self) -> bool:
        """Only sizes are looked at, so the operator's own body does it."""
        ...


def needed_on_host(lowerings: Sequence[tuple[Node, Lowering]]) -> set[Value]:
    """Values whose content shapes others, and everything they are made from."""
    needed: set[Value] = set()
    for node, lowering in reversed(lowerings):
        if lowering.numpy:
            continue
        all_of_them = any(v in needed for v in node.outputs)
        needed.update(v for k, v in enumerate(node.inputs) if v is not None and (all_of_them or k in lowering.host))
    return needed


def is_used(value: Value) -> bool:
    return value.producer is None or bool(value.uses) or value.is_graph_output


def rank_of(node: Node, position: int) -> int | None:
    """The rank of an operand, where it is known."""
    value = node.input(position)
    return value.type.rank if value is not None and isinstance(value.type, TensorType) else None
