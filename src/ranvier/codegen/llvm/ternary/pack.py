"""Ternary weights in the order kernels read them, one form for all of them.

A code is ``w + 1``, in 2 bits. A 32-bit word holds 16 consecutive k of one column: byte b has those of k = b, 4 + b,
8 + b and 12 + b from the low bits on, so that a shift (or none) and a mask leave four neighbours along k side by side
in the bytes of a lane, which is what byte products want. Words of the columns of a panel, two vectors of them, lie
side by side; words along k follow each other; panels follow each other. Both sizes are padded with codes 0: what they
meet of the tokens is 0, and columns past the end are never stored.
"""

from __future__ import annotations

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
class PackedTernary:
    """Weights [K, N]; ``storage`` is [panels, words, columns of a panel] of 32-bit words."""

    storage: Storage
    k: int
    n: int
    width: int  # columns of a panel

    @property
    def words(self) -> int:
        """Words of a column."""
        return padded(self.k) // DEPTH

    @property
    def panels(self) -> int:
        return -(-self.n // self.width)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes


def pack_ternary(codes: Array, k: int, isa: Isa) -> PackedTernary:
    """``codes`` are bytes [N, ceil(K / 4)], the code of k in byte k // 4 at bit 2 · (k mod 4)."""
    n = codes.shape[0]
    width = VECTORS * isa.lanes(4)
    panels, words = -(-n // width), padded(k) // DEPTH
    packed = packed_empty((panels, words, width), np.dtype(np.uint32))
    at_once = max(1, (1 << 18) // max(1, words * width))  # panels whose words stay in the cache
    for first in range(0, panels, at_once):
        part = codes[first * width : (first + at_once) * width]
        count = min(at_once, panels - first)
        rows = np.zeros((count * width, words * 4), np.uint8)
        rows[: len(part), : part.shape[1]] = part
        packed[first : first + count] = turned(rows.view("<u4"), 2).reshape(count, width, words).swapaxes(1, 2)
    return PackedTernary(Storage.packed(packed), k, n, width)
