"""Convolutions with very few output channels (a mask, a heat map).

As a matrix product they would leave most lanes of a vector idle, so here vectors run along the input channels: every
output is a dot product. A tile is as many pixels as a vector has lanes; their sums become one vector, along which the
epilogue runs. Rows are found as in any implicit product (:class:`TableRows`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.conv.driver import Code
from ranvier.codegen.llvm.conv.epilogues import Lanes, below, channel_pieces
from ranvier.codegen.llvm.conv.implicit import TableRows
from ranvier.codegen.llvm.conv.shape import ConvShape, Packed, packed_constant
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.dtypes import DType

_AT_ONCE = 8  # pixels whose pointers and sums fit the registers
_PRODUCT = 3.5, 0.8  # cycles of a pixel in a matrix product of a single vector of columns, and of every input channel
_MEASURED = 8  # lanes from which on these hold


def is_narrow(shape: ConvShape, isa: Isa, item: int) -> bool:
    """Whether dot products beat a matrix product: few columns, and runs of at least a vector."""
    lanes = isa.lanes(item)
    if shape.group > 1 or shape.cout * 4 > lanes or shape.depth < lanes:
        return False
    plain = shape.taps == 1 and shape.strides == (1, 1, 1) and shape.size == shape.out
    return not plain or lanes < _MEASURED or _dots(shape, lanes) < _PRODUCT[0] + _PRODUCT[1] * shape.depth


_WINDOW = 4.0, 2.5, 8.0  # cycles of a tap, of a vector of it for every output, and of the sum of an output's lanes
_WINDOW_PRODUCT = 1.3  # … and of a tap's channel in a matrix product of a single vector of columns


def dots_are_quicker(shape: ConvShape, joined: ConvShape, pixels: int, isa: Isa) -> bool:
    """Whether dot products beat a matrix product of ``joined``, in which so many pixels are one: a pixel's cycles."""
    tap, piece, total = _WINDOW
    vectors = -(-shape.depth // isa.lanes(4))
    dots = shape.taps * (tap + piece * vectors * shape.cout) + total * shape.cout
    return dots < _WINDOW_PRODUCT * joined.taps * joined.depth / pixels


def _dots(shape: ConvShape, lanes: int) -> float:
    """Cycles a pixel: its pointer, then of every output some for the sum of all lanes, and those of the vectors."""
    return 9.0 + shape.cout * (8.0 + 2.0 * -(-shape.depth // lanes))


def pack(w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape, dtype: DType) -> Packed:
    """[output channel][tap][input channel], input channels padded to whole vectors."""
    lanes = isa.lanes(dtype.numpy.itemsize)
    padded = -(-shape.depth // lanes) * lanes
    found = np.zeros((shape.cout, shape.taps, padded), dtype.numpy)
    found[:, :, : shape.depth] = w.reshape(shape.cout, shape.depth, shape.taps).transpose(0, 2, 1)
    return packed_constant("narrow", found, dtype, padded)


def along_pixels(epilogue: Epilogue | None) -> Epilogue | None:
    """The epilogue with pixels and channels exchanged: vectors run along pixels here."""
    if epilogue is None:
        return None
    swapped = tuple(replace(o, strides=(o.strides[0], o.strides[2], o.strides[1])) for o in epilogue.operands)
    return Epilogue(epilogue.value, swapped)


class NarrowRows(TableRows):
    """A panel is one output channel."""

    works = True

    def __init__(self, module: Module, symbol: str, isa: Isa, code: Code, structure: int = 0) -> None:
        super().__init__(module, symbol, isa, code, structure)
        self.places_of_outputs = [self.f.stack("i64", isa.lanes(self.item)) for _ in range(2)]

    def even_rows(self, count: Val) -> None:
        """Whole tiles, and a rest: the rows of a short tile that do not exist are computed and dropped."""
        f, most = self.f, self.at["most_rows"]
        self.tiles = f.div(count + most - 1, most)
        self.total = count

    def span(self, tile: Val) -> tuple[Val, Val]:
        first = tile * self.at["most_rows"]
        return self.f.min_(self.total - first, self.at["most_rows"]), self.first_pixel + first

    def panel(self, image: Val, group: Val, panel: Val) -> None:
        f, at = self.f, self.at
        weights = f.gep(self.w, panel * at["panel_bytes"])
        channel, beyond = panel, f.i64(0)
        self.further = f.i64(0)
        if self.code.shuffled:
            channel = f.rem(panel, at["fc"])
            beyond, self.further = self.tap_pixel(f.div(panel, at["fc"]))
        target = f.gep(self.y, image * at["yn"] + beyond + channel, self.out_element)
        operands = self.tail.rows(image, channel)
        lanes = self.isa.lanes(self.item)
        with f.loop(0, self.tiles) as tile:
            count, pixel = self.span(tile)
            table = self.rows_at(tile, pixel)
            with f.loop(0, lanes, min(lanes, _AT_ONCE)) as row:
                self.dots(table, row, weights)
            if self.code.uniform:
                self.finish_evenly(count, pixel, target, operands)
            else:
                self.finish_singly(count, pixel, target, operands)

    def dots(self, table: Val, row: Val, weights: Val) -> None:
        """Some rows against one column; the sums go to the scratch tile."""
        f, at = self.f, self.at
        lanes = self.isa.lanes(self.item)
        number = min(lanes, _AT_ONCE)
        wide = [f.var(vector(self.element, lanes), 0.0) for _ in range(number)]
        single = [f.var(self.element, 0.0) for _ in range(number)]
        padded = f.and_(at["depth"] + (lanes - 1), -lanes)
        with f.loop(0, at["segments"]) as s:
            where = f.gep(table, s * at["pitch"] + row, "i64")
            rows = [f.load("ptr", f.gep(where, r, "ptr")) for r in range(number)]
            line = f.gep(weights, s * padded, self.element)

            def body(piece: Lanes) -> None:
                kind = vector(self.element, piece.count)
                weight = f.load(kind, f.gep(line, piece.channel, self.element))
                sums: list[Var] = wide if piece.count > 1 else single
                for address, total in zip(rows, sums):
                    at_channel = f.gep(address, piece.channel, self.element)
                    if piece.mask is None:
                        value = f.load(kind, at_channel)
                    else:
                        value = f.masked_load(kind, at_channel, piece.mask)
                    total.set(f.fma(value, weight, total.get()))

            channel_pieces(f, self.isa, self.item, f.i64(0), at["depth"], body)
        place = f.gep(self.held, row, self.element)
        f.store(self.summed([w.get() for w in wide]), place)
        if not self.isa.masks:  # what did not fill a vector
            for r, rest in enumerate(single):
                here = f.gep(place, r, self.element)
                f.store(f.load(self.element, here) + rest.get(), here)

    def summed(self, vectors: list[Val]) -> Val:
        """The sums of all lanes of each vector, as one vector.

        Pairs of vectors are merged: blocks of ``size`` partial sums of one and of the other, even blocks plus odd.
        """
        f, lanes, size = self.f, vectors[0].lanes, 1
        while len(vectors) > 1:
            even = [v * lanes + b + j for b in range(0, lanes, 2 * size) for v in (0, 1) for j in range(size)]
            odd = [k + size for k in even]
            vectors = [
                f.shuffle(a, b, even) + f.shuffle(a, b, odd) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            size *= 2
        found = vectors[0]
        while found.lanes > size:
            half = found.lanes // 2
            found = f.shuffle(found, None, range(half)) + f.shuffle(found, None, range(half, 2 * half))
        return found

    def finish_evenly(self, count: Val, pixel: Val, target: Val, operands: list[Val]) -> None:
        f, at = self.f, self.at
        lanes = self.isa.lanes(self.item)
        whole = f.cmp("eq", count, lanes)
        dense = f.cmp("eq", at["yw"], 1)
        if self.isa.masks:
            mask = below(f, lanes, count)
            with f.if_else(dense) as otherwise:
                acc = f.load(vector(self.element, lanes), self.held)
                place = f.gep(target, pixel, self.out_element)
                self.tail.store(acc, operands, pixel, place, self.code.out_dtype, mask)
                otherwise()
                self.finish_singly(count, pixel, target, operands)
            return
        with f.if_else(f.and_(whole, dense)) as otherwise:
            acc = f.load(vector(self.element, lanes), self.held)
            place = f.gep(target, pixel, self.out_element)
            self.tail.store(acc, operands, pixel, place, self.code.out_dtype)
            otherwise()
            self.finish_singly(count, pixel, target, operands)

    def finish_singly(self, count: Val, pixel: Val, target: Val, operands: list[Val]) -> None:
        """Outputs that lie apart: places, and the epilogue where it does not depend on the pixel, still by vectors."""
        f, kind, lanes = self.f, self.code.out_dtype, self.isa.lanes(self.item)
        same = all(c == 0 for c in self.code.tail.classes) and kind is self.code.dtype
        if same:
            acc = f.load(vector(self.element, lanes), self.held)
            self.tail.store(acc, operands, pixel, self.held, kind)
        pixels = f.splat(f.cast(pixel, "i32"), lanes) + f.lane_ids(lanes, "i32")
        offsets, numbers = self.output_pixel(pixels)
        for place, values in zip(self.places_of_outputs, (offsets, numbers)):
            f.store(values, place)
        with f.loop(0, count) as r:
            offset, number = (f.load("i64", f.gep(place, r, "i64")) for place in self.places_of_outputs)
            value = f.load(self.element, f.gep(self.held, r, self.element))
            here = f.gep(target, offset, self.out_element)
            if same:
                f.store(value, here)
            else:
                self.tail.store(value, operands, number + self.further, here, kind)

    total: Val
    further: Val
