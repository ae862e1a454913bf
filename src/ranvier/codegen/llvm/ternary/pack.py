"""Ternary weights in the order kernels read them, one form for all of them.

A code is ``w + 1``, in 2 bits. A 32-bit word holds 16 consecutive k of one column: byte b has those of k = b, 4 + b,
8 + b and 12 + b from the low bits on, so that a shift (or none) and a mask leave four neighbours along k side by side
in the bytes of a lane, which is what byte products want. Words of the columns of a panel, two vectors of them, lie
side by side; words along k follow each other; panels follow each other. Both sizes are padded with codes 0: what they
meet of the tokens is 0, and columns past the end are never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ranvier.codegen.llvm.code_words import turned
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
VECTORS = 2  # of a panel
DEPTH = 16  # k of a word
STEP = 64  # K is padded to a multiple of it: what one tile of the matrix unit holds


def padded(k: int) -> int:
    return -(-k // STEP) * STEP


@dataclass(frozen=True)
class Packed:
    """Weights [K, N] in panels of ``width`` columns, each all of K."""

    storage: Storage
    k: int
    n: int
    width: int

    @property
    def panels(self) -> int:
        return -(-self.n // self.width)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes


class PackedTernary(Packed):
    """``storage`` is [panels, words, columns of a panel] of 32-bit words."""

    @property
    def words(self) -> int:
        """Words of a column."""
        return padded(self.k) // DEPTH


def in_parts(codes: Array, width: int, room: int, words: int) -> Iterator[tuple[slice, Array]]:
    """Some panels of ``width`` columns at a time, and the bytes of their columns, ``room`` for each with zeros behind
    the codes: as many as stay in the cache, with so many ``words`` made of a column."""
    panels = -(-len(codes) // width)
    at_once = max(1, (1 << 18) // max(1, words * width))
    for first in range(0, panels, at_once):
        part = codes[first * width : (first + at_once) * width]
        count = min(at_once, panels - first)
        rows = np.zeros((count * width, room), np.uint8)
        rows[: len(part), : part.shape[1]] = part
        yield slice(first, first + count), rows


def pack_ternary(codes: Array, k: int, isa: Isa) -> PackedTernary:
    """``codes`` are bytes [N, ceil(K / 4)], the code of k in byte k // 4 at bit 2 · (k mod 4)."""
    n = codes.shape[0]
    width = VECTORS * isa.lanes(4)
    words = padded(k) // DEPTH
    packed = packed_empty((-(-n // width), words, width), np.dtype(np.uint32))
    for those, rows in in_parts(codes, width, words * 4, words):
        packed[those] = turned(rows.view("<u4"), 2).reshape(-1, width, words).swapaxes(1, 2)
    return PackedTernary(Storage.packed(packed), k, n, width)
