"""Files mapped into memory that do not count as open ones: a checkpoint may have thousands of parts, and a process may
have some hundred files open.

A mapping outlives the file it was made of, but ``mmap`` keeps one open for each all the same, to resize it, which
nobody does here. From Python 3.13 on it can be told not to; before, the system is asked without it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any


def mapped(path: Path) -> Any:
    """The bytes of a file as a buffer that cannot be written to; pages are read when they are looked at."""
    with path.open("rb") as file:
        handle = file.fileno()
        size = os.fstat(handle).st_size
        if not size:  # of nothing there is no mapping
            return b""
        if sys.platform == "win32":
            return mmap.mmap(handle, size, access=mmap.ACCESS_READ)
        if sys.version_info >= (3, 13):
            return mmap.mmap(handle, size, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
        return _by_the_system(handle, size)


@functools.cache
def _library() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return found


def _by_the_system(handle: int, size: int) -> memoryview:
    library = _library()
    address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    owner = (ctypes.c_ubyte * size).from_address(address)
    # not when the program ends: threads may still look at it, and the system takes it back by itself
    weakref.finalize(owner, library.munmap, address, size).atexit = False
    return memoryview(owner).toreadonly().cast("B")
