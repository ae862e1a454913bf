"""Many rows times coded weights: a panel is decoded into scratch, and the product's own micro-kernels work on it.

Everything about such a product, its blocks, the epilogue and the units that multiply, is planned as for packed weights.
The kernel here stands in front of the driver: for every tile it decodes the panel that the tile needs and calls the
driver with a B which would have the panel where the scratch is. Panels are decoded to float32, or to pairs of bfloat16.
"""

from __future__ import annotations

from enum import IntEnum

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.amx import micro as amx
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.decode import Decoder
from ranvier.codegen.llvm.coded.factors import Factors
from ranvier.codegen.llvm.coded.numbers import Scaling
from ranvier.codegen.llvm.coded.pack import CodedB
from ranvier.codegen.llvm.coded.places import Places
from ranvier.codegen.llvm.control import Launched, quotient
from ranvier.codegen.llvm.gemm import driver
from ranvier.codegen.llvm.gemm.blocks import Panels
from ranvier.codegen.llvm.gemm.narrow import PairPlan, TilePlan
from ranvier.codegen.llvm.gemm.pack import PackedB, pair_depth, panel_vectors
from ranvier.codegen.llvm.gemm.plan import Plan
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass

_PANEL_BYTES = 1 << 20  # of a decoded panel: it is read by all rows from the second-level cache
_LINE = 64


class Buf(IntEnum):
    """Positions in ``bufs``; those of the driver follow, the codes in the place of its B."""

    SCALES = 0
    ZEROS = 1
    DRIVER = 2
    GIVEN = 3


class Dim(IntEnum):
    """Positions in ``dims``; those of the driver follow."""

    GROUPS = 0
    WORDS = 1  # of a group
    DEEP = 2  # steps of a decoded panel
    VECTORS = 3  # of a wide panel
    LARGE = 4  # panels that are wide
    PANELS = 5
    ROW_GROUPS = 6
    GIVEN = 7  # buffers of the driver
    DECODED = 8  # bytes of a decoded panel, then of the driver's buffers
    BUFFERS = 9
    DRIVER = 10


def stand_in(b: CodedB, m: int, isa: Isa, *, pairs: bool) -> PackedB:
    """The weights as they would be packed if they were decoded."""
    vectors = panel_vectors(m, b.n, b.deep, isa, 4, pairs)
    deep = pair_depth(b.deep, isa) if pairs else b.deep
    fitting = max(1, _PANEL_BYTES // max(1, deep * isa.vector_bytes))
    panels = Panels.of(b.n, isa.lanes(4), min(vectors, fitting))
    return PackedB(b.codes, DType.bfloat16 if pairs else DType.float32, (), b.deep, b.n, panels, deep, pairs)


def many_rows(p: Problem, b: CodedB, isa: Isa, threads: int, floats: type[Plan] = Plan) -> list[Launch]:
    """``p`` has the weights as :func:`stand_in` gives them, and rows in their order; ``floats`` plans products of those
    that are decoded to float32."""
    assert isinstance(p.b, PackedB)
    panels, pairs = p.b.panels, p.b.pairs
    plan: Plan
    if not pairs:
        plan = floats(p, isa, threads)
    elif amx.suits(isa, DType.bfloat16, DType.bfloat16):
        plan = TilePlan(p, isa, threads, packs=False)  # tiles are single panels here: too little for it
    else:
        plan = PairPlan(p, isa, threads)
    *before, multiply = plan.launches()
    row_groups = multiply.dims[driver.Dim.ROW_GROUPS]
    dims = list(multiply.dims)
    dims[driver.Dim.PANEL_GROUP], dims[driver.Dim.PANEL_GROUPS] = 1, panels.cut.count
    dims[driver.Dim.NEXT] = 0  # what a micro-kernel brings near of the next panel is not there yet: rather its own
    decoded = panels.cut.size * isa.vector_bytes * p.b.deep
    buffers = -(-8 * len(multiply.buffers) // _LINE) * _LINE
    numbers = {
        Dim.GROUPS: b.groups,
        Dim.WORDS: b.words,
        Dim.DEEP: p.b.deep,
        Dim.VECTORS: panels.cut.size,
        Dim.LARGE: panels.cut.large,
        Dim.PANELS: panels.cut.count,
        Dim.ROW_GROUPS: row_groups,
        Dim.GIVEN: len(multiply.buffers),
        Dim.DECODED: decoded,
        Dim.BUFFERS: buffers,
    }
    spec = Unpacking(b.coding, b.scaling, pairs, b.coupled).spec()
    scratch = decoded + buffers + multiply.scratch
    tiles = p.entries * row_groups * panels.cut.count
    return [
        *before,
        Launch(
            spec,
            (At(b.scales.storage), At(b.zeros.storage), Code(driver.driver_spec()), *multiply.buffers),
            (*(numbers[each] for each in Dim if each in numbers), *dims),
            tiles=tiles,
            writes=multiply.writes,
            grain=row_groups * max(1, panels.cut.count // (8 * threads)),
            scratch=scratch,
            flops=multiply.flops,
            traffic=multiply.traffic,
            label="coded matmul",
            rate=multiply.rate,
        ),
    ]


@dataclass(frozen=True)
class Unpacking:
    """What code depends on."""

    coding: Coding
    scaling: Scaling
    pairs: bool
    coupled: bool

    def spec(self) -> KernelSpec:
        key = ("coded panels", *self.coding.key, *self.scaling.key, self.pairs, self.coupled)

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            _Panels(module.kernel(symbol), isa, self, f"{symbol}_levels").emit()

        how = "pairs" if self.pairs else "float32"
        return KernelSpec(f"coded {self.coding.bits} bits panels {how}", key, emit)


class _Panels(Launched):
    def __init__(self, fn: Fn, isa: Isa, kernel: Unpacking, table: str) -> None:
        super().__init__(fn)
        self.isa, self.kernel = isa, kernel
        self.lanes = isa.lanes(4)
        self.words = vector("i32", self.lanes)
        self.decoder = Decoder(fn, isa, kernel.coding, table, coupled=kernel.coupled)
        self.places = Places(fn, isa)

    def emit(self) -> None:
        f, size = self.fn, self.isa.vector_bytes
        scratch = f.args["scratch"]
        buffers = f.gep(scratch, self.dim(Dim.DECODED))
        rest = f.gep(buffers, self.dim(Dim.BUFFERS))
        given = f.gep(f.args["bufs"], int(Buf.GIVEN), "ptr")
        with f.loop(0, self.dim(Dim.GIVEN)) as k:
            f.store(f.load("ptr", f.gep(given, k, "ptr")), f.gep(buffers, k, "ptr"))
        dims = f.gep(f.args["dims"], int(Dim.DRIVER), "i64")
        vectors, large, deep = self.dim(Dim.VECTORS), self.dim(Dim.LARGE), self.dim(Dim.DEEP)
        decoded = f.var("i64", -1)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            above = quotient(f, tile, self.dim(Dim.ROW_GROUPS))
            panel = f.rem(above, self.dim(Dim.PANELS))
            first = panel * vectors - f.max_(panel - large, 0)
            with f.if_(f.cmp("ne", panel, decoded.get())):
                decoded.set(panel)
                width = f.select(f.cmp("slt", panel, large), vectors, vectors - 1)
                self._decode(first, width)
                # not "inbounds", which gep says: there is nothing where it leads
                back = f.i64(0) - first * size * deep
                before = f.emit("ptr", f"getelementptr i8, ptr {scratch.name}, i64 {back.name}")
                f.store(before, f.gep(buffers, int(driver.Buf.B), "ptr"))
            f.call_pointer(self.buf(Buf.DRIVER), "void", [buffers, dims, tile, tile + 1, rest])
        f.ret()

    def _decode(self, first: Val, width: Val) -> None:
        """``width`` vectors of columns from number ``first`` on."""
        f, size, coding = self.fn, self.isa.vector_bytes, self.kernel.coding
        groups, words = self.dim(Dim.GROUPS), self.dim(Dim.WORDS)
        row = width * size
        codes = self.buf(Buf.GIVEN + driver.Buf.B)
        steps = coding.per_word // (2 if self.kernel.pairs else 1)  # rows of the panel that a word makes
        factors = Factors(f, self.decoder, self.places, self.kernel.scaling)
        offsets = self.kernel.scaling.middle is not None
        scales, zeros = self.buf(Buf.SCALES), self.buf(Buf.ZEROS)
        with f.loop(0, width) as v:
            second = f.cast(f.and_(first + v, 1), "i32") if self.kernel.coupled else None
            stream = self.places.codes(codes, first + v, groups * words * coding.parts)
            target = f.gep(f.args["scratch"], v * size)
            with f.loop(0, groups) as group:
                scale, added = factors.of(scales, zeros, first + v, groups, group, second=second)
                begin = group * words
                with f.loop(begin, begin + words) as word:
                    here = f.gep(stream, word * (self.places.step * coding.parts))
                    found = self.decoder.words(here, second)
                    values = []
                    for k in range(coding.per_word):
                        value = self.decoder.value(found, k)
                        if added is not None and offsets:
                            values.append(f.fma(value, scale, added))
                        else:
                            values.append((value if added is None else value + added) * scale)
                    rows = self._paired(values) if self.kernel.pairs else values
                    here = f.gep(target, word * steps * row)
                    for value in rows:
                        f.store(value, here, size)
                        here = f.gep(here, row)
            if self.kernel.pairs:  # depths are padded for the units that multiply
                with f.loop(groups * words * steps, self.dim(Dim.DEEP)) as past:
                    f.store(f.const(self.words, 0), f.gep(target, past * row), size)

    def _paired(self, values: list[Val]) -> list[Val]:
        f = self.fn
        narrow = [f.cast(self._bfloat(v), "i32", signed=False) for v in values]
        return [f.or_(low, f.shl(high, 16)) for low, high in zip(narrow[::2], narrow[1::2])]

    def _bfloat(self, value: Val) -> Val:
        f = self.fn
        if self.isa.has("avx512bf16"):  # takes subnormal numbers for zero, as the multiplication does
            kind = vector("bfloat", self.lanes)
            made = f.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", kind, [value])
            return f.bitcast(made, vector("i16", self.lanes))
        return vmath.float_to_bfloat(f, value, self.isa)
