"""Coded weights in the order kernels read them: panels of as many columns as a vector, or some vectors, have lanes.

A 32-bit word holds consecutive k of one column, a vector of words those of a panel, and the words of a panel follow
each other along K. Where one walk through memory brings a core the most bytes, vectors that fill a line of the cache
are a panel together (:func:`beside`); elsewhere each is one, and several are read at a time. Within a word k = 4i + b
has its code in byte b, ``bits * i`` bits up: a shift and a mask leave four consecutive k as bytes, which is what
instructions for integers multiply, and single codes are no harder to reach.

Words of codes of 6 bits have three parts, each a vector as the words of others are. The bytes of each have the codes
of four k, and above them a third of those of four more: three fours take a mask, and the last an instruction that
shifts and two that shift and insert.

Groups of K that share a scale are whole words. Where they are not in the graph, or their k are not consecutive, an
order says which k of the activations stands where, and codes of zero fill what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.codegen.llvm.code_words import turned
from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.coupled import can_couple, couple
from ranvier.codegen.llvm.coded.lookup import RUN, looked_up, positions
from ranvier.codegen.llvm.coded.numbers import Columns, Numbers, Scaling, Subtracted, scales_of, subtracted_of
from ranvier.codegen.llvm.coded.packer import Packing
from ranvier.codegen.llvm.coded.shape import beside
from ranvier.codegen.llvm.integer.dots import EACH, SIGNED, dot_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage
from ranvier.ops.contrib.weight_only import unpacked
from ranvier.parts import in_parts
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_PANELS = 64  # packed at a time: what is spread out to bytes in between is small


@dataclass(frozen=True)
class Groups:
    """Which k share a scale: [groups, length] indices of K, -1 where there is nothing; ``given``: whose scale each has,
    where that is not the one of the same number."""

    k: int
    order: Array
    given: Array | None = None

    @classmethod
    def even(cls, k: int, size: int, coding: Coding) -> Groups:
        """Groups of ``size`` consecutive k; the last may be shorter."""
        size = min(size, k)
        count = -(-k // size)
        length = -(-size // coding.per_word) * coding.per_word
        at = np.arange(count)[:, None] * size + np.arange(length)
        return cls(k, np.where((np.arange(length) < size) & (at < k), at, -1))

    @classmethod
    def listed(cls, group_of: Array, count: int, coding: Coding) -> Groups:
        """The k of every group by a table that gives each k its group. Groups longer than others are several, so that
        no table makes much more of the weights than there is."""
        k = len(group_of)
        length = -(-k // (count * coding.per_word)) * coding.per_word
        sizes = np.bincount(group_of, minlength=count)
        parts = -(-sizes // length)
        by_group = np.argsort(group_of, kind="stable")
        within = np.arange(k) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # places inside groups
        first = np.repeat((np.cumsum(parts) - parts) * length, sizes)
        order = np.full(int(parts.sum()) * length, -1)
        order[first + within] = by_group
        return cls(k, order.reshape(-1, length), np.repeat(np.arange(count), parts))

    @property
    def plain(self) -> bool:
        """Whether activations are read as they are."""
        return np.array_equal(self.order.reshape(-1), np.arange(self.k))


@dataclass(frozen=True)
class CodedB:
    """A packed matrix [K, N]."""

    coding: Coding
    k: int
    n: int
    lanes: int  # of a vector
    groups: int
    words: int  # of a group, in one column
    codes: Storage  # [panels, groups, words, their parts, columns of a panel] of 32 bits, and one more
    scales: Numbers
    less: Subtracted | None
    order: Storage | None  # int32 [deep]
    coupled: bool = False  # codes of two columns share a byte (``coupled.py``)

    @property
    def deep(self) -> int:
        """K as it is packed."""
        return self.groups * self.words * self.coding.per_word

    @property
    def vectors(self) -> int:
        """Those that have columns."""
        return -(-self.n // self.lanes)

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        read = (self.scales,) if self.less is None else (self.scales, self.less.numbers)
        about = sum(numbers.layout.column(self.groups) for numbers in read)
        return self.vectors * self.lanes * (self.code_bytes + about)

    @property
    def code_bytes(self) -> int:
        """Codes of a column."""
        return 4 * self.groups * self.words * self.coding.parts

    @property
    def scaling(self) -> Scaling:
        if self.less is None:
            return Scaling(self.scales.layout)
        return Scaling(self.scales.layout, self.less.numbers.layout, self.less.middle)

    @property
    def zeros(self) -> Numbers:
        """What is subtracted; kernels that subtract nothing are handed the scales."""
        return self.scales if self.less is None else self.less.numbers


def pack_coded(
    codes: Callable[[int, int], Array],
    coding: Coding,
    n: int,
    groups: Groups,
    scales: Array,
    zeros: Array | None,
    isa: Isa,
    *,
    filled: bool = False,
    bits: int = 0,
    below: int = 0,
    coupled: bool = True,
) -> CodedB:
    """``codes(first, last)`` gives those of some columns, [columns, K] of uint8 (of floats, where those are stored), or
    ``filled`` bytes: codes of ``bits``, or as many as the coding has (:func:`held` says which holds them), the low bits
    first, anything behind the last of K. ``scales`` (float32) and ``zeros`` are [N, groups]; what is subtracted from
    the values of codes are zeros less what they are ``below`` of. ``coupled``: codes of two columns share a byte where
    that is how kernels read them best."""
    if groups.given is not None:
        scales = scales[:, groups.given]
        zeros = None if zeros is None else zeros[:, groups.given]
    lanes, order = isa.lanes(4) * beside(isa), groups.order.reshape(-1)
    count, length = groups.order.shape
    words = length // coding.per_word
    panels = -(-n // lanes)
    size = panels * count * words * coding.parts * lanes
    room = packed_empty((size + 1,), np.dtype(np.int32))  # kernels look past the last word
    room[size] = 0
    coupled = coupled and can_couple(coding, length, isa)
    given = bits or coding.bits
    in_order = groups.plain and (filled or coding.bits >= 8)
    if not in_order or not _pack_in_order(codes, coding, n, groups.k, room, given, coupled, isa):
        _pack(codes, coding, n, groups, room[:size].reshape(panels, -1, lanes), bits if filled else None)
        if coupled:
            couple(room[:size], isa.lanes(4))
    middle, shared = None, 0
    if dot_of(isa) is not SIGNED:
        middle = 1 << given - 1 if coding.kind == "integers" else None
        shared = length if groups.plain else 0
    columns = Columns(lanes, isa.lanes(4), length if coupled else 0, isa)
    less = None if zeros is None else subtracted_of(zeros, scales, shared, columns, middle, below)
    return CodedB(
        *(coding, groups.k, n, isa.lanes(4), count, words),
        codes=Storage.packed(room),
        scales=scales_of(scales, shared, columns),
        less=less,
        order=None if groups.plain else Storage.packed(order.astype(np.int32)),
        coupled=coupled,
    )


def _pack_in_order(
    codes: Callable[[int, int], Array], coding: Coding, n: int, k: int, room: Array, bits: int, coupled: bool, isa: Isa
) -> bool:  # fmt: skip
    """Those that lie in memory in the order of K, in ``bits`` each, by generated code; whether that suits them."""
    looks_up = coding.kind == "levels" and bits != coding.bits
    if k * bits % 8 or (looks_up and k % RUN):
        return False

    def positions(first: int, last: int) -> Array:
        return looked_up(codes(first, last)[:, : k * bits // 8], coding.levels, bits, isa)

    given = coding.bits if looks_up else bits
    packing, row = Packing(given, coding, coupled), k * given // 8
    if not packing.suits(row, room.nbytes, isa):
        return False
    packing.pack(positions if looks_up else codes, n, row, room, isa)
    return True


def _pack(
    codes: Callable[[int, int], Array], coding: Coding, n: int, groups: Groups, packed: Array, bits: int | None
) -> None:  # fmt: skip
    """Those of any order and size, with NumPy, to [panels, words of a column, columns of a panel]; ``bits``: of what is
    stored where bytes are full."""
    panels, _, lanes = packed.shape
    order = groups.order.reshape(-1)

    def fill(first: int, last: int) -> None:
        found = codes(first * lanes, min(n, last * lanes))
        if groups.plain and coding.parts == 1 and bits in (0, coding.bits):
            rows = _turned(found[:, : groups.k * coding.bits // 8], coding, (last - first) * lanes)
        else:
            apart = found if bits is None else _apart(found, coding, bits)[:, : groups.k]
            rows = _words(apart, order, groups.plain, coding, (last - first) * lanes)
        packed[first:last] = rows.reshape(last - first, lanes, -1).swapaxes(1, 2)

    in_parts(fill, panels, _PANELS, packed.nbytes)


def _apart(filled: Array, coding: Coding, bits: int) -> Array:
    """Bytes that are full as codes; those of fewer bits than a coding's are raised, so that its middle is theirs, and
    those of more bits than a table's are levels of it."""
    found = unpacked(filled, bits or coding.bits)
    if bits in (0, coding.bits):
        return found
    if coding.kind == "levels":
        return positions(coding.levels, bits).take(found)
    return found + np.uint8(coding.middle - (1 << (bits - 1)))


def _words(codes: Array, order: Array, plain: bool, coding: Coding, columns: int) -> Array:
    """[columns, K] as words [columns, words and their parts]; columns past the last have codes of zero."""
    if coding.bits > 8:
        floats = np.zeros((columns, len(order)), f"<u{coding.bits // 8}")
        raw = codes.view(floats.dtype)
        floats[: len(codes)] = raw if plain else np.where(order < 0, 0, raw[:, np.maximum(order, 0)])
        return floats.view("<i4")
    spread = np.full((columns, len(order)), coding.nothing, np.uint8)
    spread[: len(codes)] = codes if plain else np.where(order < 0, coding.nothing, codes[:, np.maximum(order, 0)])
    fours = spread.view("<u4").reshape(columns, -1, coding.quads)
    found = np.zeros((columns, fours.shape[1], coding.parts), "<u4")
    for i, pieces in enumerate(coding.pieces):
        below = coding.bits
        for part, at, width in pieces:
            below -= width
            piece = fours[:, :, i]
            if width < coding.bits:
                piece = piece >> np.uint32(below) & np.uint32(((1 << width) - 1) * EACH)
            found[:, :, part] |= piece << np.uint32(at)
    return found.view("<i4").reshape(columns, -1)


def _turned(rows: Array, coding: Coding, columns: int) -> Array:
    """The same of bytes that are full."""
    words = turned(np.ascontiguousarray(rows).view("<u4"), coding.bits).view("<i4")
    if len(words) == columns:
        return words
    nothing = _words(np.empty((0, coding.per_word), np.uint8), np.arange(coding.per_word), True, coding, 1)
    return np.concatenate([words, np.broadcast_to(nothing, (columns - len(words), words.shape[1]))])
