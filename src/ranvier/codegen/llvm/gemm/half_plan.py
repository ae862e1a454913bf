"""Products of float16 operands by the machine's float16 arithmetic."""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.gemm.epilogue import Finish, Simple, finish, simple_form
from ranvier.codegen.llvm.gemm.halves import HalfMicro, half_tile, rows_for
from ranvier.codegen.llvm.gemm.micro import Layout
from ranvier.codegen.llvm.gemm.plan import Plan
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.gemm.tiles import Tile
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType

_HALF = DType.float16


class HalfPlan(Plan):
    """A and B of 16 bits, or rounded to it."""

    def __init__(self, problem: Problem, isa: Isa, threads: int) -> None:
        super().__init__(problem, isa, threads)
        self.rate = 1.8

    def with_rows(self, p: Problem) -> Problem:
        return p if p.a.dtype is _HALF else self.copied(p, _HALF)

    def with_columns(self, p: Problem) -> Problem:
        return p  # nothing is widened

    def most_rows(self, vectors: int) -> int:
        return rows_for(vectors)

    def _tile(self) -> Tile:
        return half_tile(self.isa)

    def epilogue(self) -> tuple[Simple, Finish | None, int]:
        """Results of 16 bits are rounded by the micro-kernel, too."""
        p, panels = self.p, self.panels.cut.count
        simple = simple_form(p.epilogue, p.dtype)
        if simple is None or p.out.dtype is not _HALF or p.out_strides[1] != 1:
            return super().epilogue()
        self.rounds = True
        if p.n % self.lanes == 0:
            return simple, None, panels
        return simple, finish(p.epilogue, p.dtype, p.out.dtype, p.out_strides), panels - 1

    def micro(self, rows: int, vectors: int, layout: Layout) -> KernelSpec:
        return HalfMicro(rows, vectors, layout, self.packed).spec()
