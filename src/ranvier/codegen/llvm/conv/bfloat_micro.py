"""The micro-kernel of bfloat16 convolutions where there are no tile registers: dot products of pairs.

It stands where the matrix unit's (``amx/micro.py``) of the layout "starts" does, and reads the same control block and
the same packed weights: 1 to 32 rows times one or two vectors. Rows are computed eight at a time, whatever lies behind
the last: rows do not mix, and the driver drops those it did not mean.
"""

from __future__ import annotations

from typing import Literal

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.amx.micro import TileMicro
from ranvier.codegen.llvm.amx.micro import suits as suits_tiles
from ranvier.codegen.llvm.builder import Fn, Module, Val, Var, vector
from ranvier.codegen.llvm.gemm.micro import Slot, read_slot, write_slot
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType

_ROWS = 8  # rows whose sums stay in registers
_LANES = 16
_LINE = 64


# Segments of a row: one of whole lines, several of such, or several no longer than a line, which need not be whole.
Form = Literal["single", "many", "short"]


def has_tiles(isa: Isa) -> bool:
    return suits_tiles(isa, DType.bfloat16, DType.bfloat16)


def suits(isa: Isa) -> bool:
    """Whether the machine multiplies bfloat16 at all."""
    return has_tiles(isa) or isa.has("avx512bf16")


def micro_spec(isa: Isa, vectors: int, form: Form) -> KernelSpec:
    tiled = has_tiles(isa)
    if tiled and form != "short":
        # of many segments every one would ask for the same lines of the next panel
        return TileMicro(DType.bfloat16, DType.bfloat16, vectors, "starts", fetches=form == "single").spec()
    writer = _ShortTiles if tiled else _Dots
    name = "short tiles" if tiled else "dots"

    def emit(module: Module, symbol: str, _: Isa) -> None:
        writer(module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")]), vectors).emit()

    return KernelSpec(f"conv bfloat16 {name} x{vectors}", (f"bfloat conv {name}", 1, vectors), emit)


class _ShortTiles:
    """Tiles as wide as a segment is long: what lies behind a window is not read. 16 or 32 rows."""

    def __init__(self, f: Fn, vectors: int) -> None:
        self.f, self.vectors = f, vectors

    def slot(self, slot: Slot, kind: str = "i64") -> Val:
        return read_slot(self.f, self.f.args["control"], slot, kind)

    def emit(self) -> None:
        f = self.f
        rows, groups = self.slot(Slot.ROWS), self.slot(Slot.K)
        with f.if_(f.cmp("eq", self.slot(Slot.TILES), 0)):
            tiles.configure(f, rows, groups)
            write_slot(f, f.args["control"], Slot.TILES, rows)
        with f.if_else(f.cmp("sgt", rows, tiles.TILE_ROWS)) as otherwise:
            self.product(2)
            otherwise()
            self.product(1)
        f.ret()

    def product(self, blocks: int) -> None:
        f, vectors = self.f, self.vectors
        sums = [(r, v) for r in range(blocks) for v in range(vectors)]
        for r, v in sums:
            tiles.zero(f, tiles.sums(r, v))
        step, line = self.slot(Slot.A_STEP), f.i64(vectors * _LINE)
        size = self.slot(Slot.K) * (vectors * _LINE)
        with f.loop(0, self.slot(Slot.SEGMENTS)) as s:
            a = f.load("ptr", f.gep(f.args["a"], s, "ptr"))
            b = f.gep(f.args["b"], s * size)
            for r in range(blocks):
                tiles.load(f, tiles.a_tile(r), f.gep(a, step * (r * tiles.TILE_ROWS)) if r else a, step)
            for v in range(vectors):
                tiles.load(f, tiles.b_tile(v), f.gep(b, v * _LINE), line)
            for r, v in sums:
                tiles.multiply(f, "tdpbf16ps", tiles.sums(r, v), tiles.a_tile(r), tiles.b_tile(v))
        out, out_step = self.slot(Slot.OUT, "ptr"), self.slot(Slot.OUT_STEP)
        for r, v in sums:
            place = f.gep(out, out_step * (r * tiles.TILE_ROWS) + v * _LINE)
            tiles.store(f, tiles.sums(r, v), place, out_step)


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
