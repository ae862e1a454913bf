"""Addresses of the operating system's functions that generated code calls, and the layout of Python's own objects.

Everything here may be absent: a null address means that the code does without.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from typing import Any

import numpy as np

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import architecture

# The system call number of ``futex``, where the driver may use it.
_FUTEX = {"x86_64": 202, "aarch64": 98}
TYPE = 8  # offset of an object's type
LIST_SIZE = 16  # offset of a list's length
LIST_ITEMS = 24  # offset of the pointer to a list's items
ARRAY_DATA = 16  # offset of the pointer to an array's elements
ARRAY_FLAGS = 64  # offset of an array's flags, 32 bits
PLAIN = 0x101  # of these: C-contiguous and aligned


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


@functools.cache
def objects_readable() -> bool:
    """Whether generated code may read lists and arrays by the offsets above.

    The pointer of a list is followed only after everything else about its layout proved right, so that a Python with
    other objects is noticed and not crashed.
    """
    plain = (
        sys.implementation.name == "cpython"
        and not hasattr(sys, "getobjects")
        and (object.__basicsize__, list.__basicsize__) == (16, 40)
        and np.ndarray.__basicsize__ >= ARRAY_FLAGS + 8
    )
    if not plain:
        return False
    arrays: list[np.ndarray[Any, Any]] = [np.empty(shape, np.float32) for shape in ((), (1,), (3, 5), (7, 0), (9000,))]
    arrays += [arrays[2][1:, ::2], arrays[2].T, np.empty(9, np.uint8)[1:].view(np.float64)]
    if any(_word(id(a) + ARRAY_DATA) != a.ctypes.data for a in arrays):
        return False
    if any(_word(id(a) + TYPE) != id(np.ndarray) for a in arrays):
        return False
    if any((_word(id(a) + ARRAY_FLAGS) & PLAIN == PLAIN) != (a.flags.c_contiguous and a.flags.aligned) for a in arrays):
        return False
    empty: list[Any] = []
    lists = [arrays * n for n in (1, 2, 50)]
    if _word(id(empty) + LIST_SIZE) != 0 or _word(id(empty) + LIST_ITEMS) != 0:
        return False
    for each in lists:
        if _word(id(each) + TYPE) != id(list):
            return False
        items = _word(id(each) + LIST_ITEMS)
        room = _word(id(each) + 32)
        if _word(id(each) + LIST_SIZE) != len(each) or not len(each) <= room < 2 * len(each) + 16:
            return False
        if not items or items % 8 or any(_word(items + 8 * k) != id(a) for k, a in enumerate(each)):
            return False
    return True


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value
