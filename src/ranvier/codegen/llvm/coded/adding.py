"""Products of fours of k, added to the sums of a pass.

An instruction adds four products to a lane of 32 bits; or, on x86 without VNNI, two of them in 16 bits. As many sums of
two as 16 bits hold are added up there, and join the lane together. Codes of so many bits that not even one sum fits are
taken apart to halves of 4 bits; what the upper ones add up to counts 16 times where it joins.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val, Var
from ranvier.codegen.llvm.integer.dots import (
    EACH,
    add_words,
    multiplies_bytes,
    multiplies_pairs_of_bytes,
    multiply_add,
    multiply_pairs,
    pairs_that_fit,
)
from ranvier.codegen.llvm.isa import Isa

_HALF_BITS = 4
_HALF = (1 << _HALF_BITS) - 1


def multiplies_fours(isa: Isa) -> bool:
    """Whether there is either instruction."""
    return multiplies_bytes(isa) or multiplies_pairs_of_bytes(isa)


def by_halves(isa: Isa, reach: int) -> bool:
    """Whether codes up to ``reach`` are taken apart: twice the instructions."""
    return not multiplies_bytes(isa) and not pairs_that_fit(reach)


def most_pairs(reach: int) -> int:
    """Sums of two that are added up in 16 bits before they join, of codes up to ``reach``."""
    return pairs_that_fit(reach) or pairs_that_fit(_HALF)


class Adding:
    """All products have joined their sums once :meth:`settle` was called: at the end of code that is repeated."""

    def __init__(self, fn: Fn, isa: Isa, reach: int) -> None:
        self.fn, self.isa = fn, isa
        self.at_once = multiplies_bytes(isa)
        self.halves = by_halves(isa, reach)
        self.most = most_pairs(reach)
        self.waiting: dict[tuple[Var, int], tuple[Val, int]] = {}  # what sums lack, and how many sums of two that is

    def parts(self, codes: Val) -> list[Val]:
        """Four codes of every lane as :meth:`add` takes them."""
        if not self.halves:
            return [codes]
        f, mask = self.fn, _HALF * EACH
        return [f.and_(codes, mask), f.and_(f.lshr(codes, _HALF_BITS), mask)]

    def add(self, acc: Var, parts: list[Val], row: Val) -> None:
        """``row``: the four signed bytes that meet the codes of every lane."""
        if self.at_once:
            acc.set(multiply_add(self.fn, self.isa, acc.get(), parts[0], row))
            return
        for part, codes in enumerate(parts):
            pairs, (before, count) = multiply_pairs(self.fn, codes, row), self.waiting.get((acc, part), (None, 0))
            self.waiting[acc, part] = pairs if before is None else before + pairs, count + 1
            if count + 1 == self.most:
                self._join(acc, part)

    def settle(self) -> None:
        for acc, part in list(self.waiting):
            self._join(acc, part)

    def _join(self, acc: Var, part: int) -> None:
        pairs, _ = self.waiting.pop((acc, part))
        acc.set(add_words(self.fn, self.isa, acc.get(), pairs, 1 << _HALF_BITS * part))
