"""The copy of an image that convolutions of codes read their rows from, and where panels of filters lie."""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.llvm.amx.tiles import LINE
from ranvier.codegen.llvm.builder import Val, vector
from ranvier.codegen.llvm.integer.dots import HALF
from ranvier.codegen.llvm.integer.frame import Frame

X, B, OUT, ZERO, OFFSETS, WIDE, NARROW, OPERANDS = range(8)
NAMES = (
    *("xn", "xh", "xw", "yn", "h", "w", "oh", "ow", "kh", "kw", "sh", "sw", "dh", "dw", "ph", "pw"),
    *("pixel", "joined", "line", "line_apart", "line_results", "copy_line", "plane", "a_step"),
    *("rows", "block_rows", "blocks", "segments", "groups"),
    *("k", "panels", "wide", "wide_panels", "panel_group", "panel_groups", "width"),
)
_LINES = vector("i8", LINE)  # that are copied at a time


class PaddedCopy:
    """What drivers share. ``base`` is where the copy begins, or pixels that are read in place; ``turns``: whether codes
    change their sign on the way; ``pairs``: whether they have 16 bits."""

    def __init__(self, frame: Frame, in_place: bool, turns: bool, pairs: bool = False) -> None:
        self.frame, self.f, self.at, self.in_place, self.turns = frame, frame.f, frame.at, in_place, turns
        self.base = self.f.args["scratch"]
        kind, lanes = ("i16", LINE // 2) if pairs else ("i8", LINE)
        self.zero = self.converted(self.f.bitcast(self.f.splat(self.f.load(kind, frame.buf(ZERO)), lanes), _LINES))

    def converted(self, codes: Val) -> Val:
        return self.f.xor(codes, HALF - 256) if self.turns else codes

    def tiles(self, walk: Callable[[Val, Val, Val, Val, Val], None]) -> None:
        """Tiles of the launch, each a block of rows of an image times a group of panels: ``walk`` gets the image, the
        first row and how many, the first panel and the one behind the last."""
        f, at = self.f, self.at
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            part, rest = f.rem(tile, at["panel_groups"]), f.div(tile, at["panel_groups"])
            image, block = f.div(rest, at["blocks"]), f.rem(rest, at["blocks"])
            top = block * at["block_rows"]
            rows = f.min_(at["oh"] - top, at["block_rows"])
            x = f.gep(self.frame.buf(X), image * at["xn"])
            if self.in_place:
                self.base = f.gep(x, top * at["a_step"])
            else:
                self.fill(x, top, rows)
            first = part * at["panel_group"]
            walk(image, top, rows, first, f.min_(first + at["panel_group"], at["panels"]))

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
                f.store(self.converted(f.load(_LINES, f.gep(here, k), 1)), f.gep(to, k), 1)
            with f.if_(f.cmp("slt", whole, length)):
                last = f.masked_load(_LINES, f.gep(here, whole), mask)
                f.store(self.converted(last), f.gep(to, whole), 1)

    def place(self, panel: Val) -> tuple[Val, Val, Val]:
        """Whether a panel is a wide one, its width, and where it begins, in bytes of sums."""
        f, at, narrower = self.f, self.at, self.frame.isa.vector_bytes
        is_wide = f.cmp("slt", panel, at["wide_panels"])
        width = f.select(is_wide, at["wide"], at["wide"] - narrower)
        return is_wide, width, panel * at["wide"] - f.max_(panel - at["wide_panels"], 0) * narrower
