"""Depthwise convolution in general: any kernel size, one to three dimensions, several outputs per input channel.

A body computes ``pixels`` neighbours of one output row at once, so an input column that several of them read is loaded
once; the taps of a kernel row are unrolled, kernel rows are a loop whose bounds follow from the position, which settles
the upper and lower border. A second copy of the body, for groups that touch the left or right border or the end of the
row, takes columns outside the image from a block of zeros.

Channels of bfloat16 come two in a word, and widening them in their order would take two instructions for a vector, as
many as there are multiplications for some. So they are taken as they lie: the words shifted are the even channels, the
words without their low half the odd ones, and only the sums are put in order.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.llvm.builder import Module, Val, Var, size_of, vector
from ranvier.codegen.llvm.conv.borders import taps_inside
from ranvier.codegen.llvm.conv.epilogues import Fields, Lanes, Tail, TailCode, channel_pieces
from ranvier.codegen.llvm.elements import gather_elements, load_vector, memory_type, register_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.pairs import apart, even_then_odd, rounded_in_order, together
from ranvier.dtypes import DType
from ranvier.records import dataclass

FIELDS = (
    *("d", "h", "w", "od", "oh", "ow", "channels", "padded"),
    *("kd", "kh", "sd", "sh", "dd", "dh", "pd", "ph", "pw"),
    *("xn", "xd", "xh", "xw", "yn", "yd", "yh", "yw"),
    *("rows", "blocks", "channel_block", "multiplier", "kw", "qd", "qh", "qw", "q0"),
)


@dataclass(frozen=True)
class Structure:
    """What the code depends on beside types and the epilogue."""

    high: int  # kernel rows written out (0: a loop)
    taps: int  # taps of a kernel row written out (0: a loop)
    stride: int
    dilation: int
    low: bool  # the image has fewer rows than the kernel: those written out begin where it does
    pixels: int
    whole: bool  # rows are whole numbers of groups, and padding is less than a kernel
    inner: bool  # there are enough groups inside for code of their own
    spread: bool  # several output channels per input channel
    pairs: bool  # bfloat16 channels by two vectors, those of even and those of odd numbers
    rest: bool  # there are channels left after those
    doubled: bool  # channels by two vectors at a time, which share the addresses of their pixels
    halves: bool  # sums are float16, and float32 when they are finished

    @property
    def key(self) -> tuple[object, ...]:
        rows = self.high, self.taps, self.stride, self.dilation, self.low, self.pixels, self.whole, self.inner
        return *rows, self.spread, self.pairs, self.rest, self.doubled, self.halves


class Depthwise:
    def __init__(
        self,
        module: Module,
        symbol: str,
        isa: Isa,
        dtype: DType,
        out_dtype: DType,
        structure: Structure,
        tail: Tail,
    ) -> None:
        self.isa, self.dtype, self.out_dtype = isa, dtype, out_dtype
        self.bias, self.tail = (None, tail) if structure.halves else tail.begun()
        self.high, self.taps, self.pixels = structure.high, structure.taps, structure.pixels
        self.low, self.inner = structure.low, structure.inner
        self.stride, self.dilation, self.spread = structure.stride, structure.dilation, structure.spread
        self.whole, self.pairs, self.rest = structure.whole, structure.pairs, structure.rest
        self.doubled = structure.doubled
        self.halves = structure.halves
        self.element, self.source = "half" if self.halves else register_type(dtype), memory_type(dtype)
        self.item = size_of(self.element)
        self.f = f = module.kernel(symbol)
        self.zeros = Val(f, "ptr", module.table(f"{symbol}_zeros", self.source, [0] * 2 * isa.lanes(self.item)))
        self.at = Fields(f, f.args["dims"], FIELDS)
        bufs = f.args["bufs"]
        self.x, self.w, self.y = (f.load("ptr", f.gep(bufs, k, "ptr")) for k in range(3))
        self.code = TailCode(f, isa, self.tail, bufs, 3, f.args["dims"], len(FIELDS))
        self.held = f.stack(self.element, 2 * self.pixels * isa.lanes(self.item))

    def function(self) -> None:
        f, at = self.f, self.at
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            block = f.rem(tile, at["blocks"])
            plane = f.div(tile, at["blocks"])
            od, image = f.rem(plane, at["od"]), f.div(plane, at["od"])
            first = block * at["rows"]
            self.rows_of(image, od, first, f.min_(first + at["rows"], at["oh"]))
        f.ret()

    def rows_of(self, image: Val, od: Val, first: Val, last: Val) -> None:
        """Output rows of one plane."""
        with self.f.loop(first, last) as oh:
            self.row(image, od, oh)

    def row(self, image: Val, od: Val, oh: Val) -> None:
        f, at = self.f, self.at
        top = oh * at["sh"] - at["ph"]
        front = od * at["sd"] - at["pd"]
        self.kh = taps_inside(f, top, at["h"], at["kh"], at["dh"])
        self.kd = taps_inside(f, front, at["d"], at["kd"], at["dd"])
        corner = f.gep(self.x, image * at["xn"] + front * at["xd"] + top * at["xh"], self.source)
        target = f.gep(self.y, image * at["yn"] + od * at["yd"] + oh * at["yh"], self._out)
        line = od * at["qd"] + oh * at["qh"] + at["q0"]
        span = (self.pixels - 1) * self.stride
        with f.loop(0, at["channels"], at["channel_block"]) as first:
            last = f.min_(first + at["channel_block"], at["channels"])
            with f.loop(0, at["ow"], self.pixels) as ow:
                left = ow * self.stride - at["pw"]
                right = left + span + (at["kw"] - 1) * self.dilation
                inside = f.and_(f.cmp("sge", left, 0), f.cmp("slt", right, at["w"]))
                inside = f.and_(inside, f.cmp("sle", ow + self.pixels, at["ow"]))
                start = f.gep(corner, left * at["xw"], self.source)
                place = f.gep(target, ow * at["yw"], self._out)
                rows = self.code.rows(image, line + ow * at["qw"])
                with f.if_else(inside) as otherwise:
                    self.pieces(first, last, lambda p: self.body(p, start, place, rows, None, None))
                    otherwise()
                    count = f.min_(at["ow"] - ow, self.pixels)
                    self.pieces(first, last, lambda p: self.body(p, start, place, rows, left, count))

    def pieces(self, first: Val, last: Val, body: Callable[[Lanes], None]) -> None:
        """Run ``body`` over channels, by two vectors at a time where they come in pairs or are doubled."""
        f = self.f
        if self.pairs or self.doubled:
            wide = 2 * self.isa.lanes(self.item)
            done = first + f.and_(last - first, -wide)
            with f.loop(first, done, wide) as channel:
                body(Lanes(wide, channel, None))
            first = done
        if self.rest:
            channel_pieces(f, self.isa, self.item, first, last, body)

    def by_pairs(self, piece: Lanes) -> bool:
        return self.pairs and piece.count > self.isa.lanes(self.item)

    def weight(self, piece: Lanes, address: Val) -> Val:
        """Of the channels of a piece, in the order of :meth:`loaded`."""
        found = self.f.load(vector(self.element, piece.count), address)
        return self.f.shuffle(found, None, apart(piece.count)) if self.by_pairs(piece) else found

    @property
    def _out(self) -> str:
        return memory_type(self.out_dtype)

    def body(self, piece: Lanes, start: Val, place: Val, rows: list[Val], left: Val | None, count: Val | None) -> None:
        f, at = self.f, self.at
        fixed = self.fixed(rows, piece)
        start_sum = self.beginning(piece, fixed)
        sums = [f.var(start_sum.type, start_sum) for _ in range(self.pixels)]
        with f.loop(*self.kd) as kd, f.loop(*self.kh) as kh:
            line = f.gep(start, kd * at["dd"] * at["xd"] + kh * at["dh"] * at["xh"], self.source)
            taps = f.gep(self.w, (kd * at["kh"] + kh) * at["kw"] * at["padded"] + piece.channel, self.element)
            if self.taps:
                self.unrolled(piece, sums, line, taps, left)
            else:
                self.looped(piece, sums, line, taps, left)
        here = self.f.gep(place, piece.channel, self._out)
        self.finish(piece, [s.get() for s in sums], here, rows, count, fixed)

    def unrolled(self, piece: Lanes, sums: list[Var], line: Val, taps: Val, left: Val | None) -> None:
        """All taps of a kernel row: each column is loaded once and added to every pixel that reads it."""
        f, at = self.f, self.at
        weights = [self.weight(piece, f.gep(taps, at["padded"] * t, self.element)) for t in range(self.taps)]
        users: dict[int, list[tuple[int, int]]] = {}
        for p in range(self.pixels):
            for t in range(self.taps):
                users.setdefault(p * self.stride + t * self.dilation, []).append((p, t))
        for column, pairs in sorted(users.items()):
            value = self.column(piece, line, left, f.i64(column))
            for p, t in pairs:
                sums[p].set(f.fma(value, weights[t], sums[p].get()))

    def looped(self, piece: Lanes, sums: list[Var], line: Val, taps: Val, left: Val | None) -> None:
        """Taps as a loop, for long kernels."""
        f, at = self.f, self.at
        with f.loop(0, at["kw"]) as t:
            weight = self.weight(piece, f.gep(taps, at["padded"] * t, self.element))
            for p in range(self.pixels):
                value = self.column(piece, line, left, t * self.dilation + p * self.stride)
                sums[p].set(f.fma(value, weight, sums[p].get()))

    def column(self, piece: Lanes, line: Val, left: Val | None, column: Val) -> Val:
        """The input at a column counted from the group's first; outside the image zeros, where ``left`` is given."""
        f, at = self.f, self.at
        there = None if left is None else f.cmp("ult", left + column, at["w"])
        base = f.gep(line, column * at["xw"], self.source)
        if self.spread:
            return self.gathered(piece, base, there)
        address = f.gep(base, piece.channel, self.source)
        if there is not None:
            address = f.select(there, address, self.zeros)
        return self.loaded(piece, address)

    def loaded(self, piece: Lanes, address: Val) -> Val:
        """Channels of the input that lie side by side; of pairs, the even ones come first."""
        if self.by_pairs(piece):
            return even_then_odd(self.f, self.f.load(vector("i32", piece.count // 2), address, 2))
        if self.halves:
            return self.f.load(vector("half", piece.count), address)
        return load_vector(self.f, self.isa, self.dtype, address, piece.count, mask=piece.mask)

    def gathered(self, piece: Lanes, base: Val, there: Val | None) -> Val:
        """Several output channels read one input channel."""
        f = self.f
        if piece.count == 1:
            address = f.gep(base, f.div(piece.channel, self.at["multiplier"]), self.source)
            return self.loaded(piece, address if there is None else f.select(there, address, self.zeros))
        ids = f.lane_ids(piece.count) + piece.channel
        where = f.div(ids, f.like(ids, self.at["multiplier"]), signed=False)
        on = piece.mask
        if there is not None:
            all_lanes = f.splat(there, piece.count)
            on = all_lanes if on is None else f.and_(on, all_lanes)
        return gather_elements(f, self.isa, self.dtype, base, where, mask=on)

    @property
    def ordered_late(self) -> bool:
        """Whether sums of pairs are put in order when they are bfloat16: half the work. Operands are the same for all
        pixels, so they are out of order once."""
        return self.pairs and self.out_dtype is DType.bfloat16 and all(self.tail.still)

    def fixed(self, rows: list[Val], piece: Lanes) -> dict[int, Val]:
        """Operands of the epilogue that are the same for all pixels, in the order of the values that meet them."""
        found = self.code.fixed(rows, piece.channel, piece)
        if not (self.by_pairs(piece) and self.ordered_late):
            return found
        return {k: v if v.lanes == 1 else self.f.shuffle(v, None, apart(v.lanes)) for k, v in found.items()}

    def beginning(self, piece: Lanes, fixed: dict[int, Val]) -> Val:
        """What sums begin with: a bias, if there is one."""
        f, kind = self.f, vector(self.element, piece.count)
        if self.bias is None:
            return f.const(kind, 0.0)
        found = fixed[self.bias]
        return f.shuffle(found, None, apart(piece.count)) if self.by_pairs(piece) and not self.ordered_late else found

    def finish(
        self,
        piece: Lanes,
        values: list[Val],
        place: Val,
        rows: list[Val],
        count: Val | None,
        fixed: dict[int, Val],
    ) -> None:
        """The epilogue and the stores of a group's sums; ``place`` is the first output's address."""
        f = self.f
        if self.by_pairs(piece) and not self.ordered_late:
            values = [f.shuffle(v, None, together(piece.count)) for v in values]
        # a long epilogue waits for itself: where vectors are short, those of all pixels are under way at once
        if count is None and (self.tail.is_cheap or self.isa.abreast > 1):
            for p, value in enumerate(values):
                self.store(piece, value, place, rows, f.i64(p), fixed)
            return
        # one copy of the epilogue in a loop over the pixels there are
        for p, value in enumerate(values):
            f.store(value, f.gep(self.held, p * piece.count, self.element))
        kind = vector(self.element, piece.count)
        with f.loop(0, self.pixels if count is None else count) as pixel:
            value = f.load(kind, f.gep(self.held, pixel * piece.count, self.element))
            self.store(piece, value, place, rows, pixel, fixed)

    def store(self, piece: Lanes, value: Val, place: Val, rows: list[Val], pixel: Val, fixed: dict[int, Val]) -> None:
        address = self.f.gep(place, pixel * self.at["yw"], self._out)
        here = self.code.moved(rows, pixel * self.at["qw"])
        value = self.f.cast(value, "float") if self.halves else value
        if self.by_pairs(piece) and self.ordered_late:
            made = self.code.value(value, here, piece.channel, piece.mask, fixed)
            self.f.store(rounded_in_order(self.f, made), address, 2)
            return
        self.code.store(value, here, piece.channel, address, self.out_dtype, piece.mask, fixed)
