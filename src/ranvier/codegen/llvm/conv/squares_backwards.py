"""Gradients of 3x3 kernels of stride 1 by Winograd's algorithm, read backwards.

``y = A'[(G g G') * (B' d B)]A`` is linear in the kernel g, so its gradient is ``G'[(A y A') * (B' d B)]G``, summed over
all squares of all images: one product per transformed position. In terms of the convolution with few outputs: images
are the kernel's input channels, channels the batch, filters the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.conv.epilogues import Fields, Lanes, channel_pieces
from ranvier.codegen.llvm.conv.shape import ConvShape, triple
from ranvier.codegen.llvm.conv.transforms import both_ways, filter_gradient, input_transform, output_gradient
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.gemm import matmul
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_PLANES = ("down", "across", "h", "w", "ph", "pw", "xn", "xh", "xw", "channels", "pitch", "plane")
_TAPS = ("channels", "row", "plane", "out_row", "out_channel", "out_h", "out_w", "blocks", "block")
# nanoseconds on the reference machine, for the choice
_FLOP, _BYTE = 1 / 150.0, 1 / 10.0
_SIDE_BY_SIDE = 64  # channels of a tile of the last transform


def square(shape: ConvShape) -> int:
    """The square of outputs whose transforms are the quickest way, or 0 where windows are."""
    plain = shape.out == (1, 3, 3) and shape.strides == shape.dilations == (1, 1, 1)
    if not plain or shape.kernel[0] != 1 or min(shape.n, shape.cout) < 16:
        return 0
    pixels = shape.cin * shape.taps
    windows = 2.0 * 9 * shape.n * shape.cout * pixels * _FLOP + 4.0 * 9 * 3 * shape.n * pixels * _BYTE
    chosen, least = 0, windows
    for m in (2, 4):
        squares = shape.cin * -(-shape.kernel[1] // m) * -(-shape.kernel[2] // m)
        positions = (m + 2) ** 2
        moved = 2 * squares * (shape.n + shape.cout) + 3 * shape.n * shape.cout
        cost = 2.0 * positions * squares * shape.n * shape.cout * _FLOP + 4.0 * positions * moved * _BYTE
        if cost < least:
            chosen, least = m, cost
    return chosen


def launches(x: View, w: View, out: View, shape: ConvShape, isa: Isa, threads: int, m: int) -> list[Launch]:
    """``x`` and ``w`` lie with their first axis innermost (stride 1); ``out`` in any order."""
    squares = shape.cin * -(-shape.kernel[1] // m) * -(-shape.kernel[2] // m)
    positions = (m + 2) ** 2
    inputs = View.temporary(x.dtype, (positions, squares, shape.n))
    slopes = View.temporary(x.dtype, (positions, squares, shape.cout))
    products = View.temporary(x.dtype, (positions, shape.cout, shape.n))
    return [
        _planes(x, inputs, shape, shape.size, shape.begin, m, "inputs"),
        _planes(w, slopes, shape, shape.kernel, (0, 0, 0), m, "slopes"),
        *matmul(slopes.transposed((0, 2, 1)), inputs, products, isa, threads=threads),
        _taps(products, out, shape, m),
    ]


def _planes(
    x: View,
    target: View,
    shape: ConvShape,
    size: tuple[int, int, int],
    begin: tuple[int, int, int],
    m: int,
    what: str,
) -> Launch:
    """The squares of an image or of slopes, transformed: [position][square][channel]."""
    assert x.shape[0] == 1 or x.strides[0] == 1, "channels lie side by side"
    places = triple(x.strides[2:], 0)
    numbers = {
        "down": -(-shape.kernel[1] // m),
        "across": -(-shape.kernel[2] // m),
        "h": size[1],
        "w": size[2],
        "ph": begin[1],
        "pw": begin[2],
        "xn": x.strides[1],
        "xh": places[1],
        "xw": places[2],
        "channels": x.shape[0],
        "pitch": target.strides[1],
        "plane": target.strides[0],
    }
    item = x.dtype.numpy.itemsize
    spec = KernelSpec(
        f"squares of {what} {m}x{m} {x.dtype}",
        ("squares backwards", 1, what, m, x.dtype.name),
        lambda module, symbol, isa: _Planes(module, symbol, isa, x.dtype, m, what).function(),
    )
    return Launch(
        spec,
        (At(x.storage, x.offset * item), At.of(target)),
        tuple(numbers[name] for name in _PLANES),
        tiles=target.shape[1],
        writes=(target.storage,),
        flops=4.0 * target.size,
        traffic=float(x.nbytes + target.nbytes),
        label=f"squares of {what}",
    )


class _Planes:
    def __init__(self, module: Module, symbol: str, isa: Isa, dtype: DType, m: int, what: str) -> None:
        self.isa, self.m, self.item = isa, m, dtype.numpy.itemsize
        self.edge, self.transform = _reads(m, what)
        self.element = register_type(dtype)
        self.f = f = module.kernel(symbol)
        self.at = Fields(f, f.args["dims"], _PLANES)
        self.x, self.target = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(2))

    def function(self) -> None:
        f, at, edge = self.f, self.at, self.edge
        with f.loop(f.args["begin"], f.args["end"]) as number:
            line = f.div(number, at["across"])
            image, top = f.div(line, at["down"]), f.rem(line, at["down"]) * self.m - at["ph"]
            left = f.rem(number, at["across"]) * self.m - at["pw"]
            corner = f.gep(self.x, image * at["xn"] + top * at["xh"] + left * at["xw"], self.element)
            place = f.gep(self.target, number * at["pitch"], self.element)
            low = f.and_(f.cmp("sge", top, 0), f.cmp("sge", left, 0))
            high = f.and_(f.cmp("sle", top + edge, at["h"]), f.cmp("sle", left + edge, at["w"]))
            with f.if_else(f.and_(low, high)) as otherwise:
                self.pieces(corner, place, None)
                otherwise()
                rows = [f.cmp("ult", top + r, at["h"]) for r in range(edge)]
                columns = [f.cmp("ult", left + c, at["w"]) for c in range(edge)]
                self.pieces(corner, place, (rows, columns))
        f.ret()

    def pieces(self, corner: Val, place: Val, inside: tuple[list[Val], list[Val]] | None) -> None:
        f, at, edge = self.f, self.at, self.edge

        def body(piece: Lanes) -> None:
            kind = vector(self.element, piece.count)
            start = f.gep(corner, piece.channel, self.element)

            def read(address: Val) -> Val:
                return f.load(kind, address) if piece.mask is None else f.masked_load(kind, address, piece.mask)

            def value(r: int, c: int) -> Val:
                address = f.gep(start, at["xh"] * r + at["xw"] * c, self.element)
                if inside is None:
                    return read(address)
                held = f.var(kind, f.zero(kind))
                with f.if_(f.and_(inside[0][r], inside[1][c])):
                    held.set(read(address))
                return held.get()

            found = both_ways(f, self.m, [[value(r, c) for c in range(edge)] for r in range(edge)], self.transform)
            plane = f.gep(place, piece.channel, self.element)
            for values in found:
                for each in values:
                    if piece.mask is None:
                        f.store(each, plane)
                    else:
                        f.masked_store(each, plane, piece.mask)
                    plane = f.gep(plane, at["plane"], self.element)

        channel_pieces(f, self.isa, self.item, f.i64(0), at["channels"], body)


def _reads(m: int, what: str) -> tuple[int, Callable[[Fn, int, list[Val]], list[Val]]]:
    return (m + 2, input_transform) if what == "inputs" else (m, output_gradient)


def _taps(products: View, out: View, shape: ConvShape, m: int) -> Launch:
    """Products by position, transformed back into taps: out [n, cout, 3, 3]."""
    _, h, w = triple(out.strides[2:], 0)
    blocks = -(-shape.n // _SIDE_BY_SIDE)
    numbers = {
        "channels": shape.n,
        "row": products.strides[1],
        "plane": products.strides[0],
        "out_row": out.strides[1],
        "out_channel": out.strides[0],
        "out_h": h,
        "out_w": w,
        "blocks": blocks,
        "block": _SIDE_BY_SIDE,
    }
    spec = KernelSpec(
        f"taps of squares {m}x{m} {out.dtype}",
        ("taps of squares", 1, m, out.dtype.name),
        lambda module, symbol, isa: _emit_taps(module, symbol, isa, out.dtype, m),
    )
    return Launch(
        spec,
        (At.of(products), At.of(out)),
        tuple(numbers[name] for name in _TAPS),
        tiles=shape.cout * blocks,
        writes=(out.storage,),
        flops=2.0 * products.size,
        traffic=float(products.nbytes + out.nbytes),
        label="taps of squares",
    )


def _emit_taps(module: Module, symbol: str, isa: Isa, dtype: DType, m: int) -> None:
    f = module.kernel(symbol)
    element, item = register_type(dtype), dtype.numpy.itemsize
    at = Fields(f, f.args["dims"], _TAPS)
    source, target = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(2))
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        row, first = f.div(tile, at["blocks"]), f.rem(tile, at["blocks"]) * at["block"]
        start = f.gep(source, row * at["row"], element)
        place = f.gep(target, row * at["out_row"], element)

        def body(piece: Lanes) -> None:
            kind = vector(element, piece.count)

            def value(position: int) -> Val:
                address = f.gep(start, at["plane"] * position + piece.channel, element)
                return f.load(kind, address) if piece.mask is None else f.masked_load(kind, address, piece.mask)

            lines = [[value(r * (m + 2) + c) for c in range(m + 2)] for r in range(m + 2)]
            here = f.gep(place, piece.channel * at["out_channel"], element)
            apart = f.lane_ids(piece.count) * f.splat(at["out_channel"], piece.count) if piece.count > 1 else f.i64(0)
            for h, values in enumerate(both_ways(f, m, lines, filter_gradient)):
                for w, each in enumerate(values):
                    f.scatter(each, f.gep(here, at["out_h"] * h + at["out_w"] * w, element), apart, piece.mask)

        channel_pieces(f, isa, item, first, f.min_(first + at["block"], at["channels"]), body)
    f.ret()
