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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ranvier.errors import InvalidConfig
from ranvier.logs import logger

Placement = Literal["local", "interleave"]
PLACEMENTS: tuple[Placement, ...] = ("local", "interleave")
_PREFERRED, _INTERLEAVE = 1, 3  # the kernel's names for them: MPOL_PREFERRED, MPOL_INTERLEAVE
_CALL_NUMBERS = {"x86_64": (237, 309), "aarch64": (235, 168)}  # of mbind and getcpu
_PAGE = 4096

Bind = Callable[[int, int, int, int], int]  # address, bytes, mode, mask of nodes → 0 or an error's number


@dataclass(frozen=True)
class NumaNode:
    """Cores and the memory next to them."""

    index: int
    cpus: frozenset[int]


@dataclass(frozen=True)
class Topology:
    """The nodes of a machine; one where nothing is known."""

    nodes: tuple[NumaNode, ...] = (NumaNode(0, frozenset()),)

    @property
    def mask(self) -> int:
        return sum(1 << node.index for node in self.nodes)

    def node_of(self, cpu: int) -> int:
        return next((node.index for node in self.nodes if cpu in node.cpus), self.nodes[0].index)


def read_topology(root: str = "/sys/devices/system/node") -> Topology:
    """The nodes with memory that a system describes under ``root``."""
    nodes = []
    for folder in sorted(Path(root).glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cpus = _cpus((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        nodes.append(NumaNode(int(folder.name[4:]), cpus))
    return Topology(tuple(nodes)) if nodes else Topology()


@functools.cache
def topology() -> Topology:
    """This machine's nodes, looked up once."""
    return read_topology()


def place(
    address: int,
    nbytes: int,
    placement: Placement = "local",
    *,
    nodes: Topology | None = None,
    bind: Bind | None = None,
    cpu: Callable[[], int] | None = None,
) -> bool:
    """Ask for untouched memory to be near the calling thread, or spread over all nodes; False where it makes no
    difference or cannot be done. Whole pages only: what a page shares with other memory stays where that is."""
    if placement not in PLACEMENTS:
        raise InvalidConfig(f"placement cannot be {placement!r} (known: {', '.join(PLACEMENTS)})")
    nodes = topology() if nodes is None else nodes
    if len(nodes.nodes) < 2:
        return False
    start = -(-address // _PAGE) * _PAGE
    length = (address + nbytes) // _PAGE * _PAGE - start
    if length <= 0:
        return False
    if placement == "interleave":
        mode, mask = _INTERLEAVE, nodes.mask
    else:
        mode, mask = _PREFERRED, 1 << nodes.node_of((cpu or current_cpu)())
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


def _cpus(text: str) -> frozenset[int]:
    """``0-3,8`` as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
