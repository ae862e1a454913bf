"""The kernel of ``padded.py`` with the vector units: strips of pixels meet panels of filters, and many are finished
together."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Val
from ranvier.codegen.llvm.integer.padded_copy import NAMES, NARROW, OFFSETS, OUT, WIDE, B, PaddedCopy

# bytes between rows of sums, how many panels these hold, and how many pixels are finished together
NAMES_OF_STRIPS = (*NAMES, "step", "together", "finished")


class StripDriver(PaddedCopy):
    def emit(self) -> None:
        f, at = self.f, self.at
        # a last block that begins before its pixels has sums before theirs
        self.sums = f.gep(f.args["scratch"], at["rows"] * at["step"])
        self.base = f.gep(self.sums, at["finished"] * at["step"])
        self.tiles(self.walk)
        f.ret()

    def walk(self, image: Val, top: Val, rows: Val, p0: Val, p1: Val) -> None:
        f, at = self.f, self.at
        pixels = rows * at["ow"]
        with f.loop(p0, p1, at["together"]) as p, f.loop(0, pixels, at["finished"]) as start:
            exist = f.min_(pixels - start, at["finished"])
            self.some(image, top, start, exist, p, f.min_(p + at["together"], p1))

    def some(self, image: Val, top: Val, start: Val, exist: Val, p0: Val, p1: Val) -> None:
        """Some panels times some pixels, and what follows for their sums."""
        f, at = self.f, self.at
        _, _, begins = self.place(p0)
        with f.loop(p0, p1) as p:
            is_wide, _, column = self.place(p)
            strip = f.select(is_wide, self.frame.buf(WIDE), self.frame.buf(NARROW))
            sums, filters = f.gep(self.sums, column - begins), f.gep(self.frame.buf(B), column * at["k"])
            if self.in_place:
                # nothing may be read behind an image: its last block does some pixels again
                pixel = f.gep(self.base, start * at["a_step"])
                numbers = [at["k"], at["a_step"], at["step"], exist, exist - at["rows"]]
                f.call_pointer(strip, "void", [pixel, filters, sums, *numbers])
            else:
                line, place = f.div(start, at["ow"]), f.rem(start, at["ow"])
                pixel = f.gep(self.base, line * at["copy_line"] + place * at["a_step"])
                skip = at["copy_line"] - at["ow"] * at["a_step"]
                numbers = [at["segments"], at["groups"], at["a_step"], at["step"], skip, exist, at["ow"], place]
                f.call_pointer(strip, "void", [pixel, filters, sums, self.frame.buf(OFFSETS), *numbers])
        _, width, last = self.place(p1 - 1)
        first = f.lshr(begins, 2)
        columns = f.min_(f.lshr(last + width - begins, 2), at["width"] - first)
        out = f.gep(self.frame.buf(OUT), image * at["yn"])
        self.frame.finish(out, self.sums, (image, top * at["ow"] + start, first, exist, columns, at["step"]))
