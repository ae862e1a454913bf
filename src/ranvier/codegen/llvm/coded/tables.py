"""Tables of integers that files are known to keep positions in.

Operators have no place for such a table, so their codes are the integers themselves, of 6 or 8 bits. There are so few
tables that kernels have them as constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.llvm.coded.lookup import RUN, all_levels, others
from ranvier.codegen.llvm.coded.packer import pays
from ranvier.codegen.llvm.isa import Isa
from ranvier.ops.contrib.levels import WHOLE_TABLES
from ranvier.ops.contrib.weight_only import unpacked
from ranvier.parts import side_by_side

Array = np.ndarray[Any, Any]
Tables = list[tuple[float, ...]]
_FIRST, _AT_A_TIME = 1 << 12, 1 << 20  # bytes that are looked at: of most weights the first ones show enough


def table_of(stored: Array, bits: int, k: int, isa: Isa) -> tuple[float, ...] | None:
    """The table that all codes are in, less the middle of their range; None where there is none. ``stored`` are bytes
    that are full of them, [..., bytes of a row], of which there are ``k``."""
    if not stored.size:
        return None
    stacks = stored[None] if stored.ndim == 2 else stored  # those of experts may have gaps in memory

    def among(known: Tables, some: Array) -> Tables:
        codes = unpacked(some, bits)[:, :k]
        return [levels for levels in known if not others(levels, bits).take(codes).any()]

    def among_many(known: Tables, some: Array) -> Tables:
        """The same by generated code."""
        return [levels for levels in known if all_levels(some, levels, bits, isa)]

    known = among([tuple(levels.tolist()) for levels in WHOLE_TABLES], stacks[0, : _count(stacks, _FIRST)])
    if not known:
        return None
    full = not k % RUN and stacks.shape[-1] * 8 == k * bits
    look = among_many if full and pays(stacks.nbytes, isa) else among
    each = _count(stacks, _AT_A_TIME)
    every = [rows[first : first + each] for rows in stacks for first in range(0, len(rows), each)]
    found = list(side_by_side(lambda some: look(known, some), every, stacks.nbytes))
    return next((levels for levels in known if all(levels in each for each in found)), None)


def _count(stacks: Array, size: int) -> int:
    """How many rows have so many bytes, or one."""
    return max(1, size // int(stacks.shape[-1]))
