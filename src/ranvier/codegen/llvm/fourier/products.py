"""Fourier transforms as matrix products, for lengths that passes do not take.

A short transform is one product with a constant matrix of cosines and sines, applied to the signal where it lies, and
a constant window is part of the matrix. A long one of length ``n1 * n2`` takes two such products with a twist between
(Cooley and Tukey's first step)::

    X[k1 + n1*k2] = sum over j2 of  w(n2)^(j2*k2) * w(n)^(j2*k1) * sum over j1 of  w(n1)^(j1*k1) * x[n2*j1 + j2]

so the work is of the order of n^1.5 at the speed of a matrix product. Small kernels bring signals into planar order
(real parts, then imaginary parts; zero-padded, windowed) and results out of it where a view cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm import gemm
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.attention.micro import ELEMENTS
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.fourier.transform import BATCH_AXES, Array, Transform
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.recurrent.weights import array_of
from ranvier.codegen.storage import Storage, View
from ranvier.errors import KernelError

_MOST_ELEMENTS = 1 << 24  # of one constant matrix
# Two products with passes over memory between them must save this much arithmetic to pay, and up to some length they
# never do: their matrices are too small to run well.
_SPLIT_GAIN = 2.0
_SHORT = 512


def _matrix(t: Transform, points: int, window: Array | None = None) -> Array:
    """``[points, parts, bins, made]`` in float64."""
    n = t.length
    turns = np.outer(np.arange(points), np.arange(t.bins)) % n
    found = _waves(turns, n, t.inverse, t.parts, t.made)
    if t.mirrored:  # every point but the first, and the middle of an even length, stands for two
        twice = np.full(points, 2.0)
        twice[0] = 1
        if n % 2 == 0 and points > n // 2:
            twice[n // 2] = 1
        found *= twice[:, None, None, None]
    if window is not None:
        found *= window[:points, None, None, None]
    return found / n if t.inverse else found


def _halves(t: Transform) -> tuple[int, int] | None:
    """Factors of the length that make two products cheaper than one; None where one product is better."""
    n, parts, direct = t.length, 2 if t.mirrored else t.parts, t.elements
    small = [d for d in range(2, math.isqrt(n) + 1) if n % d == 0]
    best: tuple[float, tuple[int, int]] | None = None
    for n1 in {*small, *(n // d for d in small)}:
        n2 = n // n1
        columns = -(-t.bins // n1) * t.made
        work = 2 * n1 * parts * n1 * n2 + n1 * 2 * n2 * columns
        fits = max(2 * n1 * parts * n1, 2 * n2 * columns) <= _MOST_ELEMENTS
        if fits and (best is None or (work, (n1, n2)) < best):
            best = work, (n1, n2)
    short = n <= _SHORT or (best is not None and _SPLIT_GAIN * best[0] > direct)
    if best is None or (short and direct <= _MOST_ELEMENTS):
        return None
    return best[1]


def _waves(turns: Array, n: int, inverse: bool, parts: int, made: int) -> Array:
    """Multiplication by ``exp(∓2πi turns / n)`` as real matrices ``[…, parts, …, made]``, one pair per entry.

    Turns are from 0 to n - 1, each of them many times: their waves are worked out once and looked up.
    """
    angle = np.arange(n) * (2 * np.pi / n)
    cos, sin = np.cos(angle), np.sin(angle) * (1 if inverse else -1)
    rows, columns = turns.shape
    found = np.empty((rows, parts, columns, made))
    for part, pair in enumerate([(cos, sin), (-sin, cos)][:parts]):
        for which, wave in enumerate(pair[:made]):
            found[:, part, :, which] = wave[turns]
    return found


def possible(length: int) -> bool:
    """Whether any transform of so many points can be done."""
    whole = Transform(length, length, 2, 2, False, False)  # complex to complex is the largest
    return whole.elements <= _MOST_ELEMENTS or _halves(whole) is not None


def launches(t: Transform, x: View, window: View | None, out: View, isa: Isa, threads: int) -> list[Launch]:
    split = _halves(t)
    if split is not None:
        return _two_products(t, split, x, window, out, isa, threads)
    if t.elements > _MOST_ELEMENTS:
        raise KernelError(f"no transform of {t.length} points")
    points, fixed = x.shape[-2], None if window is None else array_of(window)
    matrix = _matrix(t, points, None if fixed is None else fixed.astype(np.float64))
    rows = _merged(x)
    steps: list[Launch] = []
    if rows is None or (window is not None and fixed is None):
        plain = Transform(points, points, t.parts, 2, False, False)
        rows, steps = _planar(plain, x, None if fixed is not None else window)
        matrix = matrix.swapaxes(0, 1)
    constant = np.ascontiguousarray(matrix.reshape(points * t.parts, t.bins * t.made), x.dtype.numpy)
    target = _merged(out)
    direct = target is not None and target.shape[:-1] == rows.shape[:-1]
    made = target if direct and target is not None else View.temporary(x.dtype, (*rows.shape[:-1], t.bins * t.made))
    count = int(np.prod(rows.shape[:-1]))
    steps += gemm.matmul(rows, gemm.pack_b(constant, isa, rows_hint=count), made, isa, threads=threads)
    return steps if direct else [*steps, _spread(made.storage, t, 1, t.bins * t.made, 0, out)]


def _merged(x: View) -> View | None:
    """The last two axes as one, with at least one axis before; None where strides do not allow it."""
    *batch, points, parts = x.shape
    if parts > 1 and points > 1 and x.strides[-2] != parts * x.strides[-1]:
        return None
    inner = x.strides[-1] if parts > 1 else x.strides[-2]
    lead, strides = (tuple(batch), x.strides[:-2]) if batch else ((1,), (0,))
    return View(x.storage, x.dtype, (*lead, points * parts), (*strides, inner), x.offset)


def _two_products(
    t: Transform, split: tuple[int, int], x: View, window: View | None, out: View, isa: Isa, threads: int
) -> list[Launch]:
    n1, n2 = split
    n, dtype = t.length, x.dtype
    planar, steps = _planar(t, x, window)
    count, parts = planar.shape[0], planar.shape[1] // n
    # rows: (k1, part); columns: (part, j1)
    first = _waves(np.outer(np.arange(n1), np.arange(n1)) % n1, n1, t.inverse, parts, 2)
    first = first.transpose(2, 3, 1, 0).reshape(2 * n1, parts * n1)
    left = View.constant(np.ascontiguousarray(first, dtype.numpy), dtype)
    signals = View.dense(planar.storage, dtype, (count, parts * n1, n2))
    middle = View.temporary(dtype, (count, 2 * n1, n2))
    steps += gemm.matmul(left.expanded((count, *left.shape)), signals, middle, isa, threads=threads)
    steps.append(_twisted(middle, t, n1, n2))
    # rows: (part, j2); columns: (k2, part), only those with a bin that is wanted
    columns = -(-t.bins // n1)
    second = _waves(np.outer(np.arange(n2), np.arange(columns)) % n2, n2, t.inverse, 2, t.made)
    second = second.swapaxes(0, 1).reshape(2 * n2, columns * t.made) / (n if t.inverse else 1)
    packed = gemm.pack_b(np.ascontiguousarray(second, dtype.numpy), isa, rows_hint=count * n1)
    pairs = View.dense(middle.storage, dtype, (count * n1, 2 * n2))
    made = View.temporary(dtype, (count * n1, columns * t.made))
    steps += gemm.matmul(pairs, packed, made, isa, threads=threads)
    return [*steps, _spread(made.storage, t, n1, n1 * columns * t.made, columns * t.made, out)]


# -- small kernels ----------------------------------------------------------------------------------------------------

_EXTENTS = tuple(f"extent_{k}" for k in range(BATCH_AXES))
_STRIDES = tuple(f"stride_{k}" for k in range(BATCH_AXES))


def _batch_numbers(view: View) -> tuple[int, tuple[int, ...]]:
    """How many signals there are, then extents and strides of exactly :data:`BATCH_AXES` axes."""
    shape, strides = view.shape[:-2], view.strides[:-2]
    missing = BATCH_AXES - len(shape)
    count = int(np.prod(shape, dtype=np.int64))
    return count, (*(1,) * missing, *shape, *(0,) * missing, *strides)


def _signal(frame: Frame, base: Val, index: Val) -> Val:
    """Where signal number ``index`` begins."""
    f = frame.f
    for extent, stride in zip(reversed(_EXTENTS), reversed(_STRIDES)):
        outer = f.div(index, frame[extent], signed=False)
        base = frame.at(base, (index - outer * frame[extent], frame[stride]))
        index = outer
    return base


def _planar(t: Transform, x: View, window: View | None) -> tuple[View, list[Launch]]:
    """Signals one after the other, each ``[part, point]``, padded to the length, windowed, the mirror image added."""
    parts = 2 if t.mirrored else t.parts
    count, numbers = _batch_numbers(x)
    item = x.dtype.numpy.itemsize
    target = View.temporary(x.dtype, (count, parts * t.length))
    weights = At(x.storage) if window is None else At(window.storage, window.offset * item)
    launch = Launch(
        _planar_spec(ELEMENTS[x.dtype], window is not None),
        (At(x.storage, x.offset * item), weights, At(target.storage)),
        (
            *numbers,
            *(x.shape[-2], x.shape[-1], parts, t.length, *x.strides[-2:]),
            *(0 if window is None else window.strides[0], int(t.mirrored)),
        ),
        tiles=count,
        writes=(target.storage,),
        traffic=2.0 * target.nbytes,
        label="signals",
    )
    return target, [launch]


def _planar_spec(element: str, windowed: bool) -> KernelSpec:
    names = (
        *(*_EXTENTS, *_STRIDES, "points", "given", "parts", "length"),
        *("point_step", "part_step", "window_step", "mirrored"),
    )

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        frame = Frame(module, symbol, isa, element, ("x", "window", "target"), names)
        f = frame.f
        points, length = frame["points"], frame["length"]
        with f.loop(frame.begin, frame.end) as tile, f.loop(0, frame["parts"]) as part:
            source = frame.at(_signal(frame, frame.buffer("x"), tile), (part, frame["part_step"]))
            target = frame.at(frame.buffer("target"), (tile * frame["parts"] + part, length))
            there = f.select(f.cmp("slt", part, frame["given"]), points, f.i64(0))
            with f.loop(0, there) as j:
                value = f.load(element, frame.at(source, (j, frame["point_step"])))
                if windowed:
                    value = value * f.load(element, frame.at(frame.buffer("window"), (j, frame["window_step"])))
                f.store(value, frame.at(target, (j, 1)))
            with f.loop(there, length) as j:
                f.store(f.const(element, 0.0), frame.at(target, (j, 1)))
            with f.if_(f.cmp("ne", frame["mirrored"], 0)):
                # point j of the other half is point length - j, with the imaginary part turned round
                last = f.min_(there - 1, f.div(length - 1, 2, signed=False))
                sign = f.select(f.cmp("eq", part, 0), f.const(element, 1.0), f.const(element, -1.0))
                with f.loop(1, last + 1) as j:
                    value = f.load(element, frame.at(target, (j, 1))) * sign
                    f.store(value, frame.at(target, (length - j, 1)))
        f.ret()

    return KernelSpec(f"signals {element}", ("fourier planar", element, windowed), emit)


def _twisted(middle: View, t: Transform, n1: int, n2: int) -> Launch:
    """Multiplies ``[k1, part, j2]`` by ``w(n)^(j2*k1)``, in place."""
    angle = np.outer(np.arange(n1), np.arange(n2)) % t.length * (2 * np.pi / t.length)
    factors = np.stack([np.cos(angle), np.sin(angle) * (1 if t.inverse else -1)], axis=1)
    table = Storage.packed(np.ascontiguousarray(factors, middle.dtype.numpy))
    return Launch(
        _twist_spec(ELEMENTS[middle.dtype]),
        (At(middle.storage), At(table)),
        (n1, n2),
        tiles=middle.shape[0] * n1,
        writes=(middle.storage,),
        flops=3.0 * middle.size,
        traffic=2.0 * middle.nbytes,
        label="twiddle",
    )


def _twist_spec(element: str) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        frame = Frame(module, symbol, isa, element, ("values", "table"), ("rows", "columns"))
        f, lanes = frame.f, frame.lanes
        columns = frame["columns"]
        whole = f.and_(columns, -lanes)

        def turned(real: Val, imaginary: Val, cos: Val, sin: Val) -> tuple[Val, Val]:
            return f.sub(real * cos, imaginary * sin), f.add(real * sin, imaginary * cos)

        with f.loop(frame.begin, frame.end) as tile:
            k1 = f.rem(tile, frame["rows"], signed=False)
            values = frame.at(frame.buffer("values"), (tile * 2, columns))
            table = frame.at(frame.buffer("table"), (k1 * 2, columns))
            rows = [values, frame.at(values, (columns, 1)), table, frame.at(table, (columns, 1))]
            with f.loop(0, whole, lanes) as j:
                loaded = [f.load(frame.kind, frame.at(row, (j, 1))) for row in rows]
                for row, value in zip(rows, turned(*loaded)):
                    f.store(value, frame.at(row, (j, 1)))
            with f.loop(whole, columns) as j:
                loaded = [f.load(element, frame.at(row, (j, 1))) for row in rows]
                for row, value in zip(rows, turned(*loaded)):
                    f.store(value, frame.at(row, (j, 1)))
        f.ret()

    return KernelSpec(f"twiddle {element}", ("fourier twiddle", element), emit)


def _spread(made: Storage, t: Transform, n1: int, signal_step: int, row_step: int, out: View) -> Launch:
    """Bin ``k1 + n1*k2`` of every signal from row k1, pair k2 of what was computed into the output's places."""
    count, numbers = _batch_numbers(out)
    item = out.dtype.numpy.itemsize
    return Launch(
        _spread_spec(ELEMENTS[out.dtype]),
        (At(made), At(out.storage, out.offset * item)),
        (*numbers, t.bins, t.made, n1, signal_step, row_step, *out.strides[-2:]),
        tiles=count,
        writes=(out.storage,),
        traffic=2.0 * out.nbytes,
        label="spectrum",
    )


def _spread_spec(element: str) -> KernelSpec:
    own = ("bins", "parts", "rows", "signal_step", "row_step", "bin_step", "part_step")
    names: Sequence[str] = (*_EXTENTS, *_STRIDES, *own)

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        frame = Frame(module, symbol, isa, element, ("made", "out"), names)
        f = frame.f
        rows, bins = frame["rows"], frame["bins"]
        with f.loop(frame.begin, frame.end) as tile:
            source = frame.at(frame.buffer("made"), (tile, frame["signal_step"]))
            target = _signal(frame, frame.buffer("out"), tile)
            with f.loop(0, rows) as k1, f.loop(k1, bins, rows) as k, f.loop(0, frame["parts"]) as part:
                pair = f.div(k, rows, signed=False) * frame["parts"]
                value = f.load(element, frame.at(source, (k1, frame["row_step"]), (pair + part, 1)))
                f.store(value, frame.at(target, (k, frame["bin_step"]), (part, frame["part_step"])))
        f.ret()

    return KernelSpec(f"spectrum {element}", ("fourier spread", element), emit)
