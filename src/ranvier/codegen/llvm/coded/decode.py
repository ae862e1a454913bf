"""Codes of few bits as numbers, in registers: a vector of words gives a vector of floats for each k that they hold."""

from __future__ import annotations

import numpy as np

from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.coded.coding import Coding, Piece
from ranvier.codegen.llvm.coded.coupled import HALF_BITS, MIDDLES
from ranvier.codegen.llvm.coded.shape import beside
from ranvier.codegen.llvm.integer.dots import EACH, SIGNED, dot_of
from ranvier.codegen.llvm.isa import Isa

_MANTISSA, _EXPONENT = 23, 0x7F800000  # of a float: bits behind the exponent, and those of it
_TABLE = 16  # entries that an instruction of NEON looks up
_WHOLE = 0x4B000000  # 2^23 as a float: an integer in its low bits is added exactly
# float8 in the highest byte: how far down its exponent belongs, the bits that are its own, what the exponent lacks
_FLOATS = {"e4m3": (4, 0x87F00000, 120), "e5m2": (3, 0x8FE00000, 112)}
# e4m3 as half precision: its own bits, and the power of two that the exponent lacks
_HALF_OWN, _HALF_LACKS = 0xBF80, 8


class Decoder:
    """Writes the code that decodes; ``table`` is a name for a constant array where one is needed. ``coupled``: codes
    of two vectors share bytes (``coupled.py``)."""

    def __init__(self, fn: Fn, isa: Isa, coding: Coding, table: str, *, coupled: bool = False) -> None:
        self.fn, self.isa, self.coding = fn, isa, coding
        self.by_fours = coupled or coding.parts > 1  # words are taken apart to bytes, and those to single codes
        self.lanes = isa.lanes(4)
        self.kind = vector("float", self.lanes)
        self.permutes = isa.triple == "x86_64" and self.lanes >= 8
        self.step = isa.vector_bytes * beside(isa)  # bytes from one part of a word to the next
        self.mask: Val | None = None
        small = coding.bits <= 4
        # An instruction that permutes a register's lanes looks at as many bits of an index as lanes need: no mask.
        self.tables: list[Val] = []
        if small and self.permutes and (coding.kind == "levels" or self.lanes == 16 or coding.bits == 2):
            count = len(coding.values)
            values = [coding.values[k % count] for k in range(max(count, self.lanes))]
            parts = [values[k : k + self.lanes] for k in range(0, len(values), self.lanes)]
            self.tables = [fn.listed("float", part) for part in parts]
        self.halves = isa.triple == "aarch64" and isa.half and coding.kind in _FLOATS
        self.factor = 1 << _HALF_LACKS if self.halves and coding.kind == "e4m3" else 1  # that values lack
        self.planes: list[Val] = []
        if coding.kind == "levels" and not self.tables:
            if isa.triple == "aarch64":
                self.planes = _planes(fn, coding)
            else:
                self.memory = Val(fn, "ptr", fn.module.table(table, "float", coding.levels))

    def words(self, at: Val, second: Val | None = None) -> list[Val]:
        """The words at an address, once for each byte of theirs; or the floats in them, where several are decoded at
        once; or, of words that have parts and of vectors that are coupled, fours of k as bytes. ``second``: whether a
        vector is the second of such two, one or zero (of 32 bits).

        Where only the lowest bits of an index count, loading from the next byte on does what a shift by eight would do:
        the units that load have time, and those that compute have not. What follows the last word has to be readable.
        """
        f, kind = self.fn, vector("i32", self.lanes)
        if second is not None:
            return self._own_halves(at, second)
        first, *others = self.parts(at)
        if others:
            return self.quads([first, *others])
        if self.halves:
            return self._by_halves(first)
        if self.planes:
            return [value for i in range(8 // self.coding.bits) for value in self._looked_up(first, i)]
        if len(self.tables) != 1:
            return [first] * 4
        return [first, *(f.load(kind, f.gep(at, byte), 1) for byte in range(1, 4))]

    def _own_halves(self, at: Val, second: Val) -> list[Val]:
        f, size, kind = self.fn, self.isa.vector_bytes, vector("i32", self.lanes)
        first = f.gep(at, f.i64(0) - f.cast(second, "i64") * size)
        flip, shift = (f.splat(second * number, self.lanes) for number in (MIDDLES << HALF_BITS, HALF_BITS))
        both = [f.load(kind, f.gep(first, k * size), size) for k in range(2)]
        return [f.and_(f.lshr(f.xor(each, flip), shift), ((1 << HALF_BITS) - 1) * EACH) for each in both]

    def parts(self, at: Val) -> list[Val]:
        """The parts of words at an address."""
        f, size, kind = self.fn, self.isa.vector_bytes, vector("i32", self.lanes)
        return [f.load(kind, f.gep(at, part * self.step) if part else at, size) for part in range(self.coding.parts)]

    def value(self, words: list[Val], k: int) -> Val:
        """The floats of position ``k`` of the words, ``factor`` times too small."""
        f, bits = self.fn, self.coding.bits
        if self.planes or self.halves:
            return words[k]
        if len(self.tables) == 1:
            index = words[k % 4]
            return self._permuted(f.lshr(index, bits * (k // 4)) if k >= 4 else index)
        word, shift = words[0], 8 * (k % 4) + bits * (k // 4)
        if self.by_fours:
            word, shift, bits = words[k // 4], 8 * (k % 4), 8
        if self.coding.kind in _FLOATS:
            return self._float8(word, shift)
        if bits > 8:
            return self._float(word, k)
        moved = f.lshr(word, shift) if shift else word
        if self.tables:
            return self._permuted(moved)
        mask = (1 << bits) - 1
        code = moved if shift + bits == 32 else f.and_(moved, mask)
        if self.coding.kind == "levels":
            return f.gather("float", self.memory, code)
        whole = f.bitcast(f.or_(code, _WHOLE), self.kind)
        return whole - float((1 << 23) + self.coding.middle)

    def scale(self, numbers: Val) -> Val:
        """What values as :meth:`value` gives them are multiplied by."""
        return numbers * float(self.factor) if self.factor > 1 else numbers

    def zero(self, numbers: Val) -> Val:
        """What is subtracted from them before."""
        return numbers * (1.0 / self.factor) if self.factor > 1 else numbers

    def _looked_up(self, word: Val, i: int) -> list[Val]:
        """The floats of four k, from ``4 i`` on: single bytes of all of them, looked up by codes, are put together.
        Codes of one k are brought side by side before."""
        f, bits = self.fn, self.coding.bits
        bytes_ = vector("i8", 4 * self.lanes)
        mask = ((1 << bits) - 1) * 0x01010101
        codes = self._beside(f.and_(f.lshr(word, bits * i) if i else word, mask))
        parts = [f.intrinsic(_table(self.isa), bytes_, [plane, codes]) for plane in self.planes]
        halves = [_woven(f, low, high) for low, high in (parts[:2], parts[2:])]
        pairs = vector("i16", 2 * self.lanes)
        return [
            f.bitcast(value, self.kind)
            for low, high in zip(*halves)
            for value in _woven(f, f.bitcast(low, pairs), f.bitcast(high, pairs))
        ]

    def _beside(self, word: Val) -> Val:
        """The bytes of words, those of one k side by side."""
        bytes_ = self.fn.bitcast(word, vector("i8", 4 * self.lanes))
        return self.fn.shuffle(bytes_, None, [4 * lane + k for k in range(4) for lane in range(self.lanes)])

    def _by_halves(self, word: Val) -> list[Val]:
        """Float8 is half precision but for bits that it has not, or for these and the size of its exponent."""
        f, lanes = self.fn, self.lanes
        codes = self._beside(word)
        if self.coding.kind == "e4m3":
            parts = [f.shuffle(codes, None, range(at, at + 2 * lanes)) for at in (0, 2 * lanes)]
            halves = [f.and_(f.shl(f.cast(part, "i16"), 7), _HALF_OWN - (1 << 16)) for part in parts]
        else:  # in the upper byte of a half
            halves = [f.bitcast(part, vector("i16", 2 * lanes)) for part in _woven(f, f.zero(codes.type), codes)]
        quarters = [f.shuffle(half, None, range(at, at + lanes)) for half in halves for at in (0, lanes)]
        return [vmath.half_to_float(f, quarter, self.isa) for quarter in quarters]

    def _permuted(self, index: Val) -> Val:
        f = self.fn
        name = "llvm.x86.avx512.permvar.sf.512" if self.lanes == 16 else "llvm.x86.avx2.permps"
        found = [f.intrinsic(name, self.kind, [table, index]) for table in self.tables]
        if len(found) == 1:
            return found[0]
        return f.select(f.cmp("ne", f.and_(index, self.lanes), 0), found[1], found[0])

    def _float8(self, word: Val, shift: int) -> Val:
        """Sign, exponent and mantissa where a float has them; what its exponent lacks is multiplied in, or added.

        Numbers with the least exponent have no leading one. As floats of the least exponent x86 would take a hundred
        times as long to multiply them: there they are given one, which is taken off again."""
        f = self.fn
        down, own, lacking = _FLOATS[self.coding.kind]
        top = f.shl(word, 24 - shift) if shift < 24 else word
        placed = f.and_(f.ashr(top, down), own - (1 << 32))
        if self.isa.triple != "x86_64":
            return f.bitcast(placed, self.kind) * float(2**lacking)
        number = f.bitcast(placed + (lacking << _MANTISSA), self.kind)
        least = f.cmp("eq", f.and_(placed, _EXPONENT), 0)
        sign = f.and_(placed, -(1 << 31))
        leading = f.bitcast(f.or_(sign, (lacking + 1) << _MANTISSA), self.kind)
        return f.select(least, f.fma(number, 2.0, f.neg(leading)), number)

    def _float(self, word: Val, k: int) -> Val:
        """One of the floats that a word is made of."""
        f = self.fn
        if self.coding.kind == "float32":
            return f.bitcast(word, self.kind)
        if self.coding.kind == "bfloat16":
            return f.bitcast(f.and_(word, -1 << 16) if k else f.shl(word, 16), self.kind)
        half = f.cast(f.lshr(word, 16) if k else word, "i16")
        return vmath.half_to_float(f, half, self.isa)

    def hold_masks(self) -> None:
        """Before a loop: what :meth:`quads` needs in registers, which the compiler would fill anew for every use."""
        f, bits = self.fn, self.coding.bits
        mask = f.const(vector("i32", self.lanes), ((1 << bits) - 1) * EACH if bits < 8 else -0x7F7F7F80)
        self.mask = f.opaque(mask, "w")
        if self.coding.kind == "levels":
            self.bytes = f.opaque(self._bytes(), "w")

    def _bytes(self) -> Val:
        """Levels, or what they are above the least, by their codes."""
        coding, more = self.coding, subtracted(self.isa, self.coding)
        found = [int(level) + more for level in coding.levels]
        table = (found + [0] * (_TABLE - len(found))) * (self.isa.vector_bytes // _TABLE)
        return self.fn.listed("i8", table)

    def _byte(self, codes: Val) -> Val:
        """The same of bytes that are codes."""
        f, kind = self.fn, vector("i8", self.isa.vector_bytes)
        table = getattr(self, "bytes", None) or self._bytes()
        return f.bitcast(f.intrinsic(_table(self.isa), kind, [table, f.bitcast(codes, kind)]), codes.type)

    def low(self, word: Val) -> Val:
        """The lower halves of bytes (see ``coupled.py``)."""
        assert self.mask is not None
        return self.fn.and_(word, self.mask)

    def quads(self, parts: list[Val]) -> list[Val]:
        """Four consecutive k of a word as bytes each, unsigned ones but for 8 bits and levels where products are of
        signed bytes (see :func:`subtracted`)."""
        f, coding = self.fn, self.coding
        if coding.bits == 8 and dot_of(self.isa) is SIGNED:
            assert self.mask is not None
            return [f.xor(parts[0], self.mask)]
        found = [self._quad(parts, pieces) for pieces in coding.pieces]
        return [self._byte(each) for each in found] if coding.kind == "levels" else found

    def _quad(self, parts: list[Val], pieces: tuple[Piece, ...]) -> Val:
        """Four k whose codes are in one piece, or in pieces at the top of bytes, which are put one below the other."""
        f, (part, at, bits), *others = self.fn, *pieces
        word = parts[part]
        if at + bits < 8:  # what reaches to the top of its byte needs no mask
            mask: Val | int = ((1 << bits) - 1) * EACH if self.mask is None else self.mask
            return f.and_(f.lshr(word, at) if at else word, mask)
        kind = vector("i8", 4 * self.lanes)
        found = f.bitcast(word, kind)
        for part, _, width in others:
            found = self._below(found, f.bitcast(parts[part], kind), bits)
            bits += width
        return f.bitcast(f.lshr(found, 8 - bits) if bits < 8 else found, word.type)

    def _below(self, bytes_: Val, others: Val, bits: int) -> Val:
        """So many highest bits of bytes, and below them what others begin with."""
        f = self.fn
        if self.isa.triple == "aarch64":  # the compiler would make several instructions of it
            return f.intrinsic("llvm.aarch64.neon.vsri.v16i8", bytes_.type, [bytes_, others, f.const("i32", bits)])
        return f.or_(f.and_(bytes_, -(256 >> bits)), f.lshr(others, bits))


def _table(isa: Isa) -> str:
    """The instruction that looks bytes up, within each 16 of a vector."""
    if isa.triple == "aarch64":
        return "llvm.aarch64.neon.tbl1.v16i8"
    return {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}[
        isa.vector_bytes
    ]


def _planes(fn: Fn, coding: Coding) -> list[Val]:
    """Tables of the first, second, third and fourth bytes of levels, by their codes."""
    levels = np.zeros(_TABLE, "<f4")
    levels[: len(coding.levels)] = coding.levels
    return [fn.listed("i8", levels.view(np.int8)[byte::4].tolist()) for byte in range(4)]


def _woven(f: Fn, a: Val, b: Val) -> tuple[Val, Val]:
    """Elements of either in turns: those of the first halves, and of the second."""
    half = a.lanes // 2
    first = [k for at in range(half) for k in (at, a.lanes + at)]
    return f.shuffle(a, b, first), f.shuffle(a, b, [k + half for k in first])


def subtracted(isa: Isa, coding: Coding) -> int:
    """What is to be subtracted from bytes as :meth:`Decoder.quads` gives them, to leave what they stand for."""
    as_they_are = dot_of(isa) is SIGNED and (coding.bits == 8 or coding.kind == "levels")
    return 0 if as_they_are else -coding.least
