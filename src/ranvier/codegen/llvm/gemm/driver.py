"""The driver kernel: walks the tiles of a blocked product and calls micro-kernels through pointers.

One driver serves every type, shape, layout and epilogue: all of that is in its arguments, so it is compiled once per
machine. A tile is a group of row blocks times a group of panels of one batch entry. Inside, K blocks are outermost
(their partial sums wait in scratch, one dense block per micro-tile), then panels, then row blocks, so that a panel of B
is read from a near cache by all rows. Rows that micro-kernels want in another order may be packed into scratch first,
by a kernel that is called as if it were launched, or by the micro-kernel that meets them first: then they never leave
the caches.
"""

from __future__ import annotations

from enum import IntEnum

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.amx.later import BLOCK, COLLIDING, WORTH_GROUPS, Later, settle
from ranvier.codegen.llvm.amx.tiles import release
from ranvier.codegen.llvm.builder import Fn, Module, Operand, Val, Var
from ranvier.codegen.llvm.control import (
    ALPHA,
    PASSING,
    ROUND,
    SLOTS,
    Launched,
    Slot,
    batch_offsets,
    quotient,
    read_slot,
    write_slot,
)
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType


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
    SMALL_ROWS = 31  # rows of a small block
    REST = 32  # bytes of A in the last step of K, for micro-kernels that work with tiles
    B_SHIFT = 33  # 1 where elements of B are half as wide as those of the sums
    FETCHED = 34  # bytes of the next panel that a micro-kernel brings near per step of K
    PACKER = 35  # position in bufs of a kernel that packs the rows of a tile, 0 where they are read as they are
    PACKED = 36  # where in scratch it puts them
    PACK_DIMS = 37  # position in dims of its numbers
    NEXT_ROWS = 38  # of a block of rows, where the next of them is brought near and not the next panel; else 0
    KEEPS = 39  # 1 where two micro-kernels pack the rows instead, of wide and narrow panels, as they meet them first
    RANK = 40  # batch axes
    BATCH = 41  # extent, then strides of a, b, out, residual, per axis


def driver_spec() -> KernelSpec:
    return KernelSpec("gemm driver", ("gemm driver", 8), _emit)


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    _emit_rows(module, f"{symbol}_rows")
    _Driver(module.kernel(symbol, optimized=False), isa, f"{symbol}_rows").emit()


class _Driver(Launched):
    """What happens once per panel; the loop over its row blocks is :func:`_emit_rows`."""

    def __init__(self, fn: Fn, isa: Isa, rows: str) -> None:
        super().__init__(fn)
        self.isa, self.rows = isa, rows
        self.tiled = isa.has("amx-tile")
        self.control = fn.stack("i64", SLOTS)
        self.place = fn.stack("i64", 6)
        self.packing = fn.stack("ptr", 2)  # from where to where

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
        self.slot(Slot.TILES, 0)
        if self.tiled:
            self.slot(Slot.LATER, f.stack("i8", BLOCK))
            self.slot(Slot.LATER_OUT, 0)
        row_groups, panel_groups = self.dim(Dim.ROW_GROUPS), self.dim(Dim.PANEL_GROUPS)
        row_group, panel_group = self.dim(Dim.ROW_GROUP), self.dim(Dim.PANEL_GROUP)
        packed = f.var("i64", -1)  # the rows that scratch has
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            above = quotient(f, tile, row_groups)
            # every other group of panels has the rows the other way round: it finds the last ones near
            nth = tile - above * row_groups
            forth = f.cmp("eq", f.and_(above, 1), 0)
            i0 = f.select(forth, nth, row_groups - 1 - nth) * row_group
            self.i0, self.i1 = i0, f.min_(i0 + row_group, self.dim(Dim.ROW_BLOCKS))
            batch = quotient(f, above, panel_groups)
            p0 = (above - batch * panel_groups) * panel_group
            p1 = f.min_(p0 + panel_group, self.dim(Dim.PANELS))
            offsets = batch_offsets(f, self.dim, batch, Dim.RANK, Dim.BATCH, 4)
            self.source = rows = f.gep(self.buf(Buf.A), offsets[0])
            self.a = self._rows_of(rows, batch, packed)
            following = f.select(forth, f.min_(self.i1, self.dim(Dim.ROW_BLOCKS) - 1), f.max_(i0 - 1, 0))
            self.next_rows = f.gep(rows, following * self.dim(Dim.NEXT_ROWS))
            self.b = f.gep(self.buf(Buf.B), offsets[1])
            self.out = f.gep(self.buf(Buf.OUT), offsets[2])
            self.residual = f.gep(self.buf(Buf.RESIDUAL), offsets[3])
            f.store(batch, self.place)
            self.p1 = p1
            self._tile(p0, p1)
        if self.tiled:
            with f.if_else(f.cmp("ne", f.and_(self.dim(Dim.FLAGS), ROUND), 0)) as otherwise:
                Later(f, self.isa, self.control, DType.bfloat16).all()
                otherwise()
                Later(f, self.isa, self.control).all()
            with f.if_(f.cmp("ne", f.and_(self.dim(Dim.FLAGS), PASSING), 0)):
                settle(f)
            with f.if_(f.cmp("ne", read_slot(f, self.control, Slot.TILES), 0)):
                release(f)
        f.ret()

    def _rows_of(self, a: Val, batch: Val, packed: Var) -> Val:
        """A for the tile: as it is, or as if all of it were packed and these rows of it in scratch."""
        f = self.fn
        found = f.var("ptr", a)
        packer = self.dim(Dim.PACKER)
        self.unpacked = f.var("i1", f.const("i1", 0))
        with f.if_(f.cmp("ne", packer, 0)):
            back = self.dim(Dim.PACKED) - self.i0 * self.dim(Dim.ROWS) * self.dim(Dim.A_ROW)
            # not "inbounds", which gep says: there is nothing where it leads
            there = f.emit("ptr", f"getelementptr i8, ptr {f.args['scratch'].name}, i64 {back.name}")
            found.set(there)
            rows = batch * self.dim(Dim.ROW_BLOCKS) + self.i0
            with f.if_(f.cmp("ne", packed.get(), rows)):
                packed.set(rows)
                self.unpacked.set(f.cmp("ne", self.dim(Dim.KEEPS), 0))
                with f.if_(f.not_(self.unpacked.get())):
                    f.store(a, self.packing)
                    f.store(there, f.gep(self.packing, 1, "ptr"))
                    pack = f.load("ptr", f.gep(f.args["bufs"], packer, "ptr"))
                    dims = f.gep(f.args["dims"], self.dim(Dim.PACK_DIMS), "i64")
                    f.call_pointer(pack, "void", [self.packing, dims, self.i0, self.i1, f.args["scratch"]])
        return found.get()

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
            self.slot(Slot.REST, f.select(self.last, self.dim(Dim.REST), 0))
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
        narrower = self.dim(Dim.B_SHIFT)
        before = f.ashr(column * self.dim(Dim.K) + k0 * width, narrower)
        offset = f.select(packed, before, f.ashr(column, narrower) + k0 * b_step)
        b = f.gep(self.b, offset)
        is_last = f.cmp("eq", p + 1, self.dim(Dim.PANELS))
        lanes = self.dim(Dim.LANES)
        columns = f.select(is_last, self.dim(Dim.LAST_LANES), lanes)
        # Only the last K block of panels that need no finish kernel goes to memory directly.
        direct = f.and_(self.last, f.cmp("slt", p, self.dim(Dim.FINISHED)))
        in_place = f.cmp("ne", b_step, 0)
        if self.tiled:
            collide = f.cmp("eq", f.and_(self.dim(Dim.OUT_ROW), COLLIDING - 1), 0)
            rounds = f.cmp("ne", f.and_(self.dim(Dim.FLAGS), ROUND), 0)
            long = f.cmp("sge", self.dim(Dim.K_BLOCK), WORTH_GROUPS)
            worth = f.and_(f.or_(collide, rounds), long)
            self.slot(Slot.DEFERS, f.cast(f.and_(direct, worth), "i64", signed=False))
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
        waiting = f.gep(f.args["scratch"], nth * self.dim(Dim.ROW_GROUP) * self.dim(Dim.WAITING))
        a = f.gep(self.a, k0 * self.dim(Dim.A_K))
        # Rows that are to be packed by the panel that meets them first: they lie as far apart as they will.
        meets = f.and_(self.unpacked.get(), f.cmp("eq", nth, 0))
        keeper = self.dim(Dim.PACKER) + f.select(is_wide, f.i64(0), f.i64(1))
        keeps = f.load("ptr", f.gep(f.args["bufs"], keeper, "ptr"))
        large, small = (f.select(meets, keeps, each) for each in (large, small))
        kept, a = a, f.select(meets, self.source, a)
        finishes = f.and_(self.last, f.not_(direct))
        # While this panel is worked on, every row block fetches some lines of the one that comes next.
        coming = f.min_(
            p + f.select(f.cmp("slt", p + 1, self.p1), f.i64(1), self.dim(Dim.NEXT)), self.dim(Dim.PANELS) - 1
        )
        fetched = (coming * wide - f.max_(coming - wide_panels, 0) * vector_bytes) * self.dim(Dim.K)
        coming_at = f.gep(self.b, f.ashr(fetched + k0 * width, narrower))
        # Or every panel fetches its share of the rows that come next.
        share = f.gep(self.next_rows, nth * self.dim(Dim.K_BLOCK) * self.dim(Dim.FETCHED))
        coming_at = f.select(f.cmp("ne", self.dim(Dim.NEXT_ROWS), 0), share, coming_at)
        given = {
            "control": self.control,
            "place": self.place,
            "large": large,
            "small": small,
            "a": a,
            "kept": kept,
            "b": b,
            "out": self.out,
            "residual": self.residual,
            "coming": coming_at,
            "waiting": waiting,
            "i0": self.i0,
            "i1": self.i1,
            "column": column,
            "width": width,
            "direct": direct,
            "first": self.first,
            "has_residual": has_residual,
            "finishes": finishes,
        }
        shared = (f.args[name] for name in ("bufs", "dims"))
        f.call(self.rows, "void", [*shared, *(given[name] for _, name in _ROWS)])


_ROWS = (
    *(("ptr", name) for name in ("control", "place", "large", "small")),
    *(("ptr", name) for name in ("a", "kept", "b", "out", "residual", "coming", "waiting")),
    *(("i64", name) for name in ("i0", "i1", "column", "width")),
    *(("i1", name) for name in ("direct", "first", "has_residual", "finishes")),
)


def _emit_rows(module: Module, name: str) -> None:
    """All row blocks of a tile against a panel: the part that runs often enough to be optimized."""
    f = module.function(name, [("ptr", "bufs"), ("ptr", "dims"), *_ROWS], internal=True)
    at, given = Launched(f), f.args
    rows, large_rows, apart = at.dim(Dim.ROWS), at.dim(Dim.LARGE_ROWS), at.dim(Dim.WAITING)
    small_rows = at.dim(Dim.SMALL_ROWS)
    a_row, out_row, residual_row = at.dim(Dim.A_ROW), at.dim(Dim.OUT_ROW), at.dim(Dim.RESIDUAL_ROW)
    slice_ = at.dim(Dim.K_BLOCK) * at.dim(Dim.FETCHED)
    most = at.dim(Dim.K_BLOCK) * given["width"] - slice_
    narrower = f.cast(f.cmp("ne", f.and_(at.dim(Dim.FLAGS), ROUND), 0), "i64", signed=False)
    null = f.zero("ptr")

    def slot(number: Slot, value: Val) -> None:
        write_slot(f, given["control"], number, value)

    with f.loop(given["i0"], given["i1"]) as i:
        nth = i - given["i0"]
        is_large = f.cmp("slt", i, large_rows)
        row = i * rows - f.max_(i - large_rows, 0) * (rows - small_rows)
        here = f.select(is_large, rows, small_rows)
        slot(Slot.ROWS, here)
        slot(Slot.KEPT, f.gep(given["kept"], row * a_row))
        waiting = f.gep(given["waiting"], nth * apart)
        out = f.gep(given["out"], row * out_row + f.ashr(given["column"], narrower))
        slot(Slot.OUT, f.select(given["direct"], out, waiting))
        slot(Slot.PARTIAL, f.select(given["first"], null, waiting))
        beside = f.gep(given["residual"], row * residual_row + given["column"])
        slot(Slot.RESIDUAL, f.select(given["has_residual"], beside, null))
        slot(Slot.FETCH, f.gep(given["coming"], f.min_(nth * slice_, most)))
        micro = f.select(is_large, given["large"], given["small"])
        f.call_pointer(micro, "void", [f.gep(given["a"], row * a_row), given["b"], given["control"]])
        with f.if_(given["finishes"]):
            item = at.dim(Dim.ITEM)
            first_column = f.div(given["column"], item)
            exist = f.min_(f.div(given["width"], item), at.dim(Dim.COLUMNS) - first_column)
            for k, value in enumerate((row, first_column, here, exist, given["width"])):
                f.store(value, f.gep(given["place"], k + 1, "i64"))
            operands = f.gep(given["bufs"], int(Buf.OPERANDS), "ptr")
            dims = f.gep(given["dims"], at.dim(Dim.FINISH_DIMS), "i64")
            f.call_pointer(at.buf(Buf.FINISH), "void", [operands, dims, waiting, given["out"], given["place"]])
    f.ret()
