"""The micro-kernel of bfloat16 convolutions where there are no tile registers: dot products of pairs.

It stands where the matrix unit's (``amx/micro.py``) of the layout "starts" does, and reads the same control block and
the same packed weights: 1 to 32 rows times one or two vectors. Rows are computed eight at a time, whatever lies behind
the last: rows do not mix, and the driver drops those it did not mean.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.amx.micro import TileMicro
from ranvier.codegen.llvm.amx.micro import suits as suits_tiles
from ranvier.codegen.llvm.builder import Fn, Module, Val, Var, vector
from ranvier.codegen.llvm.gemm.micro import Slot, read_slot
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType

_ROWS = 8  # rows whose sums stay in registers
_LANES = 16
_LINE = 64


def has_tiles(isa: Isa) -> bool:
    return suits_tiles(isa, DType.bfloat16, DType.bfloat16)


def suits(isa: Isa) -> bool:
    """Whether the machine multiplies bfloat16 at all."""
    return has_tiles(isa) or isa.has("avx512bf16")


def micro_spec(isa: Isa, vectors: int) -> KernelSpec:
    if has_tiles(isa):
        return TileMicro(DType.bfloat16, DType.bfloat16, vectors, "starts").spec()

    def emit(module: Module, symbol: str, _: Isa) -> None:
        _Dots(module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")]), vectors).emit()

    return KernelSpec(f"conv bfloat16 dots x{vectors}", ("bfloat conv dots", 1, vectors), emit)


class _Dots:
    """Pairs of A in all lanes times rows of B."""

    def __init__(self, f: Fn, vectors: int) -> None:
        self.f, self.vectors = f, vectors
        self.kind = vector("float", _LANES)
        self.pairs = vector("bfloat", 2 * _LANES)

    def slot(self, slot: Slot, kind: str = "i64") -> Val:
        return read_slot(self.f, self.f.args["control"], slot, kind)

    def emit(self) -> None:
        f = self.f
        self.groups, self.segments, self.step = (self.slot(s) for s in (Slot.K, Slot.SEGMENTS, Slot.A_STEP))
        out, out_step = self.slot(Slot.OUT, "ptr"), self.slot(Slot.OUT_STEP)
        sums = [[f.var(self.kind) for _ in range(self.vectors)] for _ in range(_ROWS)]
        with f.loop(0, self.slot(Slot.ROWS), _ROWS) as first:
            for row in sums:
                for each in row:
                    each.set(0.0)
            self.along(sums, first)
            place = f.gep(out, first * out_step)
            for row in sums:
                for v, each in enumerate(row):
                    f.store(each.get(), f.gep(place, v * _LINE))
                place = f.gep(place, out_step)
        f.ret()

    def along(self, sums: list[list[Var]], first: Val) -> None:
        f = self.f
        b = f.var("ptr", f.args["b"])
        with f.loop(0, self.segments) as s:
            start = f.gep(f.load("ptr", f.gep(f.args["a"], s, "ptr")), first * self.step)
            rows = [f.gep(start, self.step * r) for r in range(_ROWS)]
            # a pointer of its own for every row: else each costs an addition in every step
            rows = [f.emit("ptr", f'call ptr asm "", "=r,0"(ptr {p.name})') for p in rows]
            with f.loop(0, self.groups) as k:
                panel = b.get()
                wide = [f.load(self.pairs, f.gep(panel, v * _LINE), _LINE) for v in range(self.vectors)]
                for p, row in zip(rows, sums):
                    both = f.splat(f.load("i32", f.gep(p, k, "i32"), 2), _LANES)
                    left = f.bitcast(both, self.pairs)
                    for each, right in zip(row, wide):
                        name = "llvm.x86.avx512bf16.dpbf16ps.512"
                        each.set(f.intrinsic(name, self.kind, [each.get(), left, right]))
                b.set(f.gep(panel, self.vectors * _LINE))
