"""Codes of two columns in a byte: two sums from three instructions, where codes of one column take four.

In words as ``pack.py`` makes them, a byte has the codes of two k of one column, and each has to be taken out before it
meets its activation. Here it has those that two neighbouring vectors of columns, a and b, have for the same k: as a
signed number a + 16 (b - 8). The byte as it is and its low half meet the same activation x,

    R = sum of (a + 16 (b - 8)) x        A = sum of a x        R - A = 16 times the sum of (b - 8) x

so nothing is shifted, and sums of b are centred already. Scales of a are 16 times what they are, so totals of both are
that much too large, and zeros of b, which are added to its sums. (A 16th of b's scales would be no float16 now and
then.) The first of two vectors holds the k of the low halves of its words, the second those of the high ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.shape import beside
from ranvier.codegen.llvm.integer.dots import EACH, SIGNED, dot_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.parts import in_parts

Array = np.ndarray[Any, Any]
HALF_BITS = 4
FACTOR = 1 << HALF_BITS  # what totals are too large by
MIDDLES = 8 * EACH
SCALES, ZEROS = 0, 1  # the one of two vectors whose numbers are that much larger
_LONGEST = 1 << 16  # k of a group: products of two bytes, added up, fit 32 bits
_AT_A_TIME = 1 << 16  # pairs of vectors


def couples(isa: Isa) -> bool:
    """Whether 4-bit codes are read so: products are of signed bytes, and vectors of a panel lie side by side."""
    return dot_of(isa) is SIGNED and beside(isa) % 2 == 0


def can_couple(coding: Coding, group: int, isa: Isa) -> bool:
    """Whether codes have that form; ``group``: k that share a scale."""
    return couples(isa) and coding == Coding(HALF_BITS) and group <= _LONGEST


def couple(words: Array, lanes: int) -> None:
    """Words of codes as they are packed, in that form from now on."""
    pairs = words.view(np.uint32).reshape(-1, 2, lanes)
    low, middle = np.uint32(0x0F * EACH), np.uint32(MIDDLES)

    def some(begin: int, end: int) -> None:
        first, second = (np.ascontiguousarray(pairs[begin:end, k]) for k in range(2))
        for half in range(2):
            shift = np.uint32(HALF_BITS * half)
            below, above = first >> shift & low, second >> shift & low
            pairs[begin:end, half] = below | (above ^ middle) << np.uint32(HALF_BITS)

    in_parts(some, len(pairs), _AT_A_TIME, words.nbytes)
