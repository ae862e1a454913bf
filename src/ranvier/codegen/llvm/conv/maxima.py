"""Max pooling of pictures whose channels lie together, or each by itself: largest of rows first, all along a line, then
of columns.

Lines are as contiguous as memory gets, so the first half works on whole vectors however few channels there are, and a
window of three by three takes six steps instead of nine. A row outside the image is replaced by the nearest inside,
which the window has anyway; what lies beside the image is a border of lowest values around the line. Small windows that
never leave the image need neither: all their elements are looked at in place.

Floats of 16 bits become integers of the same order with NaN of either sign above all others, by three or four
instructions, and back at the end. Of float32 it is found out beside the comparisons, for two at a time, whether there
is a NaN, unless the instruction that finds the larger of two tells.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.gemm.blocks import grain
from ranvier.codegen.llvm.integer.frame import Frame, in_order
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.fold import identity
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_INFINITY = {DType.float16: 0x7C00, DType.bfloat16: 0x7F80}
DTYPES = frozenset({*_INFINITY, DType.float32, DType.int8, DType.uint8})
_X, _OUT = range(2)
_NAMES = (
    *("xn", "xh", "yn", "yh", "yw", "h", "oh", "ow", "channels", "sh", "sw", "ph"),
    *("line", "left", "right", "wide"),  # elements of a line, and of one with borders: before it, to its end, all
)
_LONGEST = 16  # sides of windows that code is unrolled for
_IN_PLACE = 4  # elements of windows that are looked at in place
_ABREAST = 4  # vectors of a line
_FEW = 4  # vectors of a pixel that are written out
_BYTES = 16.0  # that go through a core in a nanosecond


@dataclass(frozen=True)
class _Form:
    """What the code depends on. ``flat``: results follow each other as elements of the line do. ``run`` and ``width``:
    lanes along the line, and along the channels of a pixel, which takes ``pieces`` of them; 0 if those are many."""

    dtype: DType
    rows: int
    columns: int
    in_place: bool
    flat: bool
    run: int
    width: int
    pieces: int


def maxima(x: View, out: View, shape: ConvShape, isa: Isa, threads: int = 1) -> Launch | None:
    """The launch of a pool; None where it is of another kind."""
    planes = _planes(x, out, shape)
    x, out, shape = planes or (x, out, shape)
    (_, height, width), (_, rows, columns) = shape.size, shape.kernel
    (_, sh, sw), (_, up, left) = shape.strides, shape.begin
    channels, dtype = shape.cout, x.dtype
    if shape.is_empty or dtype not in DTYPES or out.dtype is not dtype or shape.dilations != (1, 1, 1):
        return None
    if x.strides[1] != 1 or out.strides[1] != 1 or x.strides[3] != channels or max(rows, columns) > _LONGEST:
        return None
    ends = [(n - 1) * s - b for n, s, b in zip(shape.out[1:], (sh, sw), (up, left))]  # where last windows begin
    if not 0 <= up < rows or not 0 <= left < columns or ends[0] >= height or ends[1] >= width:
        return None
    leaves = up or left or ends[0] + rows > height or ends[1] + columns > width
    # every second pixel of a line, without a channel beside it: loops do better, but for bytes with masks
    if planes and not leaves and sw > 1 and not (isa.masks and dtype.bits == 8):
        return None
    in_place = not leaves and rows * columns <= _IN_PLACE
    flat = sw == 1 and out.strides[3] == channels
    lanes = isa.vector_bytes // dtype.numpy.itemsize
    line = width * channels
    wide = max((left + width) * channels, ((shape.out[2] - 1) * sw + columns) * channels)
    run, each = _power(min(lanes, line)), _power(min(lanes, shape.out[2] * channels if flat else channels))
    pieces = -(-channels // each)
    form = _Form(dtype, rows, columns, in_place, flat, run, each, pieces if not flat and pieces <= _FEW else 0)
    numbers = {
        "xn": x.strides[0],
        "xh": x.strides[2],
        "yn": out.strides[0],
        "yh": out.strides[2],
        "yw": out.strides[3],
        "h": height,
        "oh": shape.out[1],
        "ow": shape.out[2],
        "channels": channels,
        "sh": sh,
        "sw": sw,
        "ph": up,
        "line": line,
        "left": left * channels,
        "right": (left + width) * channels,
        "wide": wide,
    }
    tiles = shape.n * shape.out[1]
    item = dtype.numpy.itemsize
    traffic = float(x.nbytes + out.nbytes)
    return Launch(
        _spec(form),
        (At.of(x), At.of(out)),
        in_order(_NAMES, numbers),
        tiles=tiles,
        writes=(out.storage,),
        grain=grain(tiles, traffic * rows / _BYTES / 1e3, threads),
        scratch=0 if in_place else (wide + lanes) * item,
        flops=float(shape.n * shape.pixels * channels * rows * columns),
        traffic=traffic,
        label="pool",
    )


def _planes(x: View, out: View, shape: ConvShape) -> tuple[View, View, ConvShape] | None:
    """Channels that lie one behind the other as pictures of one channel each; None where they do not."""
    n, channels = shape.n, shape.cout
    if (x.strides[1], x.strides[3]) == (1, channels):
        return None
    steps = [v.strides[1] if channels > 1 else v.strides[0] for v in (x, out)]  # from one picture to the next
    if any(v.strides[3] != 1 or (n > 1 and v.strides[0] != channels * step) for v, step in zip((x, out), steps)):
        return None
    planes = [
        View(v.storage, v.dtype, (n * channels, 1, *v.shape[2:]), (step, 1, *v.strides[2:]), v.offset)
        for v, step in zip((x, out), steps)
    ]
    return planes[0], planes[1], replace(shape, n=n * channels, group=1, cin=1, cout=1)


def _power(n: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (n.bit_length() - 1)


def _spec(form: _Form) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Kernel(Frame(module, symbol, isa, _NAMES, 0), form).emit()

    loops = form.rows, form.columns, form.in_place, form.flat
    key = ("maxima", form.dtype.name, *loops, form.run, form.width, form.pieces)
    return KernelSpec(f"max pool {form.dtype.name} {form.rows}x{form.columns}", key, emit)


class _Kernel:
    """A tile is a row of output pixels."""

    def __init__(self, frame: Frame, form: _Form) -> None:
        self.f, self.at, self.form, self.frame = frame.f, frame.at, form, frame
        self.as_floats = form.dtype is DType.float32
        self.keyed = form.dtype in _INFINITY
        self.bits = form.dtype.bits
        self.element = "float" if self.as_floats else f"i{self.bits}"

    # -- values -----------------------------------------------------------------------------------------------------

    def load(self, at: Val, lanes: int) -> Val:
        """Elements of the image, in an order that comparisons have."""
        f = self.f
        found = f.load(vector(self.element, lanes), at, self.bits // 8)
        if not self.keyed:
            return found
        return f.add(self.turned(found), (_INFINITY[self.form.dtype] + 1) - (1 << (self.bits - 1)))

    def turned(self, codes: Val) -> Val:
        """Floats below zero the other way round, as integers have it, or back."""
        f = self.f
        return f.xor(codes, f.and_(f.ashr(codes, self.bits - 1), (1 << (self.bits - 1)) - 1))

    def store(self, value: Val, at: Val) -> None:
        f = self.f
        if self.keyed:
            value = self.turned(f.sub(value, (_INFINITY[self.form.dtype] + 1) - (1 << (self.bits - 1))))
        f.store(value, at, self.bits // 8)

    def largest(self, values: list[Val]) -> Val:
        f = self.f
        if not self.as_floats or f.module.extremes:
            signed = self.form.dtype is not DType.uint8
            return functools.reduce(lambda a, b: f.max_(a, b, signed=signed), values)
        best = functools.reduce(f.quick_max, values)
        pairs = [(values[k], values[min(k + 1, len(values) - 1)]) for k in range(0, len(values), 2)]
        none = functools.reduce(f.or_, [f.cmp("uno", a, b) for a, b in pairs])
        return f.select(none, f.const(best.type, math.nan), best)

    def lowest(self, lanes: int) -> Val:
        least = -(1 << (self.bits - 1)) if self.keyed else identity("max", self.form.dtype)
        return self.f.const(vector(self.element, lanes), least)

    def place(self, base: Val, by: Val) -> Val:
        return self.f.gep(base, by, self.element)

    # -- loops ------------------------------------------------------------------------------------------------------

    def emit(self) -> None:
        f, at, form = self.f, self.at, self.form
        inside = self.place(f.args["scratch"], at["left"])  # where the line begins
        if not form.in_place:
            self.border(f.i64(0), at["left"])
            self.border(at["right"], at["wide"])
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            image, line = f.div(tile, at["oh"]), f.rem(tile, at["oh"])
            x = self.place(self.frame.buf(_X), image * at["xn"])
            out = self.place(self.frame.buf(_OUT), image * at["yn"] + line * at["yh"])
            top = line * at["sh"] - at["ph"]
            rows = []
            for i in range(form.rows):
                y = top + i if form.in_place else f.max_(f.min_(top + i, at["h"] - 1), 0)
                rows.append(self.place(x, y * at["xh"]))
            if form.in_place:
                self.columns(rows, self.load, out)
            else:
                self.down(rows, inside)
                self.columns([f.args["scratch"]], self.read, out)
        f.ret()

    def border(self, start: Val, stop: Val) -> None:
        with self.f.loop(start, stop) as k:
            self.f.store(self.lowest(1), self.place(self.f.args["scratch"], k), self.bits // 8)

    def read(self, at: Val, lanes: int) -> Val:
        """Elements of the line."""
        return self.f.load(vector(self.element, lanes), at, self.bits // 8)

    def down(self, rows: list[Val], line: Val) -> None:
        """The largest of the rows, element by element of the line."""
        f = self.f

        def run(e: Val, count: int) -> None:
            lanes = self.form.run
            for k in range(count):
                found = self.largest([self.load(self.place(row, e + k * lanes), lanes) for row in rows])
                f.store(found, self.place(line, e + k * lanes), self.bits // 8)

        self.along(self.at["line"], self.form.run, run)

    def along(self, size: Val, lanes: int, run: Callable[[Val, int], None]) -> None:
        """Vectors that cover so many elements, some at a time; the last ends with the last element, and does some of
        them again."""
        f = self.f
        whole = f.and_(size, -lanes * _ABREAST)
        with f.loop(0, whole, lanes * _ABREAST) as e:
            run(e, _ABREAST)
        with f.loop(whole, size, lanes) as e:
            run(f.min_(e, size - lanes), 1)

    def columns(self, rows: list[Val], read: Callable[[Val, int], Val], out: Val) -> None:
        """The largest of the columns of rows, for every pixel."""
        f, at, form = self.f, self.at, self.form
        lanes = form.width

        def window(start: Val, target: Val) -> None:
            taps = [start + at["channels"] * j for j in range(form.columns)]
            self.store(self.largest([read(self.place(row, tap), lanes) for row in rows for tap in taps]), target)

        if form.flat:

            def run(e: Val, count: int) -> None:
                for k in range(count):
                    window(e + k * lanes, self.place(out, e + k * lanes))

            self.along(at["ow"] * at["channels"], lanes, run)
            return
        with f.loop(0, at["ow"]) as ow:
            first, pixel = ow * at["sw"] * at["channels"], self.place(out, ow * at["yw"])
            last = at["channels"] - lanes
            for k in range(form.pieces):
                c = last if k == form.pieces - 1 else f.i64(k * lanes)
                window(first + c, self.place(pixel, c))
            if not form.pieces:
                with f.loop(0, at["channels"], lanes) as c:
                    c = f.min_(c, last)
                    window(first + c, self.place(pixel, c))


__all__ = ["DTYPES", "maxima"]
