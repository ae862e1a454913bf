"""How much memory is left, asked before a large piece of it is taken.

Systems over-commit: a request beyond what there is succeeds, and the process is killed when it touches the memory.
So whoever wants much asks here first and gets an error that can be handled.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ranvier.devices import usable_memory
from ranvier.errors import OutOfMemory

LARGE = 64 << 20  # smaller requests are not worth the look
_HEADROOM = 32 << 20  # what the interpreter and others need to go on
_CGROUPS = "/sys/fs/cgroup"

Read = Callable[[str], str]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def memory_left(read: Read = _read) -> int | None:
    """Bytes that can still be taken: what the system calls available, or less under a container's limit; None where
    nothing tells."""
    found = [left for left in (_system_left(read), *_group_left(read)) if left is not None]
    if found:
        return max(0, min(found))
    usable = usable_memory()
    return None if usable is None else max(0, usable - resident_bytes(read))


def resident_bytes(read: Read = _read) -> int:
    """Bytes of this process that are in memory now; where the system does not say, the most there ever were."""
    words = read("/proc/self/statm").split()
    if len(words) > 1:
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(ImportError, OSError):  # not on every system
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0


def check_room(nbytes: int, part: str, read: Read = _read) -> None:
    """OutOfMemory when a large request is more than is left; small ones pass unseen."""
    if nbytes < LARGE:
        return
    left = memory_left(read)
    if left is None or nbytes + _HEADROOM <= left:
        return
    held = resident_bytes(read)
    raise OutOfMemory(
        f"{part}: {nbytes:,} bytes asked for, {left:,} are left on this machine (the process holds {held:,})",
        part=part,
        requested=nbytes,
        in_use=held,
        capacity=held + left,
    )


def _system_left(read: Read) -> int | None:
    fields = _fields(read("/proc/meminfo"))
    available = fields.get("MemAvailable:")
    return None if available is None else (available + fields.get("SwapFree:", 0)) * 1024


def _group_left(read: Read) -> list[int | None]:
    """What the control groups around this process leave it: its own and all above it."""
    found = []
    own = next((line[3:] for line in read("/proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    parts = [part for part in own.split("/") if part and part != ".."]
    for depth in range(len(parts) + 1):
        folder = "/".join([_CGROUPS, *parts[:depth]])
        found.append(_left_in(read, folder, "memory.max", "memory.current", "inactive_file"))
    old = f"{_CGROUPS}/memory"
    found.append(_left_in(read, old, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    return found


def _left_in(read: Read, folder: str, limit: str, usage: str, reclaimable: str) -> int | None:
    allowed, used = read(f"{folder}/{limit}").strip(), read(f"{folder}/{usage}").strip()
    if not allowed.isdigit() or not used.isdigit():
        return None
    # pages of files count as used, and go as soon as somebody needs the memory
    return int(allowed) - int(used) + _fields(read(f"{folder}/memory.stat")).get(reclaimable, 0)


def _fields(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
