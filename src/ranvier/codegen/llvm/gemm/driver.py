"""The driver kernel: walks the tiles of a blocked product and calls micro-kernels through pointers.

One driver serves every type, shape, layout and epilogue: all of that is in its arguments, so it is compiled once per
machine. A tile is a group of row blocks times a group of panels of one batch entry. Inside, K blocks are outermost
(their partial sums wait in scratch, one dense block per micro-tile), then panels, then row blocks, so that a panel of B
is read from a near cache by all rows.
"""

from __future__ import annotations

from enum import IntEnum

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Operand, Val
from ranvier.codegen.llvm.gemm.micro import ALPHA, SLOTS, Slot, write_slot
from ranvier.codegen.llvm.gemm.pack import batch_offsets, quotient
from ranvier.codegen.llvm.isa import Isa


class Buf(IntEnum):
    """Positions in ``bufs``; the finish kernel's operands follow."""

    A = 0
    B = 1
    OUT = 2
    BIAS = 3
    RESIDUAL = 4
    MICRO = 5  # four: (large, small rows) of wide panels, then of narrow ones
    FINISH = 9
    OPERANDS = 10


class Dim(IntEnum):
    """Positions in ``dims``; sizes in bytes unless said otherwise. The batch table and the finish dims follow."""

    ROW_BLOCKS = 0  # how many, in all
    ROWS = 1  # rows of a large block
    LARGE_ROWS = 2  # how many blocks are large
    PANELS = 3
    WIDE = 4  # width of a wide panel
    WIDE_PANELS = 5
    COLUMNS = 6  # columns of the product
    LANES = 7
    LAST_LANES = 8
    K = 9
    K_BLOCK = 10
    ROW_GROUP = 11  # row blocks per tile
    PANEL_GROUP = 12
    ROW_GROUPS = 13
    PANEL_GROUPS = 14
    A_ROW = 15
    A_K = 16
    A_STEP = 17  # for the micro-kernel's slot
    B_STEP = 18  # of a matrix in place; 0 for a packed one
    OUT_ROW = 19
    RESIDUAL_ROW = 20
    FLAGS = 21
    ALPHA = 22
    LOW = 23
    HIGH = 24
    FINISHED = 25  # panels from this one on are stored by the finish kernel
    ITEM = 26  # size of an element
    USED = 27  # bit 0: a bias, bit 1: a residual
    FINISH_DIMS = 28  # position in dims of the finish kernel's
    WAITING = 29  # between tiles that wait in scratch; 0 where none waits for another K block
    NEXT = 30  # panels from the last one of a tile to the first one of this thread's next tile, or so
    RANK = 31  # batch axes
    BATCH = 32  # extent, then strides of a, b, out, residual, per axis


def driver_spec() -> KernelSpec:
    return KernelSpec("gemm driver", ("gemm driver",), _emit)


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    _Driver(module.kernel(symbol), isa).emit()


class _Driver:
    def __init__(self, fn: Fn, isa: Isa) -> None:
        self.fn, self.isa = fn, isa
        self.control = fn.stack("i64", SLOTS)
        self.place = fn.stack("i64", 6)

    def dim(self, k: int) -> Val:
        return self.fn.load("i64", self.fn.gep(self.fn.args["dims"], int(k), "i64"), invariant=True)

    def buf(self, k: int) -> Val:
        return self.fn.load("ptr", self.fn.gep(self.fn.args["bufs"], int(k), "ptr"), invariant=True)

    def slot(self, slot: Slot, value: Operand) -> None:
        write_slot(self.fn, self.control, slot, value)

    def emit(self) -> None:
        f = self.fn
        for slot, dim in (
            (Slot.A_STEP, Dim.A_STEP),
            (Slot.B_STEP, Dim.B_STEP),
            (Slot.RESIDUAL_STEP, Dim.RESIDUAL_ROW),
            (Slot.ALPHA, Dim.ALPHA),
            (Slot.LOW, Dim.LOW),
            (Slot.HIGH, Dim.HIGH),
        ):
            self.slot(slot, self.dim(dim))
        self.slot(Slot.SEGMENTS, 1)
        row_groups, panel_groups = self.dim(Dim.ROW_GROUPS), self.dim(Dim.PANEL_GROUPS)
        row_group, panel_group = self.dim(Dim.ROW_GROUP), self.dim(Dim.PANEL_GROUP)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            above = quotient(f, tile, row_groups)
            i0 = (tile - above * row_groups) * row_group
            self.i1 = f.min_(i0 + row_group, self.dim(Dim.ROW_BLOCKS))
            self.i0 = i0
            batch = quotient(f, above, panel_groups)
            p0 = (above - batch * panel_groups) * panel_group
            p1 = f.min_(p0 + panel_group, self.dim(Dim.PANELS))
            offsets = batch_offsets(f, self.dim, batch, Dim.RANK, Dim.BATCH, 4)
            self.a = f.gep(self.buf(Buf.A), offsets[0])
            self.b = f.gep(self.buf(Buf.B), offsets[1])
            self.out = f.gep(self.buf(Buf.OUT), offsets[2])
            self.residual = f.gep(self.buf(Buf.RESIDUAL), offsets[3])
            f.store(batch, self.place)
            self.p1 = p1
            self._tile(p0, p1)
        f.ret()

    def _tile(self, p0: Val, p1: Val) -> None:
        f = self.fn
        k_all, k_block = self.dim(Dim.K), self.dim(Dim.K_BLOCK)
        k0 = f.var("i64", 0)
        with f.while_() as blocks:
            start = k0.get()
            size = f.min_(k_block, k_all - start)
            following = start + size
            self.slot(Slot.K, size)
            self.first = f.cmp("eq", start, 0)
            self.last = f.cmp("sge", following, k_all)
            with f.loop(p0, p1) as p:
                self._panel(p, p - p0, start)
            k0.set(following)
            blocks.until(self.last)

    def _panel(self, p: Val, nth: Val, k0: Val) -> None:
        """All row blocks of the tile against one panel, over one K block."""
        f, vector_bytes = self.fn, self.isa.vector_bytes
        wide, wide_panels = self.dim(Dim.WIDE), self.dim(Dim.WIDE_PANELS)
        is_wide = f.cmp("slt", p, wide_panels)
        width = f.select(is_wide, wide, wide - vector_bytes)
        column = p * wide - f.max_(p - wide_panels, 0) * vector_bytes  # in bytes
        b_step = self.dim(Dim.B_STEP)
        packed = f.cmp("eq", b_step, 0)
        offset = f.select(packed, column * self.dim(Dim.K) + k0 * width, column + k0 * b_step)
        b = f.gep(self.b, offset)
        is_last = f.cmp("eq", p + 1, self.dim(Dim.PANELS))
        lanes = self.dim(Dim.LANES)
        columns = f.select(is_last, self.dim(Dim.LAST_LANES), lanes)
        # Only the last K block of panels that need no finish kernel goes to memory directly.
        direct = f.and_(self.last, f.cmp("slt", p, self.dim(Dim.FINISHED)))
        in_place = f.cmp("ne", b_step, 0)
        # partial sums fill whole tiles, but a B in place must not be read past its last column
        self.slot(Slot.COLUMNS, f.select(f.or_(direct, in_place), columns, lanes))
        flags = self.dim(Dim.FLAGS)
        self.slot(Slot.FLAGS, f.select(direct, flags, f.and_(flags, ALPHA)))
        used = self.dim(Dim.USED)
        null = f.zero("ptr")
        has_bias = f.and_(direct, f.cmp("ne", f.and_(used, 1), 0))
        self.slot(Slot.BIAS, f.select(has_bias, f.gep(self.buf(Buf.BIAS), column), null))
        has_residual = f.and_(direct, f.cmp("ne", f.and_(used, 2), 0))
        self.slot(Slot.OUT_STEP, f.select(direct, self.dim(Dim.OUT_ROW), width))
        large = f.select(is_wide, self.buf(Buf.MICRO), self.buf(Buf.MICRO + 2))
        small = f.select(is_wide, self.buf(Buf.MICRO + 1), self.buf(Buf.MICRO + 3))
        rows, large_rows = self.dim(Dim.ROWS), self.dim(Dim.LARGE_ROWS)
        apart = self.dim(Dim.WAITING)
        group = nth * self.dim(Dim.ROW_GROUP)
        a = f.gep(self.a, k0 * self.dim(Dim.A_K))
        finishes = f.and_(self.last, f.not_(direct))
        # While this panel is worked on, every row block fetches some lines of the one that comes next.
        coming = f.min_(
            p + f.select(f.cmp("slt", p + 1, self.p1), f.i64(1), self.dim(Dim.NEXT)), self.dim(Dim.PANELS) - 1
        )
        fetched = (coming * wide - f.max_(coming - wide_panels, 0) * vector_bytes) * self.dim(Dim.K)
        coming_at = f.gep(self.b, fetched + k0 * width)
        slice_ = self.dim(Dim.K_BLOCK) * 64
        most = self.dim(Dim.K_BLOCK) * width - slice_
        with f.loop(self.i0, self.i1) as i:
            is_large = f.cmp("slt", i, large_rows)
            row = i * rows - f.max_(i - large_rows, 0)
            waiting = f.gep(f.args["scratch"], (group + (i - self.i0)) * apart)
            out = f.gep(self.out, row * self.dim(Dim.OUT_ROW) + column)
            self.slot(Slot.OUT, f.select(direct, out, waiting))
            self.slot(Slot.PARTIAL, f.select(self.first, null, waiting))
            beside = f.gep(self.residual, row * self.dim(Dim.RESIDUAL_ROW) + column)
            self.slot(Slot.RESIDUAL, f.select(has_residual, beside, null))
            self.slot(Slot.FETCH, f.gep(coming_at, f.min_((i - self.i0) * slice_, most)))
            micro = f.select(is_large, large, small)
            f.call_pointer(micro, "void", [f.gep(a, row * self.dim(Dim.A_ROW)), b, self.control])
            with f.if_(finishes):
                first_column = f.div(column, self.dim(Dim.ITEM))
                here = f.select(is_large, rows, rows - 1)
                there = f.div(width, self.dim(Dim.ITEM))
                exist = f.min_(there, self.dim(Dim.COLUMNS) - first_column)
                for k, value in enumerate((row, first_column, here, exist, width)):
                    f.store(value, f.gep(self.place, k + 1, "i64"))
                operands = f.gep(f.args["bufs"], int(Buf.OPERANDS), "ptr")
                dims = f.gep(f.args["dims"], self.dim(Dim.FINISH_DIMS), "i64")
                f.call_pointer(self.buf(Buf.FINISH), "void", [operands, dims, waiting, self.out, self.place])
