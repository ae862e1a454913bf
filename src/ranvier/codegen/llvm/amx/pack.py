"""A in the order tiles are loaded from it: block after block of 32 rows, step after step of K, 64 bytes of every row.

Rows of a matrix lie far apart, often by a power of two: then the 32 lines of a step fall into the same few sets of the
cache and push each other out, and no prefetcher follows them. Copied together once, a block is read as one stream by
every panel of B. The copy converts on its way, and pads K with zeros, so that no step is short.
"""

from __future__ import annotations

import math
from enum import IntEnum

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.amx.rows import bytes_mask
from ranvier.codegen.llvm.amx.tiles import LINE, ROWS
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.control import Launched, batch_offsets
from ranvier.codegen.llvm.elements import load_vector, memory_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType

_AT_ONCE = 4  # rows whose loads are under way together
Batch = tuple[tuple[int, int, int], ...]  # extent, stride of the source, stride of the target in bytes


class _Dim(IntEnum):
    M = 0
    K = 1  # elements of a row
    ROW = 2  # elements between rows
    STEPS = 3  # of 64 bytes
    BLOCKS = 4
    RANK = 5
    BATCH = 6


def packed_bytes(m: int, steps: int) -> int:
    """Bytes of a packed matrix."""
    return -(-m // ROWS) * ROWS * LINE * steps


def pack_rows(a: View, batch: Batch, target: Storage, steps: int, dtype: DType) -> Launch:
    """Packs the last two axes [M, K] of ``a``, whose rows are contiguous, as elements of ``dtype``."""
    m, k = a.shape
    entries = math.prod(extent for extent, _, _ in batch)
    return Launch(
        pack_spec(a.dtype, dtype),
        (At.of(a), At(target)),
        (*pack_dims(a, steps, len(batch)), *(x for each in batch for x in each)),
        tiles=entries * -(-m // ROWS),
        writes=(target,),
        traffic=1.0 * entries * (m * k * a.dtype.numpy.itemsize + packed_bytes(m, steps)),
        label="pack",
    )


def pack_dims(a: View, steps: int, rank: int = 0) -> tuple[int, ...]:
    """The numbers of the kernel that packs; those of ``rank`` batch axes follow."""
    m, k = a.shape
    numbers = {
        _Dim.M: m,
        _Dim.K: k,
        _Dim.ROW: a.strides[0],
        _Dim.STEPS: steps,
        _Dim.BLOCKS: -(-m // ROWS),
        _Dim.RANK: rank,
    }
    return tuple(numbers[each] for each in _Dim if each in numbers)


def pack_spec(source: DType, dtype: DType) -> KernelSpec:
    """Tiles of the kernel are blocks of 32 rows; the first buffer is the matrix, the second the target."""

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Packer(module.kernel(symbol), isa, source, dtype).emit()

    return KernelSpec(f"amx pack {source.name} {dtype.name}", ("amx pack", source.name, dtype.name), emit)


class _Packer(Launched):
    def __init__(self, f: Fn, isa: Isa, source: DType, dtype: DType) -> None:
        super().__init__(f)
        self.isa, self.source, self.dtype = isa, source, dtype
        self.item = dtype.numpy.itemsize
        self.per = LINE // self.item  # elements of a step

    def emit(self) -> None:
        f = self.fn
        element = memory_type(self.source)
        source, target = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(2))
        m, k, row, steps, blocks = (self.dim(d) for d in list(_Dim)[:5])
        whole = f.div(k, self.per)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            entry = f.div(tile, blocks)
            block = f.rem(tile, blocks)
            from_, to = batch_offsets(f, self.dim, entry, _Dim.RANK, _Dim.BATCH, 2)
            first = block * ROWS
            rows = f.min_(m - first, ROWS)
            there = f.gep(f.gep(target, to), first * steps * LINE)
            here = f.gep(source, from_ + first * row, element)
            whole_rows = f.and_(rows, -_AT_ONCE)
            # a few rows at a time, each a stream of its own
            with f.loop(0, whole_rows, _AT_ONCE) as r:
                self._rows(f.gep(here, r * row, element), row, f.gep(there, r * LINE), whole, steps, k, _AT_ONCE)
            with f.loop(whole_rows, rows) as r:
                self._rows(f.gep(here, r * row, element), row, f.gep(there, r * LINE), whole, steps, k, 1)
        f.ret()

    def _rows(self, here: Val, row: Val, there: Val, whole: Val, steps: Val, k: Val, count: int) -> None:
        f = self.fn
        element = memory_type(self.source)
        starts = [f.gep(here, row * r, element) for r in range(count)]
        with f.loop(0, whole) as s:
            target = f.gep(there, s * (ROWS * LINE))
            lines = [self._line(f.gep(start, s * self.per, element)) for start in starts]
            for r, line in enumerate(lines):
                f.store(line, f.gep(target, r * LINE), LINE)
        with f.if_(f.cmp("slt", whole, steps)):
            target = f.gep(there, whole * (ROWS * LINE))
            left = k - whole * self.per
            for r, start in enumerate(starts):
                line = self._line(f.gep(start, whole * self.per, element), left)
                f.store(line, f.gep(target, r * LINE), LINE)

    def _line(self, at: Val, left: Val | None = None) -> Val:
        """64 bytes of the target: whole, or ``left`` elements and zeros."""
        f = self.fn
        if self.source is self.dtype:
            kind = f"<{LINE} x i8>"
            if left is None:
                return f.load(kind, at)
            # nothing at all is left where K ends with the step before
            some = bytes_mask(f, f.max_(left * self.item, 1))
            return f.masked_load(kind, at, f.and_(some, f.splat(f.cmp("sgt", left, 0), LINE)))
        lanes = self.isa.lanes(4)
        parts = []
        for part in range(self.per // lanes):
            mask = None if left is None else f.mask_below(lanes, f.max_(left - part * lanes, 0))
            place = f.gep(at, part * lanes, memory_type(self.source))
            wide = load_vector(f, self.isa, self.source, place, lanes, mask=mask)
            parts.append(vmath.float_to_bfloat(f, wide, self.isa))
        joined = f.shuffle(parts[0], parts[1], range(2 * lanes))
        return f.bitcast(joined, vector("i8", LINE))
