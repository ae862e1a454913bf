"""Micro-kernels: a few rows of A times a panel of packed B, all int32 accumulators in registers.

They stand where the float micro-kernels do (``gemm/micro.py``) and read the same control block, so the same drivers
call them: an "element" of A and B is a 32-bit group of codes, and K counts groups. Of the optional parts only earlier
partial sums are there; everything else about a result is left to the finish kernel.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val, Var, vector
from ranvier.codegen.llvm.gemm.micro import Slot, read_slot
from ranvier.codegen.llvm.integer.dots import (
    BYTES,
    PAIRS,
    SIGNED,
    Dot,
    dot_of,
    load_groups,
    multiply_add,
    spread_groups,
)
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass

_CHAINS = 10  # independent chains that keep two units of latency 5 busy …
_SHORT_CHAINS = 3  # … and three of latency 1, where products are added apart
_UNROLLED = 4  # groups of K at a time where there are few chains
_AHEAD = 1024  # bytes of B fetched ahead of their use
_PICKED = 4  # groups of a row in a register
_BYTES = 4  # of a group of A


@dataclass(frozen=True)
class IntegerMicro:
    """``rows`` of A, one stride apart, against panels of ``vectors``; ``pairs``: codes have 16 bits."""

    rows: int
    vectors: int
    pairs: bool = False

    def dot(self, isa: Isa) -> Dot:
        return PAIRS if self.pairs else dot_of(isa)

    def spec(self) -> KernelSpec:
        key = ("integer micro", self.rows, self.vectors, self.pairs)

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            MicroEmitter(module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")]), self, isa).emit()

        name = f"integer gemm {self.rows}x{self.vectors}{' of pairs' if self.pairs else ''}"
        return KernelSpec(name, key, emit, "bytes")


def _splits(micro: IntegerMicro, isa: Isa) -> int:
    """Sums that every element of the tile has, of as many parts of K: what keeps the units busy, unless there are no
    registers for them beside a row of B, one element of A and, where it is made apart, a product."""
    apart = micro.dot(isa) is not SIGNED and dot_of(isa) is not BYTES  # products are added by another instruction
    chains, wanted = micro.rows * micro.vectors, _SHORT_CHAINS if apart else _CHAINS
    room = isa.registers - micro.vectors - (2 if apart else 1)
    fitting = [n for n in (1, 2, 4) if n == 1 or n * chains <= room]
    return next((n for n in fitting if n * chains >= wanted), fitting[-1])


def _unrolled(micro: IntegerMicro) -> int:
    """Groups of K that a step of the loop takes."""
    chains = micro.rows * micro.vectors
    return 1 if chains >= _CHAINS else 2 if chains * 2 >= _CHAINS else _UNROLLED


class MicroEmitter:
    """Writes such a kernel into a function that has ``a`` and ``b`` among its arguments."""

    def __init__(self, fn: Fn, micro: IntegerMicro, isa: Isa) -> None:
        self.fn, self.micro, self.isa = fn, micro, isa
        self.lanes = isa.lanes(4)
        self.kind = vector("i32", self.lanes)
        self.dot = micro.dot(isa)
        self.width = micro.vectors * isa.vector_bytes
        self.deep = self.width >> self.dot.narrower  # of a group of K in the panel
        self.splits = _splits(micro, isa)
        self.picks = self.dot is SIGNED  # products pick lanes of a register that holds some groups of a row
        self.at_once = _PICKED if self.picks else _unrolled(micro)
        zero = fn.const(self.kind, 0)
        self.acc: list[list[list[Var]]] = [
            [[fn.var(self.kind, zero) for _ in range(micro.vectors)] for _ in range(micro.rows)]
            for _ in range(self.splits)
        ]
        self.b = fn.var("ptr", fn.args["b"])

    def slot(self, slot: Slot, kind: str = "i64") -> Val:
        return read_slot(self.fn, self.fn.args["control"], slot, kind)

    def emit(self) -> None:
        count, step = self.slot(Slot.K), self.slot(Slot.A_STEP)
        self.multiply(self.fn.args["a"], step, count)
        self._finish()
        self.fn.ret()

    def clear(self) -> None:
        """For a function that makes several tiles: before each of them."""
        for acc in (acc for split in self.acc for row in split for acc in row):
            acc.set(self.fn.const(self.kind, 0))
        self.b.set(self.fn.args["b"])

    def multiply(self, first: Val, step: Val, count: Val) -> None:
        """Rows from ``first`` on, one step apart, times the panel."""
        self.run(self.rows_from(first, step), self.fn.i64(0), count)

    def rows_from(self, first: Val, step: Val) -> list[Val]:
        """A pointer of its own for every row: else each costs an addition in every step."""
        fn = self.fn
        return [fn.opaque(start) for start in [fn.gep(first, step * r) for r in range(self.micro.rows)]]

    def run(self, rows: list[Val], first: Val, count: Val) -> None:
        """So many groups of rows, from a byte of them on, times those of the panel that come next."""
        fn, at_once = self.fn, self.at_once
        whole = fn.and_(count, -at_once) if at_once > 1 else count
        middle, end = first + whole * _BYTES, first + count * _BYTES
        with fn.loop(first, middle, at_once * _BYTES) as k:
            self._steps(rows, k, at_once)
            self.b.set(fn.gep(self.b.get(), self.deep * at_once))
        if at_once > 1:
            with fn.loop(middle, end, _BYTES) as k:
                self._steps(rows, k, 1)
                self.b.set(fn.gep(self.b.get(), self.deep))

    def _steps(self, rows: list[Val], k: Val, count: int) -> None:
        """So many groups of K, from byte ``k`` on."""
        fn = self.fn
        held: list[list[Val]] | None = None
        if self.picks:
            held = [spread_groups(fn, self.isa, fn.gep(row, k), count) for row in rows]
        for u in range(count):
            self._step(rows, k, u, held)

    def _step(self, rows: list[Val], k: Val, u: int, held: list[list[Val]] | None) -> None:
        fn = self.fn
        base, apart = fn.gep(self.b.get(), u * self.deep), self.deep // self.micro.vectors
        for line in range(0, self.deep, 64):
            fn.prefetch(fn.gep(base, _AHEAD + line))
        panel = [load_groups(fn, self.isa, fn.gep(base, v * apart), self.dot) for v in range(self.micro.vectors)]
        sums = self.acc[u % self.splits]
        for r, row in enumerate(rows):
            if held is not None:
                for acc, part in zip(sums[r], panel, strict=True):
                    acc.set(multiply_add(fn, self.isa, acc.get(), part, held[r][u]))
                continue
            group = fn.load("i32", fn.gep(fn.gep(row, k), u, "i32"), 1)
            wide = fn.splat(group, self.lanes)
            for acc, part in zip(sums[r], panel, strict=True):
                acc.set(multiply_add(fn, self.isa, acc.get(), wide, part, self.dot))

    def join(self) -> None:
        """Sums of all chains into the first."""
        for other in self.acc[1:]:
            for sums, more in zip(self.acc[0], other):
                for acc, part in zip(sums, more):
                    acc.set(acc.get() + part.get())

    def _finish(self) -> None:
        fn, vectors = self.fn, self.micro.vectors
        self.join()
        partial = self.slot(Slot.PARTIAL, "ptr")
        with fn.if_(fn.cmp("ne", partial, fn.zero("ptr"))):
            for r, row in enumerate(self.acc[0]):
                for v, acc in enumerate(row):
                    at = fn.gep(partial, r * self.width + v * self.isa.vector_bytes)
                    acc.set(acc.get() + fn.load(self.kind, at))
        mask = fn.mask_below(self.lanes, self.slot(Slot.COLUMNS)) if self.isa.masks else None
        start, step = self.slot(Slot.OUT, "ptr"), self.slot(Slot.OUT_STEP)
        for row in self.acc[0]:
            for v, acc in enumerate(row):
                at = fn.gep(start, v * self.isa.vector_bytes)
                if mask is not None and v == vectors - 1:
                    fn.masked_store(acc.get(), at, mask)
                else:
                    fn.store(acc.get(), at)
            start = fn.gep(start, step)
