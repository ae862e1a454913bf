"""Depthwise convolution with a small two-dimensional kernel, all of it unrolled.

For one vector of channels the kernel walks down a block of output rows, so that the input rows two outputs share are
still in the first cache. Where a vector is but a part of a cache line, the vectors of some lines take turns in every
output row instead: each would else bring all of those lines near by itself.

A kernel row outside the image becomes a block of zeros with a column step of zero: borders above and below need no
other code. Groups of pixels that touch a border or the row's end run a second copy of the body, which checks every
column; where rows are whole numbers of groups, only the first and last ones. Of an image that is lower than the kernel,
only as many kernel rows are written out as it has: which they are is found for each output row.
"""

from __future__ import annotations

from typing import NamedTuple

from ranvier.codegen.llvm.builder import Val, Var, vector
from ranvier.codegen.llvm.conv.borders import taps_inside
from ranvier.codegen.llvm.conv.depthwise_any import Depthwise
from ranvier.codegen.llvm.conv.epilogues import Lanes
from ranvier.codegen.llvm.isa import Isa

MOST_TAPS = 25  # that are written out
KERNEL_TAPS = 49  # of which those are a part, at most
HELD_TAPS = 9  # weights that stay in registers while the vector of channels does
LINE = 64  # bytes


class Filters(NamedTuple):
    """Weights of a vector of channels: those of the first tap, and how many elements further those of the next are.
    ``ordered``: as :meth:`Depthwise.loaded` has channels."""

    start: Val
    step: Val
    ordered: bool


def takes_turns(isa: Isa) -> bool:
    """Whether vectors of a line take turns: they are smaller than it, and setting one up, for a row alone, is cheap
    because its weights fit the registers."""
    return isa.vector_bytes < LINE and isa.registers >= 32


class FlatDepthwise(Depthwise):
    copy: Val | None = None  # of weights, in the order of channels that are taken apart

    def rows_of(self, image: Val, od: Val, first: Val, last: Val) -> None:
        f, at = self.f, self.at
        source = f.gep(self.x, image * at["xn"], self.source)

        def column(piece: Lanes) -> None:
            known = self.known(piece, image)
            with f.loop(first, last) as oh:
                self.line(piece, image, oh, source, *known)

        if not takes_turns(self.isa):
            self.pieces(f.i64(0), at["channels"], column)
            return
        with f.loop(0, at["channels"], at["channel_block"]) as start, f.loop(first, last) as oh:
            stop = f.min_(start + at["channel_block"], at["channels"])
            self.pieces(start, stop, lambda piece: self.line(piece, image, oh, source, *self.known(piece, image)))

    @property
    def fetches(self) -> bool:
        """Whether the row that the next output row adds is asked for: a part of each pixel, from far apart places, is
        no stream that anybody else would follow."""
        return takes_turns(self.isa) and self.stride == 1

    def known(self, piece: Lanes, image: Val) -> tuple[Filters, list[Val], dict[int, Val]]:
        """What does not change from row to row: weights, those that stay in registers, and operands of the epilogue."""
        filters = Filters(self.f.gep(self.w, piece.channel, self.element), self.at["padded"], False)
        if self.by_pairs(piece) and not self.holds:
            filters = self.put_apart(piece, filters)
        weights = self.weights(filters, piece, range(self.high)) if self.holds and not self.low else []
        corner = self.code.rows(image, self.at["q0"] + self.f.i64(0))
        return filters, weights, self.fixed(corner, piece)

    @property
    def holds(self) -> bool:
        """Whether weights stay in registers."""
        return self.high * self.taps <= HELD_TAPS and self.isa.registers >= 32

    def put_apart(self, piece: Lanes, filters: Filters) -> Filters:
        """A copy in the order of :meth:`loaded`: every group of pixels would put them in order again."""
        f = self.f
        if self.copy is None:
            self.copy = f.stack(self.element, KERNEL_TAPS * piece.count)
        with f.loop(0, self.at["kh"] * self.taps) as tap:
            weight = self.weight(piece, f.gep(filters.start, tap * filters.step, self.element))
            f.store(weight, f.gep(self.copy, tap * piece.count, self.element))
        return Filters(self.copy, f.i64(piece.count), True)

    def weights(self, filters: Filters, piece: Lanes, rows: range) -> list[Val]:
        f = self.f
        found: list[Val] = []
        for tap in range(rows.start * self.taps, rows.stop * self.taps):
            place = f.gep(filters.start, filters.step * tap, self.element)
            kind = vector(self.element, piece.count)
            found.append(f.load(kind, place) if filters.ordered else self.weight(piece, place))
        return found

    def line(
        self,
        piece: Lanes,
        image: Val,
        oh: Val,
        source: Val,
        filters: Filters,
        weights: list[Val],
        fixed: dict[int, Val],
    ) -> None:
        """One output row of one vector of channels."""
        f, at = self.f, self.at
        top = oh * at["sh"] - at["ph"]
        if self.low:
            above, _ = taps_inside(f, top, at["h"], at["kh"], at["dh"])
            above = f.min_(above, at["kh"] - self.high)
            top = top + at["dh"] * above
            start = f.gep(filters.start, filters.step * self.taps * above, self.element)
            filters = filters._replace(start=start)
            weights = self.weights(filters, piece, range(self.high)) if self.holds else []
        lines: list[tuple[Val, Val]] = []  # the start of each kernel row, and its step from column to column
        for r in range(self.high):
            down = top + at["dh"] * r
            there = f.cmp("ult", down, at["h"])
            start = f.gep(source, down * at["xh"] + piece.channel, self.source)
            lines.append((f.select(there, start, self.zeros), f.select(there, at["xw"], f.i64(0))))
        target = f.gep(self.y, image * at["yn"] + oh * at["yh"] + piece.channel, self._out)
        number = oh * at["qh"] + at["q0"]
        width = (self.pixels - 1) * self.stride + (self.taps - 1) * self.dilation
        with f.loop(0, at["ow"], self.pixels) as ow:
            left = ow * self.stride - at["pw"]
            starts = [(f.gep(start, left * step, self.source), step) for start, step in lines]
            place = f.gep(target, ow * at["yw"], self._out)
            rows = self.code.rows(image, number + ow * at["qw"])
            here = piece, starts, filters, weights, left, place, rows, fixed
            if self.inner:
                inside = f.and_(f.cmp("sge", left, 0), f.cmp("slt", left + width, at["w"]))
                if not self.whole:
                    inside = f.and_(inside, f.cmp("sle", ow + self.pixels, at["ow"]))
                with f.if_else(inside) as otherwise:
                    self.group(*here, range(width + 1), None)
                    otherwise()
                    self.group(*here, self.sure(width), None if self.whole else f.min_(at["ow"] - ow, self.pixels))
            else:
                self.group(*here, self.sure(width), None)

    def sure(self, width: int) -> range:
        """Columns of a group that lie inside the image wherever the group does."""
        reach = (self.taps - 1) * self.dilation
        return range(reach, width + 1 - reach) if self.whole else range(0)

    def group(
        self,
        piece: Lanes,
        starts: list[tuple[Val, Val]],
        filters: Filters,
        weights: list[Val],
        left: Val,
        place: Val,
        rows: list[Val],
        fixed: dict[int, Val],
        sure: range,
        count: Val | None,
    ) -> None:
        """Some neighbouring pixels; columns that are not ``sure`` count as zeros where they lie outside the image."""
        f = self.f
        start_sum = self.beginning(piece, fixed) if self.bias is not None else None
        sums: list[Var | None] = [None] * self.pixels
        users: dict[int, list[tuple[int, int]]] = {}
        for p in range(self.pixels):
            for t in range(self.taps):
                users.setdefault(p * self.stride + t * self.dilation, []).append((p, t))
        there = {c: f.cmp("ult", left + c, self.at["w"]) for c in users if c not in sure}
        for r, (start, step) in enumerate(starts):
            taps = weights[r * self.taps : (r + 1) * self.taps] or self.weights(filters, piece, range(r, r + 1))
            address, at_column = start, 0
            for column, pairs in sorted(users.items()):
                address = f.gep(address, step * (column - at_column), self.source)
                at_column = column
                where = f.select(there[column], address, self.zeros) if column in there else address
                value = self.loaded(piece, where)
                if r == self.high - 1 and self.fetches:
                    f.prefetch(f.gep(address, self.at["xh"], self.source))
                for p, t in pairs:
                    total = sums[p]
                    if total is None:
                        first = value * taps[t] if start_sum is None else f.fma(value, taps[t], start_sum)
                        sums[p] = f.var(first.type, first)
                    else:
                        total.set(f.fma(value, taps[t], total.get()))
        self.finish(piece, [s.get() for s in sums if s is not None], place, rows, count, fixed)
