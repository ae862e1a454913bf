"""What codes of few bits stand for, before they are scaled."""

from __future__ import annotations

from typing import Literal

from ranvier.records import dataclass

Kind = Literal["integers", "levels", "e4m3", "e5m2", "float16", "bfloat16", "float32"]
Piece = tuple[int, int, int]  # of a code: the part of a word, the bit of a byte that it begins at, how many there are
# Bits that fill no byte: those left above the codes in all parts of a word are one more, the highest ones in the last.
_APART: dict[int, tuple[tuple[Piece, ...], ...]] = {
    6: (*(((part, 0, 6),) for part in range(3)), ((2, 6, 2), (1, 6, 2), (0, 6, 2)))
}


@dataclass(frozen=True)
class Coding:
    """Codes of 2, 4, 6 or 8 bits; or floats of 16 or 32 as they are.

    "integers" stand for themselves less half their range, so that the middle is zero; "levels" for entries of a table
    (up to 4 bits), "e4m3" and "e5m2" for the float8 with those bits, all of which have to be finite. "float16",
    "bfloat16" and "float32" are no codes: kernels that pick weights while they run read them like others.
    """

    bits: int
    kind: Kind = "integers"
    levels: tuple[float, ...] = ()

    @property
    def parts(self) -> int:
        """32-bit parts of a word: as many as whole fours of codes fill."""
        return 1 + max(part for pieces in self.pieces for part, _, _ in pieces)

    @property
    def per_word(self) -> int:
        """Codes in a word."""
        return 32 * self.parts // self.bits

    @property
    def quads(self) -> int:
        """Fours of k that a word of codes holds."""
        return len(self.pieces)

    @property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Where codes are, for each four k of a word; the highest bits of those in pieces first."""
        return _APART.get(self.bits) or tuple(((0, at, self.bits),) for at in range(0, 8, self.bits))

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def nothing(self) -> int:
        """The code that stands for zero, or any where none does: what it meets is zero then."""
        if self.kind == "integers":
            return self.middle
        return self.levels.index(0.0) if 0.0 in self.levels else 0

    @property
    def values(self) -> tuple[float, ...]:
        """What every code stands for, where there are few."""
        return self.levels or tuple(float(code - self.middle) for code in range(1 << self.bits))

    @property
    def whole(self) -> bool:
        """Whether codes stand for integers that are bytes, so that instructions for bytes multiply them."""
        if self.kind != "levels":
            return self.kind == "integers"
        return all(level == int(level) and -128 <= level < 128 for level in self.levels)

    @property
    def least(self) -> int:
        """The smallest of those integers: bytes are counted from it on."""
        return -self.middle if self.kind == "integers" else int(min(self.levels, default=0))

    @property
    def reach(self) -> int:
        """How far the largest lies from it, at the most."""
        return (1 << self.bits) - 1 if self.kind == "integers" else int(max(self.levels)) - self.least

    @property
    def key(self) -> tuple[object, ...]:
        """What code depends on."""
        return self.bits, self.kind, self.levels
