"""The driver of bfloat16 convolutions: output pixels are rows, output channels columns, (tap, channel) is depth.

The matrix unit wants its rows one stride apart, whole lines of the depth at a time. How a block of pixels gets them:

    "even"      a 1x1 convolution over whole lines of channels: rows are the input's pixels where they lie
    "padded"    the input under the block is copied into scratch with its padding, every pixel in whole lines. A row of
                the copy holds as many pixels as its outputs times the stride, so that stepping over the end of one
                row of outputs leads to the next: all pixels of a block are one stride apart, at the price of some
                columns at the end of every row that are computed and dropped. With a stride, rows whose numbers leave
                the same remainder lie together; where taps are further apart than a block is high, each row of taps has
                a **band** of rows of its own, and what lies between is not copied. A tap is an offset.
    "gathered"  few channels: from such a copy, but with pixels side by side, windows are copied once more, each into a
                row of its own

Then panels of weights run over the rows, panel outside, rows inside. Sums pass through a small block of scratch to the
finish kernel, line by line of the output.
"""

from __future__ import annotations

from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.conv.bfloat_copy import Copier, Structure
from ranvier.codegen.llvm.conv.bfloat_finish import PLACE
from ranvier.codegen.llvm.conv.bfloat_micro import has_tiles
from ranvier.codegen.llvm.conv.epilogues import Fields
from ranvier.codegen.llvm.elements import memory_type
from ranvier.codegen.llvm.gemm.micro import SLOTS, Slot, write_slot
from ranvier.codegen.llvm.isa import Isa

X, W, Y, OFFSETS, WIDE, NARROW, FINISH = range(7)  # buffers; the finish kernel's operands follow
FIELDS = (
    *("inner", "columns_outside", "pixel_blocks", "panel_blocks", "panels", "block_panels"),
    *("panel_bytes", "group_bytes", "panel_columns", "narrow_last", "width", "depth"),
    *("groups", "segments", "rows", "a_step", "tile_line"),
    *("line", "yn", "yh", "yw", "qh", "qw", "q0"),
    *("block_rows", "block_columns", "column_cuts", "oh", "ow"),
    *("xn", "xh", "xw", "xc", "h", "w", "kh", "kw", "sh", "sw", "dh", "dw", "ph", "pw"),
    *("band", "spread", "pixel", "copy_line", "plane", "joined", "runs", "run", "row_bytes"),
    *("table_at", "copy_at", "rows_at"),
)


class BfloatDriver:
    def __init__(self, module: Module, symbol: str, isa: Isa, structure: Structure) -> None:
        self.module, self.symbol, self.isa, self.structure = module, symbol, isa, structure
        self.f = f = module.kernel(symbol)
        self.at = Fields(f, f.args["dims"], FIELDS)
        bufs = f.args["bufs"]
        loaded = (f.load("ptr", f.gep(bufs, k, "ptr"), invariant=True) for k in range(FINISH + 1))
        self.x, self.w, self.y, self.offsets, self.wide, self.narrow, self.finish_code = loaded
        self.operands = f.gep(bufs, FINISH + 1, "ptr")
        self.finish_dims = f.gep(f.args["dims"], len(FIELDS), "i64")
        self.control = f.stack("i64", SLOTS)
        self.place = f.stack("i64", len(PLACE))
        self.held = f.args["scratch"]  # first: the block of sums
        self.item = structure.source.numpy.itemsize

    def function(self) -> None:
        f, at = self.f, self.at
        for slot in Slot:
            write_slot(f, self.control, slot, 0)
        for slot, name in (
            (Slot.K, "groups"),
            (Slot.SEGMENTS, "segments"),
            (Slot.A_STEP, "a_step"),
            (Slot.ROWS, "rows"),
        ):
            write_slot(f, self.control, slot, at[name])
        write_slot(f, self.control, Slot.OUT, self.held)
        write_slot(f, self.control, Slot.COLUMNS, self.isa.lanes(4))
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            outer, inner = f.div(tile, at["inner"]), f.rem(tile, at["inner"])
            columns_first = f.cmp("ne", at["columns_outside"], 0)
            columns = f.select(columns_first, outer, inner)
            pixels = f.select(columns_first, inner, outer)
            self.group, part = f.div(columns, at["panel_blocks"]), f.rem(columns, at["panel_blocks"])
            self.image, block = f.div(pixels, at["pixel_blocks"]), f.rem(pixels, at["pixel_blocks"])
            self.block(block)
            first = part * at["block_panels"]
            with f.loop(first, f.min_(first + at["block_panels"], at["panels"])) as panel:
                self.panel(panel)
        if has_tiles(self.isa):
            with f.if_(f.cmp("ne", f.load("i64", f.gep(self.control, int(Slot.TILES), "i64")), 0)):
                tiles.release(f)
        f.ret()

    # -- rows -------------------------------------------------------------------------------------------------------

    def block(self, block: Val) -> None:
        """Rows of a block of output rows times output columns (of an even one: of pixels in order)."""
        f, at = self.f, self.at
        self.top = f.div(block, at["column_cuts"]) * at["block_rows"]
        self.left = f.rem(block, at["column_cuts"]) * at["block_columns"]
        rows = f.min_(at["oh"] - self.top, at["block_rows"])
        self.columns = f.min_(at["ow"] - self.left, at["block_columns"])
        image = f.gep(self.x, (self.image * at["xn"] + self.group * at["depth"] * at["xc"]) * self.item)
        # a line longer than a block means that none is computed for nothing
        whole = f.cmp("sgt", at["line"], at["block_rows"] * at["block_columns"] + rows * at["ow"])
        self.count = f.select(whole, rows * self.columns, (rows - 1) * at["line"] + self.columns)
        if self.structure.mode == "even":
            self.base = f.gep(image, self.top * at["xh"] * 2 + self.left * at["xw"] * 2)
            return
        copy = f.gep(f.args["scratch"], at["copy_at"])
        copier = Copier(self.module, self.symbol, self.isa, self.structure, FIELDS)
        copier.call(f, image, copy, self.top, self.left, rows, self.columns)
        self.base = copy
        if self.structure.mode == "gathered":
            self.base = f.gep(f.args["scratch"], at["rows_at"])
            self.count = rows * self.columns
            copier.call_gather(f, copy, self.base, self.offsets, rows, self.columns)

    def starts(self, tile: Val) -> None:
        """Where the segments of a tile's rows begin."""
        f, at = self.f, self.at
        table = f.gep(f.args["scratch"], at["table_at"])
        here = f.gep(self.base, tile * at["a_step"])
        if self.structure.mode != "padded":
            f.store(here, table)
            return
        with f.loop(0, at["segments"]) as s:
            start = f.gep(here, f.load("i64", f.gep(self.offsets, s, "i64"), invariant=True))
            f.store(start, f.gep(table, s, "ptr"))

    # -- products ---------------------------------------------------------------------------------------------------

    def panel(self, panel: Val) -> None:
        """A panel of weights against all rows of the block."""
        f, at = self.f, self.at
        last = f.cmp("eq", panel, at["panels"] - 1)
        narrow = f.and_(last, f.cmp("ne", at["narrow_last"], 0))
        code = f.select(narrow, self.narrow, self.wide)
        self.column = panel * at["panel_columns"]
        self.step = f.select(narrow, f.i64(64), at["tile_line"])
        weights = f.gep(self.w, self.group * at["group_bytes"] + panel * at["panel_bytes"])
        write_slot(f, self.control, Slot.OUT_STEP, self.step)
        table = f.gep(f.args["scratch"], at["table_at"])
        half = f.lshr(at["panel_bytes"], 1)
        with f.loop(0, self.count, at["rows"]) as first:
            tile = first
            if self.structure.mode == "even":
                # the last tile of an image ends with its last pixel, and does some of them again
                tile = f.min_(first, (at["oh"] - self.top) * at["ow"] - self.left - at["rows"])
            self.starts(tile)
            # the first two tiles ask for a half of the next panel each
            second = f.cmp("eq", first, at["rows"])
            ahead = f.gep(weights, at["panel_bytes"] + f.select(second, half, f.i64(0)))
            none = f.or_(last, f.cmp("sgt", first, at["rows"]))
            write_slot(f, self.control, Slot.FETCH, f.select(none, f.zero("ptr"), ahead))
            f.call_pointer(code, "void", [table, weights, self.control])
            self.finish(tile, first)

    def finish(self, tile: Val, first: Val) -> None:
        """The epilogue of pixels ``first`` and following ones; row 0 of the sums is pixel ``tile``."""
        f, at = self.f, self.at
        stop = f.min_(tile + at["rows"], self.count)
        line, there = at["line"], self.columns
        item = self.structure.out.numpy.itemsize
        channel = self.group * at["width"] + self.column
        if self.structure.mode == "gathered":
            line = f.max_(line, self.columns)
        if self.structure.mode != "even":
            there = f.select(f.cmp("sgt", line, self.count), self.count, there)
        for name, value in (
            ("image", self.image),
            ("number_step", at["qw"]),
            ("channel", channel),
            ("columns", f.min_(at["width"] - self.column, at["panel_columns"])),
            ("step", self.step),
            ("out_step", at["yw"]),
        ):
            self.put(name, value)
        target = f.gep(self.y, (self.image * at["yn"] + channel) * item)
        with f.loop(f.div(first, line), f.div(stop - 1, line) + 1) as row:
            begin = f.max_(first, row * line)
            end = f.min_(stop, row * line + there)
            with f.if_(f.cmp("slt", begin, end)):
                oh, ow = self.top + row, self.left + (begin - row * line)
                self.put("number", oh * at["qh"] + ow * at["qw"] + at["q0"])
                self.put("rows", end - begin)
                sums = f.gep(self.held, (begin - tile) * self.step)
                out = f.gep(target, (oh * at["yh"] + ow * at["yw"]), memory_type(self.structure.out))
                f.call_pointer(self.finish_code, "void", [self.operands, self.finish_dims, sums, out, self.place])

    def put(self, name: str, value: Val) -> None:
        self.f.store(value, self.f.gep(self.place, PLACE.index(name), "i64"))

    # of the current tile of the launch
    group: Val
    image: Val
    top: Val
    left: Val
    columns: Val
    count: Val
    base: Val
    # of the current panel
    column: Val
    step: Val
