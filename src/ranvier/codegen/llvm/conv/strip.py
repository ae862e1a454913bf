"""Rows of a convolution over few input channels (a network's first layer).

With 1 to 4 channels one tap is too short a run for the micro-kernel. In channels-last order the whole (width, channel)
window of a kernel row is contiguous, so a block of output rows first copies the input rows it needs into a strip:
channels-last, padding included. The input may lie in any order; the usual NCHW is interleaved by shuffles.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.conv.driver import MOST_ROWS, POINTERS, Code, Driver
from ranvier.codegen.llvm.conv.interleave import interleaved
from ranvier.codegen.llvm.isa import Isa


class StripRows(Driver):
    """Rows are windows of a strip in scratch; a segment is a kernel row (a tap, where the kernel is dilated)."""

    fields: tuple[str, ...] = (
        *("xn", "xc", "xh", "xw", "cin", "h", "w", "kh", "sh", "sw", "dh", "dw", "ph", "pw", "kw"),
        *("block_rows", "block_columns", "column_cuts", "strip_pitch", "pitch", "across"),
    )

    def __init__(self, module: Module, symbol: str, isa: Isa, code: Code, structure: int = 0) -> None:
        super().__init__(module, symbol, isa, code, structure)
        self.channels = structure  # planes to interleave
        self.places = self.f.stack("i64", MOST_ROWS)

    @property
    def strip(self) -> Val:
        return self.f.args["scratch"]

    def start(self) -> None:
        for r in range(MOST_ROWS):
            self.f.store(self.f.i64(0), self.f.gep(self.places, r, "i64"))

    def prepare(self, image: Val, group: Val, block: Val) -> None:
        f, at = self.f, self.at
        oh = f.div(block, at["column_cuts"]) * at["block_rows"]
        ow = f.rem(block, at["column_cuts"]) * at["block_columns"]
        rows = f.min_(at["oh"] - oh, at["block_rows"])
        columns = f.min_(at["ow"] - ow, at["block_columns"])
        self.first_pixel = oh * at["ow"] + ow
        self.share(rows, columns)
        self.base = self.first
        with self.apart("strip", self.places, image, oh, ow, rows, columns) as (places, *inside):
            self.places = places
            self.share(inside[3], inside[4])
            self.first_pixel = self.f.i64(0)  # tiles are counted within the strip
            self.fill(*inside)
            self.point(inside[4])

    @property
    def first(self) -> Val:
        """Where the rows of a block, or the pointers to them, begin."""
        return self.table

    def share(self, rows: Val, columns: Val) -> None:
        """Cut a block into tiles."""
        self.even_rows(rows * columns)

    def fill(self, image: Val, oh: Val, ow: Val, rows: Val, columns: Val) -> None:
        """Copy the input under the block into the strip."""
        f, at = self.f, self.at
        top, left = oh * at["sh"] - at["ph"], ow * at["sw"] - at["pw"]
        height = (rows - 1) * at["sh"] + (at["kh"] - 1) * at["dh"] + 1
        width = (columns - 1) * at["sw"] + (at["kw"] - 1) * at["dw"] + 1
        low = f.min_(f.max_(f.neg(left), 0), width)
        high = f.max_(f.min_(at["w"] - left, width), low)
        source = f.gep(self.x, image * at["xn"], self.element)
        with f.loop(0, height) as r:
            line = f.gep(self.strip, r * at["strip_pitch"], self.element)
            inside = f.cmp("ult", top + r, at["h"])
            # where the row lies outside the image, all of it is padding
            first = f.select(inside, low, width)
            last = f.select(inside, high, width)
            self.clear(line, f.i64(0), first * at["cin"])
            self.clear(line, last * at["cin"], width * at["cin"])
            start = f.gep(source, (top + r) * at["xh"] + left * at["xw"], self.element)
            self.copy(line, start, first, last)

    def clear(self, line: Val, first: Val, last: Val) -> None:
        f = self.f
        with f.loop(first, last) as k:
            f.store(f.const(self.element, 0.0), f.gep(line, k, self.element))

    def copy(self, line: Val, start: Val, first: Val, last: Val) -> None:
        """Columns [first, last) of one row, channel after channel within a column."""
        f, at = self.f, self.at
        lanes = self.isa.lanes(self.item)
        begin = f.var("i64", first)
        if self.channels:
            with f.if_(f.cmp("eq", at["xw"], 1)):
                whole = first + f.and_(f.max_(last - first, 0), -lanes)
                with f.loop(first, whole, lanes) as w:
                    planes = [
                        f.load(vector(self.element, lanes), f.gep(start, at["xc"] * c + w, self.element))
                        for c in range(self.channels)
                    ]
                    f.store(interleaved(f, planes), f.gep(line, w * self.channels, self.element))
                begin.set(f.max_(whole, first))
        with f.loop(begin.get(), last) as w, f.loop(0, at["cin"]) as c:
            value = f.load(self.element, f.gep(start, w * at["xw"] + c * at["xc"], self.element))
            f.store(value, f.gep(line, w * at["cin"] + c, self.element))

    def point(self, columns: Val) -> None:
        """Work out the pointers to all rows."""
        f, at = self.f, self.at
        base = f.emit("i64", f"ptrtoint ptr {self.strip.name} to i64")
        row, column = f.var("i64", 0), f.var("i64", 0)
        kind = vector("i64", POINTERS)
        with f.loop(0, self.tiles) as tile:
            count, _ = self.span(tile)
            with f.loop(0, count) as r:
                offset = row.get() * at["sh"] * at["strip_pitch"] + column.get() * at["sw"] * at["cin"]
                f.store(base + offset * self.item, f.gep(self.places, r, "i64"))
                nxt = column.get() + 1
                ends = f.cmp("eq", nxt, columns)
                column.set(f.select(ends, f.i64(0), nxt))
                row.set(row.get() + f.cast(ends, "i64"))
            table = f.gep(self.table, tile * at["taps"] * at["pitch"], "i64")
            with f.loop(0, at["pitch"], POINTERS) as r0:
                places = f.load(kind, f.gep(self.places, r0, "i64"))
                with f.loop(0, at["kh"]) as kh, f.loop(0, at["across"]) as t:
                    over = (kh * at["dh"] * at["strip_pitch"] + t * at["dw"] * at["cin"]) * self.item
                    where = (kh * at["across"] + t) * at["pitch"] + r0
                    f.store(places + f.splat(over, POINTERS), f.gep(table, where, "i64"))

    def rows_at(self, tile: Val, pixel: Val) -> Val:
        return self.f.gep(self.base, tile * self.at["taps"] * self.at["pitch"], "i64")
