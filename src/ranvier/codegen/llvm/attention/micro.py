"""The pieces attention and recurrent layers are made of: a small product kernel, a transposing pack, lane tools.

The product kernel multiplies a few rows, read element by element, with rows of vectors that lie any distance apart.
So the same code serves queries against packed keys, probabilities against values as they lie in memory, and a hidden
state against packed recurrent weights; drivers call it through a pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val, size_of, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath import core
from ranvier.dtypes import DType
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
ELEMENTS = {DType.float32: "float", DType.float64: "double"}


@dataclass(frozen=True)
class Shape:
    """Registers of the product kernel: ``rows`` by ``vectors`` accumulators of ``lanes`` elements."""

    element: str
    lanes: int
    rows: int
    vectors: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def bytes(self) -> int:
        return size_of(self.element)


def shape_for(element: str, isa: Isa) -> Shape:
    """The largest accumulator block that leaves registers for one row of vectors and a broadcast."""
    rows, vectors = (6, 4) if isa.registers >= 32 else (6, 2) if isa.fma else (4, 2)
    return Shape(element, isa.lanes(size_of(element)), rows, vectors)


def accumulators(isa: Isa) -> int:
    """Registers a product may fill with sums, beside a row of vectors and a broadcast."""
    return 24 if isa.registers >= 32 else 12 if isa.fma else 8


def most_vectors(rows: int, isa: Isa) -> int:
    """How many vectors per row fit the registers beside ``rows`` rows."""
    return max(1, min(8, accumulators(isa) // rows))


def most_rows(vectors: int, isa: Isa) -> int:
    """How many rows of so many vectors fit, with one row of the right side and a broadcast beside the sums."""
    return max(1, min(accumulators(isa), isa.registers - 1 - vectors) // vectors)


# Rows of the right side that are fetched before their use where they come from far away.
_AHEAD = 16


def product(element: str, rows: int, vectors: int, *, far: bool = False, paired: bool = False) -> KernelSpec:
    """``void (ptr a, i64 lda, ptr b, i64 ldb, i64 k, ptr c, i64 ldc, ptr keep)``.

    ``c[r, :] = keep[r] * c[r, :] + sum over j < k of a[r, j] * b[j, :]``; a null ``keep`` forgets what ``c`` held.
    ``far`` fetches rows of ``b`` ahead: for those that stream from memory once. ``paired``: ``b`` is bfloat16, two
    vectors (:func:`pairs`) in the bits of one of ``element``, which is float32, and ``ldb`` counts those.
    """

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        lanes = isa.lanes(size_of(element))
        kind = vector(element, lanes)
        f = module.function(
            symbol,
            [
                ("ptr", "a"),
                ("i64", "lda"),
                ("ptr", "b"),
                ("i64", "ldb"),
                ("i64", "k"),
                ("ptr", "c"),
                ("i64", "ldc"),
                ("ptr", "keep"),
            ],
        )
        a, b, c, keep = (f.args[n] for n in ("a", "b", "c", "keep"))
        a_rows = [f.gep(a, f.args["lda"] * r, element) for r in range(rows)]
        c_rows = [f.gep(c, f.args["ldc"] * r, element) for r in range(rows)]
        sums = [[f.var(kind, 0.0) for _ in range(vectors)] for _ in range(rows)]
        with f.if_(f.cmp("ne", keep, f.zero("ptr"))):
            for r in range(rows):
                factor = f.splat(f.load(element, f.gep(keep, r, element)), lanes)
                for v in range(vectors):
                    sums[r][v].set(f.load(kind, f.gep(c_rows[r], v * lanes, element)) * factor)
        at = f.var("ptr", b)
        with f.loop(0, f.args["k"]) as j:
            row = at.get()
            at.set(f.gep(row, f.args["ldb"], element))
            if paired:
                loaded = [x for v in range(vectors // 2) for x in _both(f, f.gep(row, v * lanes, element), lanes)]
            else:
                loaded = [f.load(kind, f.gep(row, v * lanes, element)) for v in range(vectors)]
            if far:
                later = f.gep(row, f.args["ldb"] * _AHEAD, element)
                for offset in range(0, vectors * isa.vector_bytes, 64):
                    f.prefetch(f.gep(later, offset))
            for r in range(rows):
                factor = f.splat(f.load(element, f.gep(a_rows[r], j, element)), lanes)
                for v in range(vectors):
                    sums[r][v].set(f.fma(factor, loaded[v], sums[r][v].get()))
        for r in range(rows):
            for v in range(vectors):
                f.store(sums[r][v].get(), f.gep(c_rows[r], v * lanes, element))
        f.ret()

    name = f"product {element} {rows}x{vectors}{' of pairs' if paired else ''}"
    return KernelSpec(name, ("product of rows", element, rows, vectors, far, paired), emit)


def pairs(rows: Array, lanes: int) -> Array:
    """Rows of an even number of float32 vectors as ``product`` reads them ``paired``: of two neighbouring vectors,
    rounded to bfloat16, the first in the lower halves of 32 bits and the second in the upper ones."""
    halves = rows.astype(DType.bfloat16.numpy).view(np.uint16).reshape(-1, 2, lanes)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1)


def _both(f: Fn, place: Val, lanes: int) -> list[Val]:
    """The two float32 vectors of a vector of pairs."""
    whole, kind = vector("i32", lanes), vector("float", lanes)
    bits = f.load(whole, place)
    return [f.bitcast(f.shl(bits, 16), kind), f.bitcast(f.and_(bits, -(1 << 16)), kind)]


def call_product(
    f: Fn, code: Val, a: Val, lda: Val, b: Val, ldb: Val, k: Val, c: Val, ldc: Val, keep: Val | None = None
) -> None:
    f.call_pointer(code, "void", [a, lda, b, ldb, k, c, ldc, keep or f.zero("ptr")])


def transposing_pack(element: str) -> KernelSpec:
    """``void (ptr source, i64 row_stride, i64 rows, i64 width, ptr target, i64 columns)``.

    Writes ``target[j, r] = source[r, j]`` for rows of ``width`` contiguous elements, ``columns`` elements from one
    ``j`` to the next. Rows come in whole vectors: those past the last repeat it, so that nothing stays unwritten.
    ``width`` is rounded up to whole vectors in the target; what stands there is unspecified.
    """

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        lanes = isa.lanes(size_of(element))
        kind = vector(element, lanes)
        params = [("ptr", "source"), ("i64", "stride"), ("i64", "rows"), ("i64", "width"), ("ptr", "target")]
        f = module.function(symbol, [*params, ("i64", "columns")])
        width, columns = f.args["width"], f.args["columns"]
        last = f.args["rows"] - 1
        whole = f.and_(width, -lanes)
        with f.loop(0, f.args["rows"], lanes) as r:
            starts = [f.gep(f.args["source"], f.min_(r + i, last) * f.args["stride"], element) for i in range(lanes)]
            target = f.gep(f.args["target"], r, element)

            def block(j: Val, mask: Val | None, starts: list[Val] = starts, target: Val = target) -> None:
                places = [f.gep(s, j, element) for s in starts]
                rows = [f.load(kind, p) if mask is None else f.masked_load(kind, p, mask) for p in places]
                for i, column in enumerate(transposed(f, rows)):
                    f.store(column, f.gep(target, (j + i) * columns, element))

            if isa.masks:  # one copy of the shuffles: they are most of what there is to compile
                with f.loop(0, width, lanes) as j:
                    block(j, f.mask_below(lanes, width - j))
            else:
                with f.loop(0, whole, lanes) as j:
                    block(j, None)
                with f.if_(f.cmp("slt", whole, width)):
                    block(whole, f.mask_below(lanes, width - whole))
        f.ret()

    return KernelSpec(f"transposing pack {element}", ("transposing pack", element), emit)


def transposed(f: Fn, rows: Sequence[Val]) -> list[Val]:
    """A square of vectors with rows and columns exchanged, by log2 steps of two-source shuffles."""
    lanes = len(rows)
    found = list(rows)
    half = 1
    while half < lanes:
        low = [i if i & half == 0 else lanes + (i ^ half) for i in range(lanes)]
        high = [(i ^ half) if i & half == 0 else lanes + i for i in range(lanes)]
        for i in range(lanes):
            if i & half == 0:
                a, b = found[i], found[i + half]
                found[i], found[i + half] = f.shuffle(a, b, low), f.shuffle(a, b, high)
        half *= 2
    return found


def folded(f: Fn, value: Val, combine: Callable[[Val, Val], Val]) -> Val:
    """All lanes combined into one scalar, by halves."""
    while value.lanes > 2:
        half = value.lanes // 2
        lower, upper = (f.shuffle(value, None, range(at, at + half)) for at in (0, half))
        value = combine(lower, upper)
    return combine(f.extract(value, 0), f.extract(value, 1))


def sums_of(f: Fn, rows: Sequence[Val]) -> Val:
    """Vector whose lane i is the sum of the lanes of ``rows[i]``; as many rows as lanes."""
    found = list(rows)
    lanes = len(found)
    half = 1
    while half < lanes:
        # rows i and i + half share a vector afterwards: lanes with that bit clear belong to the first
        low = [i if i & half == 0 else lanes + (i ^ half) for i in range(lanes)]
        high = [(i ^ half) if i & half == 0 else lanes + i for i in range(lanes)]
        for i in range(0, lanes, 2 * half):
            a, b = found[i], found[i + half]
            found[i] = f.add(f.shuffle(a, b, low), f.shuffle(a, b, high))
        half *= 2
    return found[0]


def rounded_up(f: Fn, value: Val, multiple: int) -> Val:
    """To a multiple that is a power of two."""
    return f.and_(value + (multiple - 1), -multiple)


# 2^r for r in [0, 1) and in [-1/2, 1/2]: relative minimax fits in float64, error 1.9e-9
_POWER_FLOOR = (
    *(1.000000001855777, 0.6931469838424666, 0.24022983625084404, 0.055483342088603116),
    *(0.009678840786953653, 0.0012439689749613753, 0.000217022488749364),
)
_POWER_NEAREST = (
    *(1.000000000554188, 0.6931472057371935, 0.24022646890473823, 0.055503287770825985),
    *(0.009618488974464488, 0.0013399931181444342, 0.00015345807334644153),
)
LOG2E = 1.4426950408889634


def exp2_nonpositive(f: Fn, x: Val, isa: Isa) -> Val:
    """2^x for x up to about 0, minus infinity and NaN included; results that would be denormal are 0: they would take a
    hundred times as long, and products with them too.

    Softmax needs no more, and without overflow it is eleven instructions where the hardware splits off fractions and
    scales by powers of two, fourteen elsewhere.
    """
    if x.element == "float" and core.has_avx512(isa) and x.lanes * 4 == isa.vector_bytes:
        total = core.horner(f, _fraction(f, x), _POWER_FLOOR)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        f.module.declare(name, x.type, [x.type, x.type, x.type, "i16", "i32"])
        normal = f.bitcast(f.cmp("uge", x, -126.0), "i16")
        given = f"{x.type} {total.name}, {x.type} {x.name}, {x.type} zeroinitializer, i16 {normal.name}, i32 4"
        return f.emit(x.type, f"call {x.type} @{name}({given})")
    double = x.element == "double"
    lowest, bits, word = (-1022.0, 52, "i64") if double else (-126.0, 23, "i32")
    magic = 1.5 * 2.0**bits
    bounded = f.quick_max(f.const(x.type, lowest), x)
    shifted = core.exactly(f, "fadd", bounded, magic)
    rest = core.exactly(f, "fsub", bounded, core.exactly(f, "fsub", shifted, magic))
    total = core.horner(f, rest, _taylor(13) if double else _POWER_NEAREST)
    whole = vector(word, x.lanes)
    power = f.shl(f.bitcast(shifted, whole), bits)
    scaled = f.bitcast(f.add(f.bitcast(total, whole), power), x.type)
    return f.select(f.cmp("olt", x, lowest), f.const(x.type, 0.0), scaled)


def _fraction(f: Fn, x: Val) -> Val:
    """x - floor(x) by one instruction; 0 for infinities."""
    name = "llvm.x86.avx512.mask.reduce.ps.512"
    f.module.declare(name, x.type, [x.type, "i32", x.type, "i16", "i32"])
    given = f"{x.type} {x.name}, i32 9, {x.type} zeroinitializer, i16 -1, i32 4"
    return f.emit(x.type, f"call {x.type} @{name}({given})")


def _taylor(degree: int) -> tuple[float, ...]:
    """Coefficients of 2^r around 0."""
    terms = [1.0]
    for k in range(1, degree + 1):
        terms.append(terms[-1] * math.log(2) / k)
    return tuple(terms)
