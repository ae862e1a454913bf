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

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, aligned_empty
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
    packed = aligned_empty((panels, words, width), np.dtype(np.uint32))
    # a block of panels at a time: unpacked codes take four times the room
    at_once = max(1, (1 << 22) // max(1, words * DEPTH * width))
    for first in range(0, panels, at_once):
        part = codes[first * width : (first + at_once) * width]
        count = min(at_once, panels - first)
        raised = np.zeros((count * width, words * DEPTH), np.uint8)
        quads = (part[..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
        raised[: len(part), :k] = quads.reshape(len(part), -1)[:, :k]
        # [column, word, shift, byte]: the shifts of a byte are added up
        by_shift = raised.reshape(count * width, words, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
        joined = np.bitwise_or.reduce(by_shift, axis=2).view("<u4").reshape(count, width, words)
        packed[first : first + count] = joined.swapaxes(1, 2)
    return PackedTernary(Storage.packed(packed), k, n, width)
