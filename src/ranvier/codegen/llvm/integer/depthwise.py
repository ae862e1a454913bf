"""Depthwise convolutions of 8-bit codes: a vector of channels at a time, 16-bit products, int32 sums.

Filters are stored less their zero points, one 16-bit number per 32-bit lane, so that a widened code times a filter is
one instruction. Where a window leaves the image the zero point of ``x`` is multiplied instead: sums are those of all
taps everywhere, and what the zero point adds is the same for all pixels of a channel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.conv.shape import ConvShape, Pixels
from ranvier.codegen.llvm.gemm.blocks import grain
from ranvier.codegen.llvm.integer.dots import multiply_words
from ranvier.codegen.llvm.integer.frame import Frame, finish_of, in_order, start_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]
_X, _W, _OUT, _ZERO, _FINISH = range(5)
_NAMES = (
    *("xn", "xd", "xh", "xw", "yn", "d", "h", "w", "od", "oh", "ow", "channels", "room"),
    *("kd", "kh", "kw", "sd", "sh", "sw", "dd", "dh", "dw", "pd", "ph", "pw", "block", "first", "last"),
)
_TOGETHER = 4  # pixels that share a load of the filter
_SUMS_BYTES = 16 << 10
_GOPS = 40.0


def pack_depthwise(w: Array, zero: Array, isa: Isa, shape: ConvShape) -> Storage:
    """Filters [channels, 1, *kernel] less their zero points, as [tap][channel] of 32-bit lanes."""
    lanes = isa.lanes(4)
    room = -(-shape.cout // lanes) * lanes
    packed = np.zeros((shape.taps, room), np.int32)
    centred = w.astype(np.int32).reshape(shape.cout, shape.taps) - zero.astype(np.int32).reshape(-1, 1)
    packed[:, : shape.cout] = centred.T & 0xFFFF
    return Storage.constant(packed)


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
    lanes = isa.lanes(4)
    room = -(-shape.cout // lanes) * lanes
    place, target = Pixels.of(x), Pixels.of(out)
    width, kernel, step = shape.out[2], shape.kernel[2], shape.strides[2]
    # output columns whose windows lie wholly inside the image along the width
    first = min(width, -(-shape.begin[2] // step))
    reach = shape.size[2] + shape.begin[2] - (kernel - 1) * shape.dilations[2] - 1
    last = max(first, min(width, reach // step + 1 if reach >= 0 else 0))
    block = max(_TOGETHER, min(-(-width // _TOGETHER) * _TOGETHER, _SUMS_BYTES // (4 * room)))
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
    done = finish_of(epilogue, out)
    tiles = shape.n * shape.out[0] * shape.out[1]
    return [
        Launch(
            _spec(x.dtype),
            (start_of(x), At(filters), start_of(out), start_of(zero), Code(done.spec), *done.buffers),
            (*in_order(_NAMES, numbers), *done.dims),
            tiles=tiles,
            writes=(out.storage,),
            grain=grain(tiles, shape.flops / _GOPS / 1e3, threads),
            scratch=block * room * 4,
            flops=shape.flops,
            traffic=float(x.nbytes + out.nbytes),
            label="integer depthwise",
        )
    ]


def _spec(dtype: DType) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Kernel(Frame(module, symbol, isa, _NAMES, _FINISH), dtype).emit()

    return KernelSpec(f"integer depthwise {dtype.name}", ("integer depthwise", dtype.name), emit)


class _Kernel:
    """A tile is a row of output pixels."""

    def __init__(self, frame: Frame, dtype: DType) -> None:
        self.frame, self.f, self.at, self.isa = frame, frame.f, frame.at, frame.isa
        self.signed = dtype is DType.int8
        self.filters = frame.buf(_W)
        self.zero = self.widened(self.f.load("i8", frame.buf(_ZERO)))

    def widened(self, codes: Val) -> Val:
        return self.f.cast(codes, "i32", signed=self.signed)

    def emit(self) -> None:
        f, at = self.f, self.at
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
        f, at, lanes = self.f, self.at, self.isa.lanes(4)
        if self.isa.masks:
            with f.loop(0, at["channels"], lanes) as c:
                self.pixels(start, stop, c, lanes, f.mask_below(lanes, at["channels"] - c))
            return
        whole = f.and_(at["channels"], -lanes)
        with f.loop(0, whole, lanes) as c:
            self.pixels(start, stop, c, lanes, None)
        with f.loop(whole, at["channels"]) as c:
            self.pixels(start, stop, c, 1, None)

    def pixels(self, start: Val, stop: Val, c: Val, lanes: int, mask: Val | None) -> None:
        """Pixels at the borders one by one, those between several at a time."""
        f, at = self.f, self.at
        inner = f.min_(f.max_(at["first"], start), stop)
        outer = f.max_(f.min_(at["last"], stop), inner)
        together = inner + f.and_(outer - inner, -_TOGETHER)
        with f.loop(start, inner) as ow:
            self.sums(ow, start, c, lanes, mask, 1, inside=False)
        with f.loop(inner, together, _TOGETHER) as ow:
            self.sums(ow, start, c, lanes, mask, _TOGETHER, inside=True)
        with f.loop(together, stop) as ow:
            self.sums(ow, start, c, lanes, mask, 1, inside=False)

    def sums(self, ow: Val, start: Val, c: Val, lanes: int, mask: Val | None, count: int, inside: bool) -> None:
        f, at = self.f, self.at
        kind = vector("i32", lanes)
        acc: list[Var] = [f.var(kind, f.const(kind, 0)) for _ in range(count)]
        nothing = f.splat(self.zero, lanes)
        x0 = ow * at["sw"] - at["pw"]
        weights = f.var("ptr", f.gep(self.filters, c, "i32"))
        apart = at["sw"] * at["xw"]
        with f.loop(0, at["kd"]) as kd:
            z = self.z0 + kd * at["dd"]
            deep = f.cmp("ult", z, at["d"])
            with f.loop(0, at["kh"]) as kh:
                y = self.y0 + kh * at["dh"]
                there = f.and_(deep, f.cmp("ult", y, at["h"]))
                line = f.gep(self.x, z * at["xd"] + y * at["xh"] + x0 * at["xw"] + c)
                with f.loop(0, at["kw"]) as kw:
                    filters = f.load(kind, weights.get())
                    weights.set(f.gep(weights.get(), at["room"], "i32"))
                    at_tap = f.gep(line, kw * at["dw"] * at["xw"])
                    exists = there
                    if not inside:
                        exists = f.and_(there, f.cmp("ult", x0 + kw * at["dw"], at["w"]))
                    codes = [f.var(kind, nothing) for _ in range(count)]
                    with f.if_(exists):
                        for p, code in enumerate(codes):
                            code.set(self.load(f.gep(at_tap, apart * p), lanes, mask))
                    for total, code in zip(acc, codes):
                        total.set(self.product(total.get(), code.get(), filters))
        for p, total in enumerate(acc):
            target = f.gep(f.args["scratch"], (ow + p - start) * at["room"] + c, "i32")
            f.store(total.get(), target)

    def load(self, at: Val, lanes: int, mask: Val | None) -> Val:
        kind = vector("i8", lanes)
        codes = self.f.load(kind, at, 1) if mask is None else self.f.masked_load(kind, at, mask)
        return self.widened(codes)

    def product(self, total: Val, code: Val, filters: Val) -> Val:
        f = self.f
        if total.lanes > 1:
            return multiply_words(f, self.isa, total, code, filters)
        return total + code * f.ashr(f.shl(filters, 16), 16)
