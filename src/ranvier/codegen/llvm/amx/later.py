"""Sums that are written to the output while the next product is made.

Rows of an output lie a power of two apart often enough that all lines of a block fall into the same set or two of the
nearest cache, which does not hold so many: lines that were asked for before are gone again when the sums are stored,
and the stores wait for each other. So a whole block of sums is put aside, in memory that stays near, and the next call
of the micro-kernel moves some of its rows in every step, each asked for only a few rows before. The driver moves the
last block itself.

The control block says what waits: at ``Slot.LATER`` is room for a block, ``Slot.LATER_OUT`` is where it belongs (null:
nothing waits), and ``Slot.LATER_STEP`` the bytes between rows there. ``Slot.DEFERS`` is not 0 where a micro-kernel may
put sums aside: nobody reads them before the driver returns. Sums that are wanted as bfloat16 are rounded on their way.

Where ``Slot.FLAGS`` has PASSING, float32 sums go to memory past the caches, if they lie at whole lines: an output of
many megabytes would push the operands out of the second-level cache, and its old content need not be fetched then.
Whoever reads it next has to get it from memory, so that less is won than it seems, and nothing where it is smaller.
"""

from __future__ import annotations

from ranvier.codegen.llvm.amx.tiles import COLUMNS, LINE, ROWS
from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.control import PASSING, Slot, read_slot, write_slot
from ranvier.codegen.llvm.elements import store_product
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType

WIDTH = 4 * COLUMNS  # bytes of a row of a block
BLOCK = ROWS * WIDTH
COLLIDING = 2048  # bytes: rows a multiple of it apart fall into four sets of the nearest cache, or fewer
WORTH_GROUPS = 128  # of K: a shorter product has no time to move rows in
_AHEAD = 4  # rows that are on their way here


class Later:
    """The block that waits when a function begins; it belongs to an output of type ``dtype``."""

    def __init__(self, f: Fn, isa: Isa, control: Val, dtype: DType = DType.float32) -> None:
        self.f, self.isa, self.control, self.dtype = f, isa, control, dtype
        self.lanes = COLUMNS if dtype is DType.bfloat16 else COLUMNS // 2  # of a line of the output
        self.block = read_slot(f, control, Slot.LATER, "ptr")
        self.out = read_slot(f, control, Slot.LATER_OUT, "ptr")
        self.step = read_slot(f, control, Slot.LATER_STEP)
        self.rows = f.select(f.cmp("ne", self.out, f.zero("ptr")), f.i64(ROWS), f.i64(0))
        asked = f.cmp("ne", f.and_(read_slot(f, control, Slot.FLAGS), PASSING), 0)
        places = f.or_(read_slot(f, control, Slot.LATER_OUT), self.step)
        self.passing = f.and_(asked, f.cmp("eq", f.and_(places, LINE - 1), 0))

    def spread(self, steps: Val) -> None:
        """All of it is to be moved in so many steps."""
        f = self.f
        self.per = f.i64(ROWS)
        for count in (4, 2, 1):
            self.per = f.select(f.cmp("sge", steps, ROWS // count), f.i64(count), self.per)

    def some(self, s: Val) -> None:
        """The rows of step ``s``."""
        first = self.f.min_(s * self.per, self.rows)
        self._move(first, self.f.min_(first + self.per, self.rows))

    def all(self) -> None:
        self._move(self.f.i64(0), self.rows)

    def _move(self, begin: Val, end: Val) -> None:
        if self.dtype is DType.bfloat16:
            self._move_rows(begin, end)
            return
        # a loop for either way: stores of the same in two branches would become one, of the plain kind
        with self.f.if_else(self.passing) as otherwise:
            self._move_rows(begin, end, passing=True)
            otherwise()
            self._move_rows(begin, end)

    def _move_rows(self, begin: Val, end: Val, *, passing: bool = False) -> None:
        f = self.f
        with f.loop(begin, end) as r:
            if not passing:
                self._ask(self.out, self.step, f.min_(r + _AHEAD, ROWS - 1))
            here, there = f.gep(self.block, r * WIDTH), f.gep(self.out, r * self.step)
            for k in range(0, COLUMNS, self.lanes):
                value = f.load(vector("float", self.lanes), f.gep(here, 4 * k), LINE)
                line = f.gep(there, k * self.dtype.numpy.itemsize)
                if passing:
                    f.store(value, line, LINE, passing=True)
                else:
                    store_product(f, self.isa, self.dtype, value, line)

    def put(self, out: Val, step: Val) -> None:
        """A block is there now that belongs to ``out``."""
        f = self.f
        write_slot(f, self.control, Slot.LATER_OUT, out)
        write_slot(f, self.control, Slot.LATER_STEP, step)
        with f.if_(f.cmp("eq", f.and_(read_slot(f, self.control, Slot.FLAGS), PASSING), 0)):
            for r in range(_AHEAD):
                self._ask(out, step, f.i64(r))

    def none(self) -> None:
        """What waited has been moved."""
        write_slot(self.f, self.control, Slot.LATER_OUT, self.f.zero("ptr"))

    def _ask(self, out: Val, step: Val, r: Val) -> None:
        for at in range(0, COLUMNS // self.lanes * LINE, LINE):
            self.f.prefetch(self.f.gep(out, r * step + at), write=True)


def settle(f: Fn) -> None:
    """What went past the caches is there for others when this has been done: locks and flags do not wait for it."""
    f.module.declare("llvm.x86.sse.sfence", "void", [])
    f.line("call void @llvm.x86.sse.sfence()")
