"""Micro-kernels that walk down a strip: block after block of rows against one panel, sums stored block by block.

A call costs as much as some steps of K: registers are saved, numbers fetched. Where tiles of sums are small and many
are finished together, one call makes them all.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.integer.micro import IntegerMicro, MicroEmitter
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass

# the first row, a packed panel, and where sums go; 32-bit groups of K, bytes between rows and between rows of sums; how
# many rows, and the last one that a block may begin with: a block that would begin behind it begins there
ARGUMENTS = (
    *(("ptr", name) for name in ("a", "b", "out")),
    *(("i64", name) for name in ("k", "a_step", "out_step", "count", "last")),
)


@dataclass(frozen=True)
class Strip:
    """Blocks of ``rows`` against a panel of ``vectors``."""

    rows: int
    vectors: int

    def spec(self) -> KernelSpec:
        def emit(module: Module, symbol: str, isa: Isa) -> None:
            fn = module.function(symbol, ARGUMENTS)
            _Emitter(fn, IntegerMicro(self.rows, self.vectors), isa).emit()

        key = ("integer strip", self.rows, self.vectors)
        return KernelSpec(f"integer strip {self.rows}x{self.vectors}", key, emit, "bytes")


class _Emitter(MicroEmitter):
    def emit(self) -> None:
        fn = self.fn
        step, apart = fn.args["a_step"], fn.args["out_step"]
        with fn.loop(0, fn.args["count"], self.micro.rows) as at:
            first = fn.min_(at, fn.args["last"])
            self.clear()
            self.multiply(fn.gep(fn.args["a"], first * step), step, fn.args["k"])
            self.join()
            start = fn.gep(fn.args["out"], first * apart)
            for row in self.acc[0]:
                for v, acc in enumerate(row):
                    fn.store(acc.get(), fn.gep(start, v * self.isa.vector_bytes))
                start = fn.gep(start, apart)
        fn.ret()
