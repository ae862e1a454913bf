"""The micro-kernel of the matrix unit: up to 32 rows of A times a panel of one or two vectors of B.

It stands where the float micro-kernels do (``gemm/micro.py``) and reads the same control block, so the same drivers
call it. What differs:

    an "element" of A and B is a group of 32 bits (two bfloat16 or four bytes along K), and Slot.K counts groups: a
    multiple of ``STEP``. B is packed as ever, panel after panel, group after group, with zeros where K was padded. A
    tile of a wide panel then takes half of every row; with ``TileMicro.apart`` the two tiles of a step follow each
    other instead, each in one piece, which is quicker to load;
    Slot.REST says how many bytes of A exist in the last step of a segment (0: all 64), and no others are read;
    Slot.ROWS is the number of rows, 1 to 32: one kernel serves all;
    Slot.TILES is written: which configuration is loaded. The driver sets it to 0 when it is called, and where it is
    not 0 at the end, releases the tiles;
    where an operand stays near (``TileMicro.near``), sums may wait for the next call to be written (``later.py``);
    with ``TileMicro.keeps``, the tiles of A are stored at Slot.KEPT on their way, as a block of the layout "blocks":
    a driver packs rows by meeting them with their first panel, and the others find the copy.

Of A there are the layouts

    "rows"      the first row; rows lie ``A_STEP`` bytes apart (one segment)
    "blocks"    a block as ``pack.py`` makes it: 32 times 64 bytes for every step (one segment, REST is 0)
    "starts"    a table of ``SEGMENTS`` pointers, each to the first row of its segment; rows lie ``A_STEP`` bytes apart
    "table"     a table of row pointers, ``SEGMENTS`` groups of them ``A_STEP`` bytes apart: rows are copied together
                for every step, which costs about as much as the multiplication (``rows.py`` copies once for all panels)

bfloat16 sums are float32, rounded to nearest after every pair; subnormal operands and sums count as zero, which is the
unit's nature. Integer sums are exact, and everything but earlier partial sums is left to the finish kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.amx.later import Later
from ranvier.codegen.llvm.amx.rows import bytes_mask, copy_rows
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.control import ALPHA, CLAMP, PASSING, ROUND, Slot, read_slot, write_slot
from ranvier.codegen.llvm.elements import store_product
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass

STEP = 16  # groups of K that one tile holds
VECTORS = 2  # of the widest panels
LINES = 8  # of the panel that comes next, brought near in every step, and not more: all of it while four blocks pass
_MOST_BLOCKS = 16  # of rows to count on for that
_ASKED = 2  # rows of the output that are asked for in every step
NEAR_STEPS = 20  # of an operand that the nearest cache keeps from call to call: 40 KB, the rest would push them out
Layout = Literal["rows", "blocks", "starts", "table"]
Near = Literal["", "a", "b"]
INSTRUCTIONS = {
    (DType.bfloat16, DType.bfloat16): "tdpbf16ps",
    (DType.int8, DType.int8): "tdpbssd",
    (DType.int8, DType.uint8): "tdpbsud",
    (DType.uint8, DType.int8): "tdpbusd",
    (DType.uint8, DType.uint8): "tdpbuud",
}
_NEEDS = {DType.bfloat16: "amx-bf16", DType.int8: "amx-int8", DType.uint8: "amx-int8"}


def suits(isa: Isa, left: DType, right: DType) -> bool:
    """Whether the machine multiplies these types by tiles."""
    return (left, right) in INSTRUCTIONS and isa.has("amx-tile") and isa.has(_NEEDS[left])


def lines_ahead(blocks: int) -> int:
    """Of the next panel in every step: just so many that all of it is near when ``blocks`` of rows have had this one,
    because each costs time."""
    fewest = VECTORS * STEP // LINES
    return -(-VECTORS * STEP // max(fewest, min(_MOST_BLOCKS, blocks)))


def fetched_bytes(lines: int) -> int:
    """Bytes of the next panel per group of K, where so many lines come near in every step."""
    return lines * tiles.LINE // STEP


def padded_groups(groups: int) -> int:
    """Groups of a packed B whose K has so many."""
    return -(-groups // STEP) * STEP


def rest_bytes(nbytes: int) -> int:
    """Slot.REST for rows of A of so many bytes."""
    return nbytes % tiles.LINE


@dataclass(frozen=True)
class TileMicro:
    """``left`` and ``right`` are the types of A and B; ``vectors`` (1 or 2) is the width of the panels."""

    left: DType
    right: DType
    vectors: int
    a: Layout = "rows"
    lines: int = LINES  # brought near in every step, from FETCH on
    near: Near = ""  # the operand that the next call has again; the other comes and goes, and leaves it the cache
    apart: bool = False
    rounds: bool = False  # results may be wanted as bfloat16, which Slot.FLAGS says (near ones only)
    keeps: bool = False  # tiles of A are stored again, dense (near ones only)

    def spec(self) -> KernelSpec:
        names = self.left.name, self.right.name
        shape = self.vectors, self.a, self.lines, self.near, self.apart, self.rounds, self.keeps
        key = ("amx micro", 7, *names, *shape)
        name = f"amx {self.left.name} {self.right.name} x{self.vectors} {self.a}"

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            _Emitter(module.function(symbol, [("ptr", "a"), ("ptr", "b"), ("ptr", "control")]), self, isa).emit()

        narrow = DType.bfloat16 in (self.left, self.right)
        return KernelSpec(name, key, emit, "bfloat16 tiles" if narrow else "int8 tiles")


@dataclass(frozen=True)
class _Walk:
    """Where the steps of a segment are: A and its rows, the bytes from step to step of it and of B, and how many blocks
    of 16 rows there are."""

    a: Val
    step: Val
    along: int
    b: Val
    apart: int
    blocks: int


class _Emitter:
    def __init__(self, fn: Fn, micro: TileMicro, isa: Isa) -> None:
        self.fn, self.micro, self.isa = fn, micro, isa
        self.instruction = INSTRUCTIONS[micro.left, micro.right]
        self.element = "float" if micro.left is DType.bfloat16 else "i32"
        self.kind = vector(self.element, tiles.TILE_ROWS)
        self.width = micro.vectors * tiles.LINE
        self.b_row, self.b_tile = (tiles.LINE, STEP * tiles.LINE) if micro.apart else (self.width, tiles.LINE)
        self.control = fn.args["control"]
        self.line = fn.i64(tiles.LINE)
        self.block = fn.stack("i8", 2 * tiles.ROWS * tiles.LINE)  # rows copied together, or sums on their way out
        self.b = fn.var("ptr", fn.args["b"])

    def slot(self, slot: Slot, kind: str = "i64") -> Val:
        return read_slot(self.fn, self.control, slot, kind)

    def emit(self) -> None:
        f = self.fn
        self.rows = self.slot(Slot.ROWS)
        self.two = f.cmp("sgt", self.rows, tiles.TILE_ROWS)
        with f.if_(f.cmp("ne", self.slot(Slot.TILES), self.rows)):
            tiles.configure(f, self.rows)
            write_slot(f, self.control, Slot.TILES, self.rows)
        self.steps = f.lshr(self.slot(Slot.K), STEP.bit_length() - 1)
        self.rest = self.slot(Slot.REST)
        self.short = f.cmp("ne", self.rest, 0)
        self.whole = self.steps - f.cast(self.short, "i64")
        self.fetch = self.slot(Slot.FETCH, "ptr") if self.micro.lines else None
        if self.micro.keeps:
            self.kept = self.slot(Slot.KEPT, "ptr")
        self.out, self.out_step = self.slot(Slot.OUT, "ptr"), self.slot(Slot.OUT_STEP)
        self._begin()
        self._decide()
        single = self.micro.a in ("rows", "blocks")
        self._ask_for_output(self.whole * _ASKED if single else f.i64(0))
        if single:
            self._segment(f.args["a"], asks=True)
        else:
            with f.loop(0, self.slot(Slot.SEGMENTS)) as s:
                if self.micro.a == "table":
                    self._copied(f.gep(f.args["a"], s * self.slot(Slot.A_STEP)))
                else:
                    self._segment(f.load("ptr", f.gep(f.args["a"], s, "ptr")))
        self._finish()
        f.ret()

    # -- the loop over K --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Sums start at zero, or at earlier ones: those that are scaled already wait where the product is not."""
        f = self.fn
        self.partial = self.slot(Slot.PARTIAL, "ptr")
        self.flags = self.slot(Slot.FLAGS)
        there = f.cmp("ne", self.partial, f.zero("ptr"))
        scaled = f.cmp("ne", f.and_(self.flags, ALPHA), 0)
        self.adds_partial = f.and_(there, scaled)
        with f.if_else(f.and_(there, f.not_(scaled))) as otherwise:
            self._each(lambda tile, r, v: tiles.load(f, tile, self._in(self.partial, r, v), f.i64(self.width)))
            otherwise()
            self._each(lambda tile, r, v: tiles.zero(f, tile))

    def _decide(self) -> None:
        """Whether the sums are the output as they are, and whether it is written now."""
        f, none = self.fn, self.fn.zero("ptr")
        self.columns = self.slot(Slot.COLUMNS)
        self.plain = f.cmp("eq", self.columns, tiles.TILE_ROWS)
        if self.element == "float":
            absent = (f.cmp("eq", self.slot(slot, "ptr"), none) for slot in (Slot.BIAS, Slot.RESIDUAL))
            flags = f.and_(self.flags, ~(PASSING | ROUND) if self.micro.rounds else ~PASSING)
            for each in (f.cmp("eq", flags, 0), *absent):
                self.plain = f.and_(self.plain, each)
        self.later: Later | None = None
        self.defers: Val | None = None
        if self.micro.near:
            self.later = Later(f, self.isa, self.control, DType.bfloat16 if self.micro.rounds else DType.float32)
            self.later.spread(self.whole)
            if self.micro.vectors == VECTORS:
                may = f.and_(f.cmp("ne", self.slot(Slot.DEFERS), 0), f.cmp("eq", self.rows, tiles.ROWS))
                self.defers = f.and_(self.plain, may)

    def _ask_for_output(self, first: Val) -> None:
        """Lines that will be written, on their way here while the product is made: stores wait for nothing then.

        Those of the first rows are asked for step by step, because many at once keep A waiting."""
        f = self.fn
        with f.loop(first if self.defers is None else f.select(self.defers, self.rows, first), self.rows) as r:
            self._ask_for_row(r)

    def _ask_for_row(self, r: Val) -> None:
        f = self.fn
        for v in range(1 if self.micro.rounds else self.micro.vectors):
            f.prefetch(f.gep(self.out, r * self.out_step + v * tiles.LINE), write=True)

    def _in(self, base: Val, block: int, column: int) -> Val:
        """Where a tile of sums lies in a dense block."""
        return self.fn.gep(base, block * tiles.TILE_ROWS * self.width + column * tiles.LINE)

    def _each(self, what: Callable[[int, int, int], None]) -> None:
        """Every tile of sums that there is; the lower ones where there are more than 16 rows."""
        for v in range(self.micro.vectors):
            what(tiles.sums(0, v), 0, v)
        with self.fn.if_(self.two):
            for v in range(self.micro.vectors):
                what(tiles.sums(1, v), 1, v)

    def _segment(self, a: Val, *, asks: bool = False) -> None:
        f, blocks = self.fn, self.micro.a == "blocks"
        step = self.line if blocks else self.slot(Slot.A_STEP)
        along = tiles.ROWS * tiles.LINE if blocks else tiles.LINE
        start, apart = self.b.get(), STEP * self.width
        with f.if_(f.cmp("sgt", self.whole, 0)), f.if_else(self.two) as otherwise:
            self._walk(_Walk(a, step, along, start, apart, 2), asks)
            otherwise()
            self._walk(_Walk(a, step, along, start, apart, 1), asks)
        if blocks:
            self.b.set(f.gep(start, self.steps * apart))
            return
        with f.if_(self.short):
            from_ = f.gep(a, self.whole * tiles.LINE)
            mask = bytes_mask(f, self.rest)
            copy_rows(f, self.rows, lambda r: f.gep(from_, r * step), self.block, self.line, mask)
            self._either(self.block, f.gep(start, self.whole * apart))
        self.b.set(f.gep(start, self.steps * apart))

    def _copied(self, table: Val) -> None:
        """Rows that lie anywhere: copied together step by step, into two blocks in turn."""
        f = self.fn
        start, apart = self.b.get(), STEP * self.width
        with f.loop(0, self.steps) as s:
            last = f.and_(self.short, f.cmp("eq", s, self.whole))
            mask = bytes_mask(f, f.select(last, self.rest, tiles.LINE))
            block = f.gep(self.block, f.and_(s, 1) * (tiles.ROWS * tiles.LINE))

            def row(r: Val, s: Val = s) -> Val:
                return f.gep(f.load("ptr", f.gep(table, r, "ptr")), s * tiles.LINE)

            copy_rows(f, self.rows, row, block, self.line, mask)
            self._either(block, f.gep(start, s * apart))
        self.b.set(f.gep(start, self.steps * apart))

    def _either(self, block: Val, b: Val) -> None:
        with self.fn.if_else(self.two) as otherwise:
            self._step(block, self.line, b, 2)
            otherwise()
            self._step(block, self.line, b, 1)

    def _meanwhile(self, s: Val, asks: bool) -> None:
        """What is asked for in step ``s``, to be there later."""
        f = self.fn
        if self.fetch is not None:
            for k in range(self.micro.lines):
                f.prefetch(f.gep(self.fetch, s * (self.micro.lines * tiles.LINE) + k * tiles.LINE), locality=2)
        if self.later is not None:
            self.later.some(s)
        if asks and self.defers is not None:
            with f.if_(f.not_(self.defers)):
                self._ask_for_some(s)
        elif asks:
            self._ask_for_some(s)

    def _ask_for_some(self, s: Val) -> None:
        for k in range(_ASKED):
            self._ask_for_row(self.fn.min_(s * _ASKED + k, self.rows - 1))

    def _walk(self, w: _Walk, asks: bool) -> None:
        """Whole steps. Where an operand stays near, each loads the next one's tiles when it needs its own no more."""
        f = self.fn
        if not self.micro.near:
            with f.loop(0, self.whole) as s:
                self._meanwhile(s, asks)
                self._step(f.gep(w.a, s * w.along), w.step, f.gep(w.b, s * w.apart), w.blocks)
            return
        near = f.min_(self.whole, NEAR_STEPS)
        for v in range(self.micro.vectors):
            self._load_b(w, f.i64(0), v, far=False)
        for r in range(w.blocks):
            self._load_a(w, f.i64(0), r, far=False)
        with f.loop(0, near - 1) as s:
            self._meanwhile(s, asks)
            self._turn(w, s + 1, far=False)
        with f.loop(near - 1, self.whole - 1) as s:
            self._meanwhile(s, False)
            self._turn(w, s + 1, far=True)
        self._meanwhile(self.whole - 1, asks)
        tiles.turn(f, self.instruction, w.blocks, self.micro.vectors)

    def _turn(self, w: _Walk, following: Val, *, far: bool) -> None:
        tiles.turn(
            *(self.fn, self.instruction, w.blocks, self.micro.vectors),
            load_a=lambda r: self._load_a(w, following, r, far=far),
            load_b=lambda v: self._load_b(w, following, v, far=far),
        )

    def _load_a(self, w: _Walk, s: Val, r: int, *, far: bool) -> None:
        f = self.fn
        at = f.gep(w.a, s * w.along)
        if r:
            at = f.gep(at, w.step * (r * tiles.TILE_ROWS))
        tiles.load(f, tiles.a_tile(r), at, w.step, passing=self._passes("a", far) or self.micro.keeps)
        if self.micro.keeps:
            there = f.gep(self.kept, s * (tiles.ROWS * tiles.LINE) + r * (tiles.TILE_ROWS * tiles.LINE))
            tiles.store(f, tiles.a_tile(r), there, self.line)

    def _load_b(self, w: _Walk, s: Val, v: int, *, far: bool) -> None:
        f = self.fn
        at = f.gep(f.gep(w.b, s * w.apart), v * self.b_tile)
        tiles.load(f, tiles.b_tile(v), at, f.i64(self.b_row), passing=self._passes("b", far))

    def _passes(self, operand: Near, far: bool) -> bool:
        return far or operand != self.micro.near

    def _multiply(self, r: int, v: int) -> None:
        tiles.multiply(self.fn, self.instruction, tiles.sums(r, v), tiles.a_tile(r), tiles.b_tile(v))

    def _step(self, a: Val, step: Val, b: Val, blocks: int) -> None:
        """One tile of K: rows at ``a`` against the panel at ``b``."""
        f, b_row = self.fn, self.fn.i64(self.b_row)
        for v in range(self.micro.vectors):
            tiles.load(f, tiles.b_tile(v), f.gep(b, v * self.b_tile), b_row)
            for r in range(blocks):
                if v == 0:
                    at = f.gep(a, step * (r * tiles.TILE_ROWS)) if r else a
                    tiles.load(f, tiles.a_tile(r), at, step)
                self._multiply(r, v)

    # -- what happens to the sums -----------------------------------------------------------------------------------

    def _finish(self) -> None:
        f = self.fn
        if self.later is not None:
            self.later.none()
        if self.defers is None or self.later is None:
            self._write()
            return
        with f.if_else(self.defers) as otherwise:
            self._put_into(self.later.block)
            self.later.put(self.out, self.out_step)
            otherwise()
            self._write()

    def _put_into(self, block: Val) -> None:
        """The sums one row after the other."""
        f = self.fn
        self._each(lambda tile, r, v: tiles.store(f, tile, self._in(block, r, v), f.i64(self.width)))

    def _write(self) -> None:
        f = self.fn
        out, step = self.out, self.out_step

        def there(tile: int, block: int, column: int) -> None:
            at = f.gep(out, step * (block * tiles.TILE_ROWS)) if block else out
            tiles.store(f, tile, f.gep(at, column * tiles.LINE), step)

        as_they_are = self.plain
        if self.micro.rounds:
            self.rounding = f.cmp("ne", f.and_(self.flags, ROUND), 0)
            as_they_are = f.and_(as_they_are, f.not_(self.rounding))
        with f.if_else(as_they_are) as otherwise:
            self._each(there)
            otherwise()
            self._put_into(self.block)
            mask = f.mask_below(tiles.TILE_ROWS, self.columns)
            with f.loop(0, self.rows) as r:
                self._row(r, f.gep(out, r * step), mask)

    def _row(self, r: Val, out: Val, mask: Val) -> None:
        """A row of sums from the block to the output, with all that there is to add to it."""
        f, vectors = self.fn, self.micro.vectors
        row = r * self.width
        values = [f.var(self.kind, f.load(self.kind, f.gep(self.block, row + v * 64), 64)) for v in range(vectors)]

        def load(at: Val, v: int) -> Val:
            at = f.gep(at, v * tiles.LINE)
            return f.masked_load(self.kind, at, mask) if v == vectors - 1 else f.load(self.kind, at)

        if self.element == "float":
            with f.if_(f.cmp("ne", f.and_(self.flags, ALPHA), 0)):
                alpha = f.splat(self.slot(Slot.ALPHA, "float"), tiles.TILE_ROWS)
                for value in values:
                    value.set(value.get() * alpha)
            with f.if_(self.adds_partial):
                for v, value in enumerate(values):
                    value.set(value.get() + f.load(self.kind, f.gep(self.partial, row + v * tiles.LINE)))
            for slot, apart in ((Slot.BIAS, f.i64(0)), (Slot.RESIDUAL, self.slot(Slot.RESIDUAL_STEP))):
                addend = self.slot(slot, "ptr")
                with f.if_(f.cmp("ne", addend, f.zero("ptr"))):
                    for v, value in enumerate(values):
                        value.set(value.get() + load(f.gep(addend, r * apart), v))
            with f.if_(f.cmp("ne", f.and_(self.flags, CLAMP), 0)):
                low, high = (f.splat(self.slot(s, "float"), tiles.TILE_ROWS) for s in (Slot.LOW, Slot.HIGH))
                for value in values:
                    # the value stands second: where it is NaN, it is what comes out
                    value.set(f.quick_min(high, f.quick_max(low, value.get())))
        found = [value.get() for value in values]
        if not self.micro.rounds:
            self._store(found, out, mask, DType.float32)
            return
        with f.if_else(self.rounding) as otherwise:
            self._store(found, out, mask, DType.bfloat16)
            otherwise()
            self._store(found, out, mask, DType.float32)

    def _store(self, values: list[Val], out: Val, mask: Val, dtype: DType) -> None:
        f = self.fn
        for v, value in enumerate(values):
            at = f.gep(out, v * tiles.TILE_ROWS * dtype.numpy.itemsize)
            last = v == len(values) - 1
            if dtype is DType.bfloat16:
                store_product(f, self.isa, dtype, value, at, mask if last else None)
            elif last:
                f.masked_store(value, at, mask)
            else:
                f.store(value, at)
