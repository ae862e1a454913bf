"""Convolutions of 8-bit codes: windows are copied into rows, rows meet packed filters.

A tile of a launch is a block of output pixels times a block of filter panels. The codes under the windows of a block
are gathered first: taps after each other, channels side by side, the zero point where a window leaves the image, in
the form the micro-kernels want (as they are, unsigned, or 16 bits wide). Bytes are cheap to copy, a copied row has no
borders, and its length is a whole number of groups whatever the number of channels. Where tiles can find the channels
of a tap in a copy of the image itself, ``padded.py`` does without such rows.

Where tiles of sums are small, several are finished together, because a call of the finish kernel costs as much as one
of them; windows of one pixel are then copied as the block they are, or read where they lie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.amx.tiles import release
from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.conv.shape import ConvShape, Pixels
from ranvier.codegen.llvm.gemm.blocks import TILE_US, Cut, grain
from ranvier.codegen.llvm.gemm.micro import SLOTS, Slot, write_slot
from ranvier.codegen.llvm.integer.dots import HALF, LEAST_TERMS, SIGNED, TILES, WORDS, Dot, tuned_dot
from ranvier.codegen.llvm.integer.frame import Frame, finish_of, in_order
from ranvier.codegen.llvm.integer.pack import NEAR_BYTES, PackedCodes, moved_right, pack_codes, put_right
from ranvier.codegen.llvm.integer.padded import begins_lines, padded_conv, reads_padded, suits_strips, suits_tiles
from ranvier.codegen.llvm.integer.product import FINISH_US, micro_kernels, row_blocks
from ranvier.codegen.llvm.integer.strip import Strip
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, of

Array = np.ndarray[Any, Any]
_ROWS_BYTES = 128 << 10  # gathered rows of one block …
_MANY_BYTES = 512 << 10  # … and of one that meets filters too large to be read twice
_OTHERS_BYTES = tuple(size << 10 for size in (32, 64, 128, 256, 512, 1024))
_SUMS_BYTES, _PANELS = 32 << 10, 4  # that are finished together
_FEW_TERMS = 80
_TOGETHER = 4  # vectors that are copied at a time
_GOPS, _TILE_GOPS = 300.0, 1200.0  # rough speed of one core
_X, _B, _OUT, _ZERO, _WIDE, _NARROW, _FINISH = range(7)
_NAMES = (
    *("xn", "xd", "xh", "xw", "yn", "d", "h", "w", "od", "oh", "ow", "pixels"),
    *("kd", "kh", "sd", "sh", "sw", "dd", "dh", "dw", "pd", "ph", "pw"),
    *("across", "run_taps", "depth", "groups", "row_bytes", "rows", "block_pixels", "blocks"),
    *("k", "panels", "wide", "wide_panels", "panel_group", "panel_groups", "width", "entry", "apart", "finished"),
)
# how rows come about: window by window, of pixels with a fourth byte that is left out, as a block of pixels copied at
# once, or where they lie
Rows = Literal["windows", "triples", "block", "place"]
_TRIPLE, _QUAD = 3, 4  # channels of such pixels, and their bytes


def dot_of_filters(isa: Isa, shape: ConvShape) -> Dot:
    """Sums of few terms by vectors, where the matrix unit would have rows put together for it."""
    terms = shape.taps * shape.depth
    if suits_strips(shape, isa) and not suits_tiles(shape) and terms <= _FEW_TERMS:
        return tuned_dot(isa, 1, terms, shape.key())
    return tuned_dot(isa, pixels_hint(shape), max(terms, LEAST_TERMS), shape.key())


def pack_filters(w: Array, isa: Isa, shape: ConvShape) -> PackedCodes:
    """Filters [cout, cin / group, *kernel] as a matrix per group: taps and channels by outputs."""
    dot = dot_of_filters(isa, shape)
    by_tap = w.reshape(shape.group, shape.width, shape.depth, shape.taps).swapaxes(-1, -2)
    lined = begins_lines(shape, dot, isa)
    if lined:
        by_tap = in_lines(by_tap, shape, dot, -moved_right(of(w)))
    matrix = by_tap.reshape(shape.group, shape.width, -1).swapaxes(-1, -2)
    return replace(pack_codes(matrix, isa, rows_hint=pixels_hint(shape), dot=dot), lined=lined)


def in_lines(by_tap: Array, shape: ConvShape, dot: Dot, nothing: int = 0) -> Array:
    """Filters [..., taps, channels] with every line of taps in groups of its own, filled with ``nothing``."""
    lines = by_tap.reshape(*by_tap.shape[:-2], shape.taps // shape.kernel[2], shape.kernel[2] * by_tap.shape[-1])
    room = (0, -lines.shape[-1] % dot.group)
    return np.pad(lines, (*((0, 0),) * (lines.ndim - 1), room), constant_values=nothing)


def pixels_hint(shape: ConvShape) -> int:
    """Filters are packed for one of three kinds of images."""
    return 1 if shape.pixels < 4 else 8 if shape.pixels <= 16 else 256


def finishes_together(packed: PackedCodes) -> bool:
    """Whether tiles of sums are so small that several share a call of the finish kernel, which products' driver does
    not do."""
    return packed.dot is SIGNED


def takes_triples(shape: ConvShape, dot: Dot) -> bool:
    """Whether pixels of three channels may lie in four bytes each: multiplied are three."""
    return dot is SIGNED and shape.depth == _TRIPLE and shape.group == 1 and shape.dilations[2] == 1


def _rows_of(shape: ConvShape, x: View, dot: Dot) -> Rows:
    place = Pixels.of(x)
    # of a tensor with four channels the first ones: then the last pixel too has a fourth byte
    whole = not any(apart % _QUAD for apart in (x.offset, *place.numbers))
    if takes_triples(shape, dot) and place.w == _QUAD and whole:
        return "triples"
    single = shape.taps == 1 and shape.group == 1 and shape.size == shape.out and shape.strides == (1, 1, 1)
    dense = (place.w, place.h, place.d) == tuple(
        shape.depth * apart for apart in (1, shape.size[2], shape.size[1] * shape.size[2])
    )
    if dot is not SIGNED or not (single and dense) or shape.depth % dot.group:
        return "windows"
    return "block" if dot.turns(x.dtype) else "place"


def integer_conv(
    x: View,
    zero: View,
    packed: PackedCodes,
    out: View,
    shape: ConvShape,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
    apart: int = 0,
) -> list[Launch]:
    """``out = epilogue(conv(x))`` with exact int32 sums of codes as ``pack`` describes them.

    ``x`` lies channels-last, the pixels of ``out`` evenly apart. ``zero`` is the code that stands for nothing, one
    element like those of ``x``: it is what borders are padded with. Where images have filters of their own these are
    ``apart`` bytes from each other, and the epilogue takes out itself what moved codes add.
    """
    if shape.is_empty:
        return []
    # filters of all groups lie side by side in the result
    columns = None if packed.shift is None or apart else View.dense(packed.shift.storage, DType.int32, (shape.cout,))
    reach = packed.reach
    if not apart:
        epilogue, _ = put_right(x.dtype, replace(packed, batch=(), shift=columns), epilogue, (), isa, threads)
        reach = None if reach is None else reach.reshape(-1)
    elif reach is not None:
        reach = reach.reshape(-1, shape.cout).max(axis=0)
    if not apart and reads_padded(shape, packed, isa):
        return [padded_conv(x, zero, packed, out, shape, isa, epilogue, threads, reach)]
    dot = packed.dot
    item = _item(dot)
    row_bytes = packed.k * 4
    cut = packed.panels.cut
    rows = row_blocks(shape.pixels, isa, packed).size
    place, target = Pixels.of(x), Pixels.of(out)
    form = _rows_of(shape, x, dot)
    if form in ("windows", "triples"):
        row_bytes += 64 if row_bytes % 1024 == 0 else 0  # rows that are not in each other's way in the cache
    work = shape.flops / (_TILE_GOPS if dot is TILES else _GOPS) / 1e3
    work += shape.n * shape.cout * shape.pixels * FINISH_US
    wanted = 1 if threads == 1 else max(1, min(int(work / TILE_US), 8 * threads) // shape.n)

    def block(gathered: int) -> int:
        fitting = min(max(1, gathered // (row_bytes * rows)), -(-shape.pixels // (rows * wanted)))
        return Cut.of(-(-shape.pixels // rows), max(1, fitting)).size * rows

    pixels = tuning.choose(
        "integer blocks",
        lambda: (*shape.key(), x.dtype.name),
        block(_MANY_BYTES if packed.nbytes > NEAR_BYTES else _ROWS_BYTES),
        lambda: {f"{size >> 10} KB": block(size) for size in _OTHERS_BYTES},
    )
    count = -(-shape.pixels // pixels)
    panel_group = cut.count
    if threads > 1 and shape.n * count < min(int(work / TILE_US), 2 * threads):
        panel_group = max(1, cut.count * shape.n * count // (2 * threads))
    panel_groups = -(-cut.count // panel_group)
    joined = shape.dilations[2] == 1 and place.w == shape.depth and shape.group == 1
    wide = cut.size * isa.vector_bytes
    finished, room = rows, rows * wide
    if finishes_together(packed):
        finished = min(pixels, max(1, _SUMS_BYTES // (rows * wide * _PANELS)) * rows)
        room = (finished + rows) * wide * _PANELS
    numbers = {
        **dict(zip(("xn", "xd", "xh", "xw"), place.numbers)),
        "yn": target.n * out.dtype.numpy.itemsize,
        **dict(zip(("d", "h", "w"), shape.size)),
        **dict(zip(("od", "oh", "ow"), shape.out)),
        "pixels": shape.pixels,
        **dict(zip(("kd", "kh"), shape.kernel)),
        **dict(zip(("sd", "sh", "sw"), shape.strides)),
        **dict(zip(("dd", "dh", "dw"), shape.dilations)),
        **dict(zip(("pd", "ph", "pw"), shape.begin)),
        "across": 1 if joined else shape.kernel[2],
        "run_taps": shape.kernel[2] if joined else 1,
        "depth": shape.depth,
        "groups": shape.group,
        "row_bytes": row_bytes,
        "rows": rows,
        "block_pixels": pixels,
        "blocks": count,
        "k": packed.k,
        "panels": cut.count,
        "wide": wide,
        "wide_panels": cut.large,
        "panel_group": panel_group,
        "panel_groups": panel_groups,
        "width": shape.width,
        "entry": packed.entry,
        "apart": apart,
        "finished": finished,
    }
    done = finish_of(epilogue, out, reach, shortens=dot is SIGNED)
    micro = micro_kernels(Cut(rows, 1), cut, packed, x.dtype)[::2]
    if finishes_together(packed):
        micro = tuple(Strip(rows, width).spec() for width in (cut.size, cut.size - (cut.large < cut.count)))
    tiles = shape.n * count * panel_groups
    # rows, room for what a last vector writes beyond them, and one tile of sums
    gathered = -(-(pixels * row_bytes + 2 * isa.vector_bytes) // 64) * 64
    return [
        Launch(
            _spec(x.dtype, dot, form),
            (
                *(At.of(x), At(packed.storage), At.of(out), At.of(zero)),
                *map(Code, micro),
                Code(done.spec),
                *done.buffers,
            ),
            (*in_order(_NAMES, numbers), *done.dims),
            tiles=tiles,
            writes=(out.storage,),
            grain=grain(tiles, work, threads),
            scratch=room + gathered,
            flops=shape.flops,
            traffic=float(x.nbytes * item + packed.nbytes + out.nbytes),
            label="integer conv",
        )
    ]


def _item(dot: Dot) -> int:
    """Bytes of a code of A."""
    return 2 if dot is WORDS else 1


def _spec(codes: DType, dot: Dot, rows: Rows) -> KernelSpec:
    signed, turns = codes is DType.int8, dot.turns(codes)

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Driver(Frame(module, symbol, isa, _NAMES, _FINISH), signed, turns, dot, rows).emit()

    form = "turned" if turns else "words" if dot is WORDS else "plain"
    key = ("integer conv", form, signed and dot is WORDS, dot is TILES, dot is SIGNED, rows)
    return KernelSpec(f"integer conv {form}{' by tiles' if dot is TILES else ''}", key, emit)


class _Driver:
    def __init__(self, frame: Frame, signed: bool, turns: bool, dot: Dot, rows: Rows) -> None:
        self.frame, self.f, self.at, self.isa = frame, frame.f, frame.at, frame.isa
        self.signed, self.turns, self.dot, self.rows = signed, turns, dot, rows
        self.item = _item(dot)
        self.element = "i8" if self.item == 1 else "i16"
        self.control = self.f.stack("i64", SLOTS)

    def emit(self) -> None:
        f, at = self.f, self.at
        self.sums, panels = f.args["scratch"], 1
        if self.dot is SIGNED:
            panels = _PANELS
            self.sums = f.gep(self.sums, at["rows"] * at["wide"] * panels)
        self.gathered = f.gep(self.sums, at["finished"] * at["wide"] * panels)
        zero = f.load("i8", self.frame.buf(_ZERO))
        self.zero = self.converted(zero)
        self.limits()
        for slot, value in (
            (Slot.K, at["k"]),
            (Slot.A_STEP, at["row_bytes"]),
            (Slot.OUT, self.sums),
            (Slot.PARTIAL, f.zero("ptr")),
            (Slot.COLUMNS, f.i64(self.isa.lanes(4))),
            (Slot.FLAGS, f.i64(0)),
            (Slot.ROWS, at["rows"]),
            (Slot.REST, f.i64(0)),
            (Slot.TILES, f.i64(0)),
        ):
            write_slot(f, self.control, slot, value)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            part = f.rem(tile, at["panel_groups"])
            rest = f.div(tile, at["panel_groups"])
            image, block = f.div(rest, at["blocks"]), f.rem(rest, at["blocks"])
            first = block * at["block_pixels"]
            count = f.min_(at["pixels"] - first, at["block_pixels"])
            p0 = part * at["panel_group"]
            p1 = f.min_(p0 + at["panel_group"], at["panels"])
            with f.loop(0, at["groups"]) as group:
                self.gather(image, group, first, count)
                self.multiply(image, group, first, count, p0, p1)
        if self.dot is TILES:
            release(f)
        f.ret()

    # -- rows -------------------------------------------------------------------------------------------------------

    def converted(self, codes: Val) -> Val:
        """Codes as the micro-kernel wants them."""
        f = self.f
        if self.dot is WORDS:
            return f.cast(codes, "i16", signed=self.signed)
        return f.xor(codes, HALF - 256) if self.turns else codes

    def gather(self, image: Val, group: Val, first: Val, count: Val) -> None:
        f, at = self.f, self.at
        base = f.gep(self.frame.buf(_X), image * at["xn"] + group * at["depth"])
        if self.rows in ("block", "place"):
            pixels = f.gep(base, first * at["depth"])
            if self.rows == "place":
                self.gathered = pixels
            else:
                self.copy(self.gathered, pixels, count * at["depth"])
            return
        line = f.div(first, at["ow"])
        ow = f.var("i64", f.rem(first, at["ow"]))
        oh, od = f.var("i64", f.rem(line, at["oh"])), f.var("i64", f.div(line, at["oh"]))
        with f.loop(0, count) as r:
            row = f.gep(self.gathered, r * at["row_bytes"])
            z0, y0 = od.get() * at["sd"] - at["pd"], oh.get() * at["sh"] - at["ph"]
            x0 = ow.get() * at["sw"] - at["pw"]
            self.window(base, row, z0, y0, x0)
            nxt = ow.get() + 1
            ends = f.cmp("eq", nxt, at["ow"])
            ow.set(f.select(ends, f.i64(0), nxt))
            below = oh.get() + f.cast(ends, "i64")
            bottom = f.cmp("eq", below, at["oh"])
            oh.set(f.select(bottom, f.i64(0), below))
            od.set(od.get() + f.cast(bottom, "i64"))

    def limits(self) -> None:
        """Where windows begin that lie wholly inside the image, and what their runs need."""
        f, at = self.f, self.at
        self.length = at["run_taps"] * at["depth"]
        reach = (
            at["d"] - (at["kd"] - 1) * at["dd"],
            at["h"] - (at["kh"] - 1) * at["dh"],
            at["w"] - (at["across"] - 1) * at["dw"] - (at["run_taps"] - 1),
        )
        self.inner = [f.max_(end, 0) for end in reach]
        if self.dot is SIGNED:
            # runs are copied by whole vectors, as far as these end within the image
            lanes, triples = self.isa.lanes(self.item), self.rows == "triples"
            run = at["across"] * _QUAD if triples else self.length
            far = (at["kd"] - 1) * at["dd"] * at["xd"] + (at["kh"] - 1) * at["dh"] * at["xh"]
            far = far if triples else far + (at["across"] - 1) * at["dw"] * at["xw"]
            ends = (at["d"] - 1) * at["xd"] + (at["h"] - 1) * at["xh"] + (at["w"] - 1) * at["xw"]
            self.last = ends + (_QUAD if triples else at["depth"]) - far - f.and_(run + (lanes - 1), -lanes)
        if self.isa.masks:
            lanes = self.isa.lanes(self.item)
            left = f.cast(f.min_(self.length, lanes), "i8")
            self.short = f.cmp("sle", self.length, lanes)
            self.mask = f.cmp("ult", f.lane_ids(lanes, "i8"), f.splat(left, lanes))

    def window(self, base: Val, row: Val, z0: Val, y0: Val, x0: Val) -> None:
        """One row: runs of taps that lie side by side."""
        f, at = self.f, self.at
        begins = [f.cmp("ult", start, end) for start, end in zip((z0, y0, x0), self.inner)]
        first = z0 * at["xd"] + y0 * at["xh"] + x0 * at["xw"]
        start = f.gep(base, first)
        inside = f.and_(f.and_(begins[0], begins[1]), begins[2])
        if self.dot is SIGNED:
            inside = f.and_(inside, f.cmp("sle", first, self.last))
        with f.if_else(inside) as leaves:
            to = f.var("ptr", row)
            with f.loop(0, at["kd"]) as kd, f.loop(0, at["kh"]) as kh:
                line = f.gep(start, kd * at["dd"] * at["xd"] + kh * at["dh"] * at["xh"])
                if self.rows == "triples":
                    self.line_of_triples(to, line)
                else:
                    self.line_of_runs(to, line)
            leaves()
            if self.rows == "triples":
                self.border_triples(base, row, z0, y0, x0)
            else:
                self.border(base, row, z0, y0, x0)

    def line_of_runs(self, to: Var, line: Val) -> None:
        f, at = self.f, self.at
        with f.loop(0, at["across"]) as t:
            here = to.get()
            self.run(here, f.gep(line, t * at["dw"] * at["xw"]))
            to.set(f.gep(here, self.length * self.item))

    def line_of_triples(self, to: Var, line: Val) -> None:
        """Taps side by side, four pixels at a time; writes past the end, where what follows is written later."""
        f, at, lanes = self.f, self.at, self.isa.lanes(1)
        pixels = lanes // _QUAD
        wanted = [_QUAD * pixel + channel for pixel in range(pixels) for channel in range(_TRIPLE)]
        order = wanted + [0] * (lanes - len(wanted))
        here = to.get()
        with f.loop(0, at["across"], pixels) as t:
            codes = f.load(vector("i8", lanes), f.gep(line, t * _QUAD), 1)
            f.store(f.shuffle(self.converted(codes), None, order), f.gep(here, t * _TRIPLE), 1)
        to.set(f.gep(here, at["across"] * _TRIPLE))

    def border_triples(self, base: Val, row: Val, z0: Val, y0: Val, x0: Val) -> None:
        """One row with pixels that the image does not have. The fourth byte of one is written over by the next."""
        f, at, pixel = self.f, self.at, vector("i8", _QUAD)
        to, code = f.var("ptr", row), f.var(pixel)
        nothing = f.splat(self.zero, _QUAD)
        with f.loop(0, at["kd"]) as kd, f.loop(0, at["kh"]) as kh:
            z, y = z0 + kd * at["dd"], y0 + kh * at["dh"]
            there = f.and_(f.cmp("ult", z, at["d"]), f.cmp("ult", y, at["h"]))
            line = f.gep(base, z * at["xd"] + y * at["xh"] + x0 * at["xw"])
            with f.loop(0, at["across"]) as t:
                code.set(nothing)
                with f.if_(f.and_(there, f.cmp("ult", x0 + t, at["w"]))):
                    code.set(self.converted(f.load(pixel, f.gep(line, t * _QUAD), 1)))
                f.store(code.get(), to.get(), 1)
                to.set(f.gep(to.get(), _TRIPLE))

    def run(self, to: Val, source: Val) -> None:
        """A whole run; a short one is a single load whose mask is known before."""
        f = self.f
        if self.dot is SIGNED:
            self.copy_vectors(to, source)
            return
        if not self.isa.masks:
            self.copy(to, source, self.length)
            return
        with f.if_else(self.short) as longer:
            codes = f.masked_load(vector("i8", self.isa.lanes(self.item)), source, self.mask)
            f.store(self.converted(codes), to, 1)
            longer()
            self.copy(to, source, self.length)

    def copy_vectors(self, to: Val, source: Val) -> None:
        """A run by whole vectors: the last one reads and writes past its end, where what follows is written later."""
        f, lanes = self.f, self.isa.lanes(self.item)
        kind, together = vector("i8", lanes), _TOGETHER * lanes

        def vectors(k: Val, count: int) -> None:
            codes = [f.load(kind, f.gep(source, k + i * lanes), 1) for i in range(count)]
            for i, each in enumerate(codes):
                f.store(self.converted(each), f.gep(to, k + i * lanes), 1)

        many = f.and_(self.length, -together)
        with f.loop(0, many, together) as k:
            vectors(k, _TOGETHER)
        with f.loop(many, self.length, lanes) as k:
            vectors(k, 1)

    def border(self, base: Val, row: Val, z0: Val, y0: Val, x0: Val) -> None:
        """One row whose runs are cut where they leave the image."""
        f, at = self.f, self.at
        to = f.var("ptr", row)
        taps, depth = at["run_taps"], at["depth"]
        with f.loop(0, at["kd"]) as kd:
            z = z0 + kd * at["dd"]
            deep = f.cmp("ult", z, at["d"])
            with f.loop(0, at["kh"]) as kh:
                y = y0 + kh * at["dh"]
                inside = f.and_(deep, f.cmp("ult", y, at["h"]))
                line = f.gep(base, z * at["xd"] + y * at["xh"])
                with f.loop(0, at["across"]) as t:
                    x = x0 + t * at["dw"]
                    low = f.min_(f.max_(f.neg(x), 0), taps)
                    high = f.max_(f.min_(at["w"] - x, taps), low)
                    start = f.select(inside, low, taps) * depth
                    stop = f.select(inside, high, taps) * depth
                    here = to.get()
                    self.fill(here, start)
                    self.copy(f.gep(here, start * self.item), f.gep(line, (x + low) * at["xw"]), stop - start)
                    self.fill(f.gep(here, stop * self.item), self.length - stop)
                    to.set(f.gep(here, self.length * self.item))

    def fill(self, to: Val, count: Val) -> None:
        """Zero points; may write past the end, where what follows is written later."""
        f, lanes = self.f, self.isa.lanes(self.item)
        wide = f.splat(self.zero, lanes)
        with f.loop(0, count, lanes) as k:
            f.store(wide, f.gep(to, k, self.element))

    def copy(self, to: Val, source: Val, count: Val) -> None:
        """Codes, converted; reads nothing beyond them."""
        f, lanes = self.f, self.isa.lanes(self.item)

        def piece(k: Val, size: int, mask: Val | None = None) -> None:
            kind, at = vector("i8", size), f.gep(source, k)
            codes = f.load(kind, at, 1) if mask is None else f.masked_load(kind, at, mask)
            f.store(self.converted(codes), f.gep(to, k, self.element), 1)

        if self.isa.masks:
            ids = f.lane_ids(lanes, "i8")  # bytes: a mask for them all is one comparison
            with f.loop(0, count, lanes) as k:
                left = f.cast(f.min_(count - k, lanes), "i8")
                piece(k, lanes, f.cmp("ult", ids, f.splat(left, lanes)))
            return
        whole = f.and_(count, -lanes)
        with f.loop(0, whole, lanes) as k:
            piece(k, lanes)
        done = f.var("i64", whole)
        size = lanes // 2
        while size >= 4:
            with f.if_(f.cmp("sge", count - done.get(), size)):
                piece(done.get(), size)
                done.set(done.get() + size)
            size //= 2
        with f.loop(done.get(), count) as k:
            piece(k, 1)

    # -- products ---------------------------------------------------------------------------------------------------

    def multiply(self, image: Val, group: Val, first: Val, count: Val, p0: Val, p1: Val) -> None:
        f, at = self.f, self.at
        out = f.gep(self.frame.buf(_OUT), image * at["yn"])
        filters = f.gep(self.frame.buf(_B), group * at["entry"])
        if self.dot is SIGNED:
            filters = f.gep(filters, image * at["apart"])
            self.together(image, group, first, count, p0, p1, out, filters)
            return
        rows = at["rows"]
        with f.loop(p0, p1) as p:
            micro, panel, column, width = self.panel(filters, p)
            write_slot(f, self.control, Slot.OUT_STEP, width)
            first_column = f.lshr(column, 2)
            columns = f.min_(f.lshr(width, 2), at["width"] - first_column)
            following = f.gep(panel, width * at["k"])
            with f.loop(0, count, rows) as r:
                if self.dot is TILES:
                    # every block of rows fetches a part of the next panel
                    write_slot(f, self.control, Slot.FETCH, f.gep(following, f.div(r, rows) * at["k"] * 64))
                # a last block has fewer rows: what lies behind them is multiplied for nothing
                left = f.gep(self.gathered, r * at["row_bytes"])
                f.call_pointer(micro, "void", [left, panel, self.control])
                exist = f.min_(rows, count - r)
                here = group * at["width"] + first_column
                self.frame.finish(out, self.sums, (image, first + r, here, exist, columns, width))

    def panel(self, filters: Val, p: Val) -> tuple[Val, Val, Val, Val]:
        """Which kernel multiplies a panel, where it begins, and its first column and width, in bytes of int32."""
        f, at = self.f, self.at
        is_wide = f.cmp("slt", p, at["wide_panels"])
        width = f.select(is_wide, at["wide"], at["wide"] - self.isa.vector_bytes)
        column = p * at["wide"] - f.max_(p - at["wide_panels"], 0) * self.isa.vector_bytes
        micro = f.select(is_wide, self.frame.buf(_WIDE), self.frame.buf(_NARROW))
        return micro, f.gep(filters, f.ashr(column * at["k"], self.dot.narrower)), column, width

    def together(
        self, image: Val, group: Val, first: Val, count: Val, p0: Val, p1: Val, out: Val, filters: Val
    ) -> None:  # fmt: skip
        """Some panels times some rows, and then what follows for all of their sums."""
        f, at = self.f, self.at
        step = at["wide"] * _PANELS
        with f.loop(p0, p1, _PANELS) as p, f.loop(0, count, at["finished"]) as start:
            end = f.min_(p + _PANELS, p1)
            exist = f.min_(at["finished"], count - start)
            _, _, begins, _ = self.panel(filters, p)
            with f.loop(p, end) as q:
                micro, panel, column, _ = self.panel(filters, q)
                self.block(micro, panel, start, exist, column - begins, step)
            _, _, last, width = self.panel(filters, end - 1)
            first_column = f.lshr(begins, 2)
            columns = f.min_(f.lshr(last + width, 2), at["width"]) - first_column
            here = group * at["width"] + first_column
            self.frame.finish(out, self.sums, (image, first + start, here, exist, columns, step))

    def block(self, micro: Val, panel: Val, start: Val, count: Val, column: Val, step: Val) -> None:
        """Sums of some rows and a panel; the last rows are multiplied for nothing, or, where nothing may be read behind
        the image, together with some before them, once more. There is room for these in front."""
        f, at = self.f, self.at
        sums, left = f.gep(self.sums, column), f.gep(self.gathered, start * at["row_bytes"])
        last = count - at["rows"] if self.rows == "place" else count
        f.call_pointer(micro, "void", [left, panel, sums, at["k"], at["row_bytes"], step, count, last])
