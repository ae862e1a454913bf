"""Rows whose columns are pixels of a few channels each, as those of a transposed convolution that makes a mask.

Pixel by pixel most lanes of a vector would be idle. Where the taps of a line are neighbours in the output, and those of
the next row follow them, the results of many rows are one run of memory: vectors run along it, and are put
together from the scratch tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ranvier.codegen.llvm.builder import Val, vector
from ranvier.codegen.llvm.conv.epilogues import Lanes, Tail, channel_pieces
from ranvier.codegen.llvm.conv.shape import Pixels, Shuffle

if TYPE_CHECKING:
    from ranvier.codegen.llvm.conv.driver import Driver


def taps_abreast(shuffle: Shuffle | None, place: Pixels, tail: Tail, lanes: int, panels: int) -> int:
    """How many elements of a line every row gives, where vectors run along the line; 0 where they do not."""
    if shuffle is None or panels > 1:
        return 0
    elements = shuffle.channels * shuffle.kernel[2]
    follow = shuffle.steps[2] == shuffle.channels and place.w == elements
    # of one channel every element of the line has the same operands
    alike = shuffle.channels == 1 and all(tail.still)
    return elements if follow and alike and lanes % elements == 0 and elements > 1 else 0


def finish_abreast(driver: Driver, image: Val, columns: Val, count: Val, pixel: Val, line: Val) -> None:
    """The epilogue of a tile of ``count`` rows from ``pixel`` on, ``line`` bytes apart in scratch."""
    f, at, wide = driver.f, driver.at, driver.code.abreast
    last = pixel + count
    first_line, _ = driver.divided(pixel, at["ow"], driver.per_width)
    last_line, _ = driver.divided(last - 1, at["ow"], driver.per_width)
    rows = driver.tail.rows(image, f.i64(0))
    fixed = {k: driver.tail.operand(k, rows, f.i64(0), 1, None) for k in range(len(rows))}
    with f.loop(0, f.div(columns, wide)) as tap:
        beyond, _ = driver.tap_pixel(tap * at["fw"])
        target = f.gep(driver.y, image * at["yn"] + beyond, driver.out_element)
        held = f.gep(driver.held, tap * wide, driver.element)
        with f.loop(first_line, last_line + 1) as each:
            begin, end = f.max_(each * at["ow"], pixel), f.min_((each + 1) * at["ow"], last)
            offset, _ = driver.output_pixel(begin)
            place = f.gep(target, offset, driver.out_element)
            run = _Run(driver, f.gep(held, line * (begin - pixel)), line, end - begin)

            def body(piece: Lanes) -> None:
                where = f.gep(place, piece.channel, driver.out_element)
                acc = run.elements(piece)
                driver.tail.store(acc, rows, f.i64(0), where, driver.code.out_dtype, piece.mask, fixed)

            channel_pieces(f, driver.isa, driver.item, f.i64(0), run.count * wide, body, abreast=True)


class _Run:
    """Rows of a scratch tile whose results lie one after the other in the output: some elements of each."""

    def __init__(self, driver: Driver, first: Val, line: Val, count: Val) -> None:
        self.f, self.element, self.wide = driver.f, driver.element, driver.code.abreast
        self.first, self.line, self.count = first, line, count

    def elements(self, piece: Lanes) -> Val:
        """Those of a piece; lanes behind the last row hold it again."""
        f, wide = self.f, self.wide
        if piece.count == 1:
            row = f.div(piece.channel, wide)
            return f.load(self.element, f.gep(self._row(row), piece.channel - row * wide, self.element))
        row = f.div(piece.channel, wide)
        parts = [f.load(vector(self.element, wide), self._row(row + k), align=4) for k in range(piece.count // wide)]
        while len(parts) > 1:
            both = range(2 * parts[0].lanes)
            parts = [f.shuffle(a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _row(self, number: Val) -> Val:
        return self.f.gep(self.first, self.line * self.f.min_(number, self.count - 1))
