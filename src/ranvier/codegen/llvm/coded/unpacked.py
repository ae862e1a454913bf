"""Many rows times coded weights, both as bytes: panels are unpacked once for all rows.

``rows.py`` decodes in registers, again for every few rows. Here the weights of two vectors of columns become bytes in
scratch, and all rows meet them there. The vector units are what counts: a sum takes an instruction for four k, and
three when a group ends. Where products are of signed bytes codes are stored less their middle, and what a sum begins
with comes from memory as far as the compiler leaves it there, for the units that load have time; elsewhere it begins
with what the middle adds to the sums of its row. Scales that are made of two numbers are made once as well.
"""

from __future__ import annotations

import itertools
import math

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.builder import Val, Var, vector
from ranvier.codegen.llvm.coded.coupled import FACTOR
from ranvier.codegen.llvm.coded.decode import subtracted
from ranvier.codegen.llvm.coded.driver import PassDriver
from ranvier.codegen.llvm.coded.pack import CodedB
from ranvier.codegen.llvm.coded.passes import Dim, Pass, pass_launch, stays_small
from ranvier.codegen.llvm.coded.prepare import Prepared
from ranvier.codegen.llvm.gemm.blocks import Cut
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of, multiplies_bytes, spread_groups
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath.core import WHOLE_BITS

_VECTORS = 2  # of a block
# Where products pick lanes: rows of a block, with 8 sums and 8 totals, which leave registers for rows and weights; and
# rows from which on there are blocks, for with fewer decoding a few times costs less than bytes that are stored.
_PICKED = (4, 13)
_OTHERS = {32: (6, 33), 16: (3, 17)}  # the same where rows take no registers, by how many there are
_QUADS = 8  # fours of k that the code of a turn takes at most
_FACTORS = 2  # of a group: what scales it, and what is added
_DEEPEST = 1 << 16  # k whose bytes are kept in scratch
_GOPS = 100.0  # of one core, roughly


def _rows(isa: Isa) -> tuple[int, int]:
    """Of a block, and from which on there are blocks."""
    return _PICKED if dot_of(isa) is SIGNED else _OTHERS[isa.registers]


def suits_unpacked(b: CodedB, rows: int, isa: Isa) -> bool:
    """Whether products with so many rows of codes are made here."""
    return multiplies_bytes(isa) and rows >= _rows(isa)[1] and b.deep <= _DEEPEST


def by_unpacked(p: Problem, b: CodedB, prepared: Prepared, isa: Isa, threads: int) -> Launch:
    quads = b.words * b.coding.quads
    kernel = Pass(
        *(b.coding, b.scaling, "codes", Cut.of(p.m, _rows(isa)[0]).size, _VECTORS),
        together=math.gcd(quads, _QUADS),
        once=_QUADS % quads == 0,
        as_floats=dot_of(isa) is SIGNED and stays_small(b),
        coupled=b.coupled,
    )
    vectors = 2 * kernel.rows + b.deep // 4  # totals, what sums begin with, bytes
    vectors += _FACTORS * b.groups if kernel.scaling.stepped else 0
    scratch = vectors * _VECTORS * isa.vector_bytes
    work = 2.0 * p.m * p.n * p.k * p.entries / _GOPS / 1e3
    return pass_launch(kernel, Unpacked, p, b, prepared, isa, threads, work=work, scratch=scratch)


class Unpacked(PassDriver):
    """Blocks of rows that meet bytes in scratch."""

    name = "coded bytes"

    def over(self, start: Val, stop: Val, panels: int) -> None:
        f, rows = self.fn, self.kernel.rows
        if self.picks:
            self.decoder.hold_masks()
        self._begin(panels)
        with f.loop(start, stop, panels) as panel:
            self._unpack(panel, panels)
            with f.loop(0, self.m, rows) as row:
                self._block(panel, row, panels)
                self.finish(panel, row, f.min_(self.m - row, rows), panels)

    def _begin(self, panels: int) -> None:
        """Behind the totals: what sums begin with, and the bytes. The compiler does not know that none of these is
        another, or it would keep in a register what is to be loaded."""
        f, size = self.fn, self.isa.vector_bytes
        block = self.kernel.rows * panels
        self.begins, self.bytes = (f.opaque(f.gep(f.args["scratch"], block * k * size)) for k in (1, 2))
        begins = f.const(self.words, WHOLE_BITS if self.kernel.as_floats else 0)
        for k in range(block if self.picks else 0):
            f.store(begins, f.gep(self.begins, k * size), size)

    def _unpack(self, panel: Val, panels: int) -> None:
        """Bytes to scratch, [fours of k, vectors]."""
        f, size = self.fn, self.isa.vector_bytes
        deep = self.dim(Dim.GROUPS) * self.dim(Dim.WORDS)
        streams = self.streams(panel, deep, panels)
        with f.loop(0, deep) as word:
            found = self._bytes([self.decoder.parts(f.gep(s, word * self.step)) for s in streams])
            to = f.gep(self.bytes, word * (self.quads * panels * size))
            for v, i in itertools.product(range(panels), range(self.quads)):
                f.store(found[v][i], f.gep(to, (i * panels + v) * size), size)
        if not self.kernel.scaling.stepped:
            return
        self.made = f.gep(self.bytes, deep * (self.quads * panels * size))
        with f.loop(0, self.dim(Dim.GROUPS)) as group:
            for v in range(panels):
                for k, each in enumerate(super().factors(panel, v, group)):
                    if each is not None:
                        f.store(each, self._made(v, group, k), size)

    def factors(self, panel: Val, v: int, group: Val) -> tuple[Val, Val | None]:
        if not self.kernel.scaling.stepped:
            return super().factors(panel, v, group)
        f, size = self.fn, self.isa.vector_bytes
        scale, added = (f.load(self.kind, self._made(v, group, k), size) for k in range(_FACTORS))
        return scale, None if self.kernel.scaling.zero is None else added

    def _made(self, v: int, group: Val, which: int) -> Val:
        """Where a factor of a vector's group is, in scratch."""
        f, size = self.fn, self.isa.vector_bytes
        return f.gep(self.made, group * (_VECTORS * _FACTORS * size) + (v * _FACTORS + which) * size)

    def _bytes(self, words: list[list[Val]]) -> list[list[Val]]:
        """Words of vectors as fours of k, less their middle where products are of signed bytes."""
        f, coding = self.fn, self.kernel.coding
        kind = vector("i8", self.isa.vector_bytes)
        if not self.kernel.coupled:
            middle = subtracted(self.isa, coding) if self.picks else 0
            fours = [[f.bitcast(x, kind) for x in self.decoder.quads(each)] for each in words]
            return [[x - middle if middle else x for x in each] for each in fours]
        found: list[list[Val]] = []
        alone = [word for (word,) in words]
        for pair in zip(alone[::2], alone[1::2], strict=True):
            found.append([f.bitcast(self.decoder.low(each), kind) - coding.middle for each in pair])
            found.append([f.and_(f.bitcast(each, kind), -FACTOR) for each in pair])
        return found

    def _block(self, panel: Val, row: Val, panels: int) -> None:
        """Totals of a block of rows. Rows past the end repeat the last one; nobody looks at their sums."""
        f, kernel, size = self.fn, self.kernel, self.isa.vector_bytes
        left, about = self.pointers(row)
        each = list(itertools.product(range(kernel.rows), range(panels)))
        at = {cell: k * size for k, cell in enumerate(each)}
        totals = {cell: f.var(self.kind, f.const(self.kind, 0.0)) for cell in each}
        sums = {cell: f.var(self.words) for cell in each}
        quads = self.dim(Dim.WORDS) * self.quads
        with f.loop(0, self.dim(Dim.GROUPS)) as group:
            for cell in each:
                sums[cell].set(self._begins(at[cell], about[cell[0]], group))
            if kernel.once:
                self._products(group * quads, left, sums, panels)
            else:
                with f.loop(group * quads, (group + 1) * quads, kernel.together) as quad:
                    self._products(quad, left, sums, panels)
            for v in range(panels):
                gathered = [[self.number(sums[r, v].get())] for r in range(kernel.rows)]
                self.join(panel, v, group, about, gathered, [totals[r, v] for r in range(kernel.rows)])
        for cell, total in totals.items():
            self.keep(total, f.gep(f.args["scratch"], at[cell]))

    def _begins(self, at: int, about: Val, group: Val) -> Val:
        """What the sum at a place begins with."""
        f = self.fn
        if self.picks:
            return f.load(self.words, f.gep(self.begins, at), self.isa.vector_bytes)
        return f.splat(f.load("i32", f.gep(f.gep(about, group * self.about_bytes), 4)), self.lanes)

    def _products(self, quad: Val, left: list[Val], sums: dict[tuple[int, int], Var], panels: int) -> None:
        f, size = self.fn, self.isa.vector_bytes
        assert self.adding is not None
        span = math.gcd(self.kernel.together, self.lanes)
        for first in range(0, self.kernel.together, span):
            rows = [spread_groups(f, self.isa, f.gep(x, (quad + first) * 4), span) for x in left]
            for k in range(span):
                at = f.gep(self.bytes, (quad + (first + k)) * (panels * size))
                codes = [self.adding.parts(f.load(self.words, f.gep(at, v * size), size)) for v in range(panels)]
                for r, row in enumerate(rows):
                    for v, code in enumerate(codes):
                        self.adding.add(sums[r, v], code, row[k])
        self.adding.settle()
