"""The micro-kernel of float16 operands where the machine has their arithmetic: eight products an instruction, not four.

It stands where :class:`~ranvier.codegen.llvm.gemm.micro.Micro` does, reads the same control block, and its results are
float32 as well. A and B are float16, and panels of B at most ``PANEL`` vectors of these results wide. Products are
summed in float16 for ``CHUNK`` steps of K, in registers, and these sums in float32: a float16 sum of that many products
is off by about a thousandth of what such sums usually come to, and what follows adds nothing to that. A sum beyond
65504 becomes infinite there, so operands have to be known to be small (``providers/cpu/narrow``). Where Slot.FLAGS has
ROUND, results are stored as float16.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.control import ROUND, Slot
from ranvier.codegen.llvm.gemm import micro
from ranvier.codegen.llvm.gemm.tiles import Tile
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass

CHUNK = 64  # steps of K that are summed in float16
_MOST_ROWS = 12  # of pointers to rows that registers hold
PANEL = 8  # vectors of float32 sums beside each other, to six rows
_SUMS = 24  # registers of them
_CHAINS = 8  # of dependent products that keep two units busy
_ITEM = DType.float16.numpy.itemsize


def multiplies_halves(isa: Isa) -> bool:
    return isa.has("fullfp16")


def rows_for(vectors: int) -> int:
    """The most rows of a micro-kernel on panels of so many vectors of float32."""
    return min(_MOST_ROWS, _SUMS // -(-vectors // 2))


def half_tile(isa: Isa) -> Tile:
    """The largest one."""
    return Tile(isa.registers, rows_for(PANEL), PANEL, 1.0)


@dataclass(frozen=True)
class HalfMicro:
    """``rows`` times a panel of ``vectors`` vectors of float32 sums, as ``Micro`` has them."""

    rows: int
    vectors: int
    a: micro.Layout = "rows"
    packed: bool = True

    def spec(self) -> KernelSpec:
        key = ("gemm halves", 3, self.rows, self.vectors, self.a, self.packed, CHUNK)
        name = f"gemm float16 {self.rows}x{self.vectors} {self.a}" + ("" if self.packed else " in place")
        form = micro.Micro("float", self.rows, self.vectors, self.a, self.packed, "half")

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            fn = module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")])
            _Emitter(fn, form, isa).emit()

        return KernelSpec(name, key, emit)


class _Emitter(micro.Emitter):
    """Sums of 16 bits beside those of 32, which wait in memory meanwhile."""

    def _splits(self) -> int:
        return 1

    def _along_k(self, count: Val, rows: list[Val], step: Val | None = None) -> None:
        fn, b_step = self.fn, self.b_step or self.fn.i64(self.panel)
        start = self.b.get()

        def loader(k: Val) -> Callable[[int], Val]:
            if step is None:
                return lambda r: fn.load("half", fn.gep(rows[r], k * _ITEM))
            column = fn.gep(rows[0], k * step)
            return lambda r: fn.load("half", fn.gep(column, r * _ITEM))

        pieces = -(-self.micro.vectors // 2)
        turns = max(1, min(4, _CHAINS // (pieces * self.micro.rows)))
        kind = vector("half", 2 * self.lanes)
        short = [[[fn.var(kind, 0.0) for _ in range(pieces)] for _ in range(self.micro.rows)] for _ in range(turns)]

        def chunk(first: Val, *, begins: bool) -> None:
            end = fn.min_(first + CHUNK, count)
            for each in (x for turn in short for row in turn for x in row):
                each.set(0.0)
            whole = first + fn.and_(end - first, -turns)
            with fn.loop(first, whole, turns) as k:
                for turn in range(turns):
                    here = k + turn
                    self._half_step(fn.gep(start, here * b_step), loader(here), short[turn])
            if turns > 1:
                with fn.loop(whole, end) as k:
                    self._half_step(fn.gep(start, k * b_step), loader(k), short[0])
            self._gather(short, begins=begins)

        # where nothing was summed yet, the first sums are those of 32 bits: short products need no others
        begins = self.micro.a in ("rows", "columns")
        if begins:
            chunk(fn.i64(0), begins=True)
        with fn.loop(CHUNK if begins else 0, count, CHUNK) as first:
            chunk(first, begins=False)
        self.b.set(fn.gep(start, count * b_step))

    def _half_step(self, base: Val, row: Callable[[int], Val], sums: list[list[Var]]) -> None:
        fn = self.fn
        panel = [self._halves(base, v) for v in range(0, self.micro.vectors, 2)]
        for r, line in enumerate(sums):
            wide = fn.splat(row(r), 2 * self.lanes)
            for b, total in zip(panel, line):
                total.set(fn.fma(wide, b, total.get()))

    def _halves(self, base: Val, v: int) -> Val:
        """A register of B; of a last vector that stands alone the lower half counts."""
        fn, lanes = self.fn, self.lanes
        at = fn.gep(base, v * self.b_bytes)
        if v + 1 < self.micro.vectors:
            return fn.load(vector("half", 2 * lanes), at, _ITEM)
        return fn.shuffle(fn.load(vector("half", lanes), at, _ITEM), None, [*range(lanes), *[-1] * lanes])

    def _gather(self, short: list[list[list[Var]]], *, begins: bool) -> None:
        """Adds the sums of 16 bits to those of 32, or makes these of them."""
        fn, lanes = self.fn, self.lanes
        for r, line in enumerate(self.acc[0]):
            for v, total in enumerate(line):
                for t, turn in enumerate(short):
                    half = fn.shuffle(turn[r][v // 2].get(), None, range(v % 2 * lanes, (v % 2 + 1) * lanes))
                    wide = fn.cast(half, "float")
                    total.set(wide if begins and t == 0 else total.get() + wide)

    def _store(self) -> None:
        fn = self.fn
        with fn.if_else(fn.cmp("ne", fn.and_(self.slot(Slot.FLAGS), ROUND), 0)) as otherwise:
            out, step = self.slot(Slot.OUT, "ptr"), self.slot(Slot.OUT_STEP)
            for line in self.acc[0]:
                for v in range(0, len(line), 2):
                    self._store_halves([total.get() for total in line[v : v + 2]], fn.gep(out, v * self.lanes * _ITEM))
                out = fn.gep(out, step)
            otherwise()
            super()._store()

    def _store_halves(self, values: list[Val], at: Val) -> None:
        fn = self.fn
        both = values[0] if len(values) == 1 else fn.shuffle(values[0], values[1], range(2 * self.lanes))
        fn.store(fn.cast(both, "half"), at, _ITEM)
