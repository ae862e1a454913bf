"""Emission of the micro-kernels: a few rows of A times a panel of B, all accumulators in registers.

A micro-kernel is its own :class:`KernelSpec`, compiled once per machine, and called by drivers through a ``Code``
pointer as ``void micro(ptr a, ptr b, ptr control)``. It computes ``rows`` x (``vectors`` * lanes) results

    acc[r][j]  = sum over segments s and k of A(s, r, k) * B(s, k, j)
    out[r][j]  = clamp(alpha * acc[r][j] + partial[r][j] + bias[j] + residual[r][j])

where ``a`` is, by :attr:`Micro.a`:

    "rows"      the first row; rows lie ``A_STEP`` bytes apart, k is contiguous (one segment)
    "columns"   the first column; consecutive k lie ``A_STEP`` bytes apart, rows are contiguous (one segment)
    "table"     a table of row pointers, ``SEGMENTS`` groups of them ``A_STEP`` bytes apart; each pointer leads to K
                contiguous elements. Convolution points border rows at zeros.
    "lines"     the first row; rows lie ``A_STEP`` bytes apart and segments ``SEGMENT_STEP``

and ``b`` is a packed panel (``k`` after ``k``, ``vectors`` * lanes elements each, segments after each other, aligned
to a vector), or, without :attr:`Micro.packed`, rows of a matrix ``B_STEP`` bytes apart with contiguous columns. By
:attr:`Micro.stored` its elements are

    ""          of the kernel's type
    "half"      16 bits wide, and widened as they are loaded
    "bfloat"
    "pairs"     two bfloat16 in 32 bits, which meet two of A; K counts pairs, and sums are float32. An instruction
                multiplies them (avx512bf16); it takes subnormal operands for zero.

``control`` is an array of 8-byte slots, numbered by :class:`Slot`. It is read only, so a driver fills it once and
changes the few slots that differ from tile to tile. Optional parts are null pointers or clear flag bits:

    PARTIAL     accumulators of earlier K blocks: a dense tile of ``rows`` x (``vectors`` * lanes), or null. It may be
                the same memory as ``OUT``.
    BIAS        one element per column, or null
    RESIDUAL    an addend like the output with rows ``RESIDUAL_STEP`` bytes apart, or null
    FLAGS       ``ALPHA``: multiply by the ALPHA slot; ``CLAMP``: clamp to [LOW, HIGH], where NaN stays NaN

A kernel that :attr:`Micro.fetches` asks for one cache line per k step from FETCH on, to have it in the second-level
cache: the driver points it at the panel that comes next, which else would be waited for by its first rows.

ALPHA, LOW and HIGH hold the kernel's element type in the low bytes of their slot. ``COLUMNS`` is how many lanes of
the *last* vector exist: where the instruction set has masks, bias, residual, output and an unpacked B are touched
only there. Where it has none, COLUMNS is ignored: the driver lets the kernel
write the whole tile to scratch and copies from there (``epilogue.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.builder import Fn, Module, Val, Var, size_of, vector
from ranvier.codegen.llvm.control import ALPHA, CLAMP, ROUND, SLOTS, Slot, number_bits, read_slot, write_slot
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass

__all__ = [
    "ALPHA",
    "CLAMP",
    "Emitter",
    "NARROW_STORED",
    "ROUND",
    "SLOTS",
    "Layout",
    "Micro",
    "Slot",
    "Stored",
    "number_bits",
    "read_slot",
    "write_slot",
]

Layout = Literal["rows", "columns", "table", "lines"]  # how A is given
Stored = Literal["", "half", "bfloat", "pairs"]  # how B is
NARROW_STORED: dict[DType, Stored] = {DType.float16: "half", DType.bfloat16: "bfloat"}
_FETCHING_ROWS = range(4, 9)


@dataclass(frozen=True)
class Micro:
    """One micro-kernel. ``element`` is LLVM's name of the type: ``float`` or ``double``."""

    element: str
    rows: int
    vectors: int
    a: Layout = "rows"
    packed: bool = True
    stored: Stored = ""

    @property
    def fetches(self) -> bool:
        """Whether it brings lines of a later panel near.

        Always where it is free, near panels or far, so that one kernel serves both. With fewer rows a line per k would
        be much beside the panel itself, narrow tiles have no load to spare, and beside more pointers to rows none fits.
        """
        return self.packed and self.rows in _FETCHING_ROWS and self.vectors > 1

    def spec(self) -> KernelSpec:
        key = ("gemm micro", self.element, self.rows, self.vectors, self.a, self.packed, self.stored)
        name = f"gemm {self.stored or self.element} {self.rows}x{self.vectors} {self.a}"
        name += "" if self.packed else " in place"

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            fn = module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")])
            Emitter(fn, self, isa).emit()

        return KernelSpec(name, key, emit)


# Independent chains of FMAs that keep two units of latency 4 busy; small tiles split K to have as many.
_CHAINS = 8
# Bytes of packed B, or rows of one in place, fetched ahead of their use; one stream alone is followed without us.
_AHEAD, _AHEAD_ALONE = 2048, 1024
_ROWS_AHEAD = 8


# Row pointers that fit the general registers; beyond, a pointer serves three rows, and has to be moved by itself in
# every turn: there several k steps per turn pay.
_POINTERS = 12
_UNROLL_MANY = 2


class Emitter:
    """Writes one micro-kernel."""

    def __init__(self, fn: Fn, micro: Micro, isa: Isa) -> None:
        self.fn, self.micro, self.isa = fn, micro, isa
        self.size = size_of(micro.element)
        self.lanes = isa.lanes(self.size)
        self.kind = vector(micro.element, self.lanes)
        self.width = micro.vectors * self.lanes * self.size  # bytes of a row of sums
        self.b_bytes = self.lanes * (2 if micro.stored in ("half", "bfloat") else self.size)  # of a vector of B
        self.panel = micro.vectors * self.b_bytes  # bytes of a panel per k
        # a pair may begin at any bfloat16
        pairs = micro.stored == "pairs"
        self.a_element, self.a_align = ("i32" if pairs else micro.element), (2 if pairs else self.size)
        self.control = fn.args["control"]
        self.splits = self._splits()
        # accumulators: [split][row][vector]
        zero = fn.const(self.kind, 0.0)
        self.acc: list[list[list[Var]]] = [
            [[fn.var(self.kind, zero) for _ in range(micro.vectors)] for _ in range(micro.rows)]
            for _ in range(self.splits)
        ]
        self.b = fn.var("ptr", fn.args["b"])

    def _splits(self) -> int:
        """Parts of K that have sums of their own, to have chains enough."""
        chains = self.micro.rows * self.micro.vectors
        if self.micro.rows == 1 and 5 * self.micro.vectors < self.isa.registers:
            return 4
        return 1 if chains >= _CHAINS else 2 if chains * 2 >= _CHAINS else 4

    def slot(self, slot: Slot, kind: str = "i64") -> Val:
        return read_slot(self.fn, self.control, slot, kind)

    # -- the loop over K --------------------------------------------------------------------------------------------

    def emit(self) -> None:
        fn, micro = self.fn, self.micro
        self.mask = self._mask() if self.isa.masks else None
        self.b_step: Val | None = None if micro.packed else self.slot(Slot.B_STEP)
        self.fetch: Val | None = self.slot(Slot.FETCH, "ptr") if micro.fetches else None
        count = self.slot(Slot.K)
        step = self.slot(Slot.A_STEP)
        if micro.a == "table":
            with fn.loop(0, self.slot(Slot.SEGMENTS)) as s:
                table = fn.gep(fn.args["a"], s * step)
                self._along_k(count, [fn.load("ptr", fn.gep(table, r, "ptr")) for r in range(micro.rows)])
        elif micro.a == "lines":
            further = self.slot(Slot.SEGMENT_STEP)
            with fn.loop(0, self.slot(Slot.SEGMENTS)) as s:
                self._even_rows(count, step, fn.gep(fn.args["a"], s * further))
        elif micro.a == "rows":
            self._even_rows(count, step, fn.args["a"])
        else:
            self._along_k(count, [fn.args["a"]], step)
        self._finish()
        fn.ret()

    def _even_rows(self, count: Val, step: Val, first: Val) -> None:
        if self.micro.rows > _POINTERS:
            self._many_rows(count, step, first)
        else:
            self._along_k(count, [self.fn.opaque(self.fn.gep(first, step * r)) for r in range(self.micro.rows)])

    def _mask(self) -> Val:
        return self.fn.mask_below(self.lanes, self.slot(Slot.COLUMNS))

    def _along_k(self, count: Val, rows: list[Val], step: Val | None = None) -> None:
        """All of one segment; ``rows`` are row pointers, or the one column pointer with its ``step``.

        Where a memory far away answers several streams faster than one, every split walks its own part of K: as many
        streams through B. Elsewhere splits take turns along one.
        """
        fn, element, splits = self.fn, self.a_element, self.splits
        b_step = self.b_step or fn.i64(self.panel)
        part = fn.lshr(count, splits.bit_length() - 1) if splits > 1 else count
        start = self.b.get()
        apart = self.isa.streams > 1

        def row_loader(k: Val, skipped: Val | None) -> Callable[[int], Val]:
            if step is None:
                places = rows if skipped is None else [fn.gep(p, skipped, element) for p in rows]
                return lambda r: fn.load(element, fn.gep(places[r], k, element), self.a_align)
            column = fn.gep(rows[0], (k if skipped is None else k + skipped) * step)
            return lambda r: fn.load(element, fn.gep(column, r, element))

        with fn.loop(0, part) as k:
            for split in range(splits):
                if split:
                    self._fence()
                if not apart:
                    here = k * splits + split if splits > 1 else k
                    self._step(fn.gep(start, here * b_step), row_loader(here, None), split, here)
                    continue
                skipped = part * split if split else None
                panel = start if skipped is None else fn.gep(start, skipped * b_step)
                self._step(fn.gep(panel, k * b_step), row_loader(k, skipped), split, k)
        if splits > 1:
            with fn.loop(part * splits, count) as k:
                self._step(fn.gep(start, k * b_step), row_loader(k, None), 0)
        self.b.set(fn.gep(start, count * b_step))

    def _many_rows(self, count: Val, step: Val, first: Val) -> None:
        """More rows than pointers fit the registers: every pointer serves three rows, one and two steps apart."""
        fn, element = self.fn, self.a_element
        starts = [fn.gep(first, step * r) for r in range(0, self.micro.rows, 3)]
        groups = [fn.var("ptr", self.fn.opaque(p)) for p in starts]
        b_step = self.b_step or fn.i64(self.panel)

        def turn(steps: int) -> None:
            here, panel = [g.get() for g in groups], self.b.get()
            for u in range(steps):
                if u:
                    self._fence()

                def row(r: int, u: int = u) -> Val:
                    at = here[r // 3]
                    at = fn.gep(at, step * (r % 3)) if r % 3 else at
                    return fn.load(element, fn.gep(at, u, element), self.a_align)

                self._step(fn.gep(panel, b_step * u) if u else panel, row, 0)
            for g, p in zip(groups, here):
                g.set(self.fn.opaque(fn.gep(p, steps, element)))
            self.b.set(fn.gep(panel, b_step * steps))

        whole = fn.and_(count, -_UNROLL_MANY)
        with fn.loop(0, whole, _UNROLL_MANY):
            turn(_UNROLL_MANY)
        with fn.loop(whole, count):
            turn(1)

    def _fence(self) -> None:
        """Keeps the loads of one k step together: gathered over several steps they would not fit the registers."""
        self.fn.line('call void asm sideeffect "", "~{memory}"()')

    def _step(self, base: Val, row: Callable[[int], Val], split: int, k: Val | None = None) -> None:
        """One k: the panel's vectors at ``base`` times ``row(r)`` of every row."""
        fn, micro = self.fn, self.micro
        if k is not None and self.fetch is not None:
            fn.prefetch(fn.gep(self.fetch, k * 64), locality=2)
        ahead: Val | None
        if self.b_step is None:
            ahead = fn.gep(base, _AHEAD if self.isa.streams > 1 else _AHEAD_ALONE)
        elif self.splits > 1 and micro.rows == 1:
            ahead = None  # short pieces of four rows at once: asking for more of them gets in the way
        else:
            ahead = fn.gep(base, self.b_step * (_ROWS_AHEAD if micro.rows > 1 else _ROWS_AHEAD // 2))
        if ahead is not None:
            for line in range(0, self.panel, 64):
                fn.prefetch(fn.gep(ahead, line))
        panel = [self._load_b(base, v) for v in range(micro.vectors)]
        for r in range(micro.rows):
            wide = fn.splat(row(r), self.lanes)
            for v in range(micro.vectors):
                acc = self.acc[split][r][v]
                acc.set(self._multiplied(wide, panel[v], acc.get()))

    def _multiplied(self, a: Val, b: Val, acc: Val) -> Val:
        if self.micro.stored != "pairs":
            return self.fn.fma(a, b, acc)
        kind = vector("bfloat", 2 * self.lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{8 * self.isa.vector_bytes}"
        return self.fn.intrinsic(name, acc.type, [acc, self.fn.bitcast(a, kind), self.fn.bitcast(b, kind)])

    def _load_b(self, base: Val, v: int) -> Val:
        fn, stored = self.fn, self.micro.stored
        at = fn.gep(base, v * self.b_bytes)
        if stored in ("", "pairs"):
            kind = vector(self.a_element, self.lanes)
            return fn.load(kind, at, self.isa.vector_bytes) if self.micro.packed else self._load(at, v)
        kind = vector("i16", self.lanes)
        masked = not self.micro.packed and self.mask is not None and v == self.micro.vectors - 1
        raw = fn.masked_load(kind, at, self.mask) if masked and self.mask is not None else fn.load(kind, at)
        widen = vmath.half_to_float if stored == "half" else vmath.bfloat_to_float
        return widen(fn, raw, self.isa)

    # -- what happens to the accumulators ---------------------------------------------------------------------------

    def _load(self, at: Val, v: int) -> Val:
        """A vector of a tensor: the last one of a panel only as far as it exists."""
        if self.mask is not None and v == self.micro.vectors - 1:
            return self.fn.masked_load(self.kind, at, self.mask)
        return self.fn.load(self.kind, at)

    def _all(self) -> list[tuple[int, int, Var]]:
        return [(r, v, acc) for r, row in enumerate(self.acc[0]) for v, acc in enumerate(row)]

    def _finish(self) -> None:
        fn = self.fn
        for other in self.acc[1:]:
            for r, v, acc in self._all():
                acc.set(acc.get() + other[r][v].get())
        flags = self.slot(Slot.FLAGS)
        with fn.if_(fn.cmp("ne", fn.and_(flags, ALPHA), 0)):
            alpha = fn.splat(self.slot(Slot.ALPHA, self.micro.element), self.lanes)
            for _, _, acc in self._all():
                acc.set(acc.get() * alpha)
        # partial sums, bias and residual are all addends with a step between rows: one piece of code takes them in turn
        dense, apart = fn.i64(self.width), self.slot(Slot.RESIDUAL_STEP)
        with fn.loop(int(Slot.PARTIAL), int(Slot.RESIDUAL) + 1) as which:
            addend = fn.load("ptr", fn.gep(self.control, which, "i64"))
            with fn.if_(fn.cmp("ne", addend, fn.zero("ptr"))):
                step = fn.select(fn.cmp("eq", which, int(Slot.PARTIAL)), dense, 0)
                step = fn.select(fn.cmp("eq", which, int(Slot.RESIDUAL)), apart, step)
                for at, v, acc in self._places(addend, step):
                    acc.set(acc.get() + self._load(at, v))
        with fn.if_(fn.cmp("ne", fn.and_(flags, CLAMP), 0)):
            low = fn.splat(self.slot(Slot.LOW, self.micro.element), self.lanes)
            high = fn.splat(self.slot(Slot.HIGH, self.micro.element), self.lanes)
            for _, _, acc in self._all():
                # the accumulator stands second: where it is NaN, it is what comes out
                acc.set(fn.quick_min(high, fn.quick_max(low, acc.get())))
        self._store()

    def _store(self) -> None:
        fn = self.fn
        for at, v, acc in self._places(self.slot(Slot.OUT, "ptr"), self.slot(Slot.OUT_STEP)):
            if self.mask is not None and v == self.micro.vectors - 1:
                fn.masked_store(acc.get(), at, self.mask)
            else:
                fn.store(acc.get(), at)

    def _places(self, start: Val, step: Val) -> Iterator[tuple[Val, int, Var]]:
        """Every accumulator with the address that belongs to it, rows ``step`` bytes apart, and its vector's number."""
        for row in self.acc[0]:
            for v, acc in enumerate(row):
                yield self.fn.gep(start, v * self.isa.vector_bytes), v, acc
            start = self.fn.gep(start, step)
