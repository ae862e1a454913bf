"""The micro-kernel of convolutions in place: tiles whose depth is a sum of segments, each an offset away from the rows.

A driver calls it as ``void micro(ptr a, ptr b, ptr control)``: ``a`` is the first row, ``b`` a packed panel, and the
control block has the numbers of :data:`CONTROL`. Segments are whole steps of 64 bytes, or each less than one ("short"):
then tiles are as wide as a segment, and what lies behind is not read.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.amx.micro import INSTRUCTIONS
from ranvier.codegen.llvm.builder import Fn, Module, Val, Var
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType

# whether tiles have been set up; 1 to 32 rows and the bytes between them; how many segments, where their offsets are,
# and 32-bit groups of each; where sums go and the bytes between rows of them; a panel that is wanted next, or null
CONTROL = ("ready", "rows", "a_step", "segments", "offsets", "groups", "sums", "sums_step", "fetch")
_FETCHED = 16  # lines of the next panel, brought near in every step


def put(f: Fn, control: Val, name: str, value: Val) -> None:
    f.store(value, f.gep(control, CONTROL.index(name), "i64"))


def segments_spec(left: DType, right: DType, vectors: int, *, short: bool, groups: int) -> KernelSpec:
    """``groups`` of a whole panel: a large one passes by the nearest cache, which serves pixels then."""
    passing = groups * vectors * tiles.LINE >= tiles.PASSING_BYTES

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        f = module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")])
        _Emitter(f, INSTRUCTIONS[left, right], vectors, short, passing).emit()

    key = ("amx segments", left.name, right.name, vectors, short, passing)
    name = f"amx {left.name} {right.name} x{vectors} {'short ' if short else ''}segments"
    return KernelSpec(name, key, emit, "int8 tiles")


class _Emitter:
    def __init__(self, f: Fn, instruction: str, vectors: int, short: bool, passing: bool) -> None:
        self.f, self.instruction, self.vectors, self.short, self.passing = f, instruction, vectors, short, passing
        self.line = f.i64(vectors * tiles.LINE)

    def number(self, name: str, kind: str = "i64") -> Val:
        f = self.f
        return f.load(kind, f.gep(f.args["control"], CONTROL.index(name), "i64"))

    def emit(self) -> None:
        f = self.f
        rows, self.groups = self.number("rows"), self.number("groups")
        with f.if_(f.cmp("eq", self.number("ready"), 0)):
            tiles.configure(f, rows, self.groups if self.short else None)
            put(f, f.args["control"], "ready", f.i64(1))
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
        step, offsets = self.number("a_step"), self.number("offsets", "ptr")
        b, ahead = f.var("ptr", f.args["b"]), f.var("ptr", self.number("fetch", "ptr"))
        fetches = f.cmp("ne", ahead.get(), f.zero("ptr"))
        with f.loop(0, self.number("segments")) as s:
            a = f.gep(f.args["a"], f.load("i64", f.gep(offsets, s, "i64"), invariant=True))
            if self.short:
                self.step(a, b.get(), step, sums)
                b.set(f.gep(b.get(), self.groups * self.line))
            else:
                self.steps(a, b, step, sums, ahead, fetches)
        out, apart = self.number("sums", "ptr"), self.number("sums_step")
        for r, v in sums:
            tiles.store(f, tiles.sums(r, v), f.gep(out, apart * (r * tiles.TILE_ROWS) + v * tiles.LINE), apart)

    def steps(self, a: Val, b: Var, step: Val, sums: list[tuple[int, int]], ahead: Var, fetches: Val) -> None:
        """A segment of whole steps."""
        f = self.f
        with f.loop(0, f.lshr(self.groups, 4)) as k:
            with f.if_(fetches):
                for line in range(_FETCHED):
                    f.prefetch(f.gep(ahead.get(), line * tiles.LINE), locality=2)
                ahead.set(f.gep(ahead.get(), _FETCHED * tiles.LINE))
            self.step(f.gep(a, k * tiles.LINE), b.get(), step, sums)
            b.set(f.gep(b.get(), self.line * tiles.TILE_ROWS))

    def step(self, a: Val, b: Val, step: Val, sums: list[tuple[int, int]]) -> None:
        f = self.f
        for v in range(self.vectors):
            tiles.load(f, tiles.b_tile(v), f.gep(b, v * tiles.LINE), self.line, passing=self.passing)
        for r, v in sums:
            if v == 0:
                tiles.load(f, tiles.a_tile(r), f.gep(a, step * (r * tiles.TILE_ROWS)) if r else a, step)
            tiles.multiply(f, self.instruction, tiles.sums(r, v), tiles.a_tile(r), tiles.b_tile(v))
