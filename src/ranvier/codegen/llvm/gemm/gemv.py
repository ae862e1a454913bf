"""Few rows times a B whose columns are contiguous along K: dot products, B streamed once where it lies.

One query against the keys of a cache, or a vector times a matrix given as its transpose. Packing such a B would read
and write all of it for a handful of uses. A block is ``rows`` rows of A times as many columns of B as give one
accumulator per lane; every accumulator is a vector along K, and at the end all of them are folded into one vector of
sums at once. Sums gather in scratch, and a finish kernel (``epilogue.py``) stores them.
"""

from __future__ import annotations

import math
from enum import IntEnum

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, size_of, vector
from ranvier.codegen.llvm.control import Launched, batch_offsets, number_bits, quotient
from ranvier.codegen.llvm.elements import load_vector, memory_type, register_type
from ranvier.codegen.llvm.gemm.blocks import TILE_US, grain, microseconds
from ranvier.codegen.llvm.gemm.epilogue import finish
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.turning import slices
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.varying import largest, smallest

STRIP = 128  # columns that gather in scratch before they are stored


MOST_ROWS = 24  # with more rows packing pays


class Buf(IntEnum):
    """Positions in ``bufs``; the finish kernel's operands follow."""

    A = 0
    B = 1
    OUT = 2
    FINISH = 3
    OPERANDS = 4


class Dim(IntEnum):
    """Positions in ``dims``, strides in bytes; the batch table and the finish dims follow."""

    M = 0
    N = 1
    K = 2
    A_ROW = 3
    B_COLUMN = 4
    GROUP = 5  # columns per tile
    GROUPS = 6
    ALPHA = 7
    FINISH_DIMS = 8
    RANK = 9
    BATCH = 10  # extent, then strides of a, b, out, per axis


def suits_dots(p: Problem) -> bool:
    """Few rows, and both sides contiguous along K."""
    return can_be_dots(p, MOST_ROWS)


def can_be_dots(p: Problem, rows: int = 3 * MOST_ROWS) -> bool:
    """As that, with more rows than are usually multiplied like this."""
    return isinstance(p.b, View) and p.m <= rows and p.b_strides[0] == p.a_strides[1] == 1 and p.k > 1


def dots(p: Problem, isa: Isa, threads: int) -> Launch:
    """The launch of a product that :func:`suits_dots`."""
    assert isinstance(p.b, View)
    item = p.dtype.numpy.itemsize
    a_item, b_item = p.a.dtype.numpy.itemsize, p.b.dtype.numpy.itemsize
    out_item = p.out.dtype.numpy.itemsize
    # a power of two, so that rows times columns is a whole vector
    rows = min(1 if p.m == 1 else 2 if p.m == 2 else 4, isa.lanes(item))
    nbytes = 1.0 * b_item * p.k * p.n * p.entries
    flops = 2.0 * p.m * p.n * p.k * p.entries
    work = microseconds(flops / isa.pace, nbytes)
    strips = -(-p.n // STRIP)
    wanted = slices(nbytes, isa) if p.b.storage.array is not None else 1
    if threads > 1:
        wanted = smallest(math.floor(work / TILE_US), 8 * threads)
    group = STRIP * largest(1, strips * p.entries // largest(1, wanted))
    groups = -(-p.n // group)
    done = finish(p.epilogue, p.dtype, p.out.dtype, p.out_strides)
    table = [x for each in p.batch for x in (each.extent, each.a * a_item, each.b * b_item, each.out * out_item)]
    numbers = {
        Dim.M: p.m,
        Dim.N: p.n,
        Dim.K: p.k,
        Dim.A_ROW: p.a_strides[0] * a_item,
        Dim.B_COLUMN: p.b_strides[1] * b_item,
        Dim.GROUP: group,
        Dim.GROUPS: groups,
        Dim.ALPHA: number_bits(p.alpha, item),
        Dim.FINISH_DIMS: Dim.BATCH + len(table),
        Dim.RANK: len(p.batch),
    }
    tiles = p.entries * groups
    return Launch(
        dot_spec(p.a.dtype, p.b.dtype, rows),
        (
            At(p.a.storage, p.a.offset * a_item),
            At(p.b.storage, p.b.offset * b_item),
            At(p.out.storage, p.out.offset * out_item),
            Code(done.spec),
            *done.buffers,
        ),
        (*(numbers[each] for each in Dim if each in numbers), *table, *done.dims),
        tiles=tiles,
        writes=(p.out.storage,),
        grain=grain(tiles, work, threads),
        scratch=rows * STRIP * item,
        flops=flops,
        traffic=nbytes,
        label="matmul",
    )


def dot_spec(left: DType, right: DType, rows: int) -> KernelSpec:
    """Operands of 16 bits are widened as they are loaded."""

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Dots(module.kernel(symbol), isa, left, right, rows).emit()

    return KernelSpec(f"gemv {right.name} {rows} rows", ("gemm dots", left.name, right.name, rows), emit)


class _Dots(Launched):
    def __init__(self, fn: Fn, isa: Isa, left: DType, right: DType, rows: int) -> None:
        super().__init__(fn)
        self.isa, self.types, self.rows = isa, (left, right), rows
        self.element = register_type(right)
        self.size = size_of(self.element)
        self.lanes = isa.lanes(self.size)
        self.kind = vector(self.element, self.lanes)
        self.columns = self.lanes // rows
        self.place = fn.stack("i64", 6)

    def emit(self) -> None:
        f = self.fn
        m, n, group, groups = (self.dim(d) for d in (Dim.M, Dim.N, Dim.GROUP, Dim.GROUPS))
        self.k = self.dim(Dim.K)
        self.whole = f.and_(self.k, -self.lanes)
        alpha = f.load(self.element, f.gep(f.args["dims"], int(Dim.ALPHA), "i64"))
        self.alpha = f.splat(alpha, self.lanes)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            batch = quotient(f, tile, groups)
            start = (tile - batch * groups) * group
            stop = f.min_(start + group, n)
            offsets = batch_offsets(f, self.dim, batch, Dim.RANK, Dim.BATCH, 3)
            a, b, out = (f.gep(self.buf(x), o) for x, o in zip((Buf.A, Buf.B, Buf.OUT), offsets))
            with f.loop(start, stop, STRIP) as first, f.loop(0, m, self.rows) as row:
                last = f.min_(first + STRIP, stop)
                with f.loop(first, last, self.columns) as column:
                    self._block(a, b, row, column, column - first)
                height = f.min_(m - row, self.rows)
                step = f.i64(STRIP * self.size)
                for k, value in enumerate((batch, row, first, height, last - first, step)):
                    f.store(value, f.gep(self.place, k, "i64"))
                operands = f.gep(f.args["bufs"], int(Buf.OPERANDS), "ptr")
                dims = f.gep(f.args["dims"], self.dim(Dim.FINISH_DIMS), "i64")
                f.call_pointer(self.buf(Buf.FINISH), "void", [operands, dims, f.args["scratch"], out, self.place])
        f.ret()

    def _block(self, a: Val, b: Val, row: Val, column: Val, at: Val) -> None:
        """One vector of sums. Rows and columns past the end repeat the last one; nobody looks at their sums."""
        f, rows, columns = self.fn, self.rows, self.columns
        a_row, b_column = self.dim(Dim.A_ROW), self.dim(Dim.B_COLUMN)
        bottom, right = self.dim(Dim.M) - 1, self.dim(Dim.N) - 1
        left = [f.gep(a, f.min_(row + r, bottom) * a_row) for r in range(rows)]
        above = [f.gep(b, f.min_(column + c, right) * b_column) for c in range(columns)]
        zero = f.const(self.kind, 0.0)
        sums = [[f.var(self.kind, zero) for _ in range(columns)] for _ in range(rows)]

        def step(x: list[Val], load_column: list[Val]) -> None:
            for c, y in enumerate(load_column):
                for r in range(rows):
                    sums[r][c].set(f.fma(x[r], y, sums[r][c].get()))

        def loaded(at: Val, lanes: int, mask: Val | None = None) -> list[list[Val]]:
            return [
                [load_vector(f, self.isa, kind, f.gep(p, at, memory_type(kind)), lanes, mask=mask) for p in side]
                for side, kind in zip((left, above), self.types)
            ]

        with f.loop(0, self.whole, self.lanes) as k:
            step(*loaded(k, self.lanes))
        if self.isa.masks:
            with f.if_(f.cmp("slt", self.whole, self.k)):
                step(*loaded(self.whole, self.lanes, f.mask_below(self.lanes, self.k - self.whole)))
        else:
            with f.loop(self.whole, self.k) as k:
                step(*([f.insert(zero, x, 0) for x in side] for side in loaded(k, 1)))
        folded = _folded(f, [sums[r][c].get() for r in range(rows) for c in range(columns)]) * self.alpha
        for r in range(rows):
            part = folded if rows == 1 else f.shuffle(folded, None, range(r * columns, (r + 1) * columns))
            f.store(part, f.gep(f.args["scratch"], at + r * STRIP, self.element))


def _folded(f: Fn, vectors: list[Val]) -> Val:
    """Lane i of the result is the sum of the lanes of vector i; as many vectors as lanes."""
    lanes = bit = len(vectors)
    while len(vectors) > 1:
        # Vectors x and y of which only ``bit`` partial sums per group are left become one: x in the lanes where the
        # half bit is clear, y where it is set.
        bit //= 2
        merged = []
        half = len(vectors) // 2
        for x, y in zip(vectors[:half], vectors[half:]):
            kept = f.shuffle(x, y, [lanes + l if l & bit else l for l in range(lanes)])
            moved = f.shuffle(x, y, [lanes + (l ^ bit) if l & bit else l ^ bit for l in range(lanes)])
            merged.append(kept + moved)
        vectors = merged
    return vectors[0]
