"""Rows of A that do not lie one stride apart, copied together so that tiles can be loaded from them."""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.amx.tiles import LINE
from ranvier.codegen.llvm.builder import Fn, Module, Val
from ranvier.codegen.llvm.control import Slot, read_slot
from ranvier.codegen.llvm.isa import Isa

_BYTES = f"<{LINE} x i8>"


def bytes_mask(f: Fn, count: Val) -> Val:
    """The first 1 to 64 bytes of a line."""
    return f.bitcast(f.lshr(f.const("i64", -1), f.sub(f.i64(LINE), count)), f"<{LINE} x i1>")


def copy_rows(f: Fn, rows: Val, row: Callable[[Val], Val], target: Val, step: Val, mask: Val) -> None:
    """A line of every row to places ``step`` bytes apart: the bytes of the mask, and zeros after them."""
    with f.loop(0, rows) as r:
        f.store(f.masked_load(_BYTES, row(r), mask), f.gep(target, r * step), LINE)


def rows_spec() -> KernelSpec:
    """``void copy(ptr table, ptr target, ptr control)``: the rows that a "table" leads to, dense and padded with zeros.

    Reads Slot.ROWS, K (groups per segment, a multiple of ``STEP``), REST, SEGMENTS and A_STEP as the micro-kernel of
    the layout "table" does. A row of the target (at a multiple of 64 bytes) is its segments one after the other,
    SEGMENTS * K groups in all: a layout "rows" of one segment.
    """
    return KernelSpec("amx rows", ("amx rows",), _emit)


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    f = module.function(symbol, [("ptr", "table"), ("ptr", "target"), ("ptr", "control")])
    rows, k, rest, segments, apart = (
        read_slot(f, f.args["control"], slot) for slot in (Slot.ROWS, Slot.K, Slot.REST, Slot.SEGMENTS, Slot.A_STEP)
    )
    deep = k * 4
    short = f.cmp("ne", rest, 0)
    whole = deep - f.select(short, f.i64(LINE), f.i64(0))
    with f.loop(0, segments) as s, f.loop(0, rows) as r:
        source = f.load("ptr", f.gep(f.gep(f.args["table"], s * apart), r, "ptr"))
        target = f.gep(f.args["target"], (r * segments + s) * deep)
        with f.loop(0, whole, LINE) as at:
            f.store(f.load(_BYTES, f.gep(source, at)), f.gep(target, at), LINE)
        with f.if_(short):
            f.store(f.masked_load(_BYTES, f.gep(source, whole), bytes_mask(f, rest)), f.gep(target, whole), LINE)
    f.ret()
