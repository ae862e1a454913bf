"""Rows of an implicit GEMM: no copy of the input is made, rows are pointers into it.

A 1x1 convolution of stride 1 is a plain matrix product: rows lie evenly apart. Everything else has one row pointer per
(pixel, kernel tap), worked out per block; a tap outside the image points at zeros.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.conv.driver import MOST_ROWS, POINTERS, Code, Driver
from ranvier.codegen.llvm.isa import Isa


class EvenRows(Driver):
    """Input pixels lie evenly apart and are the output's pixels."""

    fields = ("xn", "xw", "block_pixels", "pixels")

    def prepare(self, image: Val, group: Val, block: Val) -> None:
        f, at = self.f, self.at
        self.first_pixel = block * at["block_pixels"]
        self.even_rows(f.min_(at["pixels"] - self.first_pixel, at["block_pixels"]))
        self.base = f.gep(self.x, image * at["xn"] + group * at["depth"], self.x_element)

    def rows_at(self, tile: Val, pixel: Val) -> Val:
        return self.f.gep(self.base, pixel * self.at["xw"], self.x_element)


class TableRows(Driver):
    """One pointer per tap and pixel: [tile][tap][row], rows padded to whole groups of ``POINTERS``."""

    fields = (
        *("xn", "xd", "xh", "xw", "block_pixels", "pixels", "pitch", "zero_bytes"),
        *("d", "h", "w", "kd", "kh", "kw", "sd", "sh", "sw", "dd", "dh", "dw", "pd", "ph", "pw"),
    )

    def __init__(self, module: Module, symbol: str, isa: Isa, code: Code, structure: int = 0) -> None:
        super().__init__(module, symbol, isa, code, structure)
        # positions of the current tile's rows: offset of tap 0 in bytes, and depth, height, width of tap 0
        self.place_table = self.f.stack("i64", 4 * MOST_ROWS)

    def start(self) -> None:
        f = self.f
        with f.loop(0, self.at["zero_bytes"], 8) as k:
            f.store(f.i64(0), f.gep(f.args["scratch"], k))
        with f.loop(0, 4 * MOST_ROWS) as k:
            f.store(f.i64(0), f.gep(self.place_table, k, "i64"))

    def prepare(self, image: Val, group: Val, block: Val) -> None:
        f, at = self.f, self.at
        self.first_pixel = block * at["block_pixels"]
        count = f.min_(at["pixels"] - self.first_pixel, at["block_pixels"])
        self.even_rows(count)
        self.base = self.table
        image_at = f.gep(self.x, image * at["xn"] + group * at["depth"], self.x_element)
        start = f.emit("i64", f"ptrtoint ptr {image_at.name} to i64")
        with self.apart("table", self.place_table, start, self.first_pixel, count) as (places, begin, first, number):
            self.place_table, self.first_pixel = places, first
            self.even_rows(number)
            self.all_pointers(begin)

    def all_pointers(self, start: Val) -> None:
        """The table of a block, ``start`` being where its image begins."""
        f, at = self.f, self.at
        self.places = [f.gep(self.place_table, k * MOST_ROWS, "i64") for k in range(4)]
        line = f.div(self.first_pixel, at["ow"])
        ow = f.var("i64", f.rem(self.first_pixel, at["ow"]))
        oh = f.var("i64", f.rem(line, at["oh"]))
        od = f.var("i64", f.div(line, at["oh"]))
        with f.loop(0, self.tiles) as tile:
            count, _ = self.span(tile)
            with f.loop(0, count) as r:
                self.place(r, od.get(), oh.get(), ow.get())
                nxt = ow.get() + 1
                ends = f.cmp("eq", nxt, at["ow"])
                ow.set(f.select(ends, f.i64(0), nxt))
                below = oh.get() + f.cast(ends, "i64")
                bottom = f.cmp("eq", below, at["oh"])
                oh.set(f.select(bottom, f.i64(0), below))
                od.set(od.get() + f.cast(bottom, "i64"))
            self.pointers(f.gep(self.table, tile * at["taps"] * at["pitch"], "i64"), start)

    def place(self, r: Val, od: Val, oh: Val, ow: Val) -> None:
        f, at = self.f, self.at
        z, y, x = od * at["sd"] - at["pd"], oh * at["sh"] - at["ph"], ow * at["sw"] - at["pw"]
        offset = (z * at["xd"] + y * at["xh"] + x * at["xw"]) * self.x_item
        for place, value in zip(self.places, (offset, z, y, x)):
            f.store(value, f.gep(place, r, "i64"))

    def pointers(self, table: Val, start: Val) -> None:
        """Fill a tile's part of the table from the rows' places."""
        f, at = self.f, self.at
        kind = vector("i64", POINTERS)
        zeros = f.splat(f.emit("i64", f"ptrtoint ptr {f.args['scratch'].name} to i64"), POINTERS)
        with f.loop(0, at["pitch"], POINTERS) as r:
            offset, z, y, x = (f.load(kind, f.gep(place, r, "i64")) for place in self.places)
            base = offset + f.splat(start, POINTERS)
            with f.loop(0, at["kd"]) as kd:
                deep = f.cmp("ult", z + f.splat(kd * at["dd"], POINTERS), f.splat(at["d"], POINTERS))
                with f.loop(0, at["kh"]) as kh:
                    high = f.cmp("ult", y + f.splat(kh * at["dh"], POINTERS), f.splat(at["h"], POINTERS))
                    inside = f.and_(deep, high)
                    line = (kd * at["kh"] + kh) * at["kw"]
                    over = kd * at["dd"] * at["xd"] + kh * at["dh"] * at["xh"]
                    with f.loop(0, at["kw"]) as kw:
                        wide = f.cmp("ult", x + f.splat(kw * at["dw"], POINTERS), f.splat(at["w"], POINTERS))
                        tap = (over + kw * at["dw"] * at["xw"]) * self.x_item
                        address = f.select(f.and_(inside, wide), base + f.splat(tap, POINTERS), zeros)
                        f.store(address, f.gep(table, (line + kw) * at["pitch"] + r, "i64"))

    def rows_at(self, tile: Val, pixel: Val) -> Val:
        return self.f.gep(self.base, tile * self.at["taps"] * self.at["pitch"], "i64")
