"""Rows of a first layer, line by line.

In a strip (:mod:`strip`) the windows of one output line lie evenly apart, and so do the rows of the kernel. As long as
no tile goes on in the next line, a micro-kernel needs no table of pointers: that is worked out for every pixel, which
is much beside a window of a few dozen elements, and where a vector holds all output channels twice as many rows fit.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Val
from ranvier.codegen.llvm.conv.strip import StripRows
from ranvier.codegen.llvm.gemm.micro import Slot, write_slot


class LineRows(StripRows):
    """Tiles are parts of lines of the strip; a segment is a kernel row."""

    fields: tuple[str, ...] = (*StripRows.fields, "segment_step")

    def start(self) -> None:
        write_slot(self.f, self.control, Slot.SEGMENT_STEP, self.at["segment_step"])

    def share(self, rows: Val, columns: Val) -> None:
        """Every line evenly among as few tiles as possible."""
        self.even_rows(columns)
        self.tiles = self.tiles * rows

    def point(self, columns: Val) -> None:
        """There is nothing to point at rows."""

    @property
    def first(self) -> Val:
        return self.strip

    def within(self, tile: Val) -> tuple[Val, Val, Val]:
        """The line of a tile, its rows, and its first column."""
        f, at = self.f, self.at
        # a block is whole lines, or a part of one
        per_line = f.min_(self.tiles, f.div(at["ow"] + at["most_rows"] - 1, at["most_rows"]))
        line = f.div(tile, f.max_(per_line, 1))
        inside = tile - line * per_line
        count = self.rows + f.cast(f.cmp("slt", inside, self.extra), "i64")
        return line, count, inside * self.rows + f.min_(inside, self.extra)

    def span(self, tile: Val) -> tuple[Val, Val]:
        line, count, column = self.within(tile)
        return count, self.first_pixel + line * self.at["ow"] + column

    def rows_at(self, tile: Val, pixel: Val) -> Val:
        at = self.at
        line, _, column = self.within(tile)
        return self.f.gep(self.base, line * at["sh"] * at["strip_pitch"] + column * at["sw"] * at["cin"], self.element)
