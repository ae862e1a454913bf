"""Micro-kernels that walk down a strip: block after block of rows against one panel, sums stored block by block.

A call costs as much as some steps of K: registers are saved, numbers fetched. Where tiles of sums are small and many
are finished together, one call makes them all. Rows lie in one piece and one step apart, or they are windows of an
image: in segments that are offsets away from where they begin, with a step of its own from the end of a line to the
next one.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.integer.micro import IntegerMicro, MicroEmitter
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass

# the first row, a packed panel, and where sums go; 32-bit groups of K, bytes between rows and between rows of sums; how
# many rows, and the last one that a block may begin with: a block that would begin behind it begins there
ARGUMENTS = (
    *(("ptr", name) for name in ("a", "b", "out")),
    *(("i64", name) for name in ("k", "a_step", "out_step", "count", "last")),
)
# the first window, a packed panel, where sums go, and the offsets of segments in bytes; how many these are, 32-bit
# groups of each, bytes between windows, between rows of sums, and more of them at the end of a line; how many windows,
# how many a line has, and which one of those is the first
OF_WINDOWS = (
    *(("ptr", name) for name in ("a", "b", "out", "offsets")),
    *(("i64", name) for name in ("segments", "k", "a_step", "out_step", "skip", "count", "line", "at")),
)


@dataclass(frozen=True)
class Strip:
    """Blocks of ``rows``, or of ``windows``, against a panel of ``vectors``; ``pairs``: codes have 16 bits."""

    rows: int
    vectors: int
    windows: bool = False
    pairs: bool = False

    def spec(self) -> KernelSpec:
        def emit(module: Module, symbol: str, isa: Isa) -> None:
            fn = module.function(symbol, OF_WINDOWS if self.windows else ARGUMENTS)
            kind = _Windows if self.windows else _Rows
            kind(fn, IntegerMicro(self.rows, self.vectors, self.pairs), isa).emit()

        name = f"integer strip {self.rows}x{self.vectors}{' of windows' if self.windows else ''}"
        name += " of pairs" if self.pairs else ""
        return KernelSpec(name, ("integer strip", self.rows, self.vectors, self.windows, self.pairs), emit, "bytes")


class _Strip(MicroEmitter):
    def store(self, out: Val) -> None:
        """The sums of a block."""
        fn = self.fn
        self.join()
        for row in self.acc[0]:
            for v, acc in enumerate(row):
                fn.store(acc.get(), fn.gep(out, v * self.isa.vector_bytes))
            out = fn.gep(out, fn.args["out_step"])


class _Rows(_Strip):
    def emit(self) -> None:
        fn = self.fn
        step = fn.args["a_step"]
        with fn.loop(0, fn.args["count"], self.micro.rows) as at:
            first = fn.min_(at, fn.args["last"])
            self.clear()
            self.multiply(fn.gep(fn.args["a"], first * step), step, fn.args["k"])
            self.store(fn.gep(fn.args["out"], first * fn.args["out_step"]))
        fn.ret()


class _Windows(_Strip):
    def emit(self) -> None:
        fn = self.fn
        self.next = fn.var("ptr", fn.args["a"])
        self.place = fn.var("i64", fn.args["at"])  # in its line
        with fn.loop(0, fn.args["count"], self.micro.rows) as at:
            self.clear()
            rows = [self.window() for _ in range(self.micro.rows)]
            with fn.loop(0, fn.args["segments"]) as segment:
                offset = fn.load("i64", fn.gep(fn.args["offsets"], segment, "i64"), invariant=True)
                self.run(rows, offset, fn.args["k"])
            self.store(fn.gep(fn.args["out"], at * fn.args["out_step"]))
        fn.ret()

    def window(self) -> Val:
        fn = self.fn
        here, following = self.next.get(), self.place.get() + 1
        ends = fn.cmp("eq", following, fn.args["line"])
        self.place.set(fn.select(ends, fn.i64(0), following))
        self.next.set(fn.gep(here, fn.args["a_step"] + fn.select(ends, fn.args["skip"], fn.i64(0))))
        return fn.opaque(here)
