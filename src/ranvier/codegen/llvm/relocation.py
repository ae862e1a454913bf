"""How machine code names places, by architecture: what a linker writes into code so that it reaches a target.

Only the kinds that generated kernels have are known, by their numbers in the ELF ABI of each architecture.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from ranvier.records import dataclass


@dataclass(frozen=True)
class Rules:
    """One architecture. A place and a target are offsets into the same piece of memory."""

    machine: int  # in the header of its objects
    page: int  # code is placed by multiples of this: distances that it holds are true there only
    absolute: int  # the kind that is 8 bytes of address
    calls: frozenset[int]  # of functions, which may be reached through a stub
    slots: frozenset[int]  # of an 8-byte slot that holds the address of something far away
    write: Callable[[bytearray, int, int, int], bool]  # code, place, kind and target: False where that cannot be
    stub: Callable[[int, int], bytes | None]  # code at a place that jumps to where the slot at another one points


# -- x86-64 ---------------------------------------------------------------------------------------------------------

_NEAR = {2, 4, 9, 41, 42}  # all are the distance in 4 bytes


def _write_x86(code: bytearray, at: int, kind: int, target: int) -> bool:
    if kind not in _NEAR:
        return False
    struct.pack_into("<i", code, at, target - at)
    return True


def _stub_x86(at: int, slot: int) -> bytes | None:
    return b"\xff\x25" + struct.pack("<i", slot - at - 6)  # jmp [rip + …]


# -- aarch64 --------------------------------------------------------------------------------------------------------

_PREL64, _PREL32, _ADR, _ADRP, _JUMP, _CALL, _SLOT_PAGE, _SLOT_LOAD = 260, 261, 274, 275, 282, 283, 311, 312
_BRANCHES = frozenset({_JUMP, _CALL})
# the low 12 bits of an address, in an addition or in a load or store of 1, 2 … 16 bytes, which counts in its size
_LOW_BITS = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4, _SLOT_LOAD: 3}
_PAGE = 4096  # what adrp counts in, whatever the pages of the system are
_ADDRESS_BITS = ~(3 << 29 | 0x7FFFF << 5)


def _write_aarch64(code: bytearray, at: int, kind: int, target: int) -> bool:
    distance = target - at
    if kind == _PREL64:
        struct.pack_into("<q", code, at, distance)
        return True
    if kind == _PREL32:
        struct.pack_into("<i", code, at, distance)
        return True
    (word,) = struct.unpack_from("<I", code, at)
    if kind in _BRANCHES:
        if distance % 4 or not -(1 << 27) <= distance < 1 << 27:
            return False
        word = word & ~0x3FFFFFF | distance >> 2 & 0x3FFFFFF
    elif kind in (_ADR, _ADRP, _SLOT_PAGE):
        if kind != _ADR:
            distance = target // _PAGE - at // _PAGE
        if not -(1 << 20) <= distance < 1 << 20:
            return False
        word = word & _ADDRESS_BITS | (distance & 3) << 29 | (distance >> 2 & 0x7FFFF) << 5
    elif kind in _LOW_BITS:
        low, size = target % _PAGE, _LOW_BITS[kind]
        if low % (1 << size):
            return False
        word = word & ~(0xFFF << 10) | low >> size << 10
    else:
        return False
    struct.pack_into("<I", code, at, word)
    return True


def _stub_aarch64(at: int, slot: int) -> bytes | None:
    distance = slot - at
    if distance % 4 or not -(1 << 20) <= distance < 1 << 20:
        return None
    load = 0x58000010 | (distance >> 2 & 0x7FFFF) << 5  # ldr x16, slot
    return struct.pack("<II", load, 0xD61F0200)  # br x16


RULES = {
    "x86_64": Rules(62, 64, 1, frozenset({4}), frozenset({9, 41, 42}), _write_x86, _stub_x86),
    "aarch64": Rules(183, _PAGE, 257, _BRANCHES, frozenset({_SLOT_PAGE, _SLOT_LOAD}), _write_aarch64, _stub_aarch64),
}
