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

from dataclasses import replace

import numpy as np

from ranvier.codegen.llvm.coded.numbers import Layout, Numbers
from ranvier.codegen.llvm.coded.pack import CodedB, beside
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage
from ranvier.dtypes import DType
from ranvier.parts import in_parts

_HALF_BITS = 4
FACTOR = 1 << _HALF_BITS  # what totals are too large by
_SHORT = 64  # k of a group: there widening scales of float16 takes longer than reading as many of float32
_LONGEST = 1 << 16  # k of a group: products of two bytes, added up, fit 32 bits
_AT_A_TIME = 1 << 16  # pairs of vectors
_LOW, _MIDDLE = np.uint32(0x0F0F0F0F), np.uint32(0x08080808)


def couples(isa: Isa) -> bool:
    """Whether 4-bit codes that meet codes of 8 bits are read so: products are of signed bytes, and vectors of a panel
    lie side by side."""
    return dot_of(isa) is SIGNED and beside(isa) % 2 == 0


def coupled(b: CodedB, isa: Isa) -> CodedB:
    """The same weights in that form, if they have one."""
    fits = b.words * b.coding.per_word <= _LONGEST
    if not couples(isa) or b.coding.kind != "integers" or b.coding.bits != 4 or not fits:
        return b
    assert b.codes.array is not None
    given = b.codes.array.view(np.uint32)
    room = packed_empty(given.shape, np.dtype(np.int32))
    room[-1] = 0
    pairs = given[:-1].reshape(-1, 2, b.lanes)
    found = room[:-1].view(np.uint32).reshape(-1, 2, b.lanes)

    def couple(begin: int, end: int) -> None:
        first, second = (np.ascontiguousarray(pairs[begin:end, k]) for k in range(2))
        for half in range(2):
            shift = np.uint32(4 * half)
            low, high = first >> shift & _LOW, second >> shift & _LOW
            found[begin:end, half] = low | (high ^ _MIDDLE) << np.uint32(4)

    in_parts(couple, len(pairs), _AT_A_TIME, room.nbytes)
    short = b.words * b.coding.per_word < _SHORT
    less = b.less
    if less is not None:
        assert less.middle is None
        less = replace(less, numbers=_enlarged(b, less.numbers, short, 1))
    return replace(b, codes=Storage.packed(room), scales=_enlarged(b, b.scales, short, 0), less=less, coupled=True)


def _enlarged(b: CodedB, numbers: Numbers, short: bool, which: int) -> Numbers:
    """What the first or second of two vectors has, times the factor; in float32 where its type has no such number, or
    takes longer to read."""
    storage, layout = numbers.storage, numbers.layout
    assert storage.array is not None
    assert not layout.run
    dtype = DType.float32 if short and layout.dtype is DType.float16 else layout.dtype
    wide = storage.array.astype(np.float32)
    wide.reshape(-1, 2, b.lanes)[:, which] *= np.float32(FACTOR)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype(dtype.numpy)
        fits = np.array_equal(narrow.astype(np.float32), wide)
    return Numbers(Storage.packed(narrow if fits else wide), Layout(dtype if fits else DType.float32))
