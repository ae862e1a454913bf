"""Depthwise convolutions of 8-bit codes: a vector of channels at a time, int32 sums.

Where filters are bytes and the processor multiplies four bytes of a lane at once, codes of up to four rows are brought
together, channel by channel, by one permutation, or for four vectors at once by eight that interleave: a column of a
window is then one instruction instead of four. Where it is one permutation, several lines of output are made of the
same rows, each with filters that begin with another row. Elsewhere filters are one 16-bit number per 32-bit lane, so
that a widened code times a filter is one instruction.

Where a window leaves the image the zero point of ``x`` is multiplied instead: sums are those of all taps everywhere,
and what the zero point adds is the same for all pixels of a channel. Mostly that is done for columns only, above all
where lines share rows, and where images have fewer rows than windows. Rows are such that exist, then, as many as there
are: at the upper and lower borders filters are moved against them, and what the zero point adds for rows of filters
that meet none is known from sums of those, where sums begin.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.conv.shape import ConvShape, Pixels, lying
from ranvier.codegen.llvm.gemm.blocks import grain
from ranvier.codegen.llvm.integer.depthwise_filters import (
    CHANNELS,
    ROWS,
    in_bytes,
    is_unrolled,
    lengthwise,
    pack_depthwise,
    permutes,
    room_of,
)
from ranvier.codegen.llvm.integer.dots import HALF, SIGNED, dot_of, multiply_add, multiply_words
from ranvier.codegen.llvm.integer.frame import Frame, finish_of, in_order
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

__all__ = ["integer_depthwise", "is_unrolled", "lengthwise", "pack_depthwise"]

_X, _W, _OUT, _ZERO, _FINISH = range(5)
_NAMES = (
    *("xn", "xd", "xh", "xw", "yn", "d", "h", "w", "od", "oh", "ow", "channels", "room", "kd", "kh", "kw", "sd", "sh"),
    *("sw", "dd", "dh", "dw", "pd", "ph", "pw", "blocks", "block", "groups", "first", "last", "tail"),
)
_TOGETHER = 4  # pixels that share a load of the filter …
_MOST_TOGETHER = 8  # … and where registers hold as many sums: a product waits for the one before it
_LATENCY = 5  # cycles for which it does
_LINES = 3  # of output at most that share their rows
_BESIDE = 3  # registers for what is neither a sum nor a filter
_SUMS_BYTES = 32 << 10
_SHARED_BYTES = 24 << 10  # of sums where lines share their rows: fewer turns, as there is more to set up for each
_GOPS = 40.0
_PERMUTED = "llvm.x86.avx512.permvar.qi.512"  # by an order that is read, or the compiler would take it apart


def integer_depthwise(
    x: View,
    zero: View,
    filters: Storage,
    out: View,
    shape: ConvShape,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
) -> list[Launch]:
    """``out = epilogue(sums)`` of codes as they are times centred filters; layouts as for ``integer_conv``."""
    if shape.is_empty:
        return []
    if (along := lengthwise(shape, isa)) != shape:
        shape, x, out = along, lying(x), lying(out)
    room, coded = room_of(isa, shape), in_bytes(filters)
    windows = _windows(shape, isa, coded, x.dtype)
    lines = windows.lines if windows is not None else 1
    place, target = Pixels.of(x), Pixels.of(out)
    width, kernel, step = shape.out[2], shape.kernel[2], shape.strides[2]
    # output columns whose windows lie wholly inside the image along the width
    first = min(width, -(-shape.begin[2] // step))
    reach = shape.size[2] + shape.begin[2] - (kernel - 1) * shape.dilations[2] - 1
    last = max(first, min(width, reach // step + 1 if reach >= 0 else 0))
    size = shape.size
    if size[1] == 0:  # no row exists: then no column does
        size, last = (size[0], 0, 0), first
    together = windows.together if windows is not None else _TOGETHER
    runs = -(-width // together)
    most_runs = max(2, (_SHARED_BYTES if lines > 1 else _SUMS_BYTES) // (4 * room * together * lines))
    block = -(-runs // -(-runs // most_runs)) * together  # all about as wide
    blocks, groups = -(-width // block), -(-shape.out[1] // lines)
    numbers = {
        **dict(zip(("xn", "xd", "xh", "xw"), place.numbers)),
        "yn": target.n * out.dtype.numpy.itemsize,
        **dict(zip(("d", "h", "w"), size)),
        **dict(zip(("od", "oh", "ow"), shape.out)),
        "channels": shape.cout,
        "room": room,
        **dict(zip(("kd", "kh", "kw"), shape.kernel)),
        **dict(zip(("sd", "sh", "sw"), shape.strides)),
        **dict(zip(("dd", "dh", "dw"), shape.dilations)),
        **dict(zip(("pd", "ph", "pw"), shape.begin)),
        "blocks": blocks,
        "block": block,
        "groups": groups,
        "first": first,
        "last": last,
        "tail": _tail(shape.cout, isa, out, epilogue),
    }
    # of codes as they are and filters less their zero points
    most = np.full(shape.cout, shape.taps * 255 * 255)
    done = finish_of(epilogue, out, most, shortens=dot_of(isa) is SIGNED)
    tiles = shape.n * shape.out[0] * groups * blocks
    return [
        Launch(
            _spec(x.dtype, windows, coded),
            (At.of(x), At(filters), At.of(out), At.of(zero), Code(done.spec), *done.buffers),
            (*in_order(_NAMES, numbers), *done.dims),
            tiles=tiles,
            writes=(out.storage,),
            grain=grain(tiles, shape.flops / _GOPS / 1e3, threads),
            scratch=lines * block * room * 4 + room,
            flops=shape.flops,
            traffic=float(x.nbytes + out.nbytes),
            label="integer depthwise",
        )
    ]


def _tail(channels: int, isa: Isa, out: View, epilogue: Epilogue | None) -> int:
    """The last channels, finished apart: some again that were finished before, so that no store of codes needs a mask.

    Nothing that they are made of may be overwritten by then: operands belong to channels, or to all.
    """
    lanes = isa.lanes(4)
    beyond = channels % (2 * lanes)  # vectors are finished in pairs
    if not isa.masks or out.dtype.numpy.itemsize > 1 or channels < 2 * lanes or beyond in (0, lanes):
        return 0
    if epilogue is None or not epilogue.is_still:
        return 0
    return lanes if beyond < lanes else 2 * lanes


@dataclass(frozen=True)
class _Windows:
    """Of windows that code is unrolled for."""

    rows: int  # of the image that are multiplied
    width: int
    stride: int  # along the width
    lines: int  # of output that are made of them
    moves: bool  # filters are moved against rows of the image; else rows that do not exist are zero points
    together: int  # pixels
    close: bool  # none lies beside the image: of some that follow each other only the outer columns may


def _windows(shape: ConvShape, isa: Isa, coded: bool, dtype: DType) -> _Windows | None:
    if not is_unrolled(shape):
        return None
    shares = coded and permutes(isa)
    lines = _lines(shape, isa.registers) if shares else 1
    # sums that begin with zero cost less than others; those of codes that are turned begin with something anyway
    begins = coded and dot_of(isa).turns(dtype)
    moves = bool(shares or begins or shape.size[1] < shape.kernel[1])
    together = _TOGETHER if coded or isa.registers < 32 else _pixels(shape)
    width, stride = shape.kernel[2], shape.strides[2]
    return _Windows(_rows(shape, lines), width, stride, lines, moves, together, _is_close(shape))


def _is_close(shape: ConvShape) -> bool:
    """Whether every window has a column in the image."""
    begins = shape.begin[0] == 0 and 0 <= shape.begin[2] < shape.kernel[2] and shape.size[1] > 0
    ends = ((shape.out[axis] - 1) * shape.strides[axis] - shape.begin[axis] < shape.size[axis] for axis in (0, 2))
    return bool(begins and all(ends))


def _pixels(shape: ConvShape) -> int:
    """How many pixels at a time take the fewest cycles for a line, one tap after the other."""
    (height, width), stride = shape.kernel[1:], shape.strides[2]

    def cycles(count: int) -> float:
        columns = (count - 1) * stride + width
        instructions = height * (columns + count * width)
        return -(-shape.out[2] // count) * max(instructions / 2, height * width * _LATENCY)

    return min(range(_TOGETHER, _MOST_TOGETHER + 1), key=cycles)


def _rows(shape: ConvShape, lines: int) -> int:
    """Rows of the image that windows of so many lines reach."""
    return max(1, int(min(shape.size[1], shape.kernel[1] + (lines - 1) * shape.strides[1])))


def _lines(shape: ConvShape, registers: int) -> int:
    """How many lines of output share their rows: as many as take the fewest instructions for all."""
    width, columns = shape.kernel[2], (_TOGETHER - 1) * shape.strides[2] + shape.kernel[2]

    def instructions(lines: int) -> int:
        rows = _rows(shape, lines)
        # one for each row of a column that is brought together, one for each tap; filters beyond what registers hold
        # are read again for every pixel, two at a time
        fours = -(-rows // ROWS)
        held = lines * (_TOGETHER + fours * width + 1) + _BESIDE
        again = max(0, held - registers) * _TOGETHER // 2
        return -(-shape.out[1] // lines) * (columns * rows + lines * _TOGETHER * fours * width + again)

    return min(range(1, int(min(_LINES, shape.out[1])) + 1), key=instructions)


def _spec(dtype: DType, windows: _Windows | None, coded: bool) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Kernel(Frame(module, symbol, isa, _NAMES, _FINISH), dtype, windows, coded).emit()

    size = "any"
    if windows is not None:
        size = f"{windows.rows}x{windows.width} stride {windows.stride}{' moves' * windows.moves}"
        size += f" lines {windows.lines}" if windows.lines > 1 else ""
        size += f" by {windows.together}" if windows.together > _TOGETHER else ""
        size += "" if windows.close else " far"
    key = ("integer depthwise", dtype.name, repr(windows), coded)
    return KernelSpec(f"integer depthwise {dtype.name} {size}{' bytes' * coded}", key, emit)


class _Kernel:
    """A tile is a part of a line of output, or of several."""

    def __init__(self, frame: Frame, dtype: DType, windows: _Windows | None, coded: bool) -> None:
        self.windows, self.in_bytes = windows, coded
        self.frame, self.f, self.at, self.isa = frame, frame.f, frame.at, frame.isa
        self.signed, self.turns = dtype is DType.int8, dot_of(self.isa).turns(dtype)
        self.lanes = max(self.isa.lanes(4), CHANNELS) if coded else self.isa.lanes(4)  # channels at a time
        self.lines = windows.lines if windows is not None else 1
        self.filters = frame.buf(_W)
        self.code = self.f.load("i8", frame.buf(_ZERO))
        self.zero = self.widened(self.code)
        self.line_bytes = self.at["block"] * self.at["room"] * 4  # of sums
        # a pixel of zero points, for columns beside the image
        self.nothing = self.f.gep(self.f.args["scratch"], self.line_bytes * self.lines)

    def widened(self, codes: Val) -> Val:
        return self.f.cast(codes, "i32", signed=self.signed)

    def emit(self) -> None:
        f, at, lanes = self.f, self.at, self.lanes
        with f.loop(0, at["room"], lanes) as c:
            f.store(f.splat(self.code, lanes), f.gep(self.nothing, c))
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            start = f.rem(tile, at["blocks"]) * at["block"]
            stop = f.min_(start + at["block"], at["ow"])
            rest = f.div(tile, at["blocks"])
            # the last lines end with the last one; of those that were made before sums are made again, and dropped
            line = f.rem(rest, at["groups"]) * self.lines
            first = f.min_(line, at["oh"] - self.lines)
            rest = f.div(rest, at["groups"])
            depth, image = f.rem(rest, at["od"]), f.div(rest, at["od"])
            self.x = f.gep(self.frame.buf(_X), image * at["xn"])
            self.z0, self.y0 = depth * at["sd"] - at["pd"], first * at["sh"] - at["ph"]
            # of a slice before or behind a volume no column exists
            self.deep = f.cmp("ult", self.z0, at["d"])
            self.width = f.select(self.deep, at["w"], f.i64(0))
            self.channels(start, stop)
            out = f.gep(self.frame.buf(_OUT), image * at["yn"])
            with f.loop(line, first + self.lines) as here:
                sums = f.gep(f.args["scratch"], (here - first) * self.line_bytes)
                row = (depth * at["oh"] + here) * at["ow"]
                self.finish(out, sums, image, row + start, stop - start)
        f.ret()

    def finish(self, out: Val, sums: Val, image: Val, pixel: Val, pixels: Val) -> None:
        """Sums of pixels that follow each other; the last channels apart, if they are to be."""
        f, channels, tail = self.f, self.at["channels"], self.at["tail"]
        apart, step = f.cmp("ne", tail, 0), self.at["room"] * 4
        most = f.select(apart, f.and_(channels, -2 * self.isa.lanes(4)), channels)
        self.frame.finish(out, sums, (image, pixel, f.i64(0), pixels, most, step))
        with f.if_(apart):
            rest = channels - tail
            self.frame.finish(out, f.gep(sums, rest, "i32"), (image, pixel, rest, pixels, tail, step))

    def channels(self, start: Val, stop: Val) -> None:
        """All channels of a run of pixels, sums to scratch."""
        f, at, lanes = self.f, self.at, self.lanes
        with f.if_else(f.cmp("sge", at["channels"], lanes)) as few:
            with f.loop(0, at["channels"], lanes) as c:
                # the last vector ends with the last channel, and does some of them again
                self.pixels(start, stop, f.min_(c, at["channels"] - lanes), lanes)
            few()
            with f.loop(0, at["channels"]) as c, f.loop(start, stop) as ow:
                self.sums(ow, start, c, 1)

    def pixels(self, start: Val, stop: Val, c: Val, lanes: int) -> None:
        """Several pixels at a time, of kernels that code is unrolled for; of others one by one."""
        f, at = self.f, self.at
        inner = f.min_(f.max_(at["first"], start), stop)
        if self.windows is None:
            with f.loop(start, stop) as ow:
                self.sums(ow, start, c, lanes)
            return
        outer = f.select(self.deep, f.max_(f.min_(at["last"], stop), inner), inner)
        self.unrolled(self.windows, start, inner, outer, stop, c, lanes)

    def unrolled(self, windows: _Windows, start: Val, first: Val, last: Val, stop: Val, c: Val, lanes: int) -> None:
        """Filters stay in registers, and pixels whose windows lie inside along the width share their codes."""
        f, at, stride = self.f, self.at, windows.stride
        size = self.isa.lanes(4)
        kind, parts = vector("i32", size), range(lanes // size)
        together = ROWS if self.in_bytes else 1
        groups = [range(i, min(i + together, windows.rows)) for i in range(0, windows.rows, together)]

        def numbers(line: Val) -> list[Val]:
            first = f.gep(self.filters, at["room"] * line + c, "i32")
            return [f.load(kind, f.gep(first, part * size, "i32")) for part in parts]

        # the first row that is multiplied
        top = f.min_(f.max_(self.y0, 0), at["h"] - windows.rows) if windows.moves else self.y0
        image, nothing = f.gep(self.x, self.z0 * at["xd"] + c), f.gep(self.nothing, c)
        rows_at: list[tuple[Val, Val]] = []  # and how far apart their pixels are
        for i in range(windows.rows):
            row, step = f.gep(image, (top + i) * at["xh"]), at["xw"]
            if not windows.moves:
                exists = f.cmp("ult", top + i, at["h"])
                row, step = f.select(exists, row, nothing), f.select(exists, step, f.i64(0))
            rows_at.append((row, step))
        beyond = together - 1
        filters: list[list[list[list[Val]]]] = []  # of lines, groups of rows, columns, parts
        first_sums: list[list[Val]] = []
        sums_at = (at["kh"] + together) * windows.width
        for k in range(windows.lines):
            # the row of this line's windows that meets the first one
            met = top - self.y0 - at["sh"] * k if windows.moves else f.i64(0)
            places = [f.min_(met + (rows[0] + beyond), at["kh"] + beyond, signed=False) for rows in groups]
            filters.append([[numbers(p * windows.width + j) for j in range(windows.width)] for p in places])
            first_sums.append(self.first_sums(numbers, sums_at, met, windows))
        if self.in_bytes and len(parts) == 1:
            order = f.gep(self.filters, at["room"] * (sums_at + at["kh"] + 2), "i32")
            self.order = f.load(vector("i8", ROWS * lanes), order)
        multiply = multiply_add if self.in_bytes else multiply_words

        # pixel by pixel where registers hold the codes of a window beside the sums, else column by column
        taps_in_turn = [(p, j) for p in range(windows.together) for j in range(windows.width)]
        if len(parts) * (windows.width + windows.together) > self.isa.registers:
            taps_in_turn.sort(key=lambda each: each[0] * stride + each[1])

        def held(address: Val) -> Val:
            """As it is: sums of offsets of rows and of columns would be more than there are registers."""
            return f.opaque(address) if windows.moves else address

        def pixels(ow: Val, count: int, *, border: bool = False) -> None:
            acc = [[list(sums) for _ in range(count)] for sums in first_sums]
            x0 = ow * stride - at["pw"]
            for number, rows in enumerate(groups):
                here = [(held(f.gep(row, x0 * step)), step) for row, step in rows_at[rows.start : rows.stop]]
                found: dict[int, list[Val]] = {}
                for p, j in (each for each in taps_in_turn if each[0] < count):
                    k = p * stride + j
                    if k not in found:
                        places = [f.gep(row, step * k) for row, step in here]
                        if border and not (windows.close and windows.width - 1 <= k <= (count - 1) * stride):
                            inside = f.cmp("ult", x0 + k, self.width)
                            if windows.moves:
                                below = f.select(inside, at["xh"], f.i64(0))
                                upper = f.select(inside, places[0], nothing)
                                places = [f.gep(upper, below * i) for i in range(len(rows))]
                            else:
                                places = [f.select(inside, place, nothing) for place in places]
                        found[k] = self.column(places, lanes)
                    for line, sums in enumerate(acc):
                        taps = filters[line][number][j]
                        sums[p] = [multiply(f, self.isa, *each) for each in zip(sums[p], found[k], taps)]
            for line, pixels in enumerate(acc):
                target = f.gep(f.args["scratch"], (at["block"] * line + ow - start) * at["room"] + c, "i32")
                target = held(target)
                for p, totals in enumerate(pixels):
                    first = f.gep(target, at["room"] * p, "i32")
                    for part, total in enumerate(totals):
                        f.store(total, f.gep(first, part * size, "i32") if part else first)

        def whole(count: Val) -> Val:
            return f.div(count, f.i64(windows.together)) * windows.together

        with f.if_else(f.cmp("sge", stop - start, windows.together)) as few:
            # runs at the borders end with the last pixel at the latest, and may do some pixels again
            final = stop - windows.together
            with f.loop(start, first, windows.together) as ow:
                pixels(f.min_(ow, final), windows.together, border=True)
            inside = start + whole(first - start + (windows.together - 1))
            outside = inside + whole(f.max_(last - inside, 0))
            with f.loop(inside, outside, windows.together) as ow:
                pixels(ow, windows.together)
            with f.loop(outside, stop, windows.together) as ow:
                pixels(f.min_(ow, final), windows.together, border=True)
            few()
            with f.loop(start, stop) as ow:
                pixels(ow, 1, border=True)

    def first_sums(self, numbers: Callable[[Val], list[Val]], sums_at: Val, met: Val, windows: _Windows) -> list[Val]:
        """What the zero point adds for rows of filters that meet none, less what moved codes add too much.

        ``numbers`` finds a line of the filters, ``sums_at`` is where sums of rows stand, ``met`` the first one that is
        met, were there as many above as below.
        """
        f, height = self.f, self.at["kh"]
        moved = dot_of(self.isa).moves if self.in_bytes and self.turns else 0
        every = numbers(sums_at + height)
        whole_windows = numbers(sums_at + height + 1) if moved else [f.zero(each.type) for each in every]
        if not windows.moves:
            return whole_windows
        found = [f.var(each.type, each) for each in whole_windows]
        start, end = (f.min_(f.max_(x, 0), height) for x in (met, met + windows.rows))
        with f.if_(f.cmp("slt", end - start, height)):
            for sums, whole, above, through in zip(found, every, numbers(sums_at + start), numbers(sums_at + end)):
                taken = through - above
                left = (whole - taken) * f.splat(self.zero, whole.lanes)
                sums.set(left - taken * f.const(taken.type, moved) if moved else left)
        return [sums.get() for sums in found]

    def sums(self, ow: Val, start: Val, c: Val, lanes: int) -> None:
        """One pixel anywhere."""
        f, at = self.f, self.at
        kind = vector("i32", lanes)
        total, code = f.var(kind, f.const(kind, 0)), f.var(kind)
        x0 = ow * at["sw"] - at["pw"]
        weights = f.var("ptr", f.gep(self.filters, c, "i32"))
        with f.loop(0, at["kd"]) as kd:
            z = self.z0 + kd * at["dd"]
            deep = f.cmp("ult", z, at["d"])
            with f.loop(0, at["kh"]) as kh:
                y = self.y0 + kh * at["dh"]
                there = f.and_(deep, f.cmp("ult", y, at["h"]))
                line = f.gep(self.x, z * at["xd"] + y * at["xh"] + c)
                with f.loop(0, at["kw"]) as kw:
                    x = x0 + kw * at["dw"]
                    code.set(f.splat(self.zero, lanes))
                    with f.if_(f.and_(there, f.cmp("ult", x, at["w"]))):
                        code.set(self.load(f.gep(line, x * at["xw"]), lanes))
                    total.set(self.product(total.get(), code.get(), f.load(kind, weights.get())))
                    weights.set(f.gep(weights.get(), at["room"], "i32"))
        f.store(total.get(), f.gep(f.args["scratch"], (ow - start) * at["room"] + c, "i32"))

    def column(self, places: list[Val], lanes: int) -> list[Val]:
        """Codes of a column of a window for its products: a widened one, or the bytes of up to four rows."""
        if not self.in_bytes:
            return [self.load(places[0], lanes)]
        f = self.f
        parts = [f.load(vector("i8", lanes), place, 1) for place in places]
        if lanes > self.isa.lanes(4):
            return self.interleaved(parts)
        count = len(parts)
        if count == 1:
            found = f.cast(parts[0], "i32", signed=False)
        else:
            parts += [self.absent(parts[-1])] * (ROWS - count)
            halves = [f.shuffle(parts[k], parts[k + 1], range(2 * lanes)) for k in (0, 2)]
            rows = f.shuffle(halves[0], halves[1], range(ROWS * lanes))
            found = f.bitcast(self.permuted(rows), vector("i32", lanes))
        flipped = int.from_bytes([HALF] * count, "little", signed=count == ROWS)
        return [f.xor(found, f.const(found.type, flipped)) if self.turns else found]

    def permuted(self, rows: Val) -> Val:
        """The bytes of four rows, channel by channel: by one instruction, or four channels at a time and then those."""
        f = self.f
        if self.isa.has("avx512vbmi"):
            return f.intrinsic(_PERMUTED, rows.type, [rows, self.order])
        count = rows.lanes // ROWS
        fours = f.bitcast(rows, vector("i32", count))
        apart = [row * ROWS + k for k in range(ROWS) for row in range(ROWS)]
        lying = f.bitcast(f.shuffle(fours, None, apart), rows.type)
        within = [16 * k + row * ROWS + channel for k in range(ROWS) for channel in range(ROWS) for row in range(ROWS)]
        return f.shuffle(lying, None, within)

    def interleaved(self, rows: list[Val]) -> list[Val]:
        """Codes of rows, each of four vectors' channels in one register, as those four vectors."""
        f = self.f
        if self.turns:
            rows = [f.xor(row, f.const(row.type, HALF - 256)) for row in rows]
        rows = rows + [self.absent(rows[-1])] * (ROWS - len(rows))
        pairs = [f.bitcast(x, vector("i16", 8)) for x in (*self.mixed(*rows[:2]), *self.mixed(*rows[2:]))]
        quads = (*self.mixed(pairs[0], pairs[2]), *self.mixed(pairs[1], pairs[3]))
        return [f.bitcast(quad, vector("i32", 4)) for quad in quads]

    def absent(self, row: Val) -> Val:
        """For rows that are not multiplied: zeros, or any row where their filters are zeros for sure."""
        return self.f.zero(row.type) if self.windows is not None and self.windows.moves else row

    def mixed(self, a: Val, b: Val) -> tuple[Val, Val]:
        """Elements of two registers by turns: of their first halves, of their second."""
        count = a.lanes
        order = [k + second for k in range(count) for second in (0, count)]
        return self.f.shuffle(a, b, order[:count]), self.f.shuffle(a, b, order[count:])

    def load(self, at: Val, lanes: int) -> Val:
        return self.widened(self.f.load(vector("i8", lanes), at, 1))

    def product(self, total: Val, code: Val, filters: Val) -> Val:
        f = self.f
        if total.lanes > 1:
            return multiply_words(f, self.isa, total, code, filters)
        return total + code * f.ashr(f.shl(filters, 16), 16)
