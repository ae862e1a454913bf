"""The kernel of ``padded.py`` with the matrix unit: copies a block of the image, then walks panels of filters and tiles
of pixels."""

from __future__ import annotations

from ranvier.codegen.llvm.amx.tiles import release
from ranvier.codegen.llvm.builder import Val
from ranvier.codegen.llvm.integer.frame import Frame
from ranvier.codegen.llvm.integer.padded_copy import NARROW, OFFSETS, OUT, WIDE, B, PaddedCopy
from ranvier.codegen.llvm.integer.segments import CONTROL, put


class TileDriver(PaddedCopy):
    def __init__(self, frame: Frame, in_place: bool) -> None:
        super().__init__(frame, in_place, turns=False)
        self.control = self.f.stack("i64", len(CONTROL))

    def emit(self) -> None:
        f, at = self.f, self.at
        self.held = at["rows"] * at["wide"]  # bytes of a block of sums
        self.base = f.gep(f.args["scratch"], self.held * 2)  # of a copy
        for name in ("rows", "a_step", "segments", "groups"):
            put(f, self.control, name, at[name])
        put(f, self.control, "offsets", self.frame.buf(OFFSETS))
        put(f, self.control, "ready", f.i64(0))
        self.tiles(self.walk)
        release(f)
        f.ret()

    def walk(self, image: Val, top: Val, rows: Val, p0: Val, p1: Val) -> None:
        """Tile after tile of every panel; each is finished when the next one is on its way."""
        f, at = self.f, self.at
        count = (rows - 1) * at["line"] + at["ow"]
        tiles = f.div(count + at["rows"] - 1, at["rows"])
        panel, first = f.var("i64", p0), f.var("i64", f.i64(0))
        last_panel, last_first = f.var("i64", p0), f.var("i64", f.i64(0))
        total = (p1 - p0) * tiles
        with f.loop(0, total + 1) as step:
            with f.if_(f.cmp("slt", step, total)):
                self.multiply(panel.get(), first.get(), self.start(top, first.get()), self.sums(step))
            with f.if_(f.cmp("sgt", step, 0)):
                self.finish(image, top, count, last_panel.get(), last_first.get(), self.sums(step - 1))
            last_panel.set(panel.get())
            last_first.set(first.get())
            following = first.get() + at["rows"]
            ends = f.cmp("sge", following, count)
            first.set(f.select(ends, f.i64(0), following))
            panel.set(panel.get() + f.cast(ends, "i64"))

    def start(self, top: Val, first: Val) -> Val:
        """The pixel that a tile begins with: in place, the last one ends with the image and does some again."""
        f, at = self.f, self.at
        return f.min_(first, at["oh"] - top - at["rows"]) if self.in_place else first

    def sums(self, step: Val) -> Val:
        return self.f.gep(self.f.args["scratch"], self.f.and_(step, 1) * self.held)

    def multiply(self, panel: Val, first: Val, start: Val, sums: Val) -> None:
        f, at = self.f, self.at
        is_wide, width, column = self.place(panel)
        filters = f.gep(self.frame.buf(B), column * at["k"])
        put(f, self.control, "sums", sums)
        put(f, self.control, "sums_step", width)
        # the first two tiles of a panel ask for a half of the next one each
        size = width * at["k"]
        second = f.cmp("eq", first, at["rows"])
        ahead = f.gep(filters, size + f.select(second, f.lshr(size, 1), f.i64(0)))
        none = f.or_(f.cmp("sgt", first, at["rows"]), f.cmp("eq", panel + 1, at["panels"]))
        put(f, self.control, "fetch", f.select(none, f.zero("ptr"), ahead))
        micro = f.select(is_wide, self.frame.buf(WIDE), self.frame.buf(NARROW))
        f.call_pointer(micro, "void", [f.gep(self.base, start * at["a_step"]), filters, self.control])

    def finish(self, image: Val, top: Val, count: Val, panel: Val, first: Val, sums: Val) -> None:
        """Sums of pixels ``first`` and following ones, line by line of the output."""
        f, at, line = self.f, self.at, self.at["line_apart"]
        _, width, begins = self.place(panel)
        column = f.lshr(begins, 2)
        columns = f.min_(f.lshr(width, 2), at["width"] - column)
        out = f.gep(self.frame.buf(OUT), image * at["yn"])
        start = self.start(top, first)
        stop = f.min_(start + at["rows"], count)
        with f.loop(f.div(first, line), f.div(stop - 1, line) + 1) as row:
            begin = f.max_(first, row * line)
            end = f.min_(stop, row * line + at["line_results"])
            with f.if_(f.cmp("slt", begin, end)):
                pixel = top * at["ow"] + row * at["line_results"] + (begin - row * line)
                here = f.gep(sums, (begin - start) * width)
                self.frame.finish(out, here, (image, pixel, column, end - begin, columns, width))
