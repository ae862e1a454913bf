"""What a processor must be told before it runs instructions that were written as data.

x86 notices by itself. aarch64 keeps instructions and data in caches that do not watch each other: lines that were
written go out to where both meet, and what the other cache holds of these addresses is dropped, on all cores. A core
may have fetched some instructions ahead even so, and every one that runs this process is made to forget them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ranvier.codegen.llvm.isa import architecture

_MEMBARRIER = 283  # the system call, on aarch64
_CORES, _REGISTER = 1 << 5, 1 << 6  # its commands: synchronize the cores of this process; announce that it will ask to


def possible() -> bool:
    """Can this process run code that it wrote itself?"""
    return sys.platform == "linux" and (architecture() == "x86_64" or _cleaner() is not None)


def announce(start: int, size: int) -> None:
    """Call after the last write into code and before the first jump there."""
    if architecture() == "x86_64":
        return
    clean = _cleaner()
    assert clean is not None  # possible() was asked
    clean(start, start + size)
    synchronize = _synchronizer().result()
    if synchronize is not None:
        synchronize(_CORES)


def expect() -> None:
    """Call where code will come before long: what the system takes milliseconds for goes on meanwhile."""
    if architecture() != "x86_64" and possible():
        _synchronizer()


@functools.cache
def _cleaner() -> Any:
    """The compiler's support library has the loop over cache lines; there is no system call for it."""
    if architecture() != "aarch64":
        return None
    for library in (None, "libgcc_s.so.1"):
        try:
            found = ctypes.CDLL(library).__clear_cache
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        return found
    return None


@functools.cache
def _synchronizer() -> Future[Callable[[int], int] | None]:
    """None where the system has no such call, or a sandbox forbids it: then the loop above has to do.

    To register a process that has threads takes the system several milliseconds, so a thread of its own waits for it.
    """
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    answer: Future[Callable[[int], int] | None] = Future()

    def ask(command: int) -> int:
        return int(call(ctypes.c_long(_MEMBARRIER), ctypes.c_long(command), ctypes.c_long(0), ctypes.c_long(0)))

    def register() -> None:
        answer.set_result(ask if ask(_REGISTER) == 0 else None)

    try:
        threading.Thread(target=register, name="ranvier-fresh-code", daemon=True).start()
    except RuntimeError:  # no more threads can be had
        register()
    return answer


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_synchronizer.cache_clear)  # whoever was to answer does not exist there
