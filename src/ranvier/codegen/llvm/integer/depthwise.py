"""Depthwise convolutions of 8-bit codes: a vector of channels at a time, int32 sums.

Filters are stored less their zero points. Where that leaves 8 bits, and the processor multiplies four bytes of a lane
at once, codes of up to four rows of a window are brought together, channel by channel, by one permutation, or for four
vectors at once by eight that interleave: a column of a window is then one instruction instead of four. Elsewhere
filters are one 16-bit number per 32-bit lane, so that a widened code times a filter is one instruction. Where a window
leaves the image the zero point of ``x`` is multiplied instead: sums are those of all taps everywhere, and what the zero
point adds is the same for all pixels of a channel. Of images with fewer rows than a window no more rows than there are
are multiplied: what the zero point adds for the others is known from sums of the filters' rows, where sums begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.conv.shape import ConvShape, Pixels
from ranvier.codegen.llvm.gemm.blocks import grain
from ranvier.codegen.llvm.integer.dots import HALF, SIGNED, dot_of, multiply_add, multiply_words
from ranvier.codegen.llvm.integer.frame import Frame, finish_of, in_order
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import Storage, View, aligned_empty
from ranvier.dtypes import DType
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_X, _W, _OUT, _ZERO, _FINISH = range(5)
_NAMES = (
    *("xn", "xd", "xh", "xw", "yn", "d", "h", "w", "od", "oh", "ow", "channels", "room"),
    *("kd", "kh", "kw", "sd", "sh", "sw", "dd", "dh", "dw", "pd", "ph", "pw", "block", "first", "last"),
)
_UNROLLED = 25  # taps of a kernel at most for which code is unrolled; of more than 9 some filters are read again
_TOGETHER = 4  # pixels that share a load of the filter
_ROWS = 4  # of a window that are multiplied at once, as bytes
_CHANNELS = 16  # whose bytes are brought together at a time
_SUMS_BYTES = 16 << 10
_GOPS = 40.0
_PERMUTED = "llvm.x86.avx512.permvar.qi.512"  # by an order that is read, or the compiler would take it apart


def pack_depthwise(w: Array, zero: Array, isa: Isa, shape: ConvShape) -> Storage:
    """Filters [channels, 1, *kernel] less their zero points: words, as [tap][channel] of 32-bit lanes, or bytes.

    Bytes stand as [first row][column][channel][row]: any four rows that follow each other, with zeros behind the last.
    Of windows that code is unrolled for sums of the rows before each one follow, channel by channel, and behind bytes
    the order that brings rows together. None of it depends on the size of images.
    """
    lanes, room = isa.lanes(4), _room(isa, shape)
    centred = w.astype(np.int32).reshape(shape.cout, shape.taps) - zero.astype(np.int32).reshape(-1, 1)
    words = np.zeros((shape.taps, room), np.int32)
    words[:, : shape.cout] = centred.T
    if _structure(shape) is None:
        return _stored([words & 0xFFFF])
    _, height, width = shape.kernel
    rows = words.reshape(height, width, room)
    before = np.zeros((height + 1, room), np.int32)
    np.cumsum(rows.sum(axis=1), axis=0, out=before[1:])
    if not _fits_bytes(centred, isa, shape):
        return _stored([words & 0xFFFF, before])
    taps = np.zeros((height + _ROWS - 1, width, room), np.int8)
    taps[:height] = rows
    fours = np.stack([taps[k : k + height] for k in range(_ROWS)], axis=-1)
    order = np.zeros((1, room), np.int32)
    order.view(np.int8)[0, : _ROWS * lanes] = np.arange(_ROWS * lanes).reshape(_ROWS, lanes).T.reshape(-1)
    return _stored([fours.reshape(shape.taps, -1).view(np.int32), before, order], np.int8)


def _stored(parts: list[Array], filters: type = np.int32) -> Storage:
    """Lines of 32-bit lanes; the type of the whole says what filters are."""
    packed = aligned_empty((sum(map(len, parts)), parts[0].shape[1]), np.dtype(np.int32))
    np.concatenate(parts, out=packed)
    return Storage.constant(packed.view(filters))


def _fits_bytes(centred: Array, isa: Isa, shape: ConvShape) -> bool:
    """Whether filters are bytes, of windows that code is unrolled for, and there is a whole vector of channels."""
    permutes = isa.vector_bytes == 64 and isa.has("avx512vnni") and isa.has("avx512vbmi")
    if not permutes and dot_of(isa) is not SIGNED:
        return False
    if _structure(shape) is None or shape.cout < _CHANNELS or shape.kernel[1] < 2:
        return False
    return bool(centred.min(initial=0) >= -128 and centred.max(initial=0) <= 127)


def _room(isa: Isa, shape: ConvShape) -> int:
    """Channels that filters and sums have room for."""
    lanes = max(isa.lanes(4), _CHANNELS) if dot_of(isa) is SIGNED else isa.lanes(4)
    return -(-shape.cout // lanes) * lanes


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
    room = _room(isa, shape)
    place, target = Pixels.of(x), Pixels.of(out)
    width, kernel, step = shape.out[2], shape.kernel[2], shape.strides[2]
    # output columns whose windows lie wholly inside the image along the width
    first = min(width, -(-shape.begin[2] // step))
    reach = shape.size[2] + shape.begin[2] - (kernel - 1) * shape.dilations[2] - 1
    last = max(first, min(width, reach // step + 1 if reach >= 0 else 0))
    runs = min(-(-width // _TOGETHER), max(2, _SUMS_BYTES // (4 * room * _TOGETHER)))
    block = runs * _TOGETHER
    numbers = {
        **dict(zip(("xn", "xd", "xh", "xw"), place.numbers)),
        "yn": target.n * out.dtype.numpy.itemsize,
        **dict(zip(("d", "h", "w"), shape.size)),
        **dict(zip(("od", "oh", "ow"), shape.out)),
        "channels": shape.cout,
        "room": room,
        **dict(zip(("kd", "kh", "kw"), shape.kernel)),
        **dict(zip(("sd", "sh", "sw"), shape.strides)),
        **dict(zip(("dd", "dh", "dw"), shape.dilations)),
        **dict(zip(("pd", "ph", "pw"), shape.begin)),
        "block": block,
        "first": first,
        "last": last,
    }
    assert filters.array is not None
    in_bytes = filters.array.dtype == np.int8
    # of codes as they are and filters less their zero points
    most = np.full(shape.cout, shape.taps * 255 * 255) if dot_of(isa) is SIGNED else None
    done = finish_of(epilogue, out, most, shortens=most is not None)
    tiles = shape.n * shape.out[0] * shape.out[1]
    return [
        Launch(
            _spec(x.dtype, _structure(shape), in_bytes),
            (At.of(x), At(filters), At.of(out), At.of(zero), Code(done.spec), *done.buffers),
            (*in_order(_NAMES, numbers), *done.dims),
            tiles=tiles,
            writes=(out.storage,),
            grain=grain(tiles, shape.flops / _GOPS / 1e3, threads),
            scratch=block * room * 4 + room,
            flops=shape.flops,
            traffic=float(x.nbytes + out.nbytes),
            label="integer depthwise",
        )
    ]


@dataclass(frozen=True)
class Structure:
    """Of windows that code is unrolled for."""

    height: int  # rows of a window that are multiplied
    width: int
    stride: int  # along the width
    low: bool  # windows have more rows than images


def _structure(shape: ConvShape) -> Structure | None:
    if shape.kernel[0] > 1 or shape.taps > _UNROLLED or shape.dilations[1:] != (1, 1) or shape.strides[2] > 2:
        return None
    _, height, width = shape.kernel
    return Structure(min(height, shape.size[1]), width, shape.strides[2], shape.size[1] < height)


def _spec(dtype: DType, structure: Structure | None, in_bytes: bool) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Kernel(Frame(module, symbol, isa, _NAMES, _FINISH), dtype, structure, in_bytes).emit()

    size = "any"
    if structure is not None:
        size = f"{structure.height}x{structure.width} stride {structure.stride}{' low' * structure.low}"
    key = ("integer depthwise", dtype.name, repr(structure), in_bytes)
    return KernelSpec(f"integer depthwise {dtype.name} {size}{' bytes' * in_bytes}", key, emit)


class _Kernel:
    """A tile is a row of output pixels."""

    def __init__(self, frame: Frame, dtype: DType, structure: Structure | None, in_bytes: bool) -> None:
        self.structure, self.in_bytes = structure, in_bytes
        self.frame, self.f, self.at, self.isa = frame, frame.f, frame.at, frame.isa
        self.signed, self.turns = dtype is DType.int8, dot_of(self.isa).turns(dtype)
        self.lanes = max(self.isa.lanes(4), _CHANNELS) if in_bytes else self.isa.lanes(4)  # channels at a time
        self.filters = frame.buf(_W)
        self.code = self.f.load("i8", frame.buf(_ZERO))
        self.zero = self.widened(self.code)
        # a pixel of zero points, for rows above and below the image
        self.nothing = self.f.gep(self.f.args["scratch"], self.at["block"] * self.at["room"], "i32")

    def widened(self, codes: Val) -> Val:
        return self.f.cast(codes, "i32", signed=self.signed)

    def emit(self) -> None:
        f, at, lanes = self.f, self.at, self.lanes
        with f.loop(0, at["room"], lanes) as c:
            f.store(f.splat(self.code, lanes), f.gep(self.nothing, c))
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            line = f.rem(tile, at["oh"])
            rest = f.div(tile, at["oh"])
            depth, image = f.rem(rest, at["od"]), f.div(rest, at["od"])
            self.x = f.gep(self.frame.buf(_X), image * at["xn"])
            self.z0, self.y0 = depth * at["sd"] - at["pd"], line * at["sh"] - at["ph"]
            out = f.gep(self.frame.buf(_OUT), image * at["yn"])
            row = (depth * at["oh"] + line) * at["ow"]
            with f.loop(0, at["ow"], at["block"]) as start:
                stop = f.min_(start + at["block"], at["ow"])
                self.channels(start, stop)
                place = (image, row + start, f.i64(0), stop - start, at["channels"], at["room"] * 4)
                self.frame.finish(out, f.args["scratch"], place)
        f.ret()

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
        outer = f.max_(f.min_(at["last"], stop), inner)
        if self.structure is None:
            with f.loop(start, stop) as ow:
                self.sums(ow, start, c, lanes)
            return
        self.unrolled(self.structure, start, inner, outer, stop, c, lanes)

    def unrolled(self, structure: Structure, start: Val, first: Val, last: Val, stop: Val, c: Val, lanes: int) -> None:
        """Filters stay in registers, and pixels whose windows lie inside along the width share their codes."""
        f, at = self.f, self.at
        height, width, stride = structure.height, structure.width, structure.stride
        nothing = f.gep(self.nothing, c)
        size = self.isa.lanes(4)
        kind, parts = vector("i32", size), range(lanes // size)
        # the first row of a window that is multiplied: those above lie above the image, and those behind below it
        top = f.min_(f.max_(f.neg(self.y0), 0), at["kh"] - height) if structure.low else f.i64(0)
        rows: list[tuple[Val, Val]] = []
        for i in range(height):
            y = self.y0 + top + i
            exists = f.cmp("ult", y, at["h"])
            line = f.gep(self.x, y * at["xh"] + c)
            rows.append((f.select(exists, line, nothing), f.select(exists, at["xw"], f.i64(0))))
        together = _ROWS if self.in_bytes else 1
        groups = [rows[i : i + together] for i in range(0, height, together)]

        def numbers(line: Val) -> list[Val]:
            first = f.gep(self.filters, at["room"] * line + c, "i32")
            return [f.load(kind, f.gep(first, part * size, "i32")) for part in parts]

        filters = [[numbers((top + i * together) * width + j) for j in range(width)] for i in range(len(groups))]
        before = at["kh"] * width  # where sums of filters' rows stand
        start_sums = self.first_sums(structure, numbers, before, top)
        if self.in_bytes and len(parts) == 1:
            order = f.gep(self.filters, at["room"] * (before + at["kh"] + 1), "i32")
            self.order = f.load(vector("i8", _ROWS * lanes), order)
        multiply = multiply_add if self.in_bytes else multiply_words

        def pixels(ow: Val, count: int, *, border: bool = False) -> None:
            acc = [list(start_sums) for _ in range(count)]
            x0 = ow * stride - at["pw"]
            for group, taps in zip(groups, filters):
                here = [(f.gep(line, x0 * step), step) for line, step in group]
                codes: dict[int, list[Val]] = {}
                for p in range(count):
                    for j, tap in enumerate(taps):
                        k = p * stride + j
                        if k not in codes:
                            places = [f.gep(line, step * k) for line, step in here]
                            if border:
                                inside = f.cmp("ult", x0 + k, at["w"])
                                places = [f.select(inside, place, nothing) for place in places]
                            codes[k] = self.column(places, lanes)
                        for part in parts:
                            acc[p][part] = multiply(f, self.isa, acc[p][part], codes[k][part], tap[part])
            for p, totals in enumerate(acc):
                first = f.gep(f.args["scratch"], (ow + p - start) * at["room"] + c, "i32")
                for part, total in enumerate(totals):
                    f.store(total, f.gep(first, part * size, "i32") if part else first)

        with f.if_else(f.cmp("sge", stop - start, _TOGETHER)) as few:
            # runs at the borders end with the last pixel at the latest, and may do some pixels again
            final = stop - _TOGETHER
            with f.loop(start, first, _TOGETHER) as ow:
                pixels(f.min_(ow, final), _TOGETHER, border=True)
            inside = start + f.and_(first - start + (_TOGETHER - 1), -_TOGETHER)
            outside = inside + f.and_(f.max_(last - inside, 0), -_TOGETHER)
            with f.loop(inside, outside, _TOGETHER) as ow:
                pixels(ow, _TOGETHER)
            with f.loop(outside, stop, _TOGETHER) as ow:
                pixels(f.min_(ow, final), _TOGETHER, border=True)
            few()
            with f.loop(start, stop) as ow:
                pixels(ow, 1, border=True)

    def first_sums(self, structure: Structure, numbers: Callable[[Val], list[Val]], before: Val, top: Val) -> list[Val]:
        """What sums begin with: what rows that are left out add, less what moved codes add too much."""
        f = self.f
        whole = numbers(before + self.at["kh"])
        turns = self.in_bytes and self.turns
        moved = dot_of(self.isa).moves if turns else 0
        if not structure.low:
            return [each * f.const(each.type, -moved) for each in whole] if turns else [f.zero(e.type) for e in whole]
        above, through = numbers(before + top), numbers(before + top + structure.height)
        sums: list[Val] = []
        for every, first, last in zip(whole, above, through):
            taken = last - first
            left = (every - taken) * f.splat(self.zero, every.lanes)
            sums.append(left - taken * f.const(taken.type, moved) if turns else left)
        return sums

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
            # rows that are left out are zeros, whatever their filters are
            parts += [f.zero(parts[0].type)] * (_ROWS - count)
            halves = [f.shuffle(parts[k], parts[k + 1], range(2 * lanes)) for k in (0, 2)]
            rows = f.shuffle(halves[0], halves[1], range(_ROWS * lanes))
            together = f.intrinsic(_PERMUTED, rows.type, [rows, self.order])
            found = f.bitcast(together, vector("i32", lanes))
        flipped = int.from_bytes([HALF] * count, "little", signed=count == _ROWS)
        return [f.xor(found, f.const(found.type, flipped)) if self.turns else found]

    def interleaved(self, rows: list[Val]) -> list[Val]:
        """Codes of rows, each of four vectors' channels in one register, as those four vectors."""
        f = self.f
        if self.turns:
            rows = [f.xor(row, f.const(row.type, HALF - 256)) for row in rows]
        rows = rows + [f.zero(rows[0].type)] * (_ROWS - len(rows))  # whatever their filters are
        pairs = [f.bitcast(x, vector("i16", 8)) for x in (*self.mixed(*rows[:2]), *self.mixed(*rows[2:]))]
        quads = (*self.mixed(pairs[0], pairs[2]), *self.mixed(pairs[1], pairs[3]))
        return [f.bitcast(quad, vector("i32", 4)) for quad in quads]

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
