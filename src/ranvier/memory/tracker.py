"""Who holds how much memory: counted by tag, device and part, now and at most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field

from ranvier.errors import InvalidValue, MemoryLimit
from ranvier.memory import forking
from ranvier.records import dataclass


@dataclass(frozen=True, order=True)
class MemoryHolding:
    """What bytes are counted under."""

    tag: str
    device: str = "cpu"
    part: str = ""

    def __str__(self) -> str:
        return f"{self.tag}{f' of {self.part}' if self.part else ''} on {self.device}"


@dataclass(frozen=True)
class MemorySnapshot:
    """The counts of one moment. The difference of two is a snapshot too: what came and went between them."""

    current: int
    peak: int
    holdings: Mapping[MemoryHolding, int] = field(default_factory=dict)

    def by(self, what: str) -> dict[str, int]:
        """Bytes by ``tag``, ``device`` or ``part``."""
        found: dict[str, int] = {}
        for holding, nbytes in self.holdings.items():
            key: str = getattr(holding, what)
            found[key] = found.get(key, 0) + nbytes
        return found

    def diff(self, earlier: MemorySnapshot) -> MemorySnapshot:
        """What changed since ``earlier``: only what did; ``peak`` is by how much the peak rose."""
        keys = {*self.holdings, *earlier.holdings}
        changes = {key: self.holdings.get(key, 0) - earlier.holdings.get(key, 0) for key in keys}
        return MemorySnapshot(
            self.current - earlier.current,
            self.peak - earlier.peak,
            {key: change for key, change in sorted(changes.items()) if change},
        )


@dataclass
class MemoryScope:
    """What was taken and given back inside a ``with`` block, by the code that ran in it and the tasks it began."""

    tag: str
    current: int = 0
    peak: int = 0
    outer: MemoryScope | None = None


class MemoryTracker:
    """Counts bytes; thread-safe.

    ``limit`` bounds the sum. A request that would pass it first calls ``on_limit(tracker, missing bytes)``, which may
    give something back; when that is not enough it raises :class:`~ranvier.errors.MemoryLimit` and counts nothing.
    """

    fork_order = 1  # allocators count what they do while they hold their own locks

    def __init__(
        self, limit: int | None = None, on_limit: Callable[[MemoryTracker, int], object] | None = None
    ) -> None:
        if limit is not None and limit < 0:
            raise InvalidValue(f"MemoryTracker: limit must be 0 or more bytes, got {limit}")
        self.limit = limit
        self._on_limit = on_limit
        # re-entrant: what is collected while the lock is held may give bytes back
        self._lock = threading.RLock()
        self._holdings: dict[MemoryHolding, int] = {}
        self._current = self._peak = 0
        self._scope: ContextVar[MemoryScope | None] = ContextVar("scope", default=None)
        forking.watch(self)

    def add(self, nbytes: int, tag: str, *, device: str = "cpu", part: str = "") -> None:
        """Count bytes as taken."""
        self._check(nbytes)
        holding = MemoryHolding(tag, device, part)
        if self._count(nbytes, holding):
            return
        if self._on_limit is not None:  # outside the lock: it will give back what others hold
            self._on_limit(self, self._missing(nbytes))
            if self._count(nbytes, holding):
                return
        raise self._refusal(nbytes, holding)

    def remove(self, nbytes: int, tag: str, *, device: str = "cpu", part: str = "") -> None:
        """Count bytes as given back; more than were taken is an error of the caller's."""
        self._check(nbytes)
        holding = MemoryHolding(tag, device, part)
        with self._lock:
            held = self._holdings.get(holding, 0)
            if nbytes > held:
                raise InvalidValue(f"MemoryTracker: {nbytes:,} bytes of {holding} given back, {held:,} are held")
            if held == nbytes:
                self._holdings.pop(holding, None)
            else:
                self._holdings[holding] = held - nbytes
            self._current -= nbytes
            self._count_scopes(-nbytes)

    @contextmanager
    def hold(self, nbytes: int, tag: str, *, device: str = "cpu", part: str = "") -> Iterator[None]:
        """Bytes that are held for the length of a block."""
        self.add(nbytes, tag, device=device, part=part)
        try:
            yield
        finally:
            self.remove(nbytes, tag, device=device, part=part)

    @contextmanager
    def scope(self, tag: str) -> Iterator[MemoryScope]:
        """What the block takes, as a count of its own; scopes inside it count for it too."""
        scope = MemoryScope(tag, outer=self._scope.get())
        token = self._scope.set(scope)
        try:
            yield scope
        finally:
            self._scope.reset(token)

    def snapshot(self) -> MemorySnapshot:
        with self._lock:
            return MemorySnapshot(self._current, self._peak, dict(sorted(self._holdings.items())))

    def reset_peak(self) -> None:
        """The peak begins again from what is held now."""
        with self._lock:
            self._peak = self._current

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork(self, child: bool) -> None:
        self._lock.release()

    @property
    def current(self) -> int:
        return self._current

    @property
    def peak(self) -> int:
        return self._peak

    def _refusal(self, nbytes: int, holding: MemoryHolding) -> MemoryLimit:
        assert self.limit is not None
        return MemoryLimit("memory", self.limit, self._current + nbytes, part=str(holding), requested=nbytes)

    def _count(self, nbytes: int, holding: MemoryHolding) -> bool:
        with self._lock:
            if self.limit is not None and self._current + nbytes > self.limit:
                return False
            if nbytes:
                self._holdings[holding] = self._holdings.get(holding, 0) + nbytes
            self._current += nbytes
            self._peak = max(self._peak, self._current)
            self._count_scopes(nbytes)
            return True

    def _count_scopes(self, nbytes: int) -> None:
        scope = self._scope.get()
        while scope is not None:
            scope.current += nbytes
            scope.peak = max(scope.peak, scope.current)
            scope = scope.outer

    def _missing(self, nbytes: int) -> int:
        return max(0, self._current + nbytes - (self.limit or 0))

    @staticmethod
    def _check(nbytes: int) -> None:
        if nbytes < 0:
            raise InvalidValue(f"MemoryTracker: bytes must be 0 or more, got {nbytes}")
