"""The memory of a session: a pool of its own where its options ask for one, and what it holds now."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from ranvier.config import MemoryConfig, SessionConfig
from ranvier.memory import Budget, MemorySnapshot
from ranvier.providers.base import AllocatorStats, ExecutionProvider, PooledAllocator
from ranvier.records import dataclass

if TYPE_CHECKING:
    from ranvier.runtime.compiled import Compiled


@dataclass(frozen=True)
class SessionMemory:
    """Bytes by what they are for, and the pools that arenas come from."""

    weights: int  # of the model, and packed by kernels
    arenas_waiting: int
    arenas_in_use: int
    packed: int = 0  # of the weights: in a form that kernels made for themselves
    parts: Mapping[str, int] = field(default_factory=dict)  # packed, by part
    pools: Mapping[str, AllocatorStats] = field(default_factory=dict)  # shared by sessions, or this one's own
    budget: MemorySnapshot | None = None  # what counts towards ``Limits.memory_bytes`` now, and did at most

    @property
    def total(self) -> int:
        return self.weights + self.arenas_waiting + self.arenas_in_use

    def beside(self, other: SessionMemory) -> SessionMemory:
        """This together with what a second session for the same model holds; the model's own weights are shared."""
        return dataclasses.replace(
            self,
            weights=self.weights + other.packed,
            arenas_waiting=self.arenas_waiting + other.arenas_waiting,
            arenas_in_use=self.arenas_in_use + other.arenas_in_use,
            packed=self.packed + other.packed,
            parts={name: self.parts.get(name, 0) + other.parts.get(name, 0) for name in {**self.parts, **other.parts}},
        )


def own_memory(
    providers: Sequence[ExecutionProvider], config: SessionConfig
) -> tuple[PooledAllocator | None, Budget | None]:
    """A pool for one session, None where the providers' suits it, and what its runs may hold together, where there is
    a limit: then its arenas come from a pool that counts them there. The last provider is the host's."""
    limit = config.limits.memory_bytes
    shared = providers[-1].allocator()
    if not isinstance(shared, PooledAllocator):
        return None, None if limit is None else Budget(limit)
    name = f"pool of {config.name}" if config.name else "pool of a session"
    if limit is None:
        return (None if config.memory == MemoryConfig() else shared.configured(config.memory, name=name)), None

    def release() -> None:
        found = known()
        if found is not None:
            found.ask_back()

    budget = Budget(limit, arenas=True, release=release)
    pool = shared.configured(config.memory, name=name, tracker=budget)
    known = weakref.ref(pool)
    return pool, budget


class HoldsArenas(Protocol):
    def release_arenas(self) -> None: ...


def ask_before_failing(pool: PooledAllocator, holder: HoldsArenas) -> None:
    """Before the pool refuses a request, and when it closes, the arenas go that wait for a run of ``holder``."""
    known = weakref.ref(holder)

    def release() -> None:
        found = known()
        if found is not None:
            found.release_arenas()

    pool.on_pressure(release)


def held(
    compiled: Compiled, constants: int, pool: PooledAllocator | None, budget: Budget | None = None
) -> SessionMemory:
    """What a session holds: ``constants`` are the model's own weights."""
    arenas = [plan.arenas() for plan in compiled.plans()]
    parts: dict[str, int] = {}
    for item in compiled.parts:
        nbytes = item.kernel.memory_usage().constants
        if nbytes:
            name = f"{item.part.subgraph.label} on {item.part.provider.name}"
            parts[name] = parts.get(name, 0) + nbytes
    pools = {provider.name: provider.allocator().stats() for provider in compiled.providers}
    if pool is not None:
        pools["session"] = pool.stats()
    packed = sum(parts.values())
    return SessionMemory(
        constants + packed,
        sum(w for w, _ in arenas),
        sum(u for _, u in arenas),
        packed,
        parts,
        pools,
        None if budget is None else budget.snapshot(),
    )
