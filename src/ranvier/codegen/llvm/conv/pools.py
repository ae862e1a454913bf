"""Pooling of pictures whose channels lie together, or each by itself: rows first, all along a line, then columns.

Lines are as contiguous as memory gets, so the first half works on whole vectors however few channels there are, and a
window of three by three takes six steps instead of nine. A row outside the image is a line of elements that change no
result; what lies beside the image is a border of them around the line. Small windows that never leave the image need
neither: all their elements are looked at in place.

What the sum of a window is divided by is a product too: rows that count times columns that do. The latter are found
once for all lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.conv.pool_values import LARGEST, MEANS, Largest, Total, held_in
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.elements import load_every_second, load_vector, memory_type, register_type, store_vector
from ranvier.codegen.llvm.gemm.blocks import grain
from ranvier.codegen.llvm.integer.frame import Frame, in_order
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_X, _OUT = range(2)
_NAMES = (
    *("xn", "xh", "yn", "yh", "yw", "h", "oh", "ow", "channels", "sh", "sw", "dh", "ph", "pw"),
    *("line", "left", "right", "wide"),  # elements of a line, and of one with borders: before it, to its end, all
    *("tap", "missing"),  # elements from column to column of a window, and of a line that stands for one outside
    *("first_row", "last_row", "first_column", "last_column", "count", "copies"),  # what counts; copies of a number
    *("outside", "numbers"),  # where they lie in scratch: the line outside, what sums are divided by
)
_LONGEST = 16  # sides of windows that code is unrolled for
_IN_PLACE = 4  # elements of windows that are looked at in place
_ABREAST = 4  # vectors of a line
_FEW = 4  # vectors of a pixel that are written out
_BYTES = 16.0  # that go through a core in a nanosecond
_FAR = 1 << 40  # beyond all images


@dataclass(frozen=True)
class Counts:
    """How many elements of a window its sum is divided by: ``number``, or those at these rows and columns, from the
    first up to the last, which does not count."""

    number: int | None
    rows: tuple[int, int] = (-_FAR, _FAR)
    columns: tuple[int, int] = (-_FAR, _FAR)


@dataclass(frozen=True)
class _Form:
    """What the code depends on. ``step``: results follow each other as elements of the line do, or as every second one
    does; 0 if neither. ``run`` and ``width``: lanes along the line, and along the channels of a pixel, which takes
    ``pieces`` of them; 0 if those are many. ``divides``: by one number, or by one for each pixel; not at all for the
    largest."""

    dtype: DType
    target: DType
    divides: str
    rows: int
    columns: int
    in_place: bool
    step: int
    run: int
    width: int
    pieces: int


def pooled(
    x: View, out: View, shape: ConvShape, isa: Isa, threads: int = 1, counts: Counts | None = None
) -> Launch | None:
    """The launch of a pool, of the largest without ``counts``, else of means; None where it is of another kind."""
    planes = _planes(x, out, shape)
    x, out, shape = planes or (x, out, shape)
    (_, height, width), (_, rows, columns) = shape.size, shape.kernel
    (_, sh, sw), (_, dh, dw), (_, up, left) = shape.strides, shape.dilations, shape.begin
    channels, dtype = shape.cout, x.dtype
    types = LARGEST if counts is None else MEANS
    if shape.is_empty or 0 in shape.size or dtype not in types or out.dtype not in types:
        return None
    if out.dtype is not dtype and (counts is None or held_in(out.dtype) is not held_in(dtype)):
        return None
    if x.strides[1] != 1 or out.strides[1] != 1 or x.strides[3] != channels or max(rows, columns) > _LONGEST:
        return None
    if up < 0 or left < 0:
        return None
    below, beside = ((n - 1) * s - b + (k - 1) * d + 1 for n, s, b, k, d in _axes(shape))  # where last windows end
    leaves = up or left or below > height or beside > width
    divides = "" if counts is None else "each" if counts.number is None else "all"
    in_place = not leaves and rows * columns <= _IN_PLACE and divides != "each"
    step = sw if out.strides[3] == channels and (sw == 1 or (sw == 2 and channels == 1)) else 0
    # one pixel of a line, or some that lie apart, without channels beside it: loops do better, but for bytes with masks
    apart = sw > 1 and not step and not (isa.masks and dtype.bits == 8)
    if planes and not leaves and (apart or shape.out[2] == 1):
        return None
    held, item = dtype if counts is None else held_in(dtype), dtype.numpy.itemsize
    lanes = isa.vector_bytes // held.numpy.itemsize
    line, wide = width * channels, max(left + width, left + beside) * channels
    run, each = _power(min(lanes, line)), _power(min(lanes, shape.out[2] * channels if step else channels))
    pieces = -(-channels // each)
    form = _Form(
        *(dtype, out.dtype, divides, rows, columns, in_place, step, run, each),
        pieces if not step and pieces <= _FEW else 0,
    )
    counts = counts or Counts(1)
    missing = line if up or below > height else 0
    copies = channels if step else 1
    outside = -(-(wide + lanes) * held.numpy.itemsize // 64) * 64
    numbers = outside + -(-missing * item // 64) * 64
    scratch = numbers + (shape.out[2] * copies * held.numpy.itemsize if divides == "each" else 0)
    arguments = {
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
        "dh": dh,
        "ph": up,
        "pw": left,
        "line": line,
        "left": left * channels,
        "right": (left + width) * channels,
        "wide": wide,
        "tap": dw * channels,
        "missing": missing,
        "first_row": counts.rows[0],
        "last_row": counts.rows[1],
        "first_column": counts.columns[0],
        "last_column": counts.columns[1],
        "count": counts.number or 0,
        "copies": copies,
        "outside": outside,
        "numbers": numbers,
    }
    tiles = shape.n * shape.out[1]
    traffic = float(x.nbytes + out.nbytes)
    return Launch(
        _spec(form),
        (At.of(x), At.of(out)),
        in_order(_NAMES, arguments),
        tiles=tiles,
        writes=(out.storage,),
        grain=grain(tiles, traffic * rows / _BYTES / 1e3, threads),
        scratch=0 if in_place else scratch,
        flops=float(shape.n * shape.pixels * channels * rows * columns),
        traffic=traffic,
        label="pool",
    )


def _axes(shape: ConvShape) -> list[tuple[int, int, int, int, int]]:
    """Of both axes: windows, steps between them, pads before, taps, and steps between those."""
    every = shape.out, shape.strides, shape.begin, shape.kernel, shape.dilations
    return [(n, s, b, k, d) for n, s, b, k, d in list(zip(*every))[1:]]


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
        _Kernel(Frame(module, symbol, isa, _NAMES, 0), isa, form).emit()

    loops = form.rows, form.columns, form.in_place, form.step
    key = ("pool", form.dtype.name, form.target.name, form.divides, *loops, form.run, form.width, form.pieces)
    kind = "mean" if form.divides else "max"
    return KernelSpec(f"{kind} pool {form.dtype.name} {form.rows}x{form.columns}", key, emit)


class _Kernel:
    """A tile is a row of output pixels."""

    def __init__(self, frame: Frame, isa: Isa, form: _Form) -> None:
        self.f, self.at, self.form, self.frame, self.isa = frame.f, frame.at, form, frame, isa
        self.values = Total(frame.f, form.dtype) if form.divides else Largest(frame.f, form.dtype)
        self.target = form.target if form.divides else self.values.read
        scratch = self.f.args["scratch"]
        self.line = scratch
        self.outside = self.f.gep(scratch, self.at["outside"], "i8")
        self.numbers = self.f.gep(scratch, self.at["numbers"], "i8")

    # -- elements ---------------------------------------------------------------------------------------------------

    def place(self, dtype: DType, base: Val, by: Val) -> Val:
        return self.f.gep(base, by, memory_type(dtype))

    def load(self, dtype: DType, at: Val, lanes: int, step: int = 1) -> Val:
        if step == 2 and lanes > 1:
            return load_every_second(self.f, self.isa, dtype, at, lanes)
        return load_vector(self.f, self.isa, dtype, at, lanes, align=dtype.numpy.itemsize)

    def store(self, dtype: DType, value: Val, at: Val) -> None:
        store_vector(self.f, self.isa, dtype, value, at, align=dtype.numpy.itemsize)

    def fill(self, dtype: DType, value: Val, base: Val, start: Val, stop: Val) -> None:
        with self.f.loop(start, stop) as k:
            self.store(dtype, value, self.place(dtype, base, k))

    # -- loops ------------------------------------------------------------------------------------------------------

    def emit(self) -> None:
        f, at, form, values = self.f, self.at, self.form, self.values
        if not form.in_place:
            nothing = values.nothing()
            self.fill(values.held, nothing, self.line, f.i64(0), at["left"])
            self.fill(values.held, nothing, self.line, at["right"], at["wide"])
            self.fill(values.read, values.given(nothing), self.outside, f.i64(0), at["missing"])
        if form.divides == "each":
            self.count_columns()
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            image, line = f.div(tile, at["oh"]), f.rem(tile, at["oh"])
            x = self.place(values.read, self.frame.buf(_X), image * at["xn"])
            out = self.place(self.target, self.frame.buf(_OUT), image * at["yn"] + line * at["yh"])
            top = line * at["sh"] - at["ph"]
            rows = [self.row(x, top + at["dh"] * i) for i in range(form.rows)]
            number = self.number(top)
            if form.in_place:
                self.columns(rows, values.read, values.taken, out, number)
            else:
                self.down(rows)
                self.columns([self.line], values.held, lambda found: found, out, number)
        f.ret()

    def row(self, x: Val, y: Val) -> Val:
        there = self.place(self.values.read, x, y * self.at["xh"])
        if self.form.in_place:
            return there
        return self.f.select(self.f.cmp("ult", y, self.at["h"]), there, self.outside)

    def down(self, rows: list[Val]) -> None:
        """One line of all rows, element by element."""
        values, lanes = self.values, self.form.run
        inside = self.place(values.held, self.line, self.at["left"])  # where the line begins

        def run(e: Val, count: int) -> None:
            for k in range(count):
                here = [self.place(values.read, row, e + k * lanes) for row in rows]
                found = values.folded([values.taken(self.load(values.read, each, lanes)) for each in here])
                self.store(values.held, found, self.place(values.held, inside, e + k * lanes))

        self.along(self.at["line"], lanes, run)

    def along(self, size: Val, lanes: int, run: Callable[[Val, int], None]) -> None:
        """Vectors that cover so many elements, some at a time; the last ends with the last element, and does some of
        them again."""
        f = self.f
        whole = f.and_(size, -lanes * _ABREAST)
        with f.loop(0, whole, lanes * _ABREAST) as e:
            run(e, _ABREAST)
        with f.loop(whole, size, lanes) as e:
            run(f.min_(e, size - lanes), 1)

    def columns(self, rows: list[Val], dtype: DType, taken: Callable[[Val], Val], out: Val, number: Val | None) -> None:
        """One pixel of all columns of rows, for every pixel."""
        f, at, form = self.f, self.at, self.form
        lanes = form.width

        def window(start: Val, target: Val, place: Val) -> None:
            taps = [start + at["tap"] * j for j in range(form.columns)]
            places = [self.place(dtype, row, tap) for row in rows for tap in taps]
            found = self.values.folded([taken(self.load(dtype, each, lanes, form.step)) for each in places])
            self.store(self.target, self.values.given(self.divided(found, number, place)), target)

        if form.step:

            def run(e: Val, count: int) -> None:
                for k in range(count):
                    here = e + k * lanes
                    window(here * form.step, self.place(self.target, out, here), here)

            self.along(at["ow"] * at["channels"], lanes, run)
            return
        with f.loop(0, at["ow"]) as ow:
            first, pixel = ow * at["sw"] * at["channels"], self.place(self.target, out, ow * at["yw"])
            last = at["channels"] - lanes
            for k in range(form.pieces):
                c = last if k == form.pieces - 1 else f.i64(k * lanes)
                window(first + c, self.place(self.target, pixel, c), ow)
            if not form.pieces:
                with f.loop(0, at["channels"], lanes) as c:
                    c = f.min_(c, last)
                    window(first + c, self.place(self.target, pixel, c), ow)

    # -- what sums are divided by -----------------------------------------------------------------------------------

    def count_columns(self) -> None:
        """How many columns of each window count, as often as there are elements that are divided by it."""
        f, at, held = self.f, self.at, self.values.held
        with f.loop(0, at["ow"]) as ow:
            left, bounds = ow * at["sw"] - at["pw"], (at["first_column"], at["last_column"])
            found = self.counted(left, f.div(at["tap"], at["channels"]), self.form.columns, bounds)
            self.fill(held, found, self.numbers, ow * at["copies"], (ow + 1) * at["copies"])

    def counted(self, start: Val, step: Val, taps: int, bounds: tuple[Val, Val]) -> Val:
        f = self.f
        total = f.i64(0)
        for k in range(taps):
            place = start + step * k
            here = f.and_(f.cmp("sge", place, bounds[0]), f.cmp("slt", place, bounds[1]))
            total = total + f.cast(here, "i64")
        return f.cast(total, register_type(self.values.held))

    def number(self, top: Val) -> Val | None:
        """What sums of a line are divided by, but for their columns."""
        at, form = self.at, self.form
        if form.divides == "each":
            return self.counted(top, at["dh"], form.rows, (at["first_row"], at["last_row"]))
        return self.f.cast(at["count"], register_type(self.values.held)) if form.divides else None

    def divided(self, total: Val, number: Val | None, place: Val) -> Val:
        if number is None:
            return total
        f, form, held = self.f, self.form, self.values.held
        if form.divides == "each":
            lanes = total.lanes if form.step else 1
            number = f.mul(self.load(held, self.place(held, self.numbers, place), lanes), number)
        return f.div(total, f.like(total, number))


__all__ = ["Counts", "pooled"]
