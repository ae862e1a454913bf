"""Matrix products as launches: which blocks, what is packed, how the work is cut into tiles."""

from __future__ import annotations

import math
from dataclasses import replace

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.control import ALPHA, CLAMP, PASSING, ROUND, number_bits
from ranvier.codegen.llvm.gemm.blocks import TILE_US, Cut, Panels, best_tile, grain, microseconds
from ranvier.codegen.llvm.gemm.driver import Buf, Dim, driver_spec
from ranvier.codegen.llvm.gemm.epilogue import Finish, Simple, finish, place_of, simple_form
from ranvier.codegen.llvm.gemm.micro import NARROW_STORED, Layout, Micro, Stored
from ranvier.codegen.llvm.gemm.pack import PackedB, pack_launch
from ranvier.codegen.llvm.gemm.pairs import Batch, converted
from ranvier.codegen.llvm.gemm.problem import ELEMENTS, Problem
from ranvier.codegen.llvm.gemm.tiles import Tile, rows_for, tiles
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.turning import slices
from ranvier.codegen.loops.ir import Operand
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_K_BLOCK = 1024  # k steps whose panel of B and rows of A share the second-level cache
_A_BYTES = 768 << 10  # rows of A that a tile keeps in the second-level cache
_OTHER_K_BLOCKS, _OTHER_A_BYTES = (256, 512, 2048), (128 << 10, 384 << 10, 1536 << 10)  # what tuning tries
_SHARED_BYTES = 1 << 20  # columns of B that every thread keeps in its second-level cache
_OWN_BLOCKS = 8  # of rows for each thread, so that all have about as much to do
_WAITING_BYTES = 256 << 10  # partial sums that wait for the next K block
_NEAR_BYTES = 256 << 10  # a B this small is read in place: it is in a near cache after the first rows
_FEW_ROWS = 256  # up to here reading B in place costs less than packing it, if its rows do not collide in the cache
_FAR_BYTES = 16 << 10  # rows of B this far apart cost more to reach than to read
_LONG_BYTES = 1 << 10  # of such a row that one pass takes
_APART_BYTES, _APART_COLUMNS = 2 << 10, 256  # columns of A so far apart and so many are lost before the next rows come
_WIDENED_ROWS = 48  # with more, a B of 16 bits is widened once and not by every use
_WAY_BYTES, _WAYS = 128 << 10, 16  # of the second-level cache


@dataclass(frozen=True)
class Matrix:
    """An operand as the driver reads it, strides in elements."""

    at: At
    row: int
    column: int
    batch: tuple[int, ...]  # stride per batch axis


@dataclass(frozen=True)
class Packer:
    """A kernel that packs the row blocks of one entry of A, its numbers, and the bytes that a block comes to."""

    spec: KernelSpec
    dims: tuple[int, ...]
    block: int


class Plan:
    """Decisions for one product. A B of 16 bits is widened by the micro-kernel."""

    rest = 0  # bytes of A in the last step of K, of micro-kernels that work with tiles
    units = 1  # elements of B in what counts as one
    fetched = 64  # bytes of the next panel that a micro-kernel fetches per step of K
    packer: Packer | None = None  # of rows, for every tile of work by itself
    keeps = False  # whether rows are packed by micro-kernels that meet them first
    next_rows = 0  # bytes of a block of rows, where the next one is fetched and not a panel
    rounds = False  # whether the micro-kernel stores results in 16 bits
    passes = False  # whether what it stores goes past the caches

    def __init__(self, problem: Problem, isa: Isa, threads: int) -> None:
        self.isa, self.threads = isa, threads
        self.item = problem.dtype.numpy.itemsize  # of sums
        self.lanes = isa.lanes(self.item)
        self.before: list[Launch] = []
        self.p = p = self.with_columns(self.with_rows(problem))
        self.a_item, self.b_item = (x.dtype.numpy.itemsize for x in (p.a, p.b))
        self.stored: Stored = NARROW_STORED.get(p.b.dtype, "")
        self.deep = p.k  # steps of the micro-kernel along K …
        self.group = 1  # … and elements of A in each
        self.rate = 1.0  # operations in the time of one of float32's
        self.k_block, self.a_bytes, self.waiting_bytes = _K_BLOCK, _A_BYTES, _WAITING_BYTES

    def with_rows(self, p: Problem) -> Problem:
        """The product with an A that the micro-kernel can read: in the type of the sums."""
        if p.a.dtype is p.dtype:
            return p
        return self.copied(p, p.dtype)

    def with_columns(self, p: Problem) -> Problem:
        """A B of 16 bits that many rows would have to widen is widened once."""
        if not isinstance(p.b, View) or p.b.dtype is p.dtype or p.m <= _WIDENED_ROWS:
            return p
        outer = [axis for axis in p.batch if axis.b]
        lying = p.b_strides[0] == 1 and p.n > 1  # along K in memory: so it stays
        inner = ((p.n, p.k), p.b_strides[::-1]) if lying else ((p.k, p.n), p.b_strides)
        shape = (*(axis.extent for axis in outer), *inner[0])
        source = View(p.b.storage, p.b.dtype, shape, (*(axis.b for axis in outer), *inner[1]), p.b.offset)
        copy, launches = converted(source, p.dtype, self.isa, self.threads)
        self.before += launches
        steps = iter(copy.strides[:-2])
        batch = tuple(replace(axis, b=next(steps) if axis.b else 0) for axis in p.batch)
        return replace(p, b=copy, b_strides=(1, p.k) if lying else (p.n, 1), batch=batch)

    def copied(self, p: Problem, dtype: DType, *, even: bool = False) -> Problem:
        """The product with a dense copy of A; entries that broadcasting repeats are copied once."""
        outer = [axis for axis in p.batch if axis.a]
        shape = (*(axis.extent for axis in outer), p.m, p.k)
        source = View(p.a.storage, p.a.dtype, shape, (*(axis.a for axis in outer), *p.a_strides), p.a.offset)
        copy, launches = converted(source, dtype, self.isa, self.threads, even=even)
        self.before += launches
        steps = iter(copy.strides[:-2])
        batch = tuple(replace(axis, a=next(steps) if axis.a else 0) for axis in p.batch)
        return replace(p, a=copy, a_strides=(copy.strides[-2], 1), batch=batch)

    def launches(self) -> list[Launch]:
        b = self.b()
        multiply = self._multiply(self.a(), b)
        return [*self.before, multiply]

    # -- operands ---------------------------------------------------------------------------------------------------

    def b(self) -> Matrix:
        """B as the micro-kernels read it; settles panels and rows."""
        p = self.p
        if isinstance(p.b, PackedB):
            self.panels = p.b.panels
            self.rows: Cut = Cut.of(p.m, self.most_rows(self.panels.cut.size))
            self.packed = True
            return Matrix(At(p.b.storage), 0, 0, tuple(x.b for x in p.batch))
        tile = self._tile()
        self.panels = Panels.of(p.n, self.lanes, tile.vectors)
        self.rows = Cut.of(p.m, tile.strided_rows)
        b = Matrix(At(p.b.storage, p.b.offset * self.b_item), *p.b_strides, tuple(x.b for x in p.batch))
        self.packed = not self._stays_in_place(b)
        if tuning.consulted() and self._can_stay(b):
            other = {"in place" if self.packed else "packed": not self.packed}
            self.packed = tuning.choose("product way", p.key, self.packed, lambda: other)
        far = abs(b.row) * self.b_item >= _FAR_BYTES or self.isa.streams == 1
        if not self.packed and self.rows.count == 1 and far:
            # every k step is in other pages, or leaves the only stream memory follows: take much of a row while there
            vectors = min(_LONG_BYTES // self.isa.vector_bytes, (self.isa.registers - 8) // p.m)
            self.panels = Panels.of(p.n, self.lanes, max(tile.vectors, vectors))
        return self._rearranged(p.b, b, (p.k, p.n), self.panels, self.b_item) if self.packed else b

    def most_rows(self, vectors: int) -> int:
        """Of a micro-kernel on panels of this width."""
        return rows_for(self.isa, vectors)

    def _tile(self) -> Tile:
        p = self.p
        found = best_tile(p.m, p.n, p.k, self.isa, self.item)
        return tuning.choose(
            "product panels", p.key, found, lambda: {f"{t.rows} x {t.vectors}": t for t in tiles(self.isa)}
        )

    def _can_stay(self, b: Matrix) -> bool:
        """Whether the micro-kernels can read B where it is."""
        p = self.p
        if (b.column != 1 and p.n > 1) or (b.row == 0 and p.k > 1):
            return False
        return self.isa.masks or p.n % self.lanes == 0

    def _stays_in_place(self, b: Matrix) -> bool:
        """Whether they do."""
        p = self.p
        if not self._can_stay(b):
            return False
        step = abs(b.row) * self.b_item
        if self.rows.count <= 2 or step * p.k <= _NEAR_BYTES:
            return True
        # Rows of a panel that fall into the same cache sets push each other out between two uses of the panel.
        held = _WAYS * (_WAY_BYTES // math.gcd(step, _WAY_BYTES))
        return p.m <= _FEW_ROWS and 2 * p.k <= held

    def a(self) -> Matrix:
        """A with rows or columns that are contiguous."""
        p = self.p
        a = Matrix(At(p.a.storage, p.a.offset * self.a_item), *p.a_strides, tuple(x.a for x in p.batch))
        self.by_rows = a.column == 1 or p.k <= 1
        # columns do as well as rows where they stay near, or are read but once or twice and not from pages far apart
        step = abs(a.column) * self.a_item
        read_along = step < _APART_BYTES or p.k <= _APART_COLUMNS
        near = (self.panels.cut.count <= 2 and read_along) or step * p.k <= _NEAR_BYTES
        if self.by_rows or ((a.row == 1 or p.m == 1) and near):
            return a
        self.by_rows = True
        whole = Panels(p.k, self.lanes, Cut(-(-p.k // self.lanes), 1))  # one panel: a row is contiguous
        packed = self._rearranged(p.a, a, (p.m, p.k), whole, self.a_item)
        return Matrix(packed.at, whole.cut.total * self.lanes, 1, packed.batch)

    def _rearranged(self, view: View, matrix: Matrix, shape: tuple[int, int], panels: Panels, item: int) -> Matrix:
        """A matrix packed at run time."""
        size = panels.packed_elements(shape[0])
        if not size:  # nothing to read: K is 0
            return Matrix(matrix.at, 0, 0, (0,) * len(matrix.batch))
        target, table, strides = self.room(matrix, size, item)
        source = View(view.storage, view.dtype, shape, (matrix.row, matrix.column), view.offset)
        self.before.append(pack_launch(source, panels, table, target))
        return Matrix(At(target), 0, 0, strides)

    def room(self, matrix: Matrix, size: int, item: int) -> tuple[Storage, Batch, tuple[int, ...]]:
        """Memory for packed matrices of ``size`` elements; entries that broadcasting repeats are packed once.

        Returns it, the table of batch axes for the packing, and the strides between packed entries.
        """
        strides: list[int] = []
        table: list[tuple[int, int, int]] = []
        entries = 1
        for axis, stride in zip(reversed(self.p.batch), reversed(matrix.batch)):
            strides.append(entries * size if stride else 0)
            if stride:
                table.append((axis.extent, stride, entries * size))
                entries *= axis.extent
        target = Storage.temporary(entries * size * item, "packed")
        return target, tuple(reversed(table)), tuple(reversed(strides))

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _multiply(self, a: Matrix, b: Matrix) -> Launch:
        p, item, rows, panels = self.p, self.item, self.rows, self.panels
        wide = panels.cut.size * self.isa.vector_bytes
        deep = self.deep
        k_block = tuning.choose("product depth", p.key, self.depth_of_blocks(self.k_block), self._other_depths)
        k_blocks = -(-deep // k_block) if deep else 1
        tile_bytes = rows.size * wide
        flops = 2.0 * p.m * p.n * p.k * p.entries
        out_item, weights = p.out.dtype.numpy.itemsize, p.k * p.n * self.b_item // self.units
        traffic = 1.0 * (self.a_item * p.m * p.k + weights + out_item * p.m * p.n) * p.entries
        work = microseconds(flops / (self.rate * self.isa.pace), weights * p.entries)
        usual = self.groups(k_block, k_blocks, tile_bytes, work)
        sizes = {f"{size >> 10} KB of A": size for size in _OTHER_A_BYTES}
        row_group, panel_group = tuning.choose(
            "product blocks",
            p.key,
            usual,
            lambda: {name: self.groups(k_block, k_blocks, tile_bytes, work, size) for name, size in sizes.items()},
        )
        row_groups, panel_groups = -(-rows.count // row_group), -(-panels.cut.count // panel_group)
        count = p.entries * row_groups * panel_groups
        simple, done, direct = self.epilogue()
        waiting = tile_bytes if k_blocks > 1 else 0
        scratch = tile_bytes if direct < panels.cut.count or waiting else 0
        if waiting:
            scratch *= row_group * panel_group
        packer, packed = self.packer, scratch
        if packer is not None:
            scratch += packer.block * row_group
        table = self._batch_table(a, b, simple.residual)
        finish_dims, finish_buffers = (done.dims, done.buffers) if done else ((), ())
        numbers = {
            Dim.ROW_BLOCKS: rows.count,
            Dim.ROWS: rows.size,
            Dim.LARGE_ROWS: rows.large,
            Dim.PANELS: panels.cut.count,
            Dim.WIDE: wide,
            Dim.WIDE_PANELS: panels.cut.large,
            Dim.COLUMNS: p.n,
            Dim.LANES: self.lanes,
            Dim.LAST_LANES: panels.last_lanes,
            Dim.K: deep,
            Dim.K_BLOCK: k_block,
            Dim.ROW_GROUP: row_group,
            Dim.PANEL_GROUP: panel_group,
            Dim.ROW_GROUPS: row_groups,
            Dim.PANEL_GROUPS: panel_groups,
            Dim.A_ROW: a.row * self.a_item,
            Dim.A_K: a.column * self.a_item * self.group,
            Dim.A_STEP: (a.row if self.by_rows else a.column) * self.a_item,
            Dim.B_STEP: 0 if self.packed else (b.row or p.n) * self.b_item,
            Dim.OUT_ROW: p.out_strides[0] * (out_item if self.rounds else item),
            Dim.RESIDUAL_ROW: simple.residual.strides[1] * item if simple.residual else 0,
            Dim.FLAGS: (ALPHA if p.alpha != 1.0 else 0)
            | (CLAMP if simple.clamps else 0)
            | (ROUND if self.rounds else 0)
            | (PASSING if self.passes else 0),
            Dim.ALPHA: number_bits(p.alpha, item),
            Dim.LOW: number_bits(simple.low, item),
            Dim.HIGH: number_bits(simple.high, item),
            Dim.FINISHED: direct,
            Dim.ITEM: item,
            Dim.USED: (1 if simple.bias else 0) | (2 if simple.residual else 0),
            Dim.FINISH_DIMS: Dim.BATCH + len(table),
            Dim.WAITING: waiting,
            Dim.NEXT: 1 + (self.threads - 1) * panel_group,
            Dim.SMALL_ROWS: rows.small,
            Dim.REST: self.rest,
            Dim.B_SHIFT: int(self.b_item < item),
            Dim.FETCHED: self.fetched,
            Dim.PACKER: Buf.OPERANDS + len(finish_buffers) if packer else 0,
            Dim.PACKED: packed,
            Dim.PACK_DIMS: Dim.BATCH + len(table) + len(finish_dims),
            Dim.NEXT_ROWS: self.next_rows,
            Dim.KEEPS: int(self.keeps),
            Dim.RANK: len(p.batch),
        }
        micro = self.micro_kernels()
        absent = a.at
        return Launch(
            driver_spec(),
            (
                *(a.at, b.at, At.of(p.out)),
                place_of(simple.bias) if simple.bias else absent,
                place_of(simple.residual) if simple.residual else absent,
                *(Code(each) for each in micro),
                Code(done.spec if done else micro[0]),
                *finish_buffers,
                *(Code(each) for each in self.packing_kernels()),
            ),
            (
                *(numbers[each] for each in Dim if each in numbers),
                *(*table, *finish_dims, *(packer.dims if packer else ())),
            ),
            tiles=count,
            writes=(p.out.storage,),
            grain=grain(count, work, self.threads),
            scratch=scratch,
            flops=flops,
            traffic=traffic,
            label="matmul",
            rate=self.rate,
        )

    def depth_of_blocks(self, most: int) -> int:
        """Steps of K that are taken at a time."""
        if self.rows.count > 1 and self.deep > most * 5 // 4:
            return -(-self.deep // -(-self.deep // most))
        return self.deep

    def _other_depths(self) -> dict[str, int]:
        return {f"at most {most}": self.depth_of_blocks(most) for most in _OTHER_K_BLOCKS}

    def groups(
        self, k_block: int, k_blocks: int, tile_bytes: int, work: float, a_bytes: int | None = None
    ) -> tuple[int, int]:
        """Row blocks and panels of a tile of work: what stays near, and enough tiles for all threads."""
        p, rows, panels = self.p, self.rows, self.panels.cut
        near = max(1, (a_bytes or self.a_bytes) // max(1, k_block * self.group * self.a_item * rows.size))
        row_group = Cut.of(rows.count, near).size
        panel_group = panels.count
        if k_blocks > 1:
            panel_group = max(1, min(panel_group, self.waiting_bytes // (row_group * tile_bytes)))
        if self.threads > 1:
            wanted = max(1, min(math.floor(work / TILE_US), 8 * self.threads))
            others = p.entries * -(-panels.count // panel_group)
            if a_bytes is None and self._rows_apart(k_block, rows.count * others):  # what tuning tries is cut otherwise
                return min(row_group, max(1, -(-rows.count * others // wanted))), panel_group
            others = p.entries * -(-rows.count // row_group)
            panel_group = min(panel_group, max(1, panels.count * others // wanted))
            others = p.entries * -(-panels.count // panel_group)
            row_group = min(row_group, max(1, rows.count * others // wanted))
        elif rows.count == p.entries == 1 and isinstance(p.b, PackedB):
            panel_group = min(panel_group, -(-panels.count // slices(p.b.nbytes, self.isa)))
        return row_group, panel_group

    def _rows_apart(self, k_block: int, blocks: int) -> bool:
        """Whether threads have rows of their own and all columns: then rows of A that a step before made the same way
        are in the cache of the core that needs them. Each reads all of B for it, so that has to stay near, too."""
        columns = k_block * self.group * self.p.n * self.b_item // self.units
        return columns <= _SHARED_BYTES and blocks >= _OWN_BLOCKS * self.threads

    def epilogue(self) -> tuple[Simple, Finish | None, int]:
        """What the micro-kernel does, the finish kernel for the rest, and the first panel that needs it."""
        p, panels = self.p, self.panels.cut.count
        simple = simple_form(p.epilogue, p.dtype)
        if p.out.dtype is not p.dtype or (p.out_strides[1] != 1 and p.n > 1):
            simple = None
        direct = panels
        if simple is None:
            simple, direct = Simple(), 0
        elif not self.isa.masks and p.n % self.lanes:
            direct = panels - 1
        if direct == panels:
            return simple, None, direct
        return simple, finish(p.epilogue, p.dtype, p.out.dtype, p.out_strides), direct

    def packing_kernels(self) -> tuple[KernelSpec, ...]:
        """The one that packs rows, or micro-kernels of wide and narrow panels that do; none where nobody does."""
        return (self.packer.spec,) if self.packer else ()

    def _batch_table(self, a: Matrix, b: Matrix, residual: Operand | None) -> list[int]:
        """(extent, bytes between entries of a, b, out, residual) per batch axis."""
        table: list[list[int]] = []
        beside = residual.strides[0] * self.item if residual else 0
        out_item = self.p.out.dtype.numpy.itemsize
        for k in range(len(self.p.batch) - 1, -1, -1):
            axis = self.p.batch[k]
            table.append([axis.extent, a.batch[k] * self.a_item, b.batch[k] * self.b_item, axis.out * out_item, beside])
            beside *= axis.extent
        return [x for each in reversed(table) for x in each]

    def micro_kernels(self) -> tuple[KernelSpec, ...]:
        """Large and small row blocks of wide panels, then of narrow ones; what does not occur repeats another."""
        rows = [self.rows.size, self.rows.small if self.rows.large < self.rows.count else self.rows.size]
        cut = self.panels.cut
        widths = [cut.size, cut.size - 1 if cut.large < cut.count else cut.size]
        layout: Layout = "rows" if self.by_rows else "columns"
        return tuple(self.micro(r, v, layout) for v in widths for r in rows)

    def micro(self, rows: int, vectors: int, layout: Layout) -> KernelSpec:
        return Micro(ELEMENTS[self.p.dtype], rows, vectors, layout, self.packed, self.stored).spec()
