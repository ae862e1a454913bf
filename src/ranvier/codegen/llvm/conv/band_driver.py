"""The kernel that runs several launches over one band of an image after another, so that what they hand on stays near.

It knows nothing about convolutions. For every launch there is a record in ``dims``, and for every band the launches to
call and where in the image their tensors begin. Tensors between two launches, and the arrays of pointers that launches
are called with, lie in the scratch of the thread.
"""

from __future__ import annotations

from enum import IntEnum

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Module, Operand, Val
from ranvier.codegen.llvm.isa import Isa

MOVING, INSIDE = 4, 8  # buffers of a launch, at most, that begin elsewhere in every band, and that lie in scratch


class Head(IntEnum):
    """The first of ``dims``; positions are those of other numbers there."""

    LAUNCHES = 0
    RECORDS = 1  # position of the records of launches
    CALLS = 2  # launches of a band
    BANDS = 3  # position of the records of bands


class Record(IntEnum):
    """What is said about a launch."""

    CODE = 0  # position of its kernel in ``bufs``
    FIRST = 1  # position of its first buffer there
    COUNT = 2
    POINTERS = 3  # bytes from the start of scratch: the array it is called with
    DIMS = 4  # position of its own dims
    TILES = 5
    SCRATCH = 6  # bytes from the start of scratch: its own
    MOVES = 7  # how many buffers move with the band …
    INSIDE = 8  # … and how many lie in scratch
    POSITIONS = 9  # of those that move; then pairs of a position and bytes from the start of scratch
    SIZE = 9 + MOVING + 2 * INSIDE


CALL = 1 + MOVING  # numbers of a call in a band: the launch, then bytes to where each moving buffer begins


def driver_spec() -> KernelSpec:
    return KernelSpec("conv bands", ("bands", 1), _emit)


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    f = module.kernel(symbol, optimized=False)
    bufs, dims, scratch = f.args["bufs"], f.args["dims"], f.args["scratch"]

    def number(base: Val, k: Operand) -> Val:
        return f.load("i64", f.gep(base, k if isinstance(k, Val) else int(k), "i64"))

    def pointer(k: Val) -> Val:
        return f.load("ptr", f.gep(bufs, k, "ptr"))

    records = f.gep(dims, number(dims, Head.RECORDS), "i64")

    with f.loop(0, number(dims, Head.LAUNCHES)) as launch:
        record = f.gep(records, launch * int(Record.SIZE), "i64")
        target = f.gep(scratch, number(record, Record.POINTERS))
        with f.loop(0, number(record, Record.COUNT)) as k:
            f.store(pointer(number(record, Record.FIRST) + k), f.gep(target, k, "ptr"))
        with f.loop(0, number(record, Record.INSIDE)) as k:
            pair = f.gep(record, k * 2 + (int(Record.POSITIONS) + MOVING), "i64")
            f.store(f.gep(scratch, number(pair, 1)), f.gep(target, number(pair, 0), "ptr"))
    calls = number(dims, Head.CALLS)
    with f.loop(f.args["begin"], f.args["end"]) as band, f.loop(0, calls) as k:
        call = f.gep(dims, number(dims, Head.BANDS) + (band * calls + k) * CALL, "i64")
        record = f.gep(records, number(call, 0) * int(Record.SIZE), "i64")
        target = f.gep(scratch, number(record, Record.POINTERS))
        with f.loop(0, number(record, Record.MOVES)) as moving:
            position = number(record, moving + int(Record.POSITIONS))
            base = pointer(number(record, Record.FIRST) + position)
            f.store(f.gep(base, number(call, moving + 1)), f.gep(target, position, "ptr"))
        own = [f.gep(dims, number(record, Record.DIMS), "i64"), f.i64(0), number(record, Record.TILES)]
        inner = f.gep(scratch, number(record, Record.SCRATCH))
        f.call_pointer(pointer(number(record, Record.CODE)), "void", [target, *own, inner])
    f.ret()
