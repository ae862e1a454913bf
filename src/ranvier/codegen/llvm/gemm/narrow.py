"""Products of bfloat16 by instructions that multiply them in pairs, and by tiles."""

from __future__ import annotations

import math
from dataclasses import replace

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, KernelSpec
from ranvier.codegen.llvm.amx import micro as amx
from ranvier.codegen.llvm.amx.pack import pack_dims, pack_rows, pack_spec, packed_bytes
from ranvier.codegen.llvm.amx.tiles import COLUMNS, LINE, ROWS
from ranvier.codegen.llvm.gemm.blocks import Blocks, Cut, Panels
from ranvier.codegen.llvm.gemm.epilogue import Finish, Simple, simple_form
from ranvier.codegen.llvm.gemm.pack import PackedB, pair_depth, panel_vectors
from ranvier.codegen.llvm.gemm.pairs import pack_pairs
from ranvier.codegen.llvm.gemm.plan import Matrix, Packer, Plan
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.gemm.tiles import rows_for
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_BF16 = DType.bfloat16
_WHOLE_K = 1280  # pairs up to which K is not cut: then no sums wait, and an operand stays near as far as it can
_K_BLOCK = 1024  # pairs of a K that is cut: sums come and go no more often …
_NEAR_K_BLOCK, _FEW_ROWS = 320, 64  # … but for so few rows a panel should stay in the nearest cache
_A_BYTES = 1 << 20  # rows of A in the second-level cache
_B_BYTES = 1 << 20  # panels of B that stay there instead, while rows of A pass …
_PANELS = 12  # … if they are so many that packing the rows for them costs little
_LEAST_NEAR = 64  # pairs of rows that are not packed for them
_MANY_BLOCKS = 8  # of rows, from which on every tile of work packs its own
_WAITING_BYTES = 8 << 20  # of sums, written and read in one piece each: so many panels meet the rows that stay
_PASSING_BYTES = 16 << 20  # of a result that is written past the caches, which would not keep it for its reader
_BLOCK_PANELS = 4  # panels of B from which on copying A pays


def _gains_from_blocks(p: Problem) -> bool:
    return -(-p.n // COLUMNS) >= _BLOCK_PANELS and p.m > 1


class PairPlan(Plan):
    """Two bfloat16 of A and of B at a time, B packed in pairs."""

    units = 2

    def __init__(self, problem: Problem, isa: Isa, threads: int) -> None:
        super().__init__(problem, isa, threads)
        self.stored = "pairs"
        self.b_item, self.group, self.rate = 4, 2, 2.0
        self.deep = self.p.b.deep if isinstance(self.p.b, PackedB) else pair_depth(self.p.k, isa)

    def with_rows(self, p: Problem) -> Problem:
        """A as bfloat16 with pairs that are contiguous, and whole."""
        readable = p.a.dtype is _BF16 and (p.a_strides[1] == 1 or p.k == 1)
        return p if readable and self.takes(p.k) else self.copied(p, _BF16, even=not self.takes(p.k))

    def with_columns(self, p: Problem) -> Problem:
        return p

    def takes(self, k: int) -> bool:
        """Whether rows of so many elements can be read."""
        return k % 2 == 0

    def a(self) -> Matrix:
        p = self.p
        self.by_rows = True
        return Matrix(At(p.a.storage, p.a.offset * self.a_item), p.a_strides[0], 1, tuple(x.a for x in p.batch))

    def b(self) -> Matrix:
        p = self.p
        self.packed = True
        if isinstance(p.b, PackedB):
            self.panels = p.b.panels
            self.rows = self.row_blocks()
            return Matrix(At(p.b.storage), 0, 0, tuple(x.b for x in p.batch))
        self.panels = Panels.of(p.n, self.lanes, panel_vectors(p.m, p.n, p.k, self.isa, self.item, True))
        self.rows = self.row_blocks()
        b = Matrix(At(p.b.storage), *p.b_strides, tuple(x.b for x in p.batch))
        target, table, strides = self.room(b, self.panels.packed_elements(self.deep), self.b_item)
        source = View(p.b.storage, p.b.dtype, (p.k, p.n), p.b_strides, p.b.offset)
        self.before += pack_pairs(source, self.panels, table, target, self.deep, self.isa, self.threads)
        return Matrix(At(target), 0, 0, strides)

    def row_blocks(self) -> Cut:
        return Cut.of(self.p.m, rows_for(self.isa, self.panels.cut.size))


class TilePlan(PairPlan):
    """The matrix unit: 32 x 32 sums at a time.

    One operand stays in the second-level cache, some rows of A or some panels of B, and the other one passes. What the
    passing one has for one call of the micro-kernel stays in the nearest cache until the next call.
    """

    def __init__(self, problem: Problem, isa: Isa, threads: int, *, packs: bool = True) -> None:
        """``packs``: whether a tile of work may pack its rows; else all are packed before."""
        super().__init__(problem, isa, threads)
        self.packs = packs
        self.near: amx.Near = ""
        self.rate = 8.0
        self.k_block = _NEAR_K_BLOCK if self.p.m <= _FEW_ROWS else _K_BLOCK
        if self.deep <= _WHOLE_K:
            self.k_block = self.deep
        self.a_bytes, self.waiting_bytes = _A_BYTES, _WAITING_BYTES
        self.rest = amx.rest_bytes(2 * self.p.k)

    def with_rows(self, p: Problem) -> Problem:
        self.blocks = _gains_from_blocks(p)
        if tuning.consulted() and p.m > 1:
            other = {"rows" if self.blocks else "blocks": not self.blocks}
            self.blocks = tuning.choose("product panels", p.key, self.blocks, lambda: other)
        if self.blocks:
            return p if p.a_strides[1] == 1 or p.k == 1 else self.copied(p, _BF16)
        return super().with_rows(p)

    def takes(self, k: int) -> bool:
        return True

    def a(self) -> Matrix:
        packs = self.blocks and self.packs and self.rows.count > _MANY_BLOCKS and self.deep <= _WHOLE_K
        if packs and self._rows_stay_as_they_lie():
            self.blocks, self.near = False, "a"
            self._fetch_rows()
            return super().a()
        self.lines = self._lines(-(-self.rows.count // self.threads) if packs else self.rows.count)
        self.fetched = amx.fetched_bytes(self.lines)
        if not self.blocks:
            return super().a()
        p, self.by_rows, self.rest, self.near = self.p, True, 0, "b"
        steps = self.deep // amx.STEP
        source = View(p.a.storage, p.a.dtype, (p.m, p.k), p.a_strides, p.a.offset)
        if packs:
            if self._rows_pass(packed_bytes(p.m, steps)):
                self.near = "a"
                self._fetch_rows()
            self.keeps = p.a.dtype is _BF16 and p.a_strides == (p.k, 1) and 2 * self.deep == p.k
            self.packer = Packer(pack_spec(p.a.dtype, _BF16), pack_dims(source, steps), packed_bytes(ROWS, steps))
            return replace(super().a(), row=4 * self.deep // self.a_item, column=2 * ROWS // self.a_item)
        target, table, strides = self.room(super().a(), packed_bytes(p.m, steps), 1)
        self.before.append(pack_rows(source, table, target, steps, _BF16))
        self.a_item = 2
        # blocks are as long as their rows; a step of K is a line of all of them
        return Matrix(At(target), 2 * self.deep, ROWS, tuple(s // 2 for s in strides))

    def _lines(self, blocks: int) -> int:
        """Of the next panel in every step, where so many ``blocks`` of rows stay, or those of them that can."""
        near = self.a_bytes // max(1, min(self.deep, self.k_block) * self.group * 2 * ROWS)
        return amx.lines_ahead(min(near, blocks))

    def _fetch_rows(self) -> None:
        """Where rows pass, the next block of them comes near while this one meets its panels: from the last-level cache
        a block takes as long to copy as it takes to multiply with several panels."""
        p = self.p
        row = p.k * self.a_item
        dense = p.a_strides == (p.k, 1)
        steps = self.deep // amx.STEP * self.groups(self.deep, 1, 0, 0.0)[1]
        lines = -(-ROWS * row // LINE // steps)
        self.lines = lines if dense and lines <= amx.LINES else 0
        self.next_rows = ROWS * row if self.lines else 0
        self.fetched = amx.fetched_bytes(self.lines)

    def _rows_stay_as_they_lie(self) -> bool:
        """Whether B stays near and a block of rows is one piece of memory that the nearest cache takes whole: then all
        panels but the first find it there, and copying it gains nothing. Temporaries start at lines, others may not."""
        p = self.p
        fits = p.a.dtype is _BF16 and not self.rest and _LEAST_NEAR <= self.deep <= amx.NEAR_STEPS * amx.STEP
        if not fits or p.a.storage.kind != "temp" or p.a_strides != (p.k, 1):
            return False
        starts = (p.a.offset, *(axis.a for axis in p.batch))
        return not any(2 * x % LINE for x in starts) and self._rows_pass(2 * p.m * p.k)

    def _rows_pass(self, packed: int) -> bool:
        """Whether B stays: it is small, or rows have to come again for other panels in any case."""
        panels = self._resident(_B_BYTES)
        return panels >= _PANELS and (panels == self.panels.cut.count or packed > self.a_bytes)

    def _resident(self, nbytes: int) -> int:
        """Panels of B that stay near while rows pass."""
        panel = self.deep * self.panels.cut.size * self.isa.vector_bytes
        return max(1, min(self.panels.cut.count, nbytes // max(1, panel)))

    def groups(
        self, k_block: int, k_blocks: int, tile_bytes: int, work: float, a_bytes: int | None = None
    ) -> tuple[int, int]:
        if self.near == "a":
            return 1, Cut.of(self.panels.cut.count, self._resident(a_bytes or _B_BYTES)).size
        if self.packer is None:
            return super().groups(k_block, k_blocks, tile_bytes, work, a_bytes)
        # threads have rows of their own, as they would have to pack the same ones otherwise
        near = max(1, (a_bytes or self.a_bytes) // self.packer.block)
        turns = -(-self.rows.count // (near * self.threads))
        row_group = -(-self.rows.count // (turns * self.threads))
        waiting = self.waiting_bytes if k_blocks > 1 else math.inf
        return row_group, max(1, int(min(self.panels.cut.count, waiting // (row_group * tile_bytes))))

    def row_blocks(self) -> Cut:
        return Blocks.of(self.p.m, ROWS)

    def depth_of_blocks(self, most: int) -> int:
        return amx.padded_groups(super().depth_of_blocks(most))

    def epilogue(self) -> tuple[Simple, Finish | None, int]:
        """Sums that are only rounded need no finish kernel: that is done while the next ones are made."""
        p = self.p
        plain = p.alpha == 1.0 and simple_form(p.epilogue, p.dtype) == Simple()
        self.rounds = bool(self.near) and plain and p.out.dtype is _BF16 and p.out_strides[1] == 1
        size = p.entries * p.m * p.n * p.out.dtype.numpy.itemsize
        self.passes = bool(self.near) and p.out.dtype is DType.float32 and size >= _PASSING_BYTES
        return (Simple(), None, self.panels.cut.count) if self.rounds else super().epilogue()

    def micro_kernels(self) -> tuple[KernelSpec, ...]:
        wide, narrow = (each.spec() for each in self._micro_kernels())
        return wide, wide, narrow, narrow

    def packing_kernels(self) -> tuple[KernelSpec, ...]:
        if not self.keeps:
            return super().packing_kernels()
        return tuple(replace(each, a="rows", keeps=True).spec() for each in self._micro_kernels())

    def _micro_kernels(self) -> tuple[amx.TileMicro, ...]:
        """Of wide and narrow panels."""
        cut = self.panels.cut
        layout: amx.Layout = "blocks" if self.blocks else "rows"
        widths = cut.size, max(1, cut.size - 1)
        apart = isinstance(self.p.b, PackedB) and self.p.b.apart
        return tuple(
            amx.TileMicro(_BF16, _BF16, v, layout, self.lines, self.near, apart and v == cut.size, self.rounds)
            for v in widths
        )
