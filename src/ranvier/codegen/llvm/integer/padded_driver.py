"""The kernel of ``padded.py``: copies a block of the image, then walks panels of filters and tiles of pixels."""

from __future__ import annotations

from ranvier.codegen.llvm.amx.tiles import LINE, release
from ranvier.codegen.llvm.builder import Val, vector
from ranvier.codegen.llvm.integer.frame import Frame
from ranvier.codegen.llvm.integer.segments import CONTROL, put

_X, _B, _OUT, _ZERO, _OFFSETS, _WIDE, _NARROW, OPERANDS = range(8)
NAMES = (
    *("xn", "xh", "xw", "yn", "h", "w", "oh", "ow", "kh", "kw", "sh", "sw", "dh", "dw", "ph", "pw"),
    *("pixel", "joined", "line", "line_apart", "line_results", "copy_line", "plane", "a_step"),
    *("rows", "block_rows", "blocks", "segments", "groups"),
    *("k", "panels", "wide", "wide_panels", "panel_group", "panel_groups", "width"),
)
_LINES = vector("i8", LINE)


class PaddedDriver:
    """A tile of the launch is a block of rows of an image times a group of panels."""

    def __init__(self, frame: Frame, in_place: bool) -> None:
        self.frame, self.f, self.at, self.in_place = frame, frame.f, frame.at, in_place
        self.control = self.f.stack("i64", len(CONTROL))

    def emit(self) -> None:
        f, at = self.f, self.at
        self.held = at["rows"] * at["wide"]  # bytes of a block of sums
        self.base = f.gep(f.args["scratch"], self.held * 2)  # of a copy
        self.zero = f.splat(f.load("i8", self.frame.buf(_ZERO)), LINE)
        for name in ("rows", "a_step", "segments", "groups"):
            put(f, self.control, name, at[name])
        put(f, self.control, "offsets", self.frame.buf(_OFFSETS))
        put(f, self.control, "ready", f.i64(0))
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            part, rest = f.rem(tile, at["panel_groups"]), f.div(tile, at["panel_groups"])
            image, block = f.div(rest, at["blocks"]), f.rem(rest, at["blocks"])
            top = block * at["block_rows"]
            rows = f.min_(at["oh"] - top, at["block_rows"])
            x = f.gep(self.frame.buf(_X), image * at["xn"])
            if self.in_place:
                self.base = f.gep(x, top * at["a_step"])
            else:
                self.fill(x, top, rows)
            first = part * at["panel_group"]
            self.walk(image, top, rows, first, f.min_(first + at["panel_group"], at["panels"]))
        release(f)
        f.ret()

    # -- the copy ---------------------------------------------------------------------------------------------------

    def fill(self, image: Val, top: Val, rows: Val) -> None:
        """The input under output rows from ``top`` on, zero points around it."""
        f, at = self.f, self.at
        above = top * at["sh"] - at["ph"]
        height = (rows - 1) * at["sh"] + (at["kh"] - 1) * at["dh"] + 1
        width = (at["ow"] - 1) * at["sw"] + (at["kw"] - 1) * at["dw"] + 1
        low = f.min_(at["pw"], width)
        high = f.max_(f.min_(at["w"] + at["pw"], width), low)
        with f.loop(0, height) as r:
            line = f.gep(self.base, f.rem(r, at["sh"]) * at["plane"] + f.div(r, at["sh"]) * at["copy_line"])
            inside = f.cmp("ult", above + r, at["h"])
            # where the row lies outside the image, all of it is padding
            first, last = f.select(inside, low, width), f.select(inside, high, width)
            self.clear(line, f.i64(0), first)
            source = f.gep(image, (above + r) * at["xh"] + (first - at["pw"]) * at["xw"])
            self.pixels(f.gep(line, first * at["pixel"]), source, last - first)
            self.clear(line, last, width)

    def clear(self, line: Val, first: Val, last: Val) -> None:
        """May write beyond the last pixel, where what follows is written later."""
        f = self.f
        with f.loop(first * self.at["pixel"], last * self.at["pixel"], LINE) as k:
            f.store(self.zero, f.gep(line, k), 1)

    def pixels(self, target: Val, source: Val, count: Val) -> None:
        """Pixels, as one run where they lie side by side."""
        f, at = self.f, self.at
        joined = f.cmp("ne", at["joined"], 0)
        runs = f.select(joined, f.min_(count, 1), count)
        length = f.select(joined, count * at["pixel"], at["pixel"])
        whole = f.and_(length, -LINE)
        mask = f.cmp("ult", f.lane_ids(LINE, "i8"), f.splat(f.cast(length - whole, "i8"), LINE))
        with f.loop(0, runs) as i:
            to, here = f.gep(target, i * at["pixel"]), f.gep(source, i * at["xw"])
            with f.loop(0, whole, LINE) as k:
                f.store(f.load(_LINES, f.gep(here, k), 1), f.gep(to, k), 1)
            with f.if_(f.cmp("slt", whole, length)):
                f.store(f.masked_load(_LINES, f.gep(here, whole), mask), f.gep(to, whole), 1)

    # -- products ---------------------------------------------------------------------------------------------------

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

    def place(self, panel: Val) -> tuple[Val, Val, Val]:
        """Whether a panel is a wide one, its width, and where it begins, in bytes of sums."""
        f, at, narrower = self.f, self.at, self.frame.isa.vector_bytes
        is_wide = f.cmp("slt", panel, at["wide_panels"])
        width = f.select(is_wide, at["wide"], at["wide"] - narrower)
        return is_wide, width, panel * at["wide"] - f.max_(panel - at["wide_panels"], 0) * narrower

    def multiply(self, panel: Val, first: Val, start: Val, sums: Val) -> None:
        f, at = self.f, self.at
        is_wide, width, column = self.place(panel)
        filters = f.gep(self.frame.buf(_B), column * at["k"])
        put(f, self.control, "sums", sums)
        put(f, self.control, "sums_step", width)
        # the first two tiles of a panel ask for a half of the next one each
        size = width * at["k"]
        second = f.cmp("eq", first, at["rows"])
        ahead = f.gep(filters, size + f.select(second, f.lshr(size, 1), f.i64(0)))
        none = f.or_(f.cmp("sgt", first, at["rows"]), f.cmp("eq", panel + 1, at["panels"]))
        put(f, self.control, "fetch", f.select(none, f.zero("ptr"), ahead))
        micro = f.select(is_wide, self.frame.buf(_WIDE), self.frame.buf(_NARROW))
        f.call_pointer(micro, "void", [f.gep(self.base, start * at["a_step"]), filters, self.control])

    def finish(self, image: Val, top: Val, count: Val, panel: Val, first: Val, sums: Val) -> None:
        """Sums of pixels ``first`` and following ones, line by line of the output."""
        f, at, line = self.f, self.at, self.at["line_apart"]
        _, width, begins = self.place(panel)
        column = f.lshr(begins, 2)
        columns = f.min_(f.lshr(width, 2), at["width"] - column)
        out = f.gep(self.frame.buf(_OUT), image * at["yn"])
        start = self.start(top, first)
        stop = f.min_(start + at["rows"], count)
        with f.loop(f.div(first, line), f.div(stop - 1, line) + 1) as row:
            begin = f.max_(first, row * line)
            end = f.min_(stop, row * line + at["line_results"])
            with f.if_(f.cmp("slt", begin, end)):
                pixel = top * at["ow"] + row * at["line_results"] + (begin - row * line)
                here = f.gep(sums, (begin - start) * width)
                self.frame.finish(out, here, (image, pixel, column, end - begin, columns, width))
