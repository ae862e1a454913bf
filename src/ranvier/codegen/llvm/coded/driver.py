"""Code of a pass: some rows times some vectors of columns, whose codes are decoded in registers and met by all rows.

Every panel is a stream of its own through memory. Sums of a group gather unscaled, and join the total with the group's
scale. Totals gather in scratch, and a finish kernel stores them.

With activations as codes of 8 bits, four k are multiplied by an instruction for integers: sums of a group are exact.
With activations as three digits each, a row is three rows of codes whose sums of a group become one number; the lowest
digits are a fourth, for the groups where they count.
"""

from __future__ import annotations

import functools
import itertools
import math

from ranvier.codegen.llvm.builder import Fn, Val, Var, vector
from ranvier.codegen.llvm.coded.adding import Adding
from ranvier.codegen.llvm.coded.coupled import FACTOR
from ranvier.codegen.llvm.coded.decode import Decoder
from ranvier.codegen.llvm.coded.factors import Factors
from ranvier.codegen.llvm.coded.passes import Buf, Dim, Pass
from ranvier.codegen.llvm.coded.places import Places
from ranvier.codegen.llvm.coded.prepare import ABOUT, DIGITS, DIGITS_ABOUT, LOWEST_ABOUT
from ranvier.codegen.llvm.coded.shape import LINE
from ranvier.codegen.llvm.control import Launched, batch_offsets, quotient
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of, spread_groups
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath.core import WHOLE, WHOLE_BITS
from ranvier.records import dataclass

_AHEAD, _AHEAD_ALONE = 2048, 512  # bytes of a stream that are asked for before their use; of the only one
_GROUPS_AHEAD = 4
# with as few sums as this, each is kept in parts, so that additions do not wait for each other
_FEW, _SPLITS = 2, 2


@dataclass(frozen=True)
class Lines:
    """Numbers that are multiplied with the codes of a pass: so many, side by side, stand for an activation."""

    digits: int
    rows: list[Val]  # where those of each row are
    about: list[Val]  # and what is known about their groups


class PassDriver(Launched):
    """The walk over panels and rows, and what a pass does where codes are decoded in registers."""

    name = "coded"

    def __init__(self, fn: Fn, isa: Isa, kernel: Pass, table: str) -> None:
        super().__init__(fn)
        self.isa, self.kernel = isa, kernel
        self.lanes = isa.lanes(4)
        self.kind, self.words = vector("float", self.lanes), vector("i32", self.lanes)
        self.decoder = Decoder(fn, isa, kernel.coding, table, coupled=kernel.coupled)
        self.places = Places(fn, isa)
        self._factors = Factors(fn, self.decoder, self.places, kernel.scaling)
        assert self.places.beside == 1 or self.places.beside % kernel.panels == 0
        self.picks = kernel.integers and dot_of(isa) is SIGNED  # products pick lanes of what rows' registers hold
        self.adding = Adding(fn, isa, kernel.coding.reach) if kernel.integers else None
        self.quads = kernel.coding.quads
        self.step = self.places.step * kernel.coding.parts  # bytes from one word of a vector to the next
        self.about_bytes = 4 * (DIGITS_ABOUT if kernel.activations == "digits" else ABOUT)
        self.place = fn.stack("i64", 6)

    def emit(self) -> None:
        f, most = self.fn, self.kernel.panels
        share, shares = self.dim(Dim.SHARE), self.dim(Dim.SHARES)
        self.m, self.n = self.dim(Dim.M), self.dim(Dim.N)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            batch = quotient(f, tile, shares)
            start = (tile - batch * shares) * share
            stop = f.min_(start + share, self.dim(Dim.PANELS))
            offsets = batch_offsets(f, self.dim, batch, Dim.RANK, Dim.BATCH, 3)
            self.batch = batch
            self.rows, self.about, self.out = (
                f.gep(self.buf(x), o) for x, o in zip((Buf.ROWS, Buf.ABOUT, Buf.OUT), offsets)
            )
            # of vectors that are coupled, those that fill the last panel have no columns, but are there
            alone = most > 1 and not self.kernel.coupled
            whole = stop - f.rem(stop - start, f.i64(most)) if alone else stop
            self.over(start, whole, most)
            if alone:
                self.over(whole, stop, 1)
        f.ret()

    def over(self, start: Val, stop: Val, panels: int) -> None:
        """All rows times the vectors of a range, so many at a time."""
        f, rows = self.fn, self.kernel.rows
        with f.loop(start, stop, panels) as panel, f.loop(0, self.m, rows) as row:
            self._sums(panel, row, panels)
            self.finish(panel, row, f.min_(self.m - row, rows), panels)

    def finish(self, panel: Val, row: Val, height: Val, panels: int) -> None:
        """Totals in scratch, [rows, vectors], to the output."""
        f = self.fn
        column = panel * self.lanes
        width = f.min_(self.n - column, panels * self.lanes)
        step = f.i64(panels * self.isa.vector_bytes)
        for k, value in enumerate((self.batch, row, column, height, width, step)):
            f.store(value, f.gep(self.place, k, "i64"))
        operands = f.gep(f.args["bufs"], int(Buf.OPERANDS), "ptr")
        dims = f.gep(f.args["dims"], self.dim(Dim.FINISH_DIMS), "i64")
        f.call_pointer(self.buf(Buf.FINISH), "void", [operands, dims, f.args["scratch"], self.out, self.place])

    def _sums(self, panel: Val, row: Val, panels: int) -> None:
        """Totals of one pass. Rows past the end repeat the last one; nobody looks at their sums."""
        f, rows, kernel = self.fn, self.kernel.rows, self.kernel
        groups, words = self.dim(Dim.GROUPS), self.dim(Dim.WORDS)
        lines = Lines(kernel.digits, *self.pointers(row))
        deep = groups * words
        streams = self.streams(panel, deep, panels)
        if self.picks:
            self.decoder.hold_masks()
        totals = [[f.var(self.kind, f.const(self.kind, 0.0)) for _ in range(panels)] for _ in range(rows)]
        with f.loop(0, groups) as group:
            ahead = self._ahead(group * words, deep, panels)
            self._ask_for_scales(panel, group, groups, panels)
            self._group(panel, group, lines, streams, totals, ahead)
            if kernel.activations == "digits":
                with f.if_(self._lowest_count(lines, group)):
                    self._group(panel, group, self._lowest(lines, deep), streams, totals, None)
        for r in range(rows):
            for v in range(panels):
                place = f.gep(f.args["scratch"], (r * panels + v) * self.isa.vector_bytes)
                self.keep(totals[r][v], place)

    def _lowest(self, lines: Lines, deep: Val) -> Lines:
        f = self.fn
        behind = deep * (self.kernel.coding.per_word * DIGITS)
        return Lines(1, [f.gep(x, behind) for x in lines.rows], [f.gep(x, 4 * LOWEST_ABOUT) for x in lines.about])

    def _lowest_count(self, lines: Lines, group: Val) -> Val:
        """Whether the lowest digits count in a group of any row: their step is something then."""
        f = self.fn
        where = (f.gep(f.gep(x, group * self.about_bytes), 4 * LOWEST_ABOUT) for x in lines.about)
        return f.cmp("ne", functools.reduce(f.or_, [f.load("i32", x) for x in where]), 0)

    def _group(
        self, panel: Val, group: Val, lines: Lines, streams: list[Val], totals: list[list[Var]], ahead: Val | None
    ) -> None:  # fmt: skip
        """What a group adds to totals."""
        f, kernel, words = self.fn, self.kernel, self.dim(Dim.WORDS)
        panels, digits = len(streams), lines.digits
        kind = self.words if kernel.integers else self.kind
        count = len(lines.rows) * digits
        splits = _SPLITS if count * panels <= _FEW else 1
        sums = [[[f.var(kind) for _ in range(panels)] for _ in range(count)] for _ in range(splits)]
        for r in range(count):
            begins = f.const(kind, 0)
            if kernel.integers:
                numbers = f.gep(lines.about[r // digits], group * self.about_bytes)
                less = f.load("i32", f.gep(numbers, 4 + 4 * (r % digits)))
                begins = f.splat(less + WHOLE_BITS if kernel.as_floats else less, self.lanes)
            for number, part in enumerate(sums):
                for acc in part[r]:
                    acc.set(begins if not number else f.const(kind, 0))
        begin = group * words
        if kernel.once:
            self._turn(panel, begin, lines, streams, sums, ahead)
        else:
            with f.loop(begin, begin + words, kernel.together) as word:
                self._turn(panel, word, lines, streams, sums, ahead)
        for part in sums[1:]:
            for r, v in itertools.product(range(count), range(panels)):
                sums[0][r][v].set(sums[0][r][v].get() + part[r][v].get())
        found = [self._numbers([part.get() for part in line]) for line in sums[0]]
        for v in range(panels):
            gathered = [[found[r + d][v] for d in range(digits)] for r in range(0, count, digits)]
            self.join(panel, v, group, lines.about, gathered, [row[v] for row in totals])

    def pointers(self, row: Val) -> tuple[list[Val], list[Val]]:
        """Where the rows of a pass are, and what is known about them."""
        f = self.fn
        picked = [f.min_(row + r, self.m - 1) for r in range(self.kernel.rows)]
        left = [f.opaque(f.gep(self.rows, r * self.dim(Dim.ROW))) for r in picked]
        return left, [f.gep(self.about, r * self.dim(Dim.ABOUT_ROW)) for r in picked]

    def streams(self, panel: Val, deep: Val, panels: int) -> list[Val]:
        """Where the codes of vectors begin: each has a pointer of its own, or those that lie side by side share one."""
        f, codes, deep = self.fn, self.buf(Buf.CODES), deep * self.kernel.coding.parts
        if self.places.beside == 1:
            return [self.fn.opaque(self.places.codes(codes, panel + v, deep)) for v in range(panels)]
        first = self.fn.opaque(self.places.codes(codes, panel, deep))
        return [f.gep(first, v * self.isa.vector_bytes) for v in range(panels)]

    def _ahead(self, word: Val, deep: Val, panels: int) -> Val:
        """How far ahead of a group's words to ask for codes: behind the end of a panel lies its neighbour, which is
        read at the same time, and what comes next lies behind all of those."""
        f = self.fn
        if self.places.beside > 1:
            return f.i64(_AHEAD_ALONE)
        inside = f.cmp("slt", word + _AHEAD // self.step, deep)
        return f.select(inside, f.i64(_AHEAD), deep * ((panels - 1) * self.step) + _AHEAD)

    def _ask_for_scales(self, panel: Val, group: Val, groups: Val, panels: int) -> None:
        """Scales are a line now and then, too few for the processor to see where they go."""
        f = self.fn
        later = group + _GROUPS_AHEAD
        if self.places.beside > 1:
            f.prefetch(self.places.entry(self.buf(Buf.SCALES), panel, groups, later, self.kernel.scaling.scale))
            return
        beyond = f.select(f.cmp("slt", later, groups), f.i64(0), groups * (panels - 1))
        for v in range(panels):
            where = panel, groups, later + beyond
            f.prefetch(self.places.entry(self.buf(Buf.SCALES), *where, self.kernel.scaling.scale, v))

    def _turn(
        self,
        panel: Val,
        word: Val,
        lines: Lines,
        streams: list[Val],
        sums: list[list[list[Var]]],
        ahead: Val | None,
    ) -> None:
        f, step, together = self.fn, self.step, self.kernel.together
        if ahead is not None:
            later = word * step + ahead
            for stream in streams if self.places.beside == 1 else streams[:1]:
                for line in range(0, step * together, LINE):
                    f.prefetch(f.gep(f.gep(stream, later), line))
        # words whose activations fill registers of a row: one load for all of them
        span = min(together, self.lanes // math.gcd(self.lanes, self.quads * lines.digits)) if self.picks else 1
        for first in range(0, together, span):
            held = self._picked(word + first if first else word, lines, span) if self.picks else None
            for k in range(first, first + span):
                here = None if held is None else [row[(k - first) * self.quads :][: self.quads] for row in held]
                self._word(panel, word + k if k else word, lines, streams, sums, here)
        if self.adding is not None:
            self.adding.settle()

    def _word(
        self,
        panel: Val,
        word: Val,
        lines: Lines,
        streams: list[Val],
        sums: list[list[list[Var]]],
        picked: list[list[Val]] | None,
    ) -> None:
        f, coding, digits = self.fn, self.kernel.coding, lines.digits
        here = [f.gep(s, word * self.step) for s in streams]
        if self.adding is not None:
            words = [self.decoder.parts(at) for at in here]
            fours = self._coupled(words) if self.kernel.coupled else [self.decoder.quads(each) for each in words]
            quads = [[self.adding.parts(four) for four in each] for each in fours]
            rows = [f.gep(row, word * (coding.per_word * digits)) for row in lines.rows] if picked is None else []
            for i, r in itertools.product(range(self.quads), range(len(lines.rows) * digits)):
                if picked is not None:
                    wide = picked[r][i]
                else:
                    four = f.load("i32", f.gep(rows[r // digits], 4 * (i * digits + r % digits)))
                    wide = f.splat(four, self.lanes)
                for v, found in enumerate(quads):
                    self.adding.add(sums[i % len(sums)][r][v], found[i], wide)
            return
        codes = [self.decoder.words(at, self._second(panel, v)) for v, at in enumerate(here)]
        for k in range(coding.per_word):
            values = [self.decoder.value(each, k) for each in codes]
            for r, row in enumerate(lines.rows):
                x = f.load("float", f.gep(f.gep(row, word * (4 * coding.per_word)), 4 * k))
                wide = f.splat(x, self.lanes)
                for v, value in enumerate(values):
                    acc = sums[k % len(sums)][r][v]
                    acc.set(f.fma(wide, value, acc.get()))

    def _coupled(self, words: list[list[Val]]) -> list[list[Val]]:
        """What the sums of every vector are made of: low halves of bytes, and the bytes themselves."""
        pairs = [[word for (word,) in words[v : v + 2]] for v in range(0, len(words), 2)]
        return [quads for pair in pairs for quads in ([self.decoder.low(each) for each in pair], pair)]

    def _picked(self, word: Val, lines: Lines, span: int) -> list[list[Val]]:
        """Quads of every line for ``span`` words: those of a row, all of its digits, lie side by side."""
        f, digits = self.fn, lines.digits
        found: list[list[Val]] = []
        for row in lines.rows:
            at = f.gep(row, word * (self.kernel.coding.per_word * digits))
            quads = spread_groups(f, self.isa, at, span * self.quads * digits)
            found += [quads[d::digits] for d in range(digits)]
        return found

    def join(
        self, panel: Val, v: int, group: Val, about: list[Val], sums: list[list[Val]], totals: list[Var]
    ) -> None:  # fmt: skip
        """Sums of a group, as floats, into the totals of vector ``v`` from ``panel`` on."""
        f, kernel = self.fn, self.kernel
        scale, added = self.factors(panel, v, group)
        zero, more = (added, None) if kernel.scaling.middle is None else (None, added)
        for where, gathered, total in zip(about, sums, totals):
            found = gathered[-1]
            if kernel.integers:
                for lower in reversed(gathered[:-1]):
                    found = f.fma(found, 256.0, lower)
                numbers = f.gep(where, group * self.about_bytes)
                step, whole = numbers, f.gep(numbers, 4 + 4 * len(gathered))
                if more is not None:
                    found = f.fma(more, self._wide(whole), found * scale)
                    total.set(f.fma(found, self._wide(step), total.get()))
                    continue
                if zero is not None:
                    found = f.fma(zero, self._wide(whole), found)
                found = found * self._wide(step)
            elif zero is not None:
                found = f.fma(zero, self._wide(f.gep(where, group, "float")), found)
            elif more is not None:
                total.set(f.fma(more, self._wide(f.gep(where, group, "float")), total.get()))
            total.set(f.fma(found, scale, total.get()))

    def factors(self, panel: Val, v: int, group: Val) -> tuple[Val, Val | None]:
        """The scales of a vector's group; and what is added, as often as activations say."""
        where = panel, self.dim(Dim.GROUPS), group, v
        return self._factors.of(self.buf(Buf.SCALES), self.buf(Buf.ZEROS), *where, second=self._second(panel, v))

    def _second(self, panel: Val, v: int) -> Val | None:
        """Whether a vector is the second of two that are coupled, where each is decoded by itself."""
        f = self.fn
        if not self.kernel.coupled or self.kernel.integers:
            return None
        return f.cast(f.and_(panel + v, 1), "i32")

    def _wide(self, at: Val) -> Val:
        """A float for all columns."""
        return self.fn.splat(self.fn.load("float", at), self.lanes)

    def _numbers(self, sums: list[Val]) -> list[Val]:
        """The sums of vectors as floats; of coupled ones the first is a part of the second, so its beginning is too."""
        f, kernel = self.fn, self.kernel
        if not kernel.integers:
            return sums
        if not kernel.coupled:
            return [self.number(each) for each in sums]
        found = []
        for low, both in zip(sums[::2], sums[1::2], strict=True):
            if kernel.as_floats:
                rest = f.bitcast(both, self.kind) - f.bitcast(low, self.kind)
            else:
                rest = f.cast(both - low, "float")
            found += [self.number(low), rest]
        return found

    def keep(self, total: Var, place: Val) -> None:
        """Store a total for the finish kernel."""
        made = total.get()
        larger = self.kernel.coupled and self.kernel.integers
        self.fn.store(made * (1 / FACTOR) if larger else made, place, self.isa.vector_bytes)

    def number(self, total: Val) -> Val:
        """An exact sum as a float; where it is the low bits of one, a subtraction does what a conversion would."""
        if self.kernel.as_floats:
            return self.fn.bitcast(total, self.kind) - WHOLE
        return self.fn.cast(total, "float")
