"""Tables of integers that files are known to keep positions in.

Operators have no place for such a table, so their codes are the integers themselves, of 6 or 8 bits. There are so few
tables that kernels have them as constants.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ranvier.ops.contrib.levels import WHOLE_TABLES
from ranvier.ops.contrib.weight_only import unpacked
from ranvier.parts import side_by_side

Array = np.ndarray[Any, Any]
Tables = list[tuple[float, ...]]
_FIRST, _AT_A_TIME = 1 << 12, 1 << 20  # bytes that are looked at: of most weights the first ones show enough


def table_of(stored: Array, bits: int, k: int) -> tuple[float, ...] | None:
    """The table that all codes are in, less the middle of their range; None where there is none. ``stored`` are bytes
    that are full of them, [..., bytes of a row], of which there are ``k``."""
    if not stored.size:
        return None
    rows = stored.reshape(-1, stored.shape[-1])

    def among(known: Tables, first: int, size: int) -> Tables:
        codes = unpacked(rows[first : first + _count(rows, size)], bits)[:, :k]
        return [levels for levels in known if not _others(levels, bits).take(codes).any()]

    known = among([tuple(levels.tolist()) for levels in WHOLE_TABLES], 0, _FIRST)
    if not known:
        return None
    every = range(0, len(rows), _count(rows, _AT_A_TIME))
    found = list(side_by_side(lambda first: among(known, first, _AT_A_TIME), every, rows.nbytes))
    return next((levels for levels in known if all(levels in each for each in found)), None)


def _count(rows: Array, size: int) -> int:
    """How many of them have so many bytes, or one."""
    return max(1, size // int(rows.shape[1]))


@functools.cache
def _others(levels: tuple[float, ...], bits: int) -> Array:
    """By code: whether it is none of these."""
    others: Array = ~np.isin(_values(bits), levels)
    return others


@functools.cache
def positions(levels: tuple[float, ...], bits: int) -> Array:
    """By code: where it is among them."""
    found: Array = (_values(bits)[:, None] == levels).argmax(axis=1)
    return found.astype(np.uint8)


def _values(bits: int) -> Array:
    """By code of so many bits: what it stands for."""
    return np.arange(1 << bits) - (1 << (bits - 1))
