"""How codes of 0, 1 and 2 meet signed bytes, by what the processor has.

``Bytes``  four products of a lane at a time into int32 (VNNI, NEON's dot products)
``Pairs``  two at a time into int16, which never saturates here: 2 · 2 · 128 is far from it, and 16 of those are added
           up before they are widened
``Words``  bytes widened to 16 bits, for everything else
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.integer.dots import (
    BYTES,
    add_words,
    dot_of,
    multiplies_bytes,
    multiplies_pairs_of_bytes,
    multiply_add,
    multiply_pairs,
    multiply_words,
)
from ranvier.codegen.llvm.isa import Isa

LOW = 0x03030303


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
        found = multiply_pairs(self.f, codes, tokens)
        self.short = found if self.short is None else self.short + found

    def total(self) -> Val:
        assert self.short is not None
        return add_words(self.f, self.isa, self.sum, self.short)


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
    if multiplies_bytes(isa):
        return Dots
    if multiplies_pairs_of_bytes(isa):
        return PairDots
    return WordDots


def adds_unshifted(isa: Isa) -> bool:
    """Can codes be multiplied where they stand in their bytes, 4, 16 or 64 times as large? Signed ones are no 128."""
    return dot_of(isa) is BYTES


class Fields:
    """Takes the four codes of every byte apart, by one instruction each where they may stay where they stand."""

    def __init__(self, f: Fn, kind: str) -> None:
        self.f = f
        self.masks = [f.const(kind, LOW << 2 * k) for k in range(4)]

    def part(self, codes: Val, k: int) -> Val:
        """Code ``k`` of every byte, 4 ** k times as large."""
        return self.f.and_(codes, self.masks[k])

    def low(self, codes: Val, k: int) -> Val:
        """Code ``k`` of every byte as it is."""
        return self.f.and_(self.f.lshr(codes, 2 * k) if k else codes, self.masks[0])


UNSHIFTED_K = 1 << 18  # 128 · 128 times a quarter of this fits int32
