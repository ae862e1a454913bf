"""Addresses of the operating system's functions that generated code calls.

Everything here may be absent: a null address means that the code does without.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import architecture

# The system call number of ``futex``, where the driver may use it.
_FUTEX = {"x86_64": 202, "aarch64": 98}


def _address(library: str | None, name: str) -> int:
    try:
        return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):  # no such library or function; Windows has no library None
        return 0


@functools.cache
def clock_function() -> int:
    """The function behind :func:`emit_now`."""
    return (
        _address("kernel32", "QueryPerformanceCounter") if sys.platform == "win32" else _address(None, "clock_gettime")
    )


@functools.cache
def copy_function() -> int:
    """``memcpy``."""
    return _address("msvcrt" if sys.platform == "win32" else None, "memcpy")


@functools.cache
def yield_function() -> int:
    """Gives the rest of the time slice to another thread; takes no arguments."""
    return _address("kernel32", "SwitchToThread") if sys.platform == "win32" else _address(None, "sched_yield")


@functools.cache
def futex() -> tuple[int, int]:
    """The address of ``syscall`` and the number of ``futex``; (0, 0) where threads cannot sleep that way."""
    number = _FUTEX.get(architecture(), 0) if sys.platform == "linux" and sys.maxsize > 2**32 else 0
    function = _address(None, "syscall") if number else 0
    return (function, number) if function else (0, 0)


def emit_now(f: Fn, clock: Val) -> Val:
    """Nanoseconds of the clock that ``time.perf_counter_ns`` shows, by a call of ``clock`` (0 where that is null)."""
    found = f.var("i64", 0)
    at = f.stack("i64", 2, 16)
    with f.if_(f.cmp("ne", clock, f.zero("ptr"))):
        if sys.platform == "win32":
            f.call_pointer(clock, "i32", [at])
            per_tick = max(1, round(time.get_clock_info("perf_counter").resolution * 1e9))
            found.set(f.load("i64", at) * per_tick)
        else:
            name = getattr(time, "CLOCK_UPTIME_RAW", getattr(time, "CLOCK_MONOTONIC", 1))
            f.call_pointer(clock, "i32", [f.const("i32", name), at])
            found.set(f.load("i64", at) * 1_000_000_000 + f.load("i64", f.gep(at, 8)))
    return found.get()
