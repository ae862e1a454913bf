"""The driver around the GEMM micro-kernels: output pixels are rows, output channels columns, (tap, channel) is depth.

A tile of a launch is a block of pixels times a block of channel panels. The driver first works out where every row of
every tap begins in the input (subclasses: :mod:`implicit`, :mod:`strip`), then runs the panels over the rows: panel
outside, rows inside, so that a panel of weights is read again and again from a near cache. A deep panel is cut into
chunks along its depth, with partial sums kept in scratch; while a chunk is worked on, the micro-kernels fetch the next.

Everything that depends on sizes is an argument; the code depends on how rows are found and on what the micro-kernel
cannot finish itself (``Finish``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.conv.epilogues import Fields, Lanes, Tail, TailCode, channel_pieces
from ranvier.codegen.llvm.conv.taps_abreast import finish_abreast
from ranvier.codegen.llvm.elements import memory_type, register_type
from ranvier.codegen.llvm.gemm.micro import SLOTS, Slot, write_slot
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass

# Who finishes a tile: the micro-kernel, or the driver from a scratch tile (always, or only for the last panel, whose
# columns may end inside a vector on machines without masks).
Finish = Literal["micro", "driver", "last"]

COMMON = (
    *("pixel_blocks", "column_blocks", "inner", "columns_outside"),  # decoding of a tile's number
    *("panels", "block_panels", "panel_columns", "panel_bytes", "group_bytes"),
    *("width", "last_columns", "depth", "most_rows"),
    *("od", "oh", "ow", "yn", "yd", "yh", "yw", "qd", "qh", "qw", "q0"),
    *("with_bias", "with_residual", "residual_n", "residual_p", "flags", "low", "high"),
    *("fc", "fh", "fw", "fyd", "fyh", "fyw", "fqd", "fqh", "fqw"),
    *("tile_at", "table_at", "taps", "a_step", "segments"),
    *("chunks", "chunk_a", "chunk_depth", "chunk_k", "chunk_segments", "last_k", "last_segments"),
    *("partial_at", "partial_bytes"),
)
# fixed buffers; after them come the micro-kernels by rows (MOST_ROWS for whole panels, as many for the last), then the
# operands of the epilogue
BUFFERS = ("x", "w", "y", "bias", "residual")
MOST_ROWS = 24
POINTERS = 8  # row pointers worked out at once


@dataclass(frozen=True)
class Code:
    """What the code of a driver depends on. ``dtype`` is the sums' and the epilogue's."""

    dtype: DType
    out_dtype: DType
    finish: Finish
    uniform: bool  # output pixels lie evenly apart across the ends of rows too, and are numbered in order
    tail: Tail
    shuffled: bool = False  # columns are pixels too
    abreast: int = 0  # so many of them lie in a line with those of the next row
    halves: bool = False  # pixels and weights are float16, and half as wide as the sums

    @property
    def key(self) -> tuple[object, ...]:
        tail = () if self.finish == "micro" else (self.uniform, self.shuffled, self.abreast, self.tail.key)
        return self.dtype.name, self.out_dtype.name, self.finish, tail, self.halves


class Driver:
    """Writes one driver kernel. Subclasses say how the rows of a block are found."""

    fields: tuple[str, ...] = ()
    works = False  # does more than calling others

    def __init__(self, module: Module, symbol: str, isa: Isa, code: Code, structure: int = 0) -> None:
        self.isa, self.code, self.module, self.symbol = isa, code, module, symbol
        self.element = register_type(code.dtype)
        self.out_element = memory_type(code.out_dtype)
        self.item = code.dtype.numpy.itemsize
        self.x_element = memory_type(DType.float16 if code.halves else code.dtype)
        self.x_item = self.item // 2 if code.halves else self.item
        self.enter(module.kernel(symbol, optimized=self.works))
        if self.works:
            self.prepare_tail()
        self.control = self.f.stack("i64", SLOTS)

    def enter(self, f: Fn) -> None:
        """Write into a function that has the kernel's ``bufs``, ``dims`` and ``scratch`` among its arguments."""
        self.f = f
        self.at = Fields(f, f.args["dims"], (*COMMON, *self.fields))
        self.bufs = f.args["bufs"]
        self.x, self.w, self.y, self.bias, self.residual = (
            f.load("ptr", f.gep(self.bufs, k, "ptr")) for k in range(len(BUFFERS))
        )
        self.table = f.gep(f.args["scratch"], self.at["table_at"])
        self.held = f.gep(f.args["scratch"], self.at["tile_at"])

    def prepare_tail(self) -> None:
        """What the epilogue needs in the function that has it."""
        f = self.f
        if self.code.finish != "micro":
            first = len(BUFFERS) + 2 * MOST_ROWS, f.args["dims"], len((*COMMON, *self.fields))
            self.tail = TailCode(f, self.isa, self.code.tail, self.bufs, *first)
        if not self.code.uniform:
            one = f.const("double", 1.0)
            self.per_width = f.div(one, f.cast(self.at["ow"], "double"))
            self.per_height = f.div(one, f.cast(self.at["oh"], "double"))

    @contextmanager
    def apart(self, name: str, *given: Val) -> Iterator[list[Val]]:
        """Code that runs for every row or element, in an optimized function of its own; takes what is ``given``."""
        outside = vars(self).copy()
        params = [(v.type, f"given{k}") for k, v in enumerate(given)]
        shared = [("ptr", "bufs"), ("ptr", "dims"), ("ptr", "scratch")]
        called = f"{self.symbol}_{name}"
        self.enter(self.module.function(called, [*shared, *params], internal=True))
        yield [self.f.args[name] for _, name in params]
        self.f.ret()
        vars(self).update(outside)
        self.f.call(called, "void", [*(self.f.args[name] for _, name in shared), *given])

    # -- how rows are found: for subclasses -------------------------------------------------------------------------

    def start(self) -> None:
        """Once per call of the kernel."""

    def prepare(self, image: Val, group: Val, block: Val) -> None:
        """Once per block: sets ``first_pixel``, ``tiles``, ``rows`` and ``extra`` and whatever ``rows_at`` needs."""
        raise NotImplementedError

    def rows_at(self, tile: Val, pixel: Val) -> Val:
        """The micro-kernel's first argument for a tile of the block."""
        raise NotImplementedError

    def even_rows(self, count: Val) -> None:
        """Share ``count`` pixels evenly among as few tiles as possible."""
        f, most = self.f, self.at["most_rows"]
        self.tiles = f.div(count + most - 1, most)
        self.rows = f.div(count, f.max_(self.tiles, 1))
        self.extra = count - self.rows * self.tiles

    # -- the loops --------------------------------------------------------------------------------------------------

    def function(self) -> None:
        f, at = self.f, self.at
        self.start()
        write_slot(f, self.control, Slot.A_STEP, at["a_step"])
        for slot in (Slot.B_STEP, Slot.ALPHA):
            write_slot(f, self.control, slot, 0)
        write_slot(f, self.control, Slot.LOW, at["low"])
        write_slot(f, self.control, Slot.HIGH, at["high"])
        write_slot(f, self.control, Slot.RESIDUAL_STEP, at["residual_p"] * self.item)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            outer, inner = f.div(tile, at["inner"]), f.rem(tile, at["inner"])
            columns_first = f.cmp("ne", at["columns_outside"], 0)
            columns = f.select(columns_first, outer, inner)
            pixels = f.select(columns_first, inner, outer)
            group, column = f.div(columns, at["column_blocks"]), f.rem(columns, at["column_blocks"])
            image, block = f.div(pixels, at["pixel_blocks"]), f.rem(pixels, at["pixel_blocks"])
            self.prepare(image, group, block)
            first = column * at["block_panels"]
            with f.loop(first, f.min_(first + at["block_panels"], at["panels"])) as panel:
                self.panel(image, group, panel)
        f.ret()

    def panel(self, image: Val, group: Val, panel: Val) -> None:
        """One panel of weights against all rows of the block."""
        f, at = self.f, self.at
        last = f.cmp("eq", panel, at["panels"] - 1)
        column = panel * at["panel_columns"]
        channel = group * at["width"] + column
        weights = f.gep(self.w, group * at["group_bytes"] + panel * at["panel_bytes"])
        lanes = self.isa.lanes(self.item)
        columns = f.min_(at["width"] - column, at["panel_columns"])
        self.line = f.and_(columns + (lanes - 1), -lanes) * self.item  # bytes of a row of the panel
        codes = f.gep(self.bufs, f.select(last, f.i64(MOST_ROWS), f.i64(0)) + (len(BUFFERS) - 1), "ptr")
        with f.loop(0, at["chunks"] - 1) as chunk:
            self.accumulate(chunk, weights, codes)
        self.take_chunk(at["chunks"] - 1, weights, at["last_k"], at["last_segments"])
        write_slot(f, self.control, Slot.COLUMNS, f.select(last, at["last_columns"], f.i64(lanes)))
        target = f.gep(self.y, image * at["yn"] + channel, self.out_element)
        if self.code.finish == "micro":
            self.by_micro(image, channel, codes, target)
        elif self.code.finish == "driver":
            self.by_driver(image, channel, column, columns, codes, target)
        else:
            with f.if_else(last) as otherwise:
                self.by_driver(image, channel, column, columns, codes, target)
                otherwise()
                self.by_micro(image, channel, codes, target)

    def take_chunk(self, chunk: Val, weights: Val, k: Val, segments: Val) -> None:
        """Point at a chunk of the panel; ``k`` and ``segments`` are the micro-kernel's."""
        f, at = self.f, self.at
        write_slot(f, self.control, Slot.K, k)
        write_slot(f, self.control, Slot.SEGMENTS, segments)
        line = f.ashr(self.line, 1) if self.code.halves else self.line  # of weights
        self.weights = f.gep(weights, chunk * at["chunk_depth"] * line)
        self.skip = chunk * at["chunk_a"]
        self.begun = f.cmp("ne", chunk, 0)
        self.slice = k * 64  # bytes that one call fetches: a line per k
        self.size = k * segments * line

    def accumulate(self, chunk: Val, weights: Val, codes: Val) -> None:
        """A chunk that is not the last: sums stay in scratch."""
        f, at = self.f, self.at
        self.take_chunk(chunk, weights, at["chunk_k"], at["chunk_segments"])
        for slot in (Slot.BIAS, Slot.RESIDUAL, Slot.FLAGS):
            write_slot(f, self.control, slot, 0)
        write_slot(f, self.control, Slot.COLUMNS, self.isa.lanes(self.item))
        write_slot(f, self.control, Slot.OUT_STEP, self.line)
        with f.loop(0, self.tiles) as tile:
            count, pixel = self.span(tile)
            write_slot(f, self.control, Slot.OUT, self.partial(tile))
            self.multiply(codes, tile, count, pixel)

    def partial(self, tile: Val) -> Val:
        return self.f.gep(self.f.args["scratch"], self.at["partial_at"] + tile * self.at["partial_bytes"])

    def multiply(self, codes: Val, tile: Val, count: Val, pixel: Val) -> None:
        """Call the micro-kernel for the rows of a tile. What follows the chunk in memory is what comes next."""
        f = self.f
        write_slot(f, self.control, Slot.PARTIAL, f.select(self.begun, self.partial(tile), f.zero("ptr")))
        ahead = self.size + f.min_(tile * self.slice, f.max_(self.size - self.slice, 0))
        write_slot(f, self.control, Slot.FETCH, f.gep(self.weights, ahead))
        code = f.load("ptr", f.gep(codes, count, "ptr"))
        f.call_pointer(code, "void", [f.gep(self.rows_at(tile, pixel), self.skip), self.weights, self.control])

    def by_micro(self, image: Val, channel: Val, codes: Val, target: Val) -> None:
        f, at = self.f, self.at
        none = f.zero("ptr")
        bias = f.gep(self.bias, channel, self.element)
        given = f.cmp("ne", at["with_bias"], 0)
        write_slot(f, self.control, Slot.BIAS, f.select(given, bias, none))
        write_slot(f, self.control, Slot.FLAGS, at["flags"])
        write_slot(f, self.control, Slot.OUT_STEP, at["yw"] * self.code.out_dtype.numpy.itemsize)
        addend = f.gep(self.residual, image * at["residual_n"] + channel, self.element)
        chunk = (self.weights, self.skip, self.begun, self.slice, self.size)
        block = (self.base, self.first_pixel, self.tiles, self.rows, self.extra)
        with self.apart("tiles", self.control, target, addend, codes, *chunk, *block) as inside:
            self.control, target, addend, codes = inside[:4]
            self.weights, self.skip, self.begun, self.slice, self.size = inside[4:9]
            self.base, self.first_pixel, self.tiles, self.rows, self.extra = inside[9:]
            self.tiles_by_micro(target, addend, codes)

    def tiles_by_micro(self, target: Val, addend: Val, codes: Val) -> None:
        f, at = self.f, self.at
        none = f.zero("ptr")
        with_residual = f.cmp("ne", at["with_residual"], 0)
        with f.loop(0, self.tiles) as tile:
            count, pixel = self.span(tile)
            write_slot(f, self.control, Slot.OUT, f.gep(target, pixel * at["yw"], self.out_element))
            here = f.gep(addend, pixel * at["residual_p"], self.element)
            write_slot(f, self.control, Slot.RESIDUAL, f.select(with_residual, here, none))
            self.multiply(codes, tile, count, pixel)

    def by_driver(self, image: Val, channel: Val, column: Val, columns: Val, codes: Val, target: Val) -> None:
        f = self.f
        for slot in (Slot.BIAS, Slot.RESIDUAL, Slot.FLAGS):
            write_slot(f, self.control, slot, 0)
        write_slot(f, self.control, Slot.OUT_STEP, self.line)
        write_slot(f, self.control, Slot.OUT, self.held)
        write_slot(f, self.control, Slot.COLUMNS, self.isa.lanes(self.item))
        with f.loop(0, self.tiles) as tile:
            count, pixel = self.span(tile)
            self.multiply(codes, tile, count, pixel)
            with self.apart("finish", image, channel, column, columns, target, count, pixel, self.line) as inside:
                self.finish_rows(*inside)

    def finish_rows(
        self, image: Val, channel: Val, column: Val, columns: Val, target: Val, count: Val, pixel: Val, line: Val
    ) -> None:
        """The epilogue of a tile's rows."""
        f = self.f
        self.prepare_tail()
        if self.code.abreast:
            finish_abreast(self, image, columns, count, pixel, line)
            return
        if self.code.shuffled:
            self.finish_shuffled(image, column, columns, count, pixel, line)
            return
        with f.loop(0, count) as r:
            offset, number = self.output_pixel(pixel + r)
            place = f.gep(target, offset, self.out_element)
            self.finish(image, number, channel, f.gep(self.held, line * r), place, columns)

    def finish_shuffled(self, image: Val, column: Val, columns: Val, count: Val, pixel: Val, line: Val) -> None:
        """Rows whose columns belong to several pixels: where those lie is worked out once for all rows."""
        f, at = self.f, self.at
        channels = at["fc"]
        with f.loop(f.div(column, channels), f.div(column + columns - 1, channels) + 1) as tap:
            first = f.max_(tap * channels - column, 0)
            wide = f.min_((tap + 1) * channels - column, columns) - first
            start = column + first - tap * channels
            beyond, further = self.tap_pixel(tap)
            target = f.gep(self.y, image * at["yn"] + beyond + start, self.out_element)
            held = f.gep(self.held, first, self.element)
            with f.loop(0, count) as r:
                offset, number = self.output_pixel(pixel + r)
                place = f.gep(target, offset, self.out_element)
                self.finish(image, number + further, start, f.gep(held, line * r), place, wide)

    def finish(self, image: Val, number: Val, channel: Val, held: Val, place: Val, columns: Val) -> None:
        """The epilogue of one row, from the scratch tile to the output."""
        f = self.f
        rows = self.tail.rows(image, number)

        def body(piece: Lanes) -> None:
            c = piece.channel
            # whole vectors exist in the scratch tile whatever the mask says
            acc = f.load(vector(self.element, piece.count), f.gep(held, c, self.element))
            there = f.gep(place, c, self.out_element)
            self.tail.store(acc, rows, channel + c, there, self.code.out_dtype, piece.mask)

        channel_pieces(f, self.isa, self.item, f.i64(0), columns, body, abreast=not self.code.tail.is_cheap)

    def tap_pixel(self, tap: Val) -> tuple[Val, Val]:
        """How far a tap's pixel lies from the row's first, in the output and in the numbering."""
        f, at = self.f, self.at
        line, w = f.div(tap, at["fw"]), f.rem(tap, at["fw"])
        d, h = f.div(line, at["fh"]), f.rem(line, at["fh"])
        offset = d * at["fyd"] + h * at["fyh"] + w * at["fyw"]
        return offset, d * at["fqd"] + h * at["fqh"] + w * at["fqw"]

    def output_pixel(self, pixel: Val) -> tuple[Val, Val]:
        """Where a pixel lies in the output, and the number the epilogue knows it by; also of i32 vectors of pixels."""
        f, at = self.f, self.at
        if self.code.uniform:
            pixel = f.cast(pixel, "i64")
            return pixel * at["yw"], pixel
        line, ow = self.divided(pixel, at["ow"], self.per_width)
        od, oh = self.divided(line, at["oh"], self.per_height)
        od, oh, ow = (f.cast(v, "i64") for v in (od, oh, ow))
        offset = od * at["yd"] + oh * at["yh"] + ow * at["yw"]
        return offset, od * at["qd"] + oh * at["qh"] + ow * at["qw"] + at["q0"]

    def divided(self, value: Val, by: Val, inverse: Val) -> tuple[Val, Val]:
        """Quotient and remainder of small positive integers; exact, and quicker than the machine's division."""
        f = self.f
        quotient = f.cast((f.cast(value, "double") + 0.5) * inverse, value.element)
        return quotient, value - quotient * f.cast(by, value.element)

    def span(self, tile: Val) -> tuple[Val, Val]:
        """Rows of a tile of the block, and its first pixel."""
        f = self.f
        count = self.rows + f.cast(f.cmp("slt", tile, self.extra), "i64")
        return count, self.first_pixel + tile * self.rows + f.min_(tile, self.extra)

    # of the current block
    base: Val  # where its rows, or the pointers to them, begin
    tiles: Val
    rows: Val
    extra: Val
    first_pixel: Val
    # of the current panel and chunk
    line: Val
    weights: Val
    skip: Val
    begun: Val
    slice: Val
    size: Val
