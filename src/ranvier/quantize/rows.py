"""Codes that are read some rows at a time, so that what is made of them on the way stays near the processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.parts import in_parts
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import Array
from ranvier.quantize.fields import Codes
from ranvier.records import dataclass

AT_A_TIME = 1 << 18  # weights: a byte of each, and what is made of them, fit the cache of a core


@dataclass(frozen=True)
class Stored:
    """Rows as blocks of bytes [rows, blocks, size] of a file. ``numbers(first, last)`` gives scales and zeros of some
    [rows, groups], and the places of groups that have codes of zero whatever is stored, where there are any."""

    blocks: Array
    codes: Codes
    numbers: Callable[[int, int], tuple[Array, Array | None, tuple[Array, ...] | None]]


@dataclass(frozen=True)
class Rows:
    """Codes of a matrix [N, K], or of several [experts, N, K], whose rows follow each other.

    ``like`` has no rows, and all else that they have in common; blocks are runs of neighbours in a row.
    ``read(first, last)`` gives some rows, as a matrix of its own.
    """

    like: Quantized
    shape: tuple[int, ...]
    read: Callable[[int, int], Quantized]
    scale_bytes: int | None = None  # of all of them
    stored: Stored | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is the same for rows of a shape that can lie side by side."""
        return _kind(self.like)

    def in_parts(self, work: Callable[[int, int], None], weights: int | None = None) -> None:
        """``work(first, last)`` for all rows, of about so many weights at a time, by several threads."""
        in_parts(work, self.count, max(1, (weights or AT_A_TIME) // max(1, self.shape[-1])), math.prod(self.shape))

    def whole(self) -> Quantized:
        """All of them at once."""
        like, k = self.like, self.shape[-1]
        groups = self.count, -(-k // like.block[-1])
        codes, scales = np.empty((self.count, k), like.codes.dtype), np.empty(groups, like.scales.dtype)
        zeros = None if like.zeros is None else np.empty(groups, like.zeros.dtype)

        def put(first: int, last: int) -> None:
            found = self.read(first, last)
            codes[first:last], scales[first:last] = found.codes, found.scales
            if zeros is not None:
                zeros[first:last] = found.zeros

        self.in_parts(put)
        shape, each = self.shape, (*self.shape[:-1], groups[1])
        return replace(
            like,
            codes=codes.reshape(shape),
            scales=scales.reshape(each),
            zeros=None if zeros is None else zeros.reshape(each),
            block=(*(1,) * (len(shape) - 2), *like.block),
            axis=len(shape) - 1,
            scale_bytes=self.scale_bytes,
        )


Experts = Rows | Sequence[Quantized]  # of one linear layer: all rows; or each expert's, where blocks are no rows


def any_of(experts: Experts) -> Quantized:
    """What is told by the codes of any of them."""
    return experts.like if isinstance(experts, Rows) else experts[0]


def rows_of(given: Quantized | Sequence[Quantized]) -> Rows | None:
    """Codes that are there: those of a matrix or of experts, or of one expert after the other; None where blocks are no
    runs of neighbours in a row, or where experts differ in kind."""
    if isinstance(given, Quantized):
        flat = _flat(given)
        return None if flat is None else Rows(_some(flat, 0, 0), given.shape, lambda a, b: _some(flat, a, b))
    own = [each for each in map(_flat, given) if each is not None]
    kinds = {(each.shape, *_kind(each)) for each in own}
    if len(own) < len(given) or len(kinds) != 1 or any(len(each.shape) != 2 for each in given):
        return None
    n, k = own[0].shape

    def read(first: int, last: int) -> Quantized:
        begins = range(first // n * n, last, n) if first < last else ()
        found = [_some(own[at // n], max(first - at, 0), min(last - at, n)) for at in begins]
        return _joined(found) if len(found) > 1 else found[0] if found else _some(own[0], 0, 0)

    return Rows(_some(own[0], 0, 0), (len(own), n, k), read)


def _kind(of: Quantized) -> tuple[Any, ...]:
    table = None if of.table is None else of.table.tobytes()
    return of.block, of.bits, of.codes.dtype, table, of.zeros is None, of.dtype


def _flat(given: Quantized) -> Quantized | None:
    """All rows of all experts as those of one matrix."""
    *others, columns = given.block
    if given.flat or given.order is not None or len(given.shape) < 2 or any(size != 1 for size in others):
        return None
    count = math.prod(given.shape[:-1])

    def of_rows(numbers: Array) -> Array | None:
        return numbers.reshape(count, numbers.shape[-1]) if numbers.shape[:-1] == given.shape[:-1] else None

    codes, scales = given.codes.reshape(count, given.shape[-1]), of_rows(given.scales)
    zeros = None if given.zeros is None else of_rows(given.zeros)
    if scales is None or (zeros is None) != (given.zeros is None):
        return None  # some rows share them
    return replace(given, codes=codes, scales=scales, zeros=zeros, block=(1, columns), axis=1, scale_bytes=None)


def _some(flat: Quantized, first: int, last: int) -> Quantized:
    zeros = None if flat.zeros is None else flat.zeros[first:last]
    return replace(flat, codes=flat.codes[first:last], scales=flat.scales[first:last], zeros=zeros)


def _joined(found: Sequence[Quantized]) -> Quantized:
    zeros = [each.zeros for each in found if each.zeros is not None]
    return replace(
        found[0],
        codes=np.concatenate([each.codes for each in found]),
        scales=np.concatenate([each.scales for each in found]),
        zeros=np.concatenate(zeros) if zeros else None,
    )
