"""Workers that sleep are woken on another core than the caller's.

Linux often wakes a thread on the core of whoever wakes it, and mostly so in a virtual machine, where a core that sleeps
counts as one the host has taken away. The caller is busy there, so the worker does not come before the scheduler
evens cores out, some milliseconds later: a run after a pause of 10 ms took as long as with one thread. So before
workers are woken the core that the caller is on is taken out of those they may use, and the one of the time before is
given back. Whoever else changes where workers may run has the last word: then nothing is changed any more.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np

from ranvier.codegen.llvm.builder import Fn, Module, Val
from ranvier.codegen.llvm.isa import architecture

# numbers of the system calls getcpu, sched_setaffinity and sched_getaffinity
_CALLS = {"x86_64": (309, 203, 204), "aarch64": (168, 122, 123)}
_MASK_WORDS = 16  # of a set of cores: room for 1024 of them
_CORES = 64 * _MASK_WORDS
# A table: cores, workers, the core that was taken out last (or as many as there are: none), what is found of a worker;
# threads of workers; then the set without each core, and the whole one.
_COUNT, _WORKERS, _LAST, _FOUND = 0, 1, 2, 3
_THREADS = _FOUND + _MASK_WORDS


def calls() -> tuple[int, int, int] | None:
    return _CALLS.get(architecture()) if sys.platform == "linux" and sys.maxsize > 2**32 else None


class Places:
    """Where the workers of a pool may run."""

    def __init__(self, workers: int, allowed: frozenset[int]) -> None:
        self._allowed = allowed
        self._count = max(self._allowed) + 1
        self._lock = threading.Lock()
        self._masks = _THREADS + workers
        self.words = np.zeros(self._masks + (self._count + 1) * _MASK_WORDS, np.int64)
        self.words[[_COUNT, _WORKERS, _LAST]] = self._count, workers, self._count
        for core in range(self._count + 1):
            start = self._masks + core * _MASK_WORDS
            bits = np.zeros(_CORES, np.uint8)
            bits[sorted(self._allowed - {core})] = 1
            self.words[start : start + _MASK_WORDS] = np.packbits(bits, bitorder="little").view("<i8")

    @classmethod
    def of(cls, workers: int) -> Places | None:
        """None where the system does not tell, or there is not a core for each worker beside the caller's."""
        if calls() is None or not workers:
            return None
        try:
            allowed = frozenset(os.sched_getaffinity(0))
        except OSError:
            return None
        return cls(workers, allowed) if workers < len(allowed) and max(allowed) < _CORES else None

    def joined(self, slot: int) -> bool:
        """The calling thread is worker ``slot``, 1 or more; False where it may not run where the others may."""
        with self._lock:
            last = int(self.words[_LAST])
            try:
                if frozenset(os.sched_getaffinity(0)) != self._allowed:
                    return False
                os.sched_setaffinity(0, self._allowed - {last})
            except OSError:
                return False
            self.words[_THREADS + slot - 1] = threading.get_native_id()
            return True


def emit_apart(m: Module, name: str, at: int) -> None:
    """``void apart(syscall, pool)``: see above; the address of a table lies at ``at`` of a pool, 0 where there is none
    or none is to be used any more."""
    numbers = calls()
    f = m.function(name, [("ptr", "system"), ("ptr", "pool")], internal=True, optimized=False)
    if numbers is not None:
        getcpu, set_, get = numbers
        where = f.gep(f.args["pool"], at)
        table = f.load("ptr", where)
        with f.if_(f.cmp("ne", table, f.zero("ptr"))):
            core = f.stack("i64", 1)
            f.store(f.i64(0), core)
            _call(f, getcpu, core, f.zero("ptr"), f.zero("ptr"))
            here = f.cast(f.load("i32", core), "i64", signed=False)
            count, last = _word(f, table, _COUNT), _word(f, table, _LAST)
            with f.if_(f.and_(f.cmp("ne", here, last), f.cmp("ult", here, count))):
                workers = _word(f, table, _WORKERS)
                masks = f.gep(table, workers + _THREADS, "i64")
                before, after = (f.gep(masks, each * _MASK_WORDS, "i64") for each in (last, here))
                f.store(here, f.gep(table, _LAST, "i64"))
                found, size = f.gep(table, _FOUND, "i64"), f.i64(8 * _MASK_WORDS)
                with f.loop(0, workers) as k:
                    thread = f.load("i64", f.gep(f.gep(table, _THREADS, "i64"), k, "i64"))
                    with f.if_(f.cmp("ne", thread, 0)):
                        other = f.var("i64", f.i64(0))
                        with f.loop(0, _MASK_WORDS) as word:  # the system fills in as many as it has
                            f.store(f.i64(0), f.gep(found, word, "i64"))
                        _call(f, get, thread, size, found)
                        with f.loop(0, _MASK_WORDS) as word:
                            pair = [f.load("i64", f.gep(mask, word, "i64")) for mask in (found, before)]
                            other.set(f.or_(other.get(), f.xor(*pair)))
                        with f.if_else(f.cmp("eq", other.get(), 0)) as otherwise:
                            _call(f, set_, thread, size, after)
                            otherwise()
                            f.store(f.zero("ptr"), where)
    f.ret()


def _word(f: Fn, table: Val, k: int) -> Val:
    return f.load("i64", f.gep(table, k, "i64"))


def _call(f: Fn, number: int, *given: Any) -> None:
    listed = ", ".join(f"{each.type} {each.name}" for each in given)
    f.emit("i64", f"call i64 (i64, ...) {f.args['system'].name}(i64 {number}, {listed})")
