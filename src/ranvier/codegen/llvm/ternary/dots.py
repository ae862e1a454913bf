"""How codes of 0, 1 and 2 meet signed bytes, by what the processor has.

``Bytes``  four products of a lane at a time into int32 (VNNI)
``Pairs``  two at a time into int16, which never saturates here: 2 · 2 · 128 is far from it, and 16 of those are added
           up before they are widened
``Words``  bytes widened to 16 bits, for everything else
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.integer.dots import BYTES, dot_of, multiply_add, multiply_words
from ranvier.codegen.llvm.isa import Isa

LOW = 0x03030303
_PAIRS = {32: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")}
_PAIRS[64] = ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")


class Dots:
    """Sums of one column vector and one row over a step of K: ``add`` each quad, then take ``total``."""

    def __init__(self, f: Fn, isa: Isa, start: Val) -> None:
        self.f, self.isa, self.sum = f, isa, start

    def add(self, codes: Val, tokens: Val) -> None:
        """``codes``: four in the bytes of each lane; ``tokens``: the four bytes they meet, in every lane."""
        self.sum = multiply_add(self.f, self.isa, self.sum, codes, tokens)

    def total(self) -> Val:
        return self.sum


class PairDots(Dots):
    def __init__(self, f: Fn, isa: Isa, start: Val) -> None:
        super().__init__(f, isa, start)
        self.short: Val | None = None

    def add(self, codes: Val, tokens: Val) -> None:
        f, lanes = self.f, codes.lanes
        bytes_, words = vector("i8", 4 * lanes), vector("i16", 2 * lanes)
        name = _PAIRS[self.isa.vector_bytes][0]
        found = f.intrinsic(name, words, [f.bitcast(codes, bytes_), f.bitcast(tokens, bytes_)])
        self.short = found if self.short is None else self.short + found

    def total(self) -> Val:
        f = self.f
        assert self.short is not None
        ones = f.const(self.short.type, 1)
        return self.sum + f.intrinsic(_PAIRS[self.isa.vector_bytes][1], self.sum.type, [self.short, ones])


class WordDots(Dots):
    def add(self, codes: Val, tokens: Val) -> None:
        f = self.f
        words = vector("i16", 2 * codes.lanes)
        pairs = f.bitcast(tokens, words)
        even = f.bitcast(f.ashr(f.shl(pairs, 8), 8), tokens.type)
        odd = f.bitcast(f.ashr(pairs, 8), tokens.type)
        mask = 0x00FF00FF
        self.sum = multiply_words(f, self.isa, self.sum, f.and_(codes, mask), even)
        self.sum = multiply_words(f, self.isa, self.sum, f.and_(f.lshr(codes, 8), mask), odd)


def dots_of(isa: Isa) -> type[Dots]:
    if dot_of(isa) is BYTES:
        return Dots
    if isa.triple == "x86_64" and isa.vector_bytes in _PAIRS:
        return PairDots
    return WordDots


def adds_unshifted(isa: Isa) -> bool:
    """Can codes be multiplied where they stand in their bytes, 4, 16 or 64 times as large?"""
    return dot_of(isa) is BYTES


UNSHIFTED_K = 1 << 18  # 128 · 128 times a quarter of this fits int32
