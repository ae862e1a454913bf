"""Files mapped into memory that do not count as open ones: a checkpoint may have thousands of parts, a model a file for
every tensor, and a process some hundred files open.

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

import numpy as np


def mapped(path: Path) -> memoryview:
    """The bytes of a file, which cannot be written to; pages are read when they are looked at."""
    with path.open("rb") as file:
        handle = file.fileno()
        size = os.fstat(handle).st_size
        if not size:  # of nothing there is no mapping
            return memoryview(b"")
        if sys.platform == "win32":
            return memoryview(_Map(handle, size, access=mmap.ACCESS_READ))
        if sys.version_info >= (3, 13):
            return memoryview(_Map(handle, size, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False))
        return _by_the_system(handle, size)


def is_mapped(data: memoryview) -> bool:
    """Is this a file that was mapped here, or a part of one?"""
    return isinstance(data.obj, _Mapped)


def give_back(data: memoryview) -> None:
    """Takes the whole pages among some bytes of a mapped file out of memory; they are read again on demand."""
    if sys.platform == "win32" or not is_mapped(data) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = np.frombuffer(data, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + len(data)) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _library().madvise(first, last - first, mmap.MADV_DONTNEED)


class _Mapped:
    """What can be told from bytes that somebody else brought: pages of those are nowhere to be read again from."""


class _Map(_Mapped, mmap.mmap):
    pass


@functools.cache
def _library() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def _by_the_system(handle: int, size: int) -> memoryview:
    library = _library()
    address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    kind = type("MappedBytes", (_Mapped, ctypes.Array), {"_type_": ctypes.c_ubyte, "_length_": size})
    owner = kind.from_address(address)  # type: ignore[attr-defined]
    # not when the program ends: threads may still look at it, and the system takes it back by itself
    weakref.finalize(owner, library.munmap, address, size).atexit = False
    return memoryview(owner).toreadonly().cast("B")
