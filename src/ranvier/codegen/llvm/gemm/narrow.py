"""Products of bfloat16 by instructions that multiply them in pairs, and by tiles."""

from __future__ import annotations

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, KernelSpec
from ranvier.codegen.llvm.amx import micro as amx
from ranvier.codegen.llvm.amx.pack import pack_rows, packed_bytes
from ranvier.codegen.llvm.amx.tiles import COLUMNS, ROWS
from ranvier.codegen.llvm.gemm.blocks import Blocks, Cut, Panels
from ranvier.codegen.llvm.gemm.pack import PackedB, pair_depth, panel_vectors
from ranvier.codegen.llvm.gemm.pairs import pack_pairs
from ranvier.codegen.llvm.gemm.plan import Matrix, Plan
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.gemm.tiles import rows_for
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_BF16 = DType.bfloat16
_K_BLOCK = 320  # pairs: a panel of so many stays in the nearest cache, if the rows of A only pass through it
_A_BYTES = 512 << 10  # rows of A in the second-level cache, beside as many bytes of sums that wait
_MANY_BLOCKS, _FEW_LINES = 8, 2  # with more blocks of rows, so few lines in every step bring the next panel near
_WAITING_BYTES = 512 << 10
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
    """The matrix unit: 32 x 32 sums at a time."""

    def __init__(self, problem: Problem, isa: Isa, threads: int) -> None:
        super().__init__(problem, isa, threads)
        self.rate = 8.0
        self.k_block, self.a_bytes, self.waiting_bytes = _K_BLOCK, _A_BYTES, _WAITING_BYTES
        self.lines = _FEW_LINES if -(-problem.m // ROWS) > _MANY_BLOCKS else amx.LINES
        self.fetched = amx.fetched_bytes(self.lines)
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
        if not self.blocks:
            return super().a()
        p, self.by_rows, self.rest = self.p, True, 0
        steps = self.deep // amx.STEP
        target, table, strides = self.room(super().a(), packed_bytes(p.m, steps), 1)
        source = View(p.a.storage, p.a.dtype, (p.m, p.k), p.a_strides, p.a.offset)
        self.before.append(pack_rows(source, table, target, steps, _BF16))
        self.a_item = 2
        # blocks are as long as their rows; a step of K is a line of all of them
        return Matrix(At(target), 2 * self.deep, ROWS, tuple(s // 2 for s in strides))

    def row_blocks(self) -> Cut:
        return Blocks.of(self.p.m, ROWS)

    def depth_of_blocks(self, most: int) -> int:
        return amx.padded_groups(super().depth_of_blocks(most))

    def micro_kernels(self) -> tuple[KernelSpec, ...]:
        cut = self.panels.cut
        layout: amx.Layout = "blocks" if self.blocks else "rows"
        widths = cut.size, max(1, cut.size - 1)
        wide, narrow = (amx.TileMicro(_BF16, _BF16, v, layout, self.lines, self.blocks).spec() for v in widths)
        return wide, wide, narrow, narrow
