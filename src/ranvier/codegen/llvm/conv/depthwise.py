"""Depthwise convolution: every output channel reads one input channel.

The vector runs over channels. A body computes ``pixels`` neighbours of one output row at once, so an input column that
several of them read is loaded once; the taps of a kernel row are unrolled, kernel rows are a loop whose bounds follow
from the position, which settles the upper and lower border. A second copy of the body, for groups that touch the left
or right border or the end of the row, takes columns outside the image from a block of zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.conv.epilogues import Fields, Lanes, Tail, TailCode, channel_pieces
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Packed, Pixels, packed_constant, require_channels_last
from ranvier.codegen.llvm.elements import memory_type, register_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_FIELDS = (
    *("d", "h", "w", "od", "oh", "ow", "channels", "padded"),
    *("kd", "kh", "sd", "sh", "dd", "dh", "pd", "ph", "pw"),
    *("xn", "xd", "xh", "xw", "yn", "yd", "yh", "yw"),
    *("rows", "blocks", "channel_block", "multiplier", "kw", "qd", "qh", "qw", "q0"),
)
_L1 = 24 << 10  # bytes of input rows that should stay in the first cache while a block of channels is worked on


def pack(w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape, dtype: DType) -> Packed:
    """[taps][channels], channels padded to whole vectors."""
    lanes = isa.lanes(dtype.numpy.itemsize)
    padded = -(-shape.cout // lanes) * lanes
    found = np.zeros((shape.taps, padded), dtype.numpy)
    found[:, : shape.cout] = w.reshape(shape.cout, shape.taps).T
    return packed_constant("depthwise", found, dtype, padded)


def depthwise(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
    numbering: Numbering | None = None,
) -> list[Launch]:
    require_channels_last(x, "the input")
    require_channels_last(out, "the output")
    tail = Tail.of(epilogue, x.dtype)
    item = x.dtype.numpy.itemsize
    lanes = isa.lanes(item)
    kernel, stride, dilation = shape.kernel[2], shape.strides[2], shape.dilations[2]
    pixels = _group(shape.out[2], kernel, isa)
    multiplier = shape.cout // shape.cin
    width = (pixels - 1) * stride + (kernel - 1) * dilation + 1
    unrolled = kernel if kernel <= 9 else 0
    structure = (unrolled, stride, dilation, pixels, multiplier > 1)
    spec = KernelSpec(
        f"depthwise {x.dtype} {unrolled or 'any'} stride {stride}",
        ("depthwise", 1, x.dtype.name, out.dtype.name, structure, tail.key),
        lambda module, symbol, target: _emit(module, symbol, target, x.dtype, out.dtype, structure, tail),
    )
    rows = shape.n * shape.out[0] * shape.out[1]
    block = max(1, min(16, rows // (8 * threads), shape.out[1]))
    blocks = -(-shape.out[1] // block)
    cached = shape.kernel[1] * max(width, shape.size[2]) * item
    channel_block = max(1, _L1 // cached // lanes) * lanes
    dims = (
        *shape.size,
        *shape.out,
        shape.cout,
        packed.block,
        *shape.kernel[:2],
        *shape.strides[:2],
        *shape.dilations[:2],
        *shape.begin,
        *Pixels.of(x).numbers,
        *Pixels.of(out).numbers,
        *(block, blocks, channel_block, multiplier, kernel),
        *(numbering or Numbering.plain(shape.out)).fields.values(),
        *tail.dims,
    )
    return [
        Launch(
            spec,
            (At(x.storage, x.offset * item), At(packed.storage), _at(out), *tail.buffers),
            dims,
            tiles=shape.n * shape.out[0] * blocks,
            writes=(out.storage,),
            flops=shape.flops,
            traffic=float(x.nbytes + out.nbytes),
            label="depthwise",
        )
    ]


def _at(view: View) -> At:
    return At(view.storage, view.offset * view.dtype.numpy.itemsize)


def _group(width: int, kernel: int, isa: Isa) -> int:
    """Output pixels per body: the number that wastes least at the end of a row and still fits the registers."""
    most = 8 if kernel <= 5 or isa.registers > 16 else 6
    return min(range(4, most + 1), key=lambda p: (-(-width // p) * p, -p))


def _emit(
    module: Module,
    symbol: str,
    isa: Isa,
    dtype: DType,
    out_dtype: DType,
    structure: tuple[int, int, int, int, bool],
    tail: Tail,
) -> None:
    writer = _Depthwise(module, symbol, isa, dtype, out_dtype, structure, tail)
    writer.function()


class _Depthwise:
    def __init__(
        self,
        module: Module,
        symbol: str,
        isa: Isa,
        dtype: DType,
        out_dtype: DType,
        structure: tuple[int, int, int, int, bool],
        tail: Tail,
    ) -> None:
        self.isa, self.dtype, self.out_dtype, self.tail = isa, dtype, out_dtype, tail
        self.taps, self.stride, self.dilation, self.pixels, self.spread = structure
        self.element = register_type(dtype)
        self.item = dtype.numpy.itemsize
        params = [("ptr", "bufs"), ("ptr", "dims"), ("i64", "begin"), ("i64", "end"), ("ptr", "scratch")]
        self.f = f = module.function(symbol, params)
        self.zeros = Val(f, "ptr", module.table(f"{symbol}_zeros", self.element, [0] * isa.lanes(self.item)))
        self.at = Fields(f, f.args["dims"], _FIELDS)
        bufs = f.args["bufs"]
        self.x, self.w, self.y = (f.load("ptr", f.gep(bufs, k, "ptr")) for k in range(3))
        self.code = TailCode(f, isa, tail, bufs, 3, f.args["dims"], len(_FIELDS))
        self.held = f.stack(self.element, self.pixels * isa.lanes(self.item))

    def function(self) -> None:
        f, at = self.f, self.at
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            block = f.rem(tile, at["blocks"])
            plane = f.div(tile, at["blocks"])
            od, image = f.rem(plane, at["od"]), f.div(plane, at["od"])
            first = block * at["rows"]
            with f.loop(first, f.min_(first + at["rows"], at["oh"])) as oh:
                self.row(image, od, oh)
        f.ret()

    def taps_inside(self, start: Val, size: Val, taps: Val, dilation: Val) -> tuple[Val, Val]:
        """The kernel taps from position ``start`` on that lie inside [0, size)."""
        f = self.f
        low = f.div(f.max_(f.neg(start) + dilation - 1, 0), dilation)
        high = f.div(f.max_(size - start + dilation - 1, 0), dilation)
        return low, f.min_(high, taps)

    def row(self, image: Val, od: Val, oh: Val) -> None:
        f, at = self.f, self.at
        top = oh * at["sh"] - at["ph"]
        front = od * at["sd"] - at["pd"]
        self.kh = self.taps_inside(top, at["h"], at["kh"], at["dh"])
        self.kd = self.taps_inside(front, at["d"], at["kd"], at["dd"])
        corner = f.gep(self.x, image * at["xn"] + front * at["xd"] + top * at["xh"], self.element)
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
                start = f.gep(corner, left * at["xw"], self.element)
                place = f.gep(target, ow * at["yw"], self._out)
                rows = self.code.rows(image, line + ow * at["qw"])
                with f.if_else(inside) as otherwise:
                    channel_pieces(
                        f, self.isa, self.item, first, last, lambda p: self.body(p, start, place, rows, None, None)
                    )
                    otherwise()
                    count = f.min_(at["ow"] - ow, self.pixels)
                    channel_pieces(
                        f, self.isa, self.item, first, last, lambda p: self.body(p, start, place, rows, left, count)
                    )

    @property
    def _out(self) -> str:
        return memory_type(self.out_dtype)

    def body(self, piece: Lanes, start: Val, place: Val, rows: list[Val], left: Val | None, count: Val | None) -> None:
        f, at = self.f, self.at
        kind = vector(self.element, piece.count)
        sums = [f.var(kind, f.zero(kind) if piece.count > 1 else 0.0) for _ in range(self.pixels)]
        with f.loop(*self.kd) as kd, f.loop(*self.kh) as kh:
            line = f.gep(start, kd * at["dd"] * at["xd"] + kh * at["dh"] * at["xh"], self.element)
            taps = f.gep(self.w, (kd * at["kh"] + kh) * at["kw"] * at["padded"] + piece.channel, self.element)
            if self.taps:
                self.unrolled(piece, sums, line, taps, left)
            else:
                self.looped(piece, sums, line, taps, left)
        self.finish(piece, [s.get() for s in sums], place, rows, count)

    def unrolled(self, piece: Lanes, sums: list[Var], line: Val, taps: Val, left: Val | None) -> None:
        """All taps of a kernel row: each column is loaded once and added to every pixel that reads it."""
        f, at = self.f, self.at
        kind = vector(self.element, piece.count)
        weights = [f.load(kind, f.gep(taps, at["padded"] * t, self.element)) for t in range(self.taps)]
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
        kind = vector(self.element, piece.count)
        with f.loop(0, at["kw"]) as t:
            weight = f.load(kind, f.gep(taps, at["padded"] * t, self.element))
            for p in range(self.pixels):
                value = self.column(piece, line, left, t * self.dilation + p * self.stride)
                sums[p].set(f.fma(value, weight, sums[p].get()))

    def column(self, piece: Lanes, line: Val, left: Val | None, column: Val) -> Val:
        """The input at a column counted from the group's first; outside the image zeros, where ``left`` is given."""
        f, at = self.f, self.at
        kind = vector(self.element, piece.count)
        there = None if left is None else f.cmp("ult", left + column, at["w"])
        base = f.gep(line, column * at["xw"], self.element)
        if self.spread:
            return self.gathered(piece, base, there)
        address = f.gep(base, piece.channel, self.element)
        if there is not None:
            address = f.select(there, address, self.zeros)
        return f.load(kind, address) if piece.mask is None else f.masked_load(kind, address, piece.mask)

    def gathered(self, piece: Lanes, base: Val, there: Val | None) -> Val:
        """Several output channels read one input channel."""
        f = self.f
        if piece.count == 1:
            address = f.gep(base, f.div(piece.channel, self.at["multiplier"]), self.element)
            return f.load(self.element, address if there is None else f.select(there, address, self.zeros))
        ids = f.lane_ids(piece.count) + piece.channel
        where = f.div(ids, f.like(ids, self.at["multiplier"]), signed=False)
        on = piece.mask
        if there is not None:
            all_lanes = f.splat(there, piece.count)
            on = all_lanes if on is None else f.and_(on, all_lanes)
        return f.gather(self.element, base, where, on)

    def finish(self, piece: Lanes, values: list[Val], place: Val, rows: list[Val], count: Val | None) -> None:
        f = self.f
        fixed = self.code.fixed(rows, piece.channel, piece)
        if count is None and self.tail.is_cheap:
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
        f = self.f
        address = f.gep(place, pixel * self.at["yw"] + piece.channel, self._out)
        here = self.code.moved(rows, pixel * self.at["qw"])
        self.code.store(value, here, piece.channel, address, self.out_dtype, piece.mask, fixed)
