"""Many models in one process, under one limit of memory and of concurrent runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, overload

from ranvier.config import ProviderConfig, SessionConfig, resolve
from ranvier.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidConfig,
    InvalidInput,
    ResourceLimit,
    SessionClosed,
    nearest,
)
from ranvier.graph.ir import Graph
from ranvier.runtime.control import RunOptions
from ranvier.runtime.metrics import Counters, SessionMetrics
from ranvier.runtime.session import Session
from ranvier.runtime.settings import effective

_POLL_SECONDS = 0.05  # how soon a run that waits for a slot notices that it was cancelled


class _Entry:
    """One model by name: loaded, or known and unloaded."""

    def __init__(self, name: str, model: Any, config: SessionConfig, base_dir: Any, slots: int | None) -> None:
        self.name = name
        self.reloadable = isinstance(model, str | os.PathLike)
        self.model = os.path.abspath(model) if self.reloadable else model
        self.config = config
        self.base_dir = base_dir
        self.slots = threading.BoundedSemaphore(slots) if slots is not None else None
        self.loading = threading.Lock()  # one thread at a time makes the session
        self.session: Session | None = None
        self.weights = 0  # bytes, set aside already while it loads
        self.arriving = False
        self.active = 0
        self.used = 0  # tick of the last use
        self.counters = Counters()

    @property
    def present(self) -> bool:
        """Is it in memory, or on its way there?"""
        return self.session is not None or self.arriving

    def arenas(self) -> int:
        if self.session is None:
            return 0
        memory = self.session.memory()
        return memory.arenas_waiting + memory.arenas_in_use

    def held(self) -> int:
        return self.weights + self.arenas() if self.present else 0

    @property
    def idle(self) -> bool:
        return self.session is not None and self.active == 0


class SessionManager:
    """Loads models, runs them by name, and unloads idle ones when memory gets short.

    ``memory_limit`` bounds the bytes of weights and arenas of all models together, ``max_sessions`` the number of
    models in memory, ``max_concurrent_runs`` the runs in progress: further ones wait. A model that was given as a path
    may be unloaded while idle, the least recently used one first, and comes back by itself when it is used again; one
    given as bytes or a message stays. Where room cannot be made, loading raises ResourceLimit.

    ``config`` holds the options that models have when ``load`` does not say otherwise.
    """

    def __init__(
        self,
        memory_limit: int | None = None,
        max_sessions: int | None = None,
        max_concurrent_runs: int | None = None,
        config: SessionConfig | ProviderConfig | None = None,
    ) -> None:
        self._memory_limit = _count("memory_limit", memory_limit)
        self._max_sessions = _count("max_sessions", max_sessions)
        slots = _count("max_concurrent_runs", max_concurrent_runs)
        self._slots = threading.BoundedSemaphore(slots) if slots is not None else None
        self._config = effective(config)
        self._entries: dict[str, _Entry] = {}
        self._arriving: list[_Entry] = []  # being loaded for the first time; may replace one that has a name
        self._lock = threading.RLock()
        self._tick = 0
        self._closed = False

    # -- models -------------------------------------------------------------------------------------------------------

    def load(
        self,
        name: str,
        model: Any,
        *,
        max_concurrent_runs: int | None = None,
        base_dir: str | os.PathLike[str] | None = None,
        replace: bool = False,
        **options: Any,
    ) -> Session:
        """Load a model under a name; ``options`` are those of :class:`~ranvier.config.SessionConfig`.

        A name that is taken raises, unless ``replace`` is true: then the new model takes its place once it is loaded.
        """
        slots = _count("max_concurrent_runs", max_concurrent_runs)
        entry = _Entry(name, model, resolve({"name": name, **options}, config=self._config).config, base_dir, slots)
        with self._lock:
            self._check_open()
            old = self._entries.get(name)
            if old is not None and not replace:
                raise InvalidConfig(f"a model named {name!r} is already loaded; unload it, or pass replace=True")
            if old is None:
                self._entries[name] = entry  # taken from here on
            self._arriving.append(entry)
        try:
            with self._using(entry) as session:
                with self._lock:
                    self._check_open()
                    old = self._entries.get(name)
                    self._entries[name] = entry
                if old is not None and old is not entry:
                    _close(old)
                self._settle(entry)
                return session
        except BaseException:
            with self._lock:
                if self._entries.get(name) is entry:
                    del self._entries[name]
            _close(entry)
            raise
        finally:
            with self._lock:
                self._arriving.remove(entry)

    def get(self, name: str) -> Session:
        """The session of a model, loaded again if need be.

        It may be closed when the model is idle and room is needed; ``run`` and ``using`` keep it until they are done.
        """
        with self.using(name) as session:
            return session

    def unload(self, name: str) -> None:
        """Forget a model; runs in progress finish."""
        with self._lock:
            entry = self._entry(name)
            del self._entries[name]
        _close(entry)

    def names(self) -> list[str]:
        """All models, loaded or not."""
        with self._lock:
            return list(self._entries)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        name: str,
        inputs: Mapping[str, Any] | Sequence[Any],
        outputs: Sequence[str] | None = None,
        options: RunOptions | None = None,
    ) -> dict[str, Any]:
        """Run a model; waits for a slot where runs are limited, not longer than the timeout of ``options``."""
        with self._lock:
            entry = self._entry(name)
        with ExitStack() as stack:
            try:
                # the model's own slot first: who waits for a busy model must not keep others from running
                for slots in (entry.slots, self._slots):
                    if slots is not None:
                        _take(slots, options, name)
                        stack.callback(slots.release)
                session = stack.enter_context(self._using(entry))
                started = time.perf_counter()
                results = session.run(inputs, outputs, options)
            except Exception as error:
                entry.counters.failed(error)
                raise
            entry.counters.ran(time.perf_counter() - started)
        self._settle(entry)
        return results

    @contextmanager
    def using(self, name: str) -> Iterator[Session]:
        """The session of a model, kept in memory as long as the block lasts."""
        with self._lock:
            entry = self._entry(name)
        with self._using(entry) as session:
            yield session

    @contextmanager
    def _using(self, entry: _Entry) -> Iterator[Session]:
        with self._lock:
            self._check_open()
            self._tick += 1
            entry.used = self._tick
            entry.active += 1  # from here on nobody unloads it
        try:
            yield self._loaded(entry)
        finally:
            with self._lock:
                entry.active -= 1

    # -- looking at it ------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and arenas of all models."""
        with self._lock:
            return sum(entry.held() for entry in self._all())

    @overload
    def metrics(self, name: str) -> SessionMetrics: ...

    @overload
    def metrics(self, name: None = None) -> dict[str, SessionMetrics]: ...

    def metrics(self, name: str | None = None) -> SessionMetrics | dict[str, SessionMetrics]:
        """Counts and times of one model, or of all by name."""
        with self._lock:
            if name is not None:
                return _metrics(self._entry(name))
            return {each: _metrics(entry) for each, entry in self._entries.items()}

    # -- making room --------------------------------------------------------------------------------------------------

    def _loaded(self, entry: _Entry) -> Session:
        session = entry.session
        if session is not None:
            return session
        with entry.loading:
            if entry.session is None:

                def reserve(graph: Graph) -> int | None:
                    return self._reserve(entry, graph.constant_bytes())

                try:
                    session = _ManagedSession(entry.model, entry.config, entry.base_dir, reserve)
                    with self._lock:
                        entry.session = session
                        entry.weights = session.memory().weights
                finally:
                    entry.arriving = False
                entry.counters.loaded()
            assert entry.session is not None
            return entry.session

    def _reserve(self, entry: _Entry, nbytes: int) -> int | None:
        """Set bytes aside for a model that is being loaded, unloading others for it; returns what a run may take."""
        with self._lock:
            self._check_open()
            victims = self._victims(entry.name, nbytes, [e for e in self._all() if e is not entry])
            entry.weights, entry.arriving = nbytes, True
            closing = [self._evict(victim) for victim in victims]
        for session in closing:
            session.close()
            session.trim()
        return self._memory_limit

    def _victims(self, name: str, nbytes: int, others: list[_Entry]) -> list[_Entry]:
        """Which idle models must go, the least recently used first; ResourceLimit where all of them are not enough."""
        candidates = sorted((e for e in others if e.idle and e.reloadable), key=lambda e: e.used)
        held = sum(e.held() for e in others)
        loaded = sum(1 for e in others if e.present)
        victims: list[_Entry] = []
        while True:
            short = self._memory_limit is not None and held + nbytes > self._memory_limit
            crowded = self._max_sessions is not None and loaded + 1 > self._max_sessions
            if not short and not crowded:
                return victims
            if not candidates:
                kept = ", ".join(repr(e.name) for e in others if e.present and e not in victims)
                what = f"loading {name!r}; " + (f"in use or not reloadable: {kept}" if kept else "no other is loaded")
                if short:
                    raise ResourceLimit("memory_limit", self._memory_limit or 0, held + nbytes, what)
                raise ResourceLimit("max_sessions", self._max_sessions or 0, loaded + 1, what)
            victim = candidates.pop(0)
            victims.append(victim)
            held -= victim.held()
            loaded -= 1

    def _all(self) -> list[_Entry]:
        """Every model, those that are on their way included."""
        return list({id(e): e for e in [*self._entries.values(), *self._arriving]}.values())

    def _evict(self, entry: _Entry) -> Session:
        session, entry.session = entry.session, None
        assert session is not None
        entry.counters.evicted()
        return session

    def _settle(self, entry: _Entry) -> None:
        """After a run the arenas may have grown: give back those of idle models, then unload, until the limit holds."""
        if self._memory_limit is None:
            return
        closing: list[Session] = []
        with self._lock:
            idle = sorted((e for e in self._entries.values() if e.idle and e is not entry), key=lambda e: e.used)
            if self.memory_bytes > self._memory_limit:
                # a trimmed model only needs new arenas, an unloaded one must be read again
                steps: list[Callable[[], None]] = [_trimmer(e) for e in idle]
                steps += [lambda e=e: closing.append(self._evict(e)) for e in idle if e.reloadable]  # type: ignore[misc]
                steps.append(_trimmer(entry))
                for step in steps:
                    step()
                    if self.memory_bytes <= self._memory_limit:
                        break
        for session in closing:
            session.close()
            session.trim()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unload everything; later calls raise SessionClosed."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            _close(entry)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("the session manager is closed")

    def _entry(self, name: str) -> _Entry:
        self._check_open()
        entry = self._entries.get(name)
        if entry is None:
            raise InvalidInput(f"no model is loaded as {name!r}{nearest(str(name), self._entries)}")
        return entry

    def __enter__(self) -> SessionManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SessionManager of {len(self)} models, {self.memory_bytes:,} bytes>"


class _ManagedSession(Session):
    """A session that asks for room once it knows how much, and before it takes any."""

    def __init__(
        self, model: Any, config: SessionConfig, base_dir: Any, reserve: Callable[[Graph], int | None]
    ) -> None:
        self._reserve = reserve
        if isinstance(model, Graph):  # nothing to read
            config = self._limited(model, config)
        super().__init__(model, config, base_dir=base_dir)

    def _load(self, model: Any, base_dir: str | os.PathLike[str] | None) -> Graph:
        graph = super()._load(model, base_dir)
        self.config = self._limited(graph, self.config)
        return graph

    def _limited(self, graph: Graph, config: SessionConfig) -> SessionConfig:
        """Ask for room; the configuration then says that weights and the buffers of one run must fit into it."""
        allowed = self._reserve(graph)
        if allowed is None:
            return config
        own = config.limits.memory_bytes
        limits = config.limits.updated(memory_bytes=max(1, allowed if own is None else min(own, allowed)))
        return config.updated(limits=limits)


def _close(entry: _Entry) -> None:
    session, entry.session = entry.session, None
    if session is not None:
        session.close()
        session.trim()


def _trimmer(entry: _Entry) -> Callable[[], None]:
    def step() -> None:
        if entry.session is not None:
            entry.session.trim()

    return step


def _metrics(entry: _Entry) -> SessionMetrics:
    return entry.counters.snapshot(
        entry.name,
        loaded=entry.session is not None,
        active=entry.active,
        weights=entry.weights if entry.present else 0,
        arenas=entry.arenas(),
        transfers=() if entry.session is None else entry.session._moved.snapshot(),
    )


def _take(slots: threading.BoundedSemaphore, options: RunOptions | None, name: str) -> None:
    """Wait for a slot; cancelling the run or its timeout ends the wait."""
    if options is None:
        slots.acquire()
        return
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    while True:
        if options.terminate:
            raise Cancelled(f"the run of {name!r} was cancelled while it waited for a slot")
        wait = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - time.monotonic())
        if slots.acquire(timeout=max(0.0, wait)):
            return
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded(f"the run of {name!r} waited {options.timeout:g} s for a slot and did not start")


def _count(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidConfig(f"SessionManager: {name} must be a whole number of 1 or more, or None, got {value!r}")
    return value


__all__ = ["SessionManager", "SessionMetrics"]
