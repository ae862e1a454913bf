"""Few tokens times weights packed five to a byte: a fifth fewer bytes than in 2 bits, for a few instructions more.

That pays where weights come from beyond the second-level cache: one core gets a line of 64 bytes in about six cycles
there, and a line of five weights a byte takes about as long to multiply.

A byte holds the codes t0 to t4 (``w + 1``) that five columns have for the same k, so all five meet the same token. The
first four are the digits of v = t0 + 3 t1 + 9 t2 + 27 t3, up to 80. Where v < 64 the byte is v + 64 t4, and its low 6
bits, which is what ``vpermb`` looks at, are v. The other 51 combinations are the bytes from 192 on, v + 128 + 17 t4.
Two tables turn the low 6 bits into four fields of 2 bits, one for either kind of byte, and a third one makes
g = v + 64 t4 of the bytes from 192 on, which the others are already.

Three of the fields are masked and multiplied where they stand, 1, 4 and 16 times as large; all four together give the
fourth by subtraction, and g, which is no less a sum of the five with known factors, the fifth. So twelve instructions
do for 320 weights. Only one of the two vector units looks things up: the next line's lookups stand between the products
of a line, for both to be busy also where a neighbour on the same core leaves half of the window to look ahead in.
Lines hold four k of 16 lanes, so a panel has 80 columns; lines follow each other along k.
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
from ranvier.codegen.llvm.ternary.dots import LOW, UNSHIFTED_K
from ranvier.codegen.llvm.ternary.pack import STEP, Packed, in_parts, padded
from ranvier.codegen.llvm.ternary.panels import FINISH, NAMES, Block, PanelDriver, panel_launch
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage, View

Array = np.ndarray[Any, Any]
ROWS = 3  # up to so many rows read weights in this form
_LEAST = 2 << 20  # bytes in 2 bits a weight: what second-level caches of such processors hold
_FIELDS = 5
_LINE = 64
_LANES = _LINE // 4
_WIDTH = _FIELDS * _LANES  # columns of a panel
_QUAD = 4  # k of a line
_STEP_BYTES = STEP // _QUAD * _LINE
_DIGITS = (1, 3, 9, 27)
_FIRST = 64  # values of v that the low 6 bits hold as they are

_AHEAD = 2  # steps of weights that are asked for before they are used
_GOPS = 120.0


class PackedFives(Packed):
    """``storage`` is [panels, K / 4, lanes] of 32-bit words, whose bytes are four k."""


def suits_fives(isa: Isa, rows: int, k: int, n: int) -> bool:
    """Are weights packed so for this many rows?"""
    has = isa.vector_bytes == _LINE and isa.has("avx512vbmi") and isa.has("avx512vnni")
    return has and rows <= ROWS and k <= UNSHIFTED_K // 2 and k * n > 4 * _LEAST


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
    """Codes of five columns, [panels, 5, lanes, quads], as one byte for each k: four bytes of a word at a time, where
    what one of them lends another comes back before the end."""
    number = np.uint32
    weighted = words[:, : len(_DIGITS)] * np.array(_DIGITS, number)[:, None, None]
    v: Array = weighted.sum(axis=1, dtype=number)
    last = words[:, len(_DIGITS)]
    beyond = v >> number(6) & number(0x01010101)
    joined: Array = v + (last << number(6)) + (beyond << number(7)) - number(47) * (last & beyond * number(3))
    return joined


def _tables() -> tuple[list[int], list[int], list[int]]:
    """By the low 6 bits: fields of bytes below 192, fields of the others, and what stands for those themselves."""

    def fields(v: int) -> int:
        return sum(v // digit % 3 << 2 * f for f, digit in enumerate(_DIGITS))

    count = 3 ** len(_DIGITS) - _FIRST
    beyond = [(_FIRST + low % count, low // count) for low in range(64)]
    below = [fields(low) for low in range(64)]
    return below, [fields(v) for v, _ in beyond], [(v + 64 * last) & 255 for v, last in beyond]


def by_fives(
    codes: View, m: int, packed: PackedFives, out: View, strides: tuple[int, int], epilogue: Epilogue | None,
    threads: int,
) -> Launch:  # fmt: skip
    block = Block(1, 3) if m == 1 else Block(ROWS, 1)
    return panel_launch(_spec(block), block, codes, m, packed, out, strides, epilogue, threads, gops=_GOPS)


def _spec(block: Block) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Driver(Frame(module, symbol, isa, NAMES, FINISH), block, _WIDTH).emit()

    return KernelSpec(f"ternary fives {block.rows} rows", ("ternary fives", block.rows, block.at_once), emit)


class _Driver(PanelDriver):
    def __init__(self, frame: Frame, block: Block, width: int) -> None:
        super().__init__(frame, block, width)
        self.bytes = vector("i8", _LINE)
        self.below, self.beyond, self.whole = (self.f.listed("i8", table) for table in _tables())

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

    def decoded(self, line: Val) -> tuple[Val, Val]:
        """Four codes in fields of 2 bits, and the sum of all five."""
        f = self.f
        is_beyond = f.cmp("uge", line, f.const(self.bytes, 192 - 256))
        fields = f.select(is_beyond, self.found(self.beyond, line), self.found(self.below, line))
        whole = f.select(is_beyond, self.found(self.whole, line), line)
        return f.bitcast(fields, self.words), f.bitcast(whole, self.words)

    def add(self, acc: list[list[Var]], tokens: list[Val], fields: Val, whole: Val) -> None:
        f = self.f
        parts = [*(f.and_(fields, LOW << 2 * field) for field in range(3)), fields, whole]
        for sums, quad in zip(acc, tokens, strict=True):
            for total, part in zip(sums, parts, strict=True):
                total.set(multiply_add(f, self.isa, total.get(), part, quad))

    def found(self, table: Val, index: Val) -> Val:
        return self.f.intrinsic("llvm.x86.avx512.permvar.qi.512", self.bytes, [table, index])

    def apart(self, sums: list[Val]) -> list[Val]:
        """The five columns' sums: what was added is them 1, 4 and 16 times, four of them together, all together."""
        f = self.f
        first, second, third, four, whole = sums
        found = [first, f.ashr(second, 2), f.ashr(third, 4), f.ashr(four - first - second - third, 6)]
        for digit, total in zip(_DIGITS, found, strict=True):
            whole = whole - (total * digit if digit > 1 else total)
        return [*found, f.ashr(whole, 6)]
