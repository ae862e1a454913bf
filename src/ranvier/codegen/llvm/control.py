"""The control block of micro-kernels, and how kernels find their batch entry: what drivers of every family share.

``control`` is an array of 8-byte slots, numbered by :class:`Slot`; ``gemm/micro.py`` says what they mean.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum

from ranvier.codegen.llvm.builder import Fn, Operand, Val


class Launched:
    """A function that has a launch's ``bufs`` and ``dims``."""

    def __init__(self, fn: Fn) -> None:
        self.fn = fn

    def dim(self, k: int) -> Val:
        return self.fn.load("i64", self.fn.gep(self.fn.args["dims"], int(k), "i64"), invariant=True)

    def buf(self, k: int) -> Val:
        return self.fn.load("ptr", self.fn.gep(self.fn.args["bufs"], int(k), "ptr"), invariant=True)


class Slot(IntEnum):
    """Slots of the control block."""

    K = 0  # elements per segment
    SEGMENTS = 1
    A_STEP = 2
    B_STEP = 3
    OUT = 4
    OUT_STEP = 5  # bytes between rows of the output
    COLUMNS = 6
    PARTIAL = 7
    BIAS = 8
    RESIDUAL = 9
    RESIDUAL_STEP = 10
    FLAGS = 11
    ALPHA = 12
    LOW = 13
    HIGH = 14
    FETCH = 15
    # of micro-kernels that work with tiles (amx/micro.py); the others know their rows, and have none to keep
    ROWS = 16
    REST = 17
    TILES = 18
    SEGMENT_STEP = 19  # bytes between segments whose rows lie one stride apart
    LATER = 20  # of micro-kernels that leave sums to the next call (amx/later.py)
    LATER_OUT = 21
    LATER_STEP = 22
    DEFERS = 23
    KEPT = 24  # where tiles of A go that the next calls find again


SLOTS = len(Slot)
# Bits of the FLAGS slot. ROUND: results are stored in 16 bits; PASSING: they are many, and need not stay in caches.
ALPHA, CLAMP, ROUND, PASSING = 1, 2, 4, 8


def number_bits(value: float, element_bytes: int) -> int:
    """A float as the low bytes of a slot; what float32 cannot hold becomes an infinity."""
    if element_bytes == 8:
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    try:
        raw = struct.pack("<f", value)
    except OverflowError:
        raw = struct.pack("<f", math.copysign(math.inf, value))
    return int(struct.unpack("<i", raw)[0])


def slot_address(fn: Fn, control: Val, slot: Slot) -> Val:
    return fn.gep(control, int(slot), "i64")


def read_slot(fn: Fn, control: Val, slot: Slot, kind: str = "i64") -> Val:
    return fn.load(kind, slot_address(fn, control, slot))


def write_slot(fn: Fn, control: Val, slot: Slot, value: Operand) -> None:
    fn.store(value if isinstance(value, Val) else fn.i64(int(value)), slot_address(fn, control, slot))


def batch_offsets(f: Fn, dim: Callable[[int], Val], flat: Val, rank_at: int, table_at: int, tensors: int) -> list[Val]:
    """Offsets of a batch entry in ``tensors`` tensors: dims hold (extent, one stride per tensor) per batch axis."""
    left = f.var("i64", flat)
    offsets = [f.var("i64", 0) for _ in range(tensors)]
    rank = dim(rank_at)
    per = tensors + 1
    base = f.gep(f.args["dims"], table_at, "i64")

    def add(index: Val, axis: Val) -> None:
        for k, offset in enumerate(offsets):
            offset.set(offset.get() + index * f.load("i64", f.gep(axis, k + 1, "i64")))

    with f.loop(1, rank) as inner:
        axis = f.gep(base, (rank - inner) * per, "i64")
        extent = f.load("i64", axis)
        add(f.rem(left.get(), extent), axis)
        left.set(f.div(left.get(), extent))
    with f.if_(f.cmp("sgt", rank, 0)):  # the outermost axis takes what is left: one axis needs no division
        add(left.get(), base)
    return [o.get() for o in offsets]


def by_widths(f: Fn, start: Val, stop: Val, widths: Sequence[int], body: Callable[[Val, int], None]) -> None:
    """Run ``body(from, width)`` over [start, stop): as far as the first width goes, what is left by the next ones, each
    of which divides the one before; the last is 1."""
    for width in dict.fromkeys(widths):
        whole = start + f.and_(stop - start, -width) if width > 1 else stop
        with f.loop(start, whole, width) as at:
            body(at, width)
        start = whole


def quotient(f: Fn, a: Val, b: Val) -> Val:
    """a / b without the division where b is 1, as it is for small work in great number."""
    found = f.var("i64", a)
    with f.if_(f.cmp("ne", b, 1)):
        found.set(f.div(a, b))
    return found.get()
