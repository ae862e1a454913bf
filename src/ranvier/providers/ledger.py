"""What providers did in this process: operations completed and the last error, over all sessions.

Counting has to cost next to nothing, so each plan counts its own runs in a :class:`Tally`, and sums are made when
somebody asks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

from ranvier.providers.base import AllocatorStats, Entry
from ranvier.records import dataclass


class Tally:
    """Runs of one plan. ``runs += 1`` needs no lock: the interpreter does not change threads within it.
    ``elsewhere`` has those that it counts by itself."""

    __slots__ = ("elsewhere", "nodes", "runs")

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self.nodes = dict(nodes)  # that one run completes, by provider
        self.runs = 0
        self.elsewhere: Entry | None = None

    @property
    def total(self) -> int:
        elsewhere = self.elsewhere
        return self.runs + (0 if elsewhere is None else elsewhere.runs)


class Ledger:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a plan may be freed, and counted, while this thread is in here
        self._open: dict[int, Tally] = {}
        self._done: dict[str, int] = {}
        self._errors: dict[str, str] = {}

    def tally(self, owner: object, nodes: Mapping[str, int]) -> Tally:
        """A counter that belongs to ``owner``: what it counted stays when the owner is gone."""
        made = Tally(nodes)
        with self._lock:
            self._open[id(made)] = made
        weakref.finalize(owner, self._close, made).atexit = False
        return made

    def _close(self, tally: Tally) -> None:
        with self._lock:
            del self._open[id(tally)]
            for name, nodes in tally.nodes.items():
                self._done[name] = self._done.get(name, 0) + nodes * tally.total

    def failed(self, name: str, error: BaseException) -> None:
        with self._lock:
            self._errors[name] = f"{type(error).__name__}: {error}"

    def operations(self) -> dict[str, int]:
        """Nodes that were run to the end, by provider."""
        with self._lock:
            found = dict(self._done)
            tallies = list(self._open.values())
        for tally in tallies:
            for name, nodes in tally.nodes.items():
                found[name] = found.get(name, 0) + nodes * tally.total
        return found

    def last_error(self, name: str) -> str:
        with self._lock:
            return self._errors.get(name, "")


@dataclass(frozen=True)
class ProviderStatus:
    """One provider as it stands. ``reason`` says why it is not ready; a provider nobody used yet is not initialised."""

    name: str
    initialised: bool
    ready: bool
    reason: str
    devices: tuple[str, ...]
    memory: AllocatorStats | None  # of all its instances
    operations: int  # nodes completed
    last_error: str
    sessions: int  # that are open and use it


def added(stats: list[AllocatorStats]) -> AllocatorStats | None:
    """The sums; None of nothing."""
    if not stats:
        return None
    return AllocatorStats(
        active=sum(s.active for s in stats),
        peak=sum(s.peak for s in stats),
        cached=sum(s.cached for s in stats),
        reserved=sum(s.reserved for s in stats),
        allocations=sum(s.allocations for s in stats),
        failures=sum(s.failures for s in stats),
    )


__all__ = ["Ledger", "ProviderStatus", "Tally", "added"]
