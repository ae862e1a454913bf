"""The threads that help: one pool per process, its workers waiting in native code without the interpreter's lock.

A worker is a daemon thread of Python that calls the worker loop of :mod:`driver` and stays there. It spins for some
tens of microseconds when it has nothing to do and then sleeps until the next run, so an idle process costs nothing.
One run uses the pool at a time; a run that finds it taken goes on alone.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ranvier.codegen.llvm import driver, system
from ranvier.codegen.llvm.apart import Places
from ranvier.codegen.llvm.isa import available
from ranvier.codegen.llvm.library import Kernel, kernels
from ranvier.devices import usable_cores

# A worker without work spins, then gives way between looks (the caller may wait for this very core), then sleeps.
SPIN_NS = 5_000
SPIN_IDLE_NS = 50_000  # until it sleeps, between runs
SPIN_BUSY_NS = 300_000  # between the steps of a run
WAKE_NS = 80_000  # wake sleepers for a single run with this much work for them
_WORK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


@functools.cache
def _worker() -> tuple[Kernel, Any]:
    """The worker loop. Kept, so that a forked child needs no compiler (whose locks another thread may have held)."""
    spec = driver.worker_spec()
    kernel = kernels([spec], available()[-1])[spec]  # no vectors in it: the plainest code will do
    return kernel, _WORK(kernel.address)


class Pool:
    """Up to ``workers`` helping threads, started when first wanted."""

    def __init__(self, workers: int) -> None:
        self._code, self._work = _worker()
        self._memory = np.zeros(driver.POOL_BYTES + 128, np.uint8)
        start = -self._memory.ctypes.data % 128
        self._words: np.ndarray[Any, Any] = self._memory[start : start + driver.POOL_BYTES].view(np.int64)
        self.address = int(self._words.ctypes.data)
        self._syscall, self._futex = system.futex()
        for offset, value in (
            (driver.POOL_CLOCK, system.clock_function()),
            (driver.POOL_YIELD, system.yield_function()),
            (driver.POOL_SYSCALL, self._syscall),
            (driver.SPIN, SPIN_NS),
            (driver.SPIN_IDLE, SPIN_IDLE_NS),
            (driver.SPIN_BUSY, SPIN_BUSY_NS),
            (driver.WAKE_WORK, WAKE_NS),
        ):
            self._words[offset // 8] = value
        self._limit = workers if system.clock_function() else 0  # without a clock they would never sleep
        self._places = Places.of(self._limit) if self._futex else None
        if self._places is not None:
            self._words[driver.PLACES // 8] = self._places.words.ctypes.data
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._runs = 0
        self._awake = threading.Event()  # only for workers that cannot sleep in native code
        self.portable = not self._futex
        self.size = 1  # threads that a run can have now, its caller among them

    def ready(self, threads: int) -> int:
        """Start what is missing; returns how many threads a run that wants ``threads`` can have."""
        if threads > self.size:
            with self._lock:
                while len(self._threads) < min(threads - 1, self._limit):
                    slot = len(self._threads) + 1
                    thread = threading.Thread(target=self._serve, args=(slot,), name=f"ranvier-{slot}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
                self.size = len(self._threads) + 1
        return min(threads, self.size)

    def _serve(self, slot: int) -> None:
        if self._places is not None and not self._places.joined(slot):
            self._words[driver.PLACES // 8] = 0
        while self._work(self.address, slot):
            self._awake.wait()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """While a run lasts, for workers that wait in Python."""
        with self._lock:
            self._runs += 1
            self._awake.set()
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._awake.clear()

    def close(self) -> None:
        """Send the workers home and wait for them. Runs go on without them, also those in progress."""
        with self._lock:
            self._limit = 0
            self._words[driver.STOP // 8] = 1
            threads, self._threads, self.size = self._threads, [], 1
            self._runs += 1  # which never ends
            self._awake.set()
        deadline = time.monotonic() + 5.0
        for thread in threads:
            while thread.is_alive() and time.monotonic() < deadline:
                self._wake()  # again and again: one may be just about to sleep
                thread.join(0.001)

    def _wake(self) -> None:
        if self._futex:
            call = ctypes.CDLL(None).syscall
            word = ctypes.c_void_p(self.address + driver.TICKET + 4)
            null = ctypes.c_void_p(0)
            call(ctypes.c_long(self._futex), word, 1 | 128, 2**31 - 1, null, null, 0)


_shared: Pool | None = None
_lock = threading.Lock()


def shared() -> Pool:
    """The pool of this process, for as many threads as there are cores to use."""
    pool = _shared
    return pool if pool is not None else _made()


def _made() -> Pool:
    global _shared
    with _lock:
        if _shared is None:
            _shared = Pool(usable_cores() - 1)
        return _shared


def _close() -> None:
    """Workers must be out of native code before the interpreter goes: their return would find no interpreter."""
    if _shared is not None:
        _shared.close()


def _forget() -> None:
    """In a forked child: the workers stayed behind, and whoever held the lock may have, too."""
    global _shared, _lock
    _shared = None
    _lock = threading.Lock()


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
