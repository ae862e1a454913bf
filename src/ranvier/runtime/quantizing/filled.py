"""Codes that fill bytes, as MatMulNBits, GatherBlockQuantized and QMoE have them, made some rows at a time.

Large weights that a file has as blocks of bytes are read by generated code, all others by NumPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ranvier.errors import KernelError, NotSupported
from ranvier.ops.contrib.weight_only import WIDTHS, packed
from ranvier.quantize import Quantized
from ranvier.quantize.rows import AT_A_TIME, Rows, Stored
from ranvier.records import dataclass
from ranvier.runtime.quantizing.grouped import check_finite, in_groups, unfit, whole_zeros
from ranvier.runtime.quantizing.tables import whole_codes

Array = np.ndarray[Any, Any]
_MANY = 1 << 21  # weights: for fewer, making code takes longer than what it saves


@dataclass(frozen=True)
class Filled:
    """Codes [rows, bytes], with scales and zeros [rows, groups]; zeros between codes are floats."""

    codes: Array
    scales: Array
    zeros: Array
    bits: int
    group: int

    @property
    def stored_zeros(self) -> Array | None:
        """As operators take them: zeros that are codes fill bytes too, and those that all are the middle of codes are
        not told."""
        if self.zeros.dtype.kind == "f":
            return self.zeros
        return packed(self.zeros, self.bits) if (self.zeros != 1 << (self.bits - 1)).any() else None


def filled(sources: Sequence[Rows], group: int) -> Filled:
    """The rows of one, or of several of a kind in turns: the first of each, then the second. ``group``: weights that
    share a scale where whole rows do. InvalidConfig where those operators have no such codes."""
    given = sources[0].like
    like, columns = in_groups(whole_codes(given), group, WIDTHS), sources[0].shape[-1]
    bits, size = like.bits, like.block[1]
    if columns % size:
        raise unfit(like, f"groups of {size} do not divide {columns} features")
    codes = room(sources, columns * bits // 8, np.uint8)
    scales = room(sources, columns // size, np.float32)
    zeros = np.empty(scales.shape, np.float32 if given.zeros is not None else np.uint8)
    for turn, source in enumerate(sources):
        into = Filled(codes[:, turn], scales[:, turn], zeros[:, turn], bits, size)
        reader = _coded(source, like) or _Numbered(source, group)
        source.in_parts(functools.partial(reader.read, into), reader.at_a_time)
    codes, scales, zeros = map(one_by_one, (codes, scales, zeros))
    return Filled(codes, scales, whole_zeros(zeros, bits) if given.zeros is not None else zeros, bits, size)


def room(sources: Sequence[Rows], columns: int, dtype: Any) -> Array:
    """For a row of each, then another."""
    return np.empty((sources[0].count, len(sources), columns), dtype)


def one_by_one(rows: Array) -> Array:
    return rows.reshape(-1, rows.shape[-1])


@dataclass(frozen=True)
class _Numbered:
    """By NumPy, which needs a byte for each code."""

    rows: Rows
    group: int
    at_a_time: ClassVar[int | None] = None

    def read(self, into: Filled, first: int, last: int) -> None:
        made = in_groups(whole_codes(self.rows.read(first, last)), self.group, WIDTHS)
        into.codes[first:last] = packed(made.codes, into.bits)
        into.scales[first:last], into.zeros[first:last] = made.scales, made.zeros


@dataclass(frozen=True)
class _Coded:
    """By generated code. Scales are ``times`` what they are, where a table was doubled."""

    like: Quantized
    stored: Stored
    fill: Callable[[Array, Array], None]
    times: np.float32
    zero: int  # where there are none
    at_a_time: ClassVar[int | None] = 4 * AT_A_TIME  # NumPy has only numbers of groups to make

    def read(self, into: Filled, first: int, last: int) -> None:
        scales, zeros, level = self.stored.numbers(first, last)
        check_finite(self.like, scales, zeros)
        codes = into.codes[first:last]
        self.fill(self.stored.blocks[first:last], codes)
        if level is not None:
            codes.reshape(*scales.shape, into.group * into.bits // 8)[level] = 0
        into.scales[first:last] = scales if self.times == 1 else scales * self.times
        into.zeros[first:last] = self.zero if zeros is None else zeros


def _coded(rows: Rows, like: Quantized) -> _Coded | None:
    """``like``: as groups have them; None where there is little to read, or no code for it."""
    stored, given = rows.stored, rows.like
    if stored is None or math.prod(rows.shape) < _MANY or like.block[1] != given.block[1]:
        return None
    from ranvier.codegen.llvm.coded.filling import Filling  # only here: it takes time

    middle, raised, times = 1 << (like.bits - 1), stored.codes.raised, np.float32(1)
    levels: tuple[int, ...] = ()
    if given.table is not None:
        each = np.arange(len(given.table), dtype=np.uint8)[None]
        found = whole_codes(replace(given, codes=each, scales=np.ones((1, 1), np.float32)))
        times, levels = found.scales[0, 0], tuple(int(level) + middle for level in found.codes[0])
    elif like.bits != given.bits:
        return None
    filling = Filling(stored.codes, like.bits, 0 if raised is None else middle - raised, levels)
    try:
        fill = filling.function()
    except (KernelError, NotSupported):  # by this system, or for such a processor
        return None
    return _Coded(given, stored, fill, times, 0 if raised is None and not levels else middle)
