"""Memory near the cores that use it, on machines where some is nearer than other.

Linux puts a page on the node of the thread that touches it first. That is right for memory one thread fills and uses;
what all threads share is better spread over the nodes, and what another thread will fill is bound to the caller's.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from ranvier.devices import NumaNode
from ranvier.devices.host import numa_nodes
from ranvier.devices.surroundings import Surroundings
from ranvier.errors import InvalidConfig
from ranvier.logs import logger

Placement = Literal["local", "interleave"]
PLACEMENTS: tuple[Placement, ...] = ("local", "interleave")
_PREFERRED, _INTERLEAVE = 1, 3  # the kernel's names for them: MPOL_PREFERRED, MPOL_INTERLEAVE
_CALL_NUMBERS = {"x86_64": (237, 309), "aarch64": (235, 168)}  # of mbind and getcpu
_PAGE = 4096

Bind = Callable[[int, int, int, int], int]  # address, bytes, mode, mask of nodes → 0 or an error's number


@functools.cache
def topology() -> tuple[NumaNode, ...]:
    """This machine's nodes, looked up once."""
    return numa_nodes(Surroundings())


def place(
    address: int,
    nbytes: int,
    placement: Placement = "local",
    *,
    nodes: Sequence[NumaNode] | None = None,
    bind: Bind | None = None,
    cpu: Callable[[], int] | None = None,
) -> bool:
    """Ask for untouched memory to be near the calling thread, or spread over all nodes; False where it makes no
    difference or cannot be done. Whole pages only: what a page shares with other memory stays where that is."""
    if placement not in PLACEMENTS:
        raise InvalidConfig(f"placement cannot be {placement!r} (known: {', '.join(PLACEMENTS)})")
    nodes = topology() if nodes is None else nodes
    if len(nodes) < 2:
        return False
    start = -(-address // _PAGE) * _PAGE
    length = (address + nbytes) // _PAGE * _PAGE - start
    if length <= 0:
        return False
    if placement == "interleave":
        mode, mask = _INTERLEAVE, sum(1 << node.index for node in nodes)
    else:
        here = (cpu or current_cpu)()
        near = next((node.index for node in nodes if here in node.cores), nodes[0].index)
        mode, mask = _PREFERRED, 1 << near
    code = (bind or _mbind)(start, length, mode, mask)
    if code:
        logger.info("memory stays where it is first touched: mbind says %s", errno.errorcode.get(code, code))
    return code == 0


def current_cpu() -> int:
    """The core the calling thread is on at this moment; 0 where the system does not say."""
    call = _syscall()
    if call is None:
        return 0
    found = ctypes.c_uint(0)
    return found.value if call(_CALL_NUMBERS[platform.machine()][1], ctypes.byref(found), None, None) == 0 else 0


def _mbind(address: int, nbytes: int, mode: int, mask: int) -> int:
    call = _syscall()
    if call is None:
        return errno.ENOSYS
    words = max(1, -(-mask.bit_length() // 64))
    bits = (ctypes.c_uint64 * words)(*[mask >> (64 * k) & (1 << 64) - 1 for k in range(words)])
    number = ctypes.c_long(_CALL_NUMBERS[platform.machine()][0])
    # the kernel looks at one bit less than it is told of
    failed = call(
        number,
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(mode),
        bits,
        ctypes.c_ulong(64 * words + 1),
        ctypes.c_uint(0),
    )
    return ctypes.get_errno() if failed else 0


@functools.cache
def _syscall() -> Callable[..., int] | None:
    if sys.platform != "linux" or platform.machine() not in _CALL_NUMBERS or os.name != "posix":
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call
