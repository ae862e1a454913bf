"""Atomic operations and the like for code that runs on several threads: functions over :class:`Fn`.

Every operation names its memory order, as LLVM spells it: ``monotonic acquire release acq_rel seq_cst``.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Operand, Val, size_of
from ranvier.codegen.llvm.isa import Isa


def pointer(f: Fn, address: Val) -> Val:
    """An address held in an i64 as a pointer.

    Threads share memory, and ``ptr`` parameters promise that nobody else touches what they point to: such functions
    take addresses as integers.
    """
    return f.emit("ptr", f"inttoptr i64 {address.name} to ptr")


def load(f: Fn, kind: str, address: Val, order: str) -> Val:
    return f.emit(kind, f"load atomic {kind}, ptr {address.name} {order}, align {size_of(kind)}")


def store(f: Fn, value: Val, address: Val, order: str) -> None:
    f.line(f"store atomic {value.type} {value.name}, ptr {address.name} {order}, align {size_of(value.type)}")


def modify(f: Fn, op: str, address: Val, value: Val, order: str) -> Val:
    """Read, ``add sub and or xchg …``, write back as one; returns what was there before."""
    return f.emit(value.type, f"atomicrmw {op} ptr {address.name}, {value.type} {value.name} {order}")


def compare_exchange(f: Fn, address: Val, expected: Val, new: Operand, success: str, failure: str) -> tuple[Val, Val]:
    """Write ``new`` where ``expected`` stands; returns what was there and whether it was written."""
    other = f.like(expected, new)
    pair = f.fresh()
    kind = expected.type
    operands = f"ptr {address.name}, {kind} {expected.name}, {kind} {other.name}"
    f.line(f"{pair} = cmpxchg {operands} {success} {failure}")
    old = f.emit(kind, f"extractvalue {{ {kind}, i1 }} {pair}, 0")
    return old, f.emit("i1", f"extractvalue {{ {kind}, i1 }} {pair}, 1")


def fence(f: Fn, order: str) -> None:
    f.line(f"fence {order}")


def pause(f: Fn, isa: Isa) -> None:
    """Tell the processor that this is a spin loop (saves power, and speed for a sibling thread)."""
    if isa.triple == "x86_64":
        f.intrinsic("llvm.x86.sse2.pause", "void", [])
    elif isa.triple == "aarch64":
        f.intrinsic("llvm.aarch64.hint", "void", [f.const("i32", 1)])
