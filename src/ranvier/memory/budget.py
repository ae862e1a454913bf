"""One limit for everything that the runs of a session hold together."""

from __future__ import annotations

from collections.abc import Callable

from ranvier.errors import MemoryLimit
from ranvier.memory.tracker import MemoryHolding, MemoryTracker

_NAMED = 4  # holders that an error names


class Budget(MemoryTracker):
    """Counts what a session's runs hold, and refuses what would pass ``limit``; thread-safe.

    Weights stay in memory from run to run and are shared by all of them, so they count once, in the largest form that
    a run has asked for. Arenas count from when they are made until they are given back, whether a run uses them or
    they wait for one; what waits goes before anything is refused.
    """

    def __init__(self, limit: int, *, arenas: bool = False, release: Callable[[], object] | None = None) -> None:
        super().__init__(limit, None if release is None else lambda tracker, missing: release())
        self.counts_arenas = arenas  # does a pool report them here, or must the runs?
        self._weights = 0

    def weigh(self, nbytes: int) -> None:
        """Weights of that many bytes are in use."""
        while (known := self._weights) < nbytes:
            self.add(nbytes - known, "weights")  # not under the lock: it may have to ask others for memory
            with self._lock:
                if self._weights == known:
                    self._weights = nbytes
                    return
            self.remove(nbytes - known, "weights")  # somebody else was quicker

    def _refusal(self, nbytes: int, holding: MemoryHolding) -> MemoryLimit:
        assert self.limit is not None
        with self._lock:
            found: dict[str, int] = {}
            for each, size in self._holdings.items():
                name = each.part or each.tag
                found[name] = found.get(name, 0) + size
            part = holding.part or holding.tag
            most = sorted(found.items(), key=lambda item: -item[1])
            names = ", ".join(f"{size:,} by {name}" for name, size in most[:_NAMED])
            held = f"; in use: {names}{' and others' if len(most) > _NAMED else ''}" if names else ""
            what = f"{part} asked for {nbytes:,} bytes{held}"
            refused = MemoryLimit("memory_bytes", self.limit, self._current + nbytes, what, part=part, requested=nbytes)
        refused.provider = "session"  # whose limit it is: no provider failed, and none would do with less
        return refused
