"""Copies of an input in scratch, as bfloat16: the pixels under a block with their padding, and windows of them."""

from __future__ import annotations

from typing import Literal

from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.conv.epilogues import Fields
from ranvier.codegen.llvm.conv.interleave import interleaved
from ranvier.codegen.llvm.elements import load_vector, narrowed, narrowed_pair
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass

Mode = Literal["even", "padded", "gathered"]
_LANES = 32  # elements of a line
_LINE = 64
_KIND = vector("i16", _LANES)


@dataclass(frozen=True)
class Structure:
    """What the code of a driver depends on."""

    mode: Mode
    source: DType
    out: DType
    planes: int = 0  # input channels that lie apart and are interleaved …
    room: int = 0  # … into so many

    @property
    def key(self) -> tuple[object, ...]:
        return self.mode, self.source.name, self.out.name, self.planes, self.room


class Copier:
    """Writes the functions that copy, and calls of them."""

    def __init__(self, module: Module, symbol: str, isa: Isa, structure: Structure, names: tuple[str, ...]) -> None:
        self.module, self.symbol, self.isa, self.structure, self.names = module, symbol, isa, structure, names
        self.item = structure.source.numpy.itemsize

    def enter(self, name: str, pointers: tuple[str, ...], numbers: tuple[str, ...]) -> dict[str, Val]:
        params = [("ptr", "dims"), *(("ptr", p) for p in pointers), *(("i64", n) for n in numbers)]
        self.f = self.module.function(f"{self.symbol}_{name}", params, internal=True)
        self.at = Fields(self.f, self.f.args["dims"], self.names)
        return self.f.args

    # -- pixels with their padding ----------------------------------------------------------------------------------

    def call(self, f: Fn, source: Val, target: Val, top: Val, left: Val, rows: Val, columns: Val) -> None:
        """The input under output rows from ``top`` and columns from ``left`` on; ``source`` is the image's corner."""
        self.copy()
        f.call(f"{self.symbol}_copy", "void", [f.args["dims"], source, target, top, left, rows, columns])

    def copy(self) -> None:
        given = self.enter("copy", ("source", "target"), ("oh0", "ow0", "rows", "columns"))
        f, at = self.f, self.at
        top, left = given["oh0"] * at["sh"] - at["ph"], given["ow0"] * at["sw"] - at["pw"]
        height = (given["rows"] - 1) * at["sh"] + (at["kh"] - 1) * at["spread"] + 1
        width = (given["columns"] - 1) * at["sw"] + (at["kw"] - 1) * at["dw"] + 1
        low = f.min_(f.max_(f.neg(left), 0), width)
        high = f.max_(f.min_(at["w"] - left, width), low)
        with f.loop(0, height) as r:
            place = f.rem(r, at["sh"]) * at["plane"] + f.div(r, at["sh"]) * at["copy_line"]
            line = f.gep(given["target"], place)
            tap = f.div(r, at["band"])
            row = top + (tap * at["dh"] + (r - tap * at["band"]))
            inside = f.cmp("ult", row, at["h"])
            # where the row lies outside the image, all of it is padding
            first, last = f.select(inside, low, width), f.select(inside, high, width)
            self.clear(line, f.i64(0), first)
            start = row * at["xh"] + (left + first) * at["xw"]
            pixels = f.gep(given["source"], start * self.item)
            target = f.gep(line, first * at["pixel"])
            if self.structure.planes:
                self.planes(target, pixels, last - first)
            else:
                self.pixels(target, pixels, last - first)
            self.clear(line, last, width)
        f.ret()

    def clear(self, line: Val, first: Val, last: Val) -> None:
        """Zeros from one pixel to another; may write up to the end of a line of 64 bytes, where what follows is written
        later."""
        f = self.f
        with f.loop(first * self.at["pixel"], last * self.at["pixel"], _LINE) as k:
            f.store(f.const(_KIND, 0), f.gep(line, k), 2)

    def pixels(self, target: Val, source: Val, count: Val) -> None:
        """Pixels of channels side by side; ``joined`` where pixels are too, in the input and in the copy."""
        f, at = self.f, self.at
        joined = f.cmp("ne", at["joined"], 0)
        runs = f.select(joined, f.min_(count, 1), count)
        length = f.select(joined, count * at["depth"], at["depth"])
        whole = f.and_(length, -_LANES)
        rest = f.cmp("slt", whole, length)
        mask = f.cmp("ult", f.lane_ids(_LANES, "i16"), f.splat(f.cast(length - whole, "i16"), _LANES))
        with f.loop(0, runs) as i:
            to, here = f.gep(target, i * at["pixel"]), f.gep(source, i * at["xw"] * self.item)
            with f.loop(0, whole, _LANES) as k:
                self.store(self.line_of(f.gep(here, k * self.item), None), f.gep(to, k * 2))
            with f.if_(rest):
                self.store(self.line_of(f.gep(here, whole * self.item), mask), f.gep(to, whole * 2))

    def store(self, value: Val, address: Val) -> None:
        self.f.store(value, address, 2)

    def line_of(self, address: Val, mask: Val | None) -> Val:
        """32 elements as bfloat16, those of the mask, and zeros."""
        f = self.f
        if self.structure.source is DType.bfloat16:
            return f.load(_KIND, address) if mask is None else f.masked_load(_KIND, address, mask)
        halves: list[Val] = []
        for half in range(2):
            part = None
            if mask is not None:
                part = f.shuffle(mask, None, range(16 * half, 16 * half + 16))
            there = f.gep(address, 16 * half * self.item)
            halves.append(load_vector(f, self.isa, self.structure.source, there, 16, mask=part))
        return narrowed_pair(f, *halves)

    def planes(self, target: Val, source: Val, count: Val) -> None:
        """Pixels of channels that lie apart, with zeros for those that are not there."""
        f, at, channels, room = self.f, self.at, self.structure.planes, self.structure.room
        kind = self.structure.source

        def some(k: Val, mask: Val | None) -> None:
            found = [
                load_vector(f, self.isa, kind, f.gep(source, (at["xc"] * c + k) * self.item), 16, mask=mask)
                for c in range(channels)
            ]
            found += [f.const(found[0].type, 0.0)] * (room - channels)
            together = interleaved(f, found)
            to = f.gep(target, k * (2 * room))
            for c in range(room):
                part = f.shuffle(together, None, range(16 * c, 16 * c + 16))
                f.store(narrowed(f, part), f.gep(to, 32 * c), 2)

        with f.if_else(f.cmp("eq", at["xw"], 1)) as otherwise:
            whole = f.and_(count, -16)
            with f.loop(0, whole, 16) as k:
                some(k, None)
            with f.if_(f.cmp("slt", whole, count)):
                some(whole, f.mask_below(16, count - whole))
            otherwise()
            with f.loop(0, count) as k:
                for c in range(room):
                    to = f.gep(target, (k * room + c) * 2)
                    if c >= channels:
                        f.store(f.const("i16", 0), to)
                        continue
                    from_ = f.gep(source, (k * at["xw"] + at["xc"] * c) * self.item)
                    wide = narrowed(f, f.splat(load_vector(f, self.isa, kind, from_, 1), 16))
                    f.store(f.extract(wide, 0), to)

    # -- windows ----------------------------------------------------------------------------------------------------

    def call_gather(self, f: Fn, copy: Val, target: Val, offsets: Val, rows: Val, columns: Val) -> None:
        self.gather()
        f.call(f"{self.symbol}_gather", "void", [f.args["dims"], copy, target, offsets, rows, columns])

    def gather(self) -> None:
        """Windows from the copy, each into a row: runs of taps that lie side by side, and zeros up to a whole line.

        Whole lines are stored and what they write too much is overwritten by the next run, or by the next row.
        """
        given = self.enter("gather", ("copy", "target", "offsets"), ("rows", "columns"))
        f, at = self.f, self.at
        length, row_bytes, last = at["run"], at["row_bytes"], at["runs"] - 1
        whole = f.and_(length - 1, -_LANES)  # the last line of a run is never empty
        mask = f.cmp("ult", f.lane_ids(_LANES, "i16"), f.splat(f.cast(length - whole, "i16"), _LANES))
        with f.loop(0, given["rows"]) as r, f.loop(0, given["columns"]) as c:
            to = f.gep(given["target"], (r * given["columns"] + c) * row_bytes)
            corner = f.gep(given["copy"], r * at["copy_line"] + c * at["sw"] * at["pixel"])
            f.store(f.const(_KIND, 0), f.gep(to, row_bytes - _LINE), 2)
            with f.loop(0, last) as run:
                self.window(f.gep(to, run * length * 2), self.run_at(corner, given["offsets"], run), whole, None)
            self.window(f.gep(to, last * length * 2), self.run_at(corner, given["offsets"], last), whole, mask)
        f.ret()

    def run_at(self, corner: Val, offsets: Val, run: Val) -> Val:
        return self.f.gep(corner, self.f.load("i64", self.f.gep(offsets, run, "i64"), invariant=True))

    def window(self, to: Val, source: Val, whole: Val, mask: Val | None) -> None:
        f = self.f
        with f.loop(0, whole, _LANES) as k:
            self.store(f.load(_KIND, f.gep(source, k * 2)), f.gep(to, k * 2))
        value = f.load(_KIND, f.gep(source, whole * 2))
        if mask is not None:
            value = f.select(mask, value, f.const(_KIND, 0))
        self.store(value, f.gep(to, whole * 2))
