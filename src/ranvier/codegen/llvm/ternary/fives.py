"""Few tokens times weights packed five to a byte: a fifth fewer bytes than in 2 bits, for a few instructions more.

That pays where weights come from beyond the second-level cache: one core gets a line of 64 bytes in about six cycles
there, and a line of five weights a byte takes about as long to multiply.

A byte holds the codes t0 to t4 (``w + 1``) that five columns have for the same k, so all five meet the same token. It
is r + 28 e, where r = t0 + 3 t1 + 9 t2 has 27 values and e = t3 + 3 t4 has nine. Steps of 28 are whole fours, so the
upper 6 bits of a byte tell e, and those are what ``vpermb`` looks at when a byte is shifted by 2. It finds 64 t4 + 4 e,
in which t4 stands alone in the upper 2 bits; added to the byte it makes r + 32 e and more 64s, whose low 5 bits are r.
Those look up t1 and t2.

So of two lookups, a shift, an addition and two masks come four sums of codes with known factors, and the byte itself is
the fifth, which is enough to know all five columns' sums: eleven instructions for 320 weights. The next line's lookups
stand between the products of a line, for both vector units to be busy also where a neighbour on the same core leaves
half of the window to look ahead in. Lines hold four k of 16 lanes, so a panel has 80 columns; lines follow each other
along k.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.codegen.launch import KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.integer.dots import multiply_add
from ranvier.codegen.llvm.integer.frame import Frame
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.dots import UNSHIFTED_K
from ranvier.codegen.llvm.ternary.pack import STEP, Packed, in_parts, padded
from ranvier.codegen.llvm.ternary.panels import FINISH, NAMES, Block, PanelDriver, panel_launch
from ranvier.codegen.llvm.turning import slices
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage, View

Array = np.ndarray[Any, Any]
ROWS = 3  # up to so many rows read weights in this form
_LEAST = 2 << 20  # bytes of a program's weights in 2 bits: what second-level caches of such processors hold
_FIELDS = 5
_LINE = 64
_LANES = _LINE // 4
_WIDTH = _FIELDS * _LANES  # columns of a panel
_QUAD = 4  # k of a line
_STEP_BYTES = STEP // _QUAD * _LINE
_FACTORS = (1, 3, 9, 28, 84)  # of the five codes in a byte
_TOP = 0xC0C0C0C0 - (1 << 32)  # t4 where the first table has it
_UPPER = 0x0C0C0C0C  # t2 where the second one has it

_AHEAD = 2  # steps of weights that are asked for before they are used
_GOPS = 120.0


class PackedFives(Packed):
    """``storage`` is [panels, K / 4, lanes] of 32-bit words, whose bytes are four k."""


def suits_fives(isa: Isa, rows: int, k: int, n: int, together: int) -> bool:
    """Are weights packed so for this many rows, in a program that has so many ternary weights ``together``?"""
    has = isa.vector_bytes == _LINE and isa.has("avx512vbmi") and isa.has("avx512vnni")
    less = -(-n // _WIDTH) * _WIDTH * 8 <= _FIELDS * n * 2  # bits, also with columns that are filled up
    return has and less and rows <= ROWS and k <= UNSHIFTED_K // 2 and together > 4 * _LEAST


def pack_fives(codes: Array, k: int) -> PackedFives:
    """``codes`` are bytes [N, ceil(K / 4)], the code of k in byte k // 4 at bit 2 · (k mod 4)."""
    n, quads = len(codes), padded(k) // _QUAD
    packed = packed_empty((-(-n // _WIDTH), quads, _LANES), np.dtype(np.uint32))
    for those, rows in in_parts(codes, _WIDTH, quads, quads):
        joined = _joined(_spread_codes().take(rows).reshape(-1, _FIELDS, _LANES, quads))
        packed[those] = joined.swapaxes(1, 2)
    return PackedFives(Storage.packed(packed), k, n, _WIDTH)


@functools.cache
def _spread_codes() -> Array:
    """The four codes of a byte as the bytes of a word."""
    every = np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    return every.view("<u4")[:, 0]


def _joined(words: Array) -> Array:
    """Codes of five columns, [panels, 5, lanes, quads], as one byte for each k, four of them in a word."""
    joined: Array = (words * np.array(_FACTORS, np.uint32)[:, None, None]).sum(axis=1, dtype=np.uint32)
    return joined


def _tables() -> tuple[list[int], list[int]]:
    """64 t4 + 4 e by the upper 6 bits of a byte, and t1 + 4 t2 by 6 bits of which the low 5 are r."""
    upper = [index // 7 for index in range(64)]
    lower = [index % 32 for index in range(64)]
    return [64 * (e // 3 % 3) + 4 * e for e in upper], [r // 3 % 3 + 4 * (r // 9 % 3) for r in lower]


def by_fives(
    codes: View, m: int, packed: PackedFives, out: View, strides: tuple[int, int], epilogue: Epilogue | None,
    isa: Isa, threads: int,
) -> Launch:  # fmt: skip
    block = Block(1, 3) if m == 1 else Block(ROWS, 1)
    return panel_launch(
        _spec(block), block, codes, m, packed, out, strides, epilogue, threads,
        gops=_GOPS, slices=slices(packed.nbytes, isa) if m == 1 else 1,
    )  # fmt: skip


def _spec(block: Block) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Driver(Frame(module, symbol, isa, NAMES, FINISH), block, _WIDTH).emit()

    return KernelSpec(f"ternary fives {block.rows} rows", ("ternary fives", block.rows, block.at_once), emit)


class _Driver(PanelDriver):
    def __init__(self, frame: Frame, block: Block, width: int) -> None:
        super().__init__(frame, block, width)
        self.bytes = vector("i8", _LINE)
        self.upper, self.lower = (self.f.listed("i8", table) for table in _tables())

    def sums(self, rows: list[Val], starts: list[Val]) -> None:
        f = self.f
        acc = [
            [[f.var(self.words, f.zero(self.words)) for _ in range(_FIELDS)] for _ in range(self.at_once)] for _ in rows
        ]
        with f.loop(0, self.at["steps"]) as step:
            later = self.later((step + _AHEAD) * _STEP_BYTES)
            waiting: Callable[[], None] | None = None
            for quad in range(STEP // _QUAD):
                tokens = [self.quad(f.gep(row, step * STEP), quad * _QUAD) for row in rows]
                for p, start in enumerate(starts):
                    line = f.gep(start, step * _STEP_BYTES + quad * _LINE)
                    f.prefetch(f.gep(start, later + quad * _LINE))
                    decoded = self.decoded(f.load(self.bytes, line, _LINE))
                    if waiting is not None:
                        waiting()
                    waiting = functools.partial(self.add, [of_row[p] for of_row in acc], tokens, *decoded)
            assert waiting is not None
            waiting()
        for r, of_row in enumerate(acc):
            for p, parts in enumerate(of_row):
                for field, total in enumerate(self.apart([part.get() for part in parts])):
                    at = (r * self.at_once + p) * _WIDTH * 4 + field * _LINE
                    f.store(total, f.gep(f.args["scratch"], at), _LINE)

    def decoded(self, line: Val) -> list[Val]:
        """Bytes, their codes t3 and t4, and t1 and t2, each pair with factors."""
        f = self.f
        high = self.found(self.upper, f.bitcast(f.lshr(f.bitcast(line, vector("i16", _LINE // 2)), 2), self.bytes))
        return [f.bitcast(part, self.words) for part in (line, high, self.found(self.lower, line + high))]

    def add(self, acc: list[list[Var]], tokens: list[Val], line: Val, high: Val, low: Val) -> None:
        f = self.f
        parts = [line, high, f.and_(high, _TOP), low, f.and_(low, _UPPER)]
        for sums, quad in zip(acc, tokens, strict=True):
            for total, part in zip(sums, parts, strict=True):
                total.set(multiply_add(f, self.isa, total.get(), part, quad))

    def found(self, table: Val, index: Val) -> Val:
        return self.f.intrinsic("llvm.x86.avx512.permvar.qi.512", self.bytes, [table, index])

    def apart(self, sums: list[Val]) -> list[Val]:
        """The five columns' sums."""
        f = self.f
        line, high, top, low, upper = sums
        t4 = f.ashr(top, 6)
        t3 = f.ashr(high - top - t4 * 12, 2)
        found = [low - upper, f.ashr(upper, 2), t3, t4]
        for factor, total in zip(_FACTORS[1:], found, strict=True):
            line = line - total * factor
        return [line, *found]
