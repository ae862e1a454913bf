"""Tokens times ternary weights by lookup, where vector units have no byte products into int32: AVX-512 without VNNI.

What three weights and three codes of a token add up to is one of 27 sums. A vector of 32 words holds them all, and
``vpermw`` looks one up for each of 32 columns, by the low 5 bits of a word, so nothing is masked. A word of 16 bits has
three such numbers, nine k of a column in 1.8 bits a weight: three lookups, three additions and two shifts are 288
products, where ``vpmaddubsw`` takes fifteen instructions for 256. Shifts are shared by the rows of a block.

Tables are made anew for every block of rows, all of K of them, and read for all panels of a tile. Sums are 16 bits wide
and widened before they pass what those hold. What is looked up is the sum of ``w + 1`` times codes, as everywhere here.

A line is 32 columns and nine k; lane 2i of its words is column i and lane 2i + 1 column 16 + i, so that widened sums
are in order. Four lines of neighbouring columns make up a panel, along k they follow each other, panels follow panels.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from ranvier.codegen.launch import KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.integer.dots import multiplies_bytes, multiply_pairs, multiply_words
from ranvier.codegen.llvm.integer.frame import Frame
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.pack import Packed, in_parts
from ranvier.codegen.llvm.ternary.panels import FINISH, NAMES, Block, PanelDriver, panel_launch
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage, View

Array = np.ndarray[Any, Any]
_LINE = 64
_LANES = _LINE // 2  # columns of a line
_LINES = 4  # of a panel, for the same k
_WIDTH = _LINES * _LANES
_TRIPLES = 3  # in a word, from the low bits on
_DEPTH = 3 * _TRIPLES  # k of a word
_BITS = 5  # of the number of three codes
_LARGEST = 3 * 2 * 128  # what a lookup can add
_SHORT = (1 << 15) // _LARGEST // _TRIPLES  # words along k whose sums fit 16 bits
_PERIOD = 36  # codes in 2 bits: whole bytes, and whole words of nine
_AHEAD = 4096  # bytes of weights asked for before they are used
_TABLES = 1 << 20  # bytes of tables for rows of a block: what second-level caches hold
_ROWS = 4
_GOPS = 150.0


class PackedTriples(Packed):
    """``storage`` is [panels, words of a column, columns of a panel] of 16-bit words."""

    @property
    def words(self) -> int:
        """Words of a column."""
        return -(-self.k // _DEPTH)


def suits_triples(isa: Isa) -> bool:
    """Are weights packed so, for any number of rows?"""
    return isa.triple == "x86_64" and isa.vector_bytes == _LINE and not multiplies_bytes(isa)


def pack_triples(codes: Array, k: int) -> PackedTriples:
    """``codes`` are bytes [N, ceil(K / 4)], the code of k in byte k // 4 at bit 2 · (k mod 4)."""
    n, filled = codes.shape
    words = -(-k // _DEPTH)
    packed = packed_empty((-(-n // _WIDTH), words, _WIDTH), np.dtype(np.uint16))
    room = -(-k // _PERIOD) * _PERIOD // 4 + 3  # the last bits are read with what would be the next ones
    for those, columns in in_parts(codes, _WIDTH, room, words):
        if k % 4:  # whatever stands behind the last code would change its lookup
            columns[:, filled - 1] &= (1 << 2 * (k % 4)) - 1
        lanes = columns.reshape(-1, 2, _LANES // 2, room).swapaxes(1, 2).reshape(-1, room)
        made = _words(lanes).reshape(-1, _WIDTH, -(-k // _PERIOD) * 4)
        for target, panel in zip(packed[those], made, strict=True):  # NumPy turns a matrix faster than a stack of them
            target[...] = panel[:, :words].T
    return PackedTriples(Storage.packed(packed), k, n, _WIDTH)


def _words(rows: Array) -> Array:
    """Rows of codes in 2 bits as words of nine: 18 bits at a time, of which four stand in nine bytes."""
    shape = (len(rows), rows.shape[1] // _DEPTH, 4)
    bits = np.ndarray(shape, "<u4", rows, 0, (rows.strides[0], _DEPTH, 2)) >> np.arange(0, 8, 2, dtype=np.uint32)
    return _nine().take(bits & np.uint32((1 << 2 * _DEPTH) - 1)).reshape(len(rows), -1)


@functools.cache
def _nine() -> Array:
    """The word of nine codes in 2 bits."""
    every = np.arange(1 << 2 * _DEPTH, dtype=np.uint32)
    digits = (every >> np.uint32(2 * k) & np.uint32(3) for k in range(_DEPTH))
    total = sum(digit * np.uint32(3 ** (k % 3) << _BITS * (k // 3)) for k, digit in enumerate(digits))
    return np.asarray(total).astype(np.uint16)


def by_triples(
    codes: View, m: int, packed: PackedTriples, out: View, strides: tuple[int, int], epilogue: Epilogue | None,
    threads: int,
) -> Launch:  # fmt: skip
    tables = packed.words * _TRIPLES * _LINE  # bytes, for one row
    rows = 1 if m == 1 else min(m + m % 2, _ROWS, max(2, _TABLES // tables & -2))
    block = Block(rows, 2 if rows == 1 else 1)
    return panel_launch(
        _spec(block), block, codes, m, packed, out, strides, epilogue, threads,
        gops=_GOPS, scratch=rows * tables, tiles_of_a_thread=1 if m <= rows else 2,
    )  # fmt: skip


def _spec(block: Block) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        driver = _One if block.rows == 1 else _Pairs
        driver(Frame(module, symbol, isa, NAMES, FINISH), block, _WIDTH).emit()

    return KernelSpec(f"ternary triples {block.rows} rows", ("ternary triples", block.rows, block.at_once), emit)


class _Driver(PanelDriver):
    """Tables of a block of rows, then panels. Rows share tables in ``groups``."""

    shared: ClassVar[int]  # rows

    def __init__(self, frame: Frame, block: Block, width: int) -> None:
        super().__init__(frame, block, width)
        self.groups = self.rows // self.shared
        self.lines = self.at_once * _LINES  # of a block, for the same k
        self.shorts = vector("i16", _LANES)
        f = self.f
        self.deep = f.div(self.at["panel_bytes"], f.i64(_LINES * _LINE))  # words of a column
        self.table = self.shared * _LINE  # bytes
        self.group_bytes = self.deep * (_TRIPLES * self.table)
        self.tables = f.gep(f.args["scratch"], self.rows * self.at_once * width * 4)

    def panels(self, first: Val, last: Val) -> None:
        f = self.f
        with f.loop(0, self.at["m"], self.rows) as row:
            tokens = self.tokens(row, self.rows)
            for g in range(self.groups):
                self.tabulate(tokens[g * self.shared : (g + 1) * self.shared], f.gep(self.tables, self.group_bytes * g))
            with f.loop(first, last, self.at_once) as panel:
                self.sums(tokens, self.starts(panel))
                self.finish(row, self.rows, panel)

    def tabulate(self, rows: list[Val], tables: Val) -> None:
        """All sums of each three codes, to whose end zeros are added (``tokens.OVER``)."""
        f = self.f
        with f.loop(0, self.deep * _TRIPLES) as triple:
            two = self.spread([f.gep(row, triple * 3) for row in rows])
            last = self.spread([f.gep(row, triple * 3 + 2) for row in rows])
            for part in range(self.shared):
                found = self.products(part, (0, 1), two) + self.products(part, (2, None), last)
                f.store(found, f.gep(tables, triple * self.table + part * _LINE), _LINE)

    @abstractmethod
    def spread(self, rows: list[Val]) -> Val:
        """The next two codes of rows that share tables, over all lanes."""

    def products(self, part: int, ks: tuple[int, int | None], tokens: Val) -> Val:
        """What two neighbours add to the sums that a vector of tables has, by how often each has them."""
        f = self.f
        count = _LANES // self.shared
        numbers = (number for number in range(part * count, (part + 1) * count) for _ in range(self.shared))
        digits = [0 if k is None or number >= 27 else number // 3**k % 3 for number in numbers for k in ks]
        times = f.listed("i8", digits)
        return multiply_pairs(f, times, tokens)

    def sums(self, rows: list[Val], starts: list[Val]) -> None:
        f = self.f
        places = self.rows * self.lines
        for half in range(2 * places):
            f.store(f.zero(self.words), f.gep(f.args["scratch"], half * _LINE), _LINE)
        with f.loop(0, self.deep, _SHORT) as begin:
            acc = [f.var(self.shorts, f.zero(self.shorts)) for _ in range(places)]
            with f.loop(begin, f.min_(begin + _SHORT, self.deep)) as word:
                self.add(acc, [f.gep(self.tables, self.group_bytes * g) for g in range(self.groups)], starts, word)
            for place, total in enumerate(acc):
                self.widen(total.get(), place)

    def add(self, acc: list[Var], tables: list[Val], starts: list[Val], word: Val) -> None:
        """A word of every column, looked up in the tables of each group of rows."""
        f = self.f
        at = word * (_LINES * _LINE)
        ahead = self.later(at + _AHEAD)
        found = []
        for start in starts:
            for line in range(_LINES):
                f.prefetch(f.gep(start, ahead + line * _LINE))
                found.append(f.load(self.shorts, f.gep(start, at + line * _LINE), _LINE))
        for triple in range(_TRIPLES):
            for g, table in enumerate(tables):
                place = f.gep(table, word * (_TRIPLES * self.table) + triple * self.table)
                vectors = [f.load(self.shorts, f.gep(place, v * _LINE), _LINE) for v in range(self.shared)]
                of_group = acc[g * self.shared * self.lines : (g + 1) * self.shared * self.lines]
                self.look_up(of_group, vectors, found)
            found = [f.lshr(codes, _BITS) for codes in found]

    @abstractmethod
    def look_up(self, acc: list[Var], table: list[Val], found: list[Val]) -> None:
        """Adds what the low bits of each word choose from a table."""

    @abstractmethod
    def halves(self, place: int) -> tuple[int, int]:
        """The vectors of sums that the even and the odd lanes of the sums at ``place`` belong to."""

    def widen(self, total: Val, place: int) -> None:
        """Adds 32 sums of 16 bits to those of 32: the even lanes, then the odd ones."""
        f = self.f
        pairs = f.bitcast(total, self.words)
        even, odd = (f.gep(f.args["scratch"], half * _LINE) for half in self.halves(place))
        first_of_each = f.const(self.words, 1)
        f.store(multiply_words(f, self.isa, f.load(self.words, even, _LINE), pairs, first_of_each), even, _LINE)
        f.store(f.load(self.words, odd, _LINE) + f.ashr(pairs, 16), odd, _LINE)


class _One(_Driver):
    """Of one row, sums of three codes are the words of a vector."""

    shared = 1

    def spread(self, rows: list[Val]) -> Val:
        return self.f.splat(self.f.load("i16", rows[0], 1), _LANES)

    def look_up(self, acc: list[Var], table: list[Val], found: list[Val]) -> None:
        for total, codes in zip(acc, found, strict=True):
            chosen = self.f.intrinsic("llvm.x86.avx512.permvar.hi.512", self.shorts, [table[0], codes])
            total.set(total.get() + chosen)

    def halves(self, place: int) -> tuple[int, int]:
        return 2 * place, 2 * place + 1


class _Pairs(_Driver):
    """Of two rows, they are the halves of double words in two vectors. A lookup is one instruction of the processor
    then, of which ``vpermw`` is two, and makes as many products; it takes the low halves of words, then the high."""

    shared = 2

    def spread(self, rows: list[Val]) -> Val:
        f = self.f
        low, high = (f.cast(f.load("i16", row, 1), "i32", signed=False) for row in rows)
        return f.splat(f.or_(low, f.shl(high, 16)), self.lanes)

    def look_up(self, acc: list[Var], table: list[Val], found: list[Val]) -> None:
        f = self.f
        low, high = (f.bitcast(vector_, self.words) for vector_ in table)
        for line, codes in enumerate(found):
            for half in range(2):
                index = f.bitcast(codes, self.words)
                index = f.lshr(index, 16) if half else index
                chosen = f.intrinsic("llvm.x86.avx512.vpermi2var.d.512", self.words, [low, index, high])
                total = acc[2 * line + half]
                total.set(total.get() + f.bitcast(chosen, self.shorts))

    def halves(self, place: int) -> tuple[int, int]:
        group, column = divmod(place, 2 * self.lines)
        return group * 4 * self.lines + column, group * 4 * self.lines + 2 * self.lines + column
