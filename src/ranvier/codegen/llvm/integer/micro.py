"""Micro-kernels: a few rows of A times a panel of packed B, all int32 accumulators in registers.

They stand where the float micro-kernels do (``gemm/micro.py``) and read the same control block, so the same drivers
call them: an "element" of A and B is a 32-bit group of codes, and K counts groups. Of the optional parts only earlier
partial sums are there; everything else about a result is left to the finish kernel.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val, Var, vector
from ranvier.codegen.llvm.gemm.micro import Slot, read_slot
from ranvier.codegen.llvm.integer.dots import multiply_add
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass

_CHAINS = 10  # independent chains that keep two units of latency 5 busy
_AHEAD = 1024  # bytes of B fetched ahead of their use


@dataclass(frozen=True)
class IntegerMicro:
    """``rows`` of A, one stride apart, against panels of ``vectors``."""

    rows: int
    vectors: int

    def spec(self) -> KernelSpec:
        key = ("integer micro", self.rows, self.vectors)

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            _Emitter(module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")]), self, isa).emit()

        return KernelSpec(f"integer gemm {self.rows}x{self.vectors}", key, emit, "bytes")


class _Emitter:
    def __init__(self, fn: Fn, micro: IntegerMicro, isa: Isa) -> None:
        self.fn, self.micro, self.isa = fn, micro, isa
        self.lanes = isa.lanes(4)
        self.kind = vector("i32", self.lanes)
        self.width = micro.vectors * isa.vector_bytes
        chains = micro.rows * micro.vectors
        self.splits = 1 if chains >= _CHAINS else 2 if chains * 2 >= _CHAINS else 4
        zero = fn.const(self.kind, 0)
        self.acc: list[list[list[Var]]] = [
            [[fn.var(self.kind, zero) for _ in range(micro.vectors)] for _ in range(micro.rows)]
            for _ in range(self.splits)
        ]
        self.b = fn.var("ptr", fn.args["b"])

    def slot(self, slot: Slot, kind: str = "i64") -> Val:
        return read_slot(self.fn, self.fn.args["control"], slot, kind)

    def emit(self) -> None:
        fn, splits = self.fn, self.splits
        count, step = self.slot(Slot.K), self.slot(Slot.A_STEP)
        # a pointer of its own for every row: else each costs an addition in every step
        starts = [fn.gep(fn.args["a"], step * r) for r in range(self.micro.rows)]
        rows = [fn.emit("ptr", f'call ptr asm "", "=r,0"(ptr {p.name})') for p in starts]
        whole = fn.and_(count, -splits) if splits > 1 else count
        with fn.loop(0, whole, splits) as k:
            for u in range(splits):
                self._step(rows, k, u, u)
            self.b.set(fn.gep(self.b.get(), self.width * splits))
        if splits > 1:
            with fn.loop(whole, count) as k:
                self._step(rows, k, 0, 0)
                self.b.set(fn.gep(self.b.get(), self.width))
        self._finish()
        fn.ret()

    def _step(self, rows: list[Val], k: Val, u: int, split: int) -> None:
        fn = self.fn
        base = fn.gep(self.b.get(), u * self.width)
        for line in range(0, self.width, 64):
            fn.prefetch(fn.gep(base, _AHEAD + line))
        panel = [
            fn.load(self.kind, fn.gep(base, v * self.isa.vector_bytes), self.isa.vector_bytes)
            for v in range(self.micro.vectors)
        ]
        for r, row in enumerate(rows):
            group = fn.load("i32", fn.gep(fn.gep(row, k, "i32"), u, "i32"), 1)
            wide = fn.splat(group, self.lanes)
            for v, part in enumerate(panel):
                acc = self.acc[split][r][v]
                acc.set(multiply_add(fn, self.isa, acc.get(), wide, part))

    def _finish(self) -> None:
        fn, vectors = self.fn, self.micro.vectors
        for other in self.acc[1:]:
            for sums, more in zip(self.acc[0], other):
                for acc, part in zip(sums, more):
                    acc.set(acc.get() + part.get())
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
