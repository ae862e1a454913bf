"""Ternary weights for NEON's dot products: four columns to a byte, seven instructions for 64 weights.

A byte holds what four columns have for the same k, so all four meet the same token: t0 + 4 t1 + 16 t2 - 64 t3, as a
signed byte, of codes ``w + 1``. Three of the fields are masked and multiplied where they stand, 1, 4 and 16 times as
large; the byte as it is gives the fourth by subtraction. The last field is negative because a signed byte is no 128.

Where fields are four k of one column instead (``pack.py``), all four are taken out first: one instruction more. But
sums of one column are in one register there, and here in four of four columns, so fewer rows go at a time.

Lines hold four k of 4 lanes, so a panel has 16 columns; lines follow each other along k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.launch import KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.code_words import turned
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of, multiply_add, spread_groups
from ranvier.codegen.llvm.integer.frame import Frame
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.dots import LOW, UNSHIFTED_K
from ranvier.codegen.llvm.ternary.pack import STEP, Packed, in_parts, padded
from ranvier.codegen.llvm.ternary.panels import FINISH, NAMES, Block, PanelDriver, panel_launch
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage, View

Array = np.ndarray[Any, Any]
FIELDS = 4
LINE = 16
_LANES = LINE // 4
WIDTH = FIELDS * _LANES  # columns of a panel
QUAD = 4  # k of a line
_STEP_BYTES = STEP // QUAD * LINE
ROWS = 5  # of a block, whose sums leave registers for what they are made of
_TOGETHER = 4  # quads of a token that one register holds

_AHEAD = 4096  # bytes of weights asked for before they are used
_GOPS = 150.0


class PackedFours(Packed):
    """``storage`` is [panels, K / 4, lanes] of 32-bit words, whose bytes are four k."""


def suits_fours(isa: Isa, k: int) -> bool:
    """Are weights packed so?"""
    return dot_of(isa) is SIGNED and isa.vector_bytes == LINE and k <= UNSHIFTED_K // 2


def pack_fours(codes: Array, k: int) -> PackedFours:
    """``codes`` are bytes [N, ceil(K / 4)], the code of k in byte k // 4 at bit 2 · (k mod 4)."""
    n, quads = len(codes), padded(k) // QUAD
    packed = packed_empty((-(-n // WIDTH), quads, _LANES), np.dtype(np.uint32))
    for those, rows in in_parts(codes, WIDTH, quads, quads):
        packed[those] = _joined(rows.reshape(-1, FIELDS, _LANES, quads))
    return PackedFours(Storage.packed(packed), k, n, WIDTH)


def _joined(columns: Array) -> Array:
    """Codes of a panel's columns, [panels, 4, lanes, quads] of bytes, as words [panels, quads, lanes]."""
    last = columns[:, -1]
    last ^= (last & np.uint8(0x55)) << np.uint8(1)  # 0, 1, 2 to 0, 3, 2: what -0, -1, -2 end with
    beside = np.empty((len(columns), columns.shape[-1], _LANES, FIELDS), np.uint8)
    for field in range(FIELDS):  # column by column: NumPy is slow where the innermost of its loops is short
        for lane in range(_LANES):
            beside[..., lane, field] = columns[:, field, lane]
    return turned(beside.view("<u4")[..., 0], 2)  # a byte has four k of a column, and then a k of four columns


def by_fours(
    codes: View, m: int, packed: PackedFours, out: View, strides: tuple[int, int], epilogue: Epilogue | None,
    threads: int,
) -> Launch:  # fmt: skip
    block = Block.of(m, ROWS)
    return panel_launch(_spec(block), block, codes, m, packed, out, strides, epilogue, threads, gops=_GOPS)


def _spec(block: Block) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Driver(Frame(module, symbol, isa, NAMES, FINISH), block, WIDTH).emit()

    return KernelSpec(f"ternary fours {block.rows} rows", ("ternary fours", block.rows, block.uneven), emit)


class Fields:
    """The four columns of a line: what is multiplied of each, and what its sum is made of."""

    def __init__(self, f: Fn) -> None:
        self.f = f
        kind = vector("i32", _LANES)
        # in registers of their own: the compiler would make them again for every use
        self.masks = [f.opaque(f.const(kind, LOW << 2 * field), "w") for field in range(FIELDS - 1)]

    def part(self, line: Val, field: int) -> Val:
        """One of them by itself: where it stands, or the last one shifted down."""
        f = self.f
        if field < len(self.masks):
            return f.and_(line, self.masks[field])
        return f.bitcast(f.ashr(f.bitcast(line, vector("i8", LINE)), 6), line.type)

    def total(self, found: Val, field: int) -> Val:
        """The sum of codes, of that of :meth:`part`."""
        return self.f.ashr(found, 2 * field) if field < len(self.masks) else self.f.neg(found)


class _Driver(PanelDriver):
    def sums(self, rows: list[Val], starts: list[Val]) -> None:
        f, start = self.f, starts[0]
        fields = Fields(f)
        acc = [[f.var(self.words, f.zero(self.words)) for _ in range(FIELDS)] for _ in rows]
        with f.loop(0, self.at["steps"]) as step:
            for line in range(0, _STEP_BYTES, 64):
                f.prefetch(f.gep(start, step * _STEP_BYTES + (_AHEAD + line)))
            for quad in range(STEP // QUAD):
                if quad % _TOGETHER == 0:
                    tokens = [f.gep(row, step * STEP + quad * QUAD) for row in rows]
                    held = [spread_groups(f, self.isa, place, _TOGETHER) for place in tokens]
                codes = f.load(self.words, f.gep(start, step * _STEP_BYTES + quad * LINE), LINE)
                # one field for all rows, then the next: so few registers are enough for what is taken out
                for field, part in enumerate([*(fields.part(codes, field) for field in range(FIELDS - 1)), codes]):
                    for sums, quads in zip(acc, held, strict=True):
                        sums[field].set(multiply_add(f, self.isa, sums[field].get(), part, quads[quad % _TOGETHER]))
        for r, sums in enumerate(acc):
            for field, total in enumerate(self.apart(fields, [found.get() for found in sums])):
                f.store(total, f.gep(f.args["scratch"], r * WIDTH * 4 + field * LINE), LINE)

    def apart(self, fields: Fields, sums: list[Val]) -> list[Val]:
        """The four columns' sums: what was added is them 1, 4 and 16 times, and these less 64 times the fourth."""
        *masked, codes = sums
        last = self.f.ashr(masked[0] + masked[1] + masked[2] - codes, 6)
        return [*(fields.total(found, field) for field, found in enumerate(masked)), last]
