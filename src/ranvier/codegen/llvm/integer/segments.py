"""The micro-kernel of convolutions in place: tiles whose depth is a sum of segments, each an offset away from the rows.

A driver calls it as ``void micro(ptr a, ptr b, ptr control)``: ``a`` is the first row, ``b`` a packed panel, and the
control block has the numbers of :data:`CONTROL`. Segments are whole steps of 64 bytes, or each less than one ("short"):
then tiles are as wide as a segment, and what lies behind is not read.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.amx.micro import INSTRUCTIONS
from ranvier.codegen.llvm.amx.segments import SegmentProduct, Segments
from ranvier.codegen.llvm.builder import Fn, Module, Val
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
        _Emitter(f, SegmentProduct(INSTRUCTIONS[left, right], vectors, short, passing, _FETCHED)).emit()

    key = ("amx segments", 2, left.name, right.name, vectors, short, passing)
    name = f"amx {left.name} {right.name} x{vectors} {'short ' if short else ''}segments"
    return KernelSpec(name, key, emit, "int8 tiles")


class _Emitter:
    def __init__(self, f: Fn, kind: SegmentProduct) -> None:
        self.f, self.kind = f, kind

    def number(self, name: str, kind: str = "i64") -> Val:
        f = self.f
        return f.load(kind, f.gep(f.args["control"], CONTROL.index(name), "i64"))

    def emit(self) -> None:
        f = self.f
        rows, self.groups = self.number("rows"), self.number("groups")
        with f.if_(f.cmp("eq", self.number("ready"), 0)):
            tiles.configure(f, rows, self.groups if self.kind.short else None)
            put(f, f.args["control"], "ready", f.i64(1))
        with f.if_else(f.cmp("sgt", rows, tiles.TILE_ROWS)) as otherwise:
            self.product(2)
            otherwise()
            self.product(1)
        f.ret()

    def product(self, blocks: int) -> None:
        f = self.f
        offsets = self.number("offsets", "ptr")

        def start(segment: Val) -> Val:
            return f.gep(f.args["a"], f.load("i64", f.gep(offsets, segment, "i64"), invariant=True))

        at = Segments(
            *(self.number("segments"), self.groups, start, self.number("a_step")),
            *(f.args["b"], self.number("fetch", "ptr"), self.number("sums", "ptr"), self.number("sums_step")),
        )
        self.kind.emit(f, at, blocks)
