"""Micro-kernels of bfloat16 convolutions: 1 to 32 rows times one or two vectors, float32 sums.

A driver calls them as it does others (``gemm/micro.py``) and hands over ``a``, a table of pointers to where segments
begin. Of the control block they read

    ROWS, A_STEP    how many rows, and how many bytes they lie apart
    SEGMENTS, K     how many segments, and groups (of two elements) of each
    OUT, OUT_STEP   where sums go
    FETCH           what comes next, or null
    TILES           whether the matrix unit has been set up: 0 when the driver begins, and at its end a reason to
                    release it where it is not 0 any more

and weights are packed segment after segment, group after group, two elements of every column side by side.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec, Units
from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.amx.micro import suits as suits_tiles
from ranvier.codegen.llvm.amx.segments import SegmentProduct, Segments
from ranvier.codegen.llvm.builder import Fn, Module, Val, Var, vector
from ranvier.codegen.llvm.gemm.micro import Slot, read_slot, write_slot
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType

_ROWS = 8  # rows whose sums stay in registers
_LANES = 16
_LINE = 64


def has_tiles(isa: Isa) -> bool:
    return suits_tiles(isa, DType.bfloat16, DType.bfloat16)


def suits(isa: Isa) -> bool:
    """Whether the machine multiplies bfloat16 faster than float32.

    Processors with half-precision arithmetic have their products of pairs by the way: measured at half the speed of
    float32 multiply-adds, which Winograd's algorithm makes faster still. Those without it were built for them.
    """
    return has_tiles(isa) or (isa.has("avx512bf16") and not isa.has("avx512fp16"))


def micro_spec(isa: Isa, vectors: int, *, short: bool, panel_bytes: int) -> KernelSpec:
    """``short``: segments are no longer than a line, but need not be whole ones; else they are whole lines.

    Weights of which a panel fills most of the nearest cache pass by it: it serves pixels then, which are read once for
    every tap.
    """
    tiled = has_tiles(isa)
    passing = tiled and panel_bytes >= tiles.PASSING_BYTES
    name = ("short tiles" if short else "tiles") if tiled else "dots"
    if passing:
        name = f"{name} passing"

    def emit(module: Module, symbol: str, _: Isa) -> None:
        f = module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")])
        (_Tiles(f, vectors, short, passing) if tiled else _Dots(f, vectors)).emit()

    units: Units = "bfloat16 tiles" if tiled else ""
    return KernelSpec(f"conv bfloat16 {name} x{vectors}", (f"bfloat conv {name}", 2, vectors), emit, units)


class _Tiles:
    """On tile registers, 1 to 32 rows. Short tiles are as wide as a segment is long: what lies behind is not read.

    While a panel is worked on, half as much of what FETCH points at, if anything, is asked for to be near.
    """

    def __init__(self, f: Fn, vectors: int, short: bool, passing: bool) -> None:
        self.f, self.vectors, self.short, self.passing = f, vectors, short, passing

    def slot(self, slot: Slot, kind: str = "i64") -> Val:
        return read_slot(self.f, self.f.args["control"], slot, kind)

    def emit(self) -> None:
        f = self.f
        rows, groups = self.slot(Slot.ROWS), self.slot(Slot.K)
        with f.if_(f.cmp("eq", self.slot(Slot.TILES), 0)):
            tiles.configure(f, rows, groups if self.short else None)
            write_slot(f, f.args["control"], Slot.TILES, rows)
        with f.if_else(f.cmp("sgt", rows, tiles.TILE_ROWS)) as otherwise:
            self.product(2, groups)
            otherwise()
            self.product(1, groups)
        f.ret()

    def product(self, blocks: int, groups: Val) -> None:
        f = self.f
        kind = SegmentProduct("tdpbf16ps", self.vectors, self.short, self.passing, 8 * self.vectors)

        def start(segment: Val) -> Val:
            return f.load("ptr", f.gep(f.args["a"], segment, "ptr"))

        at = Segments(
            *(self.slot(Slot.SEGMENTS), groups, start, self.slot(Slot.A_STEP)),
            *(f.args["b"], self.slot(Slot.FETCH, "ptr"), self.slot(Slot.OUT, "ptr"), self.slot(Slot.OUT_STEP)),
        )
        kind.emit(f, at, blocks)


class _Dots:
    """Where there are no tile registers: pairs of A in all lanes times rows of B.

    Rows are computed eight at a time, whatever lies behind the last: rows do not mix, and the driver drops those it did
    not mean.
    """

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
            rows = [f.opaque(row) for row in rows]
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
