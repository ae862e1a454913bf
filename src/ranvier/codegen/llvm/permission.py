"""What the system lets a process use only on request: the tiles of the matrix unit.

Linux keeps their state out of every thread's memory until a process asks once. Threads that run already may use them
from then on too, and forked children inherit the permission; another program started by ``exec`` asks for itself.
"""

from __future__ import annotations

import ctypes
import functools
import sys

_ARCH_PRCTL = 158  # of x86_64
_REQUEST, _TILE_DATA = 0x1023, 18


@functools.cache
def tiles_allowed() -> bool:
    """Ask, once per process. The system may refuse: an older one, a sandbox, or a signal stack that is too small."""
    if sys.platform != "linux" or sys.maxsize <= 2**32:
        return False
    try:
        call = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):
        return False
    return int(call(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST), ctypes.c_long(_TILE_DATA))) == 0
