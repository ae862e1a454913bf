"""Codes of few bits in 32-bit words, as they are stored and as kernels want them.

Stored, consecutive k fill a byte from its low bits on, and bytes follow each other. Kernels want four consecutive k in
the four bytes of a word, the next four beside them, higher up: one shift and one mask leave four neighbours as bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# Which bits change places with those how much higher: for 2 bits a word is a matrix of 4 x 4 codes to be transposed,
# for 4 bits two halves whose codes alternate afterwards.
_EXCHANGES = {2: ((0x00CC00CC, 6), (0x0000F0F0, 12)), 4: ((0x0000FF00, 8), (0x00F000F0, 4)), 8: ()}


def turned(words: Array, bits: int) -> Array:
    """Words as kernels want them from words as they are stored."""
    for mask, apart in _EXCHANGES[bits]:
        moved = (words ^ (words >> np.uint32(apart))) & np.uint32(mask)
        words = words ^ moved ^ (moved << np.uint32(apart))
    return words
