"""A look at what is left before much memory is taken.

Systems over-commit: a request beyond what there is succeeds, and the process is killed when it touches the memory.
So whoever wants much asks here first and gets an error that can be handled.
"""

from __future__ import annotations

from ranvier.devices import memory_left, resident_memory
from ranvier.devices.surroundings import Surroundings
from ranvier.errors import OutOfMemory

LARGE = 64 << 20  # smaller requests are not worth the look
_HEADROOM = 32 << 20  # what the interpreter and others need to go on


def check_room(nbytes: int, part: str, around: Surroundings | None = None) -> None:
    """OutOfMemory when a large request is more than is left; small ones pass unseen."""
    if nbytes < LARGE:
        return
    left = memory_left(around)
    if left is None or nbytes + _HEADROOM <= left:
        return
    held = resident_memory(around)
    raise OutOfMemory(
        f"{part}: {nbytes:,} bytes asked for, {left:,} are left on this machine (the process holds {held:,})",
        part=part,
        requested=nbytes,
        in_use=held,
        capacity=held + left,
    )
