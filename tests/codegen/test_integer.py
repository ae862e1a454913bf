"""Integer products and convolutions against NumPy's int64 arithmetic, on every instruction set and without its dots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import Code
from ranvier.codegen.llvm import isa as isas
from ranvier.codegen.llvm.compiler import assembly
from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.integer import (
    integer_conv,
    integer_depthwise,
    integer_matmul,
    moved_right,
    pack_codes,
    pack_depthwise,
    pack_filters,
    table_lookup,
)
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.library import source
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, of
from tests.codegen.harness import ISAS, Runner, view_of

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)
_PLAIN = [i for i in isas.TABLE if any(i.name == h.name and i.triple == h.triple and h.extensions for h in ISAS)]
_UNTILED = [isas.with_extensions(i, i.extensions - isas.TILES) for i in ISAS if i.extensions & isas.TILES]
SIZES = ((1, 1, 1), (1, 64, 40), (7, 13, 5), (13, 130, 67), (5, 24, 1), (40, 36, 17), (3, 0, 4), (30, 256, 128))
# those of this machine, then the same without tiles, and without all that only some members of a family have
PATHS = [*ISAS, *_UNTILED, *_PLAIN]


def path_name(isa: Isa) -> str:
    return isa.key


def codes(dtype: type, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    x = RNG.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)
    flat = x.reshape(-1)
    if flat.size > 4:  # the corners, where saturating instructions would go wrong
        flat[:2], flat[2:4] = limits.min, limits.max
    return x


def oracle(a: Array, b: Array) -> Array:
    left = a.astype(np.int64)
    right = b.astype(np.int64) + moved_right(of(b))
    return np.matmul(left, right)


def product(a: Array, b: Array, isa: Isa, *, packed: bool, split: int = 1, threads: int = 1) -> Array:
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.full((*batch, a.shape[-2], b.shape[-1]), -77, np.int32)
    left, right, target = view_of(a), view_of(b), view_of(out, "output")
    factor = pack_codes(b, isa, rows_hint=a.shape[-2]) if packed else right
    launches = integer_matmul(left, factor, target, isa, threads=threads)
    Runner(launches, isa, {left.storage: a, right.storage: b, target.storage: out}, split=split)()
    return out


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
@pytest.mark.parametrize("right", [np.uint8, np.int8])
def test_signs(isa: Isa, left: type, right: type) -> None:
    for m, k, n in (
        (1, 1, 1),
        (1, 64, 40),
        (7, 13, 5),
        (13, 130, 67),
        (5, 24, 1),
        (40, 36, 17),
        (3, 0, 4),
        (30, 256, 128),
    ):
        a, b = codes(left, m, k), codes(right, k, n)
        for packed in (True, False):
            np.testing.assert_array_equal(product(a, b, isa, packed=packed), oracle(a, b))


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
def test_long_and_split(isa: Isa) -> None:
    a, b = codes(np.uint8, 37, 9001), codes(np.int8, 9001, 50)
    for split, threads in ((1, 1), (3, 2), (5, 4)):
        np.testing.assert_array_equal(product(a, b, isa, packed=True, split=split, threads=threads), oracle(a, b))


@pytest.mark.parametrize("isa", ISAS, ids=path_name)
def test_batches_and_strides(isa: Isa) -> None:
    a, b = codes(np.uint8, 2, 3, 5, 24), codes(np.int8, 3, 24, 20)
    for packed in (True, False):
        np.testing.assert_array_equal(product(a, b, isa, packed=packed), oracle(a, b))
    shared = codes(np.uint8, 24, 20)
    np.testing.assert_array_equal(product(a, shared, isa, packed=True), oracle(a, shared))
    wide = codes(np.uint8, 12, 64)
    for part in (wide[:, 4:44], wide[::2, :40], wide[:, 1:41], wide[:, ::2], wide.T[:20, :8]):
        right = codes(np.int8, part.shape[1], 33)
        np.testing.assert_array_equal(product(part, right, isa, packed=True), oracle(part, right))
        turned = np.asfortranarray(right)
        np.testing.assert_array_equal(product(part, turned, isa, packed=False), oracle(part, turned))


@pytest.mark.parametrize("isa", ISAS, ids=path_name)
@pytest.mark.parametrize("kind", [np.float32, np.uint8])
def test_epilogue(isa: Isa, kind: type) -> None:
    a, b = codes(np.uint8, 19, 48), codes(np.int8, 48, 37)
    scale, rows = RNG.uniform(1e-4, 1e-3, 37).astype(np.float32), RNG.integers(-500, 500, 19).astype(np.int32)
    out = np.zeros((19, 37), kind)
    views = [view_of(x) for x in (a, scale, rows)]
    target = view_of(out, "output")
    total: Expr = Op("add", (Result(0, DType.int32), Load(1, DType.int32)), DType.int32)
    value: Expr = Op("mul", (Op("cast", (total,), DType.float32), Load(0, DType.float32)), DType.float32)
    if kind is np.uint8:
        value = Op("cast", (Op("round", (value,), DType.float32),), DType.uint8)
    epilogue = Epilogue(value, (Operand(views[1], (0, 0, 1)), Operand(views[2], (0, 1, 0))))
    launches = integer_matmul(views[0], pack_codes(b, isa, rows_hint=19), target, isa, epilogue=epilogue)
    Runner(launches, isa, dict(zip([v.storage for v in views], (a, scale, rows))) | {target.storage: out}, split=2)()
    want = (oracle(a, b) + rows[:, None]).astype(np.float32) * scale
    if kind is np.uint8:
        want = np.clip(np.rint(want), 0, 255)
    np.testing.assert_array_equal(out, want.astype(kind))


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
def test_signed_batches(isa: Isa) -> None:
    """What moving signed codes adds is taken out of every matrix of a batch, however that is broadcast."""
    a, b = codes(np.int8, 2, 3, 5, 24), codes(np.int8, 3, 24, 20)
    single, whole = codes(np.uint8, 24, 20), codes(np.int8, 2, 3, 24, 7)
    for packed in (True, False):
        for right in (b, single, whole):
            np.testing.assert_array_equal(product(a, right, isa, packed=packed), oracle(a, right))


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
def test_finished_batches_that_lie_apart(isa: Isa, left: type) -> None:
    """The same is taken out once where results of a batch lie in a larger tensor, as those do that are joined."""
    a, bias = codes(left, 3, 16, 24), RNG.integers(-500, 500, 20).astype(np.int32)
    for b in (codes(np.int8, 24, 20), codes(np.int8, 3, 24, 20)):
        room = np.zeros((3, 2, 16, 20), np.int32)
        views, target = [view_of(x) for x in (a, bias)], view_of(room[:, 1], "output")
        value = Op("add", (Result(0, DType.int32), Load(0, DType.int32)), DType.int32)
        epilogue = Epilogue(value, (Operand(views[1], (0, 0, 1)),))
        launches = integer_matmul(views[0], pack_codes(b, isa, rows_hint=48), target, isa, epilogue=epilogue)
        Runner(launches, isa, {views[0].storage: a, views[1].storage: bias, target.storage: room[:, 1]})()
        np.testing.assert_array_equal(room[:, 1], oracle(a, b) + bias)
        assert not room[:, 0].any()


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("per_row", [False, True])
def test_requantization(isa: Isa, kind: type, per_row: bool) -> None:
    """Sums become codes, numbers, and codes again, each rounding as NumPy rounds it; a residual may be infinite."""
    m, k, n = 9, 40, 37
    a, b = codes(np.uint8, m, k), codes(np.int8, k, n)
    scale = RNG.uniform(1e-4, 1e-3, n).astype(np.float32)
    step = RNG.uniform(0.02, 0.05, m if per_row else 1).astype(np.float32)
    zero = np.full(m if per_row else 1, 7, kind)
    beside = RNG.normal(size=(m, n)).astype(np.float32)
    beside[0, :4] = [np.inf, -np.inf, np.nan, 1e38]
    arrays = [scale, step, zero, beside]
    views = [view_of(x) for x in arrays]
    real = [Load(0, DType.float32), Load(1, DType.float32), Load(2, of(zero)), Load(3, DType.float32)]
    shift = Op("cast", (real[2],), DType.float32)
    first = saturated(
        Op("mul", (Op("cast", (Result(0, DType.int32),), DType.float32), real[0]), DType.float32), shift, kind
    )
    number: Expr = Op("sub", (Op("cast", (first,), DType.float32), shift), DType.float32)
    number = Op("add", (number, real[3]), DType.float32)
    number = Op("quotient", (number, real[1], Op("reciprocal", (real[1],), DType.float32)), DType.float32)
    strides = [(0, 0, 1), (0, int(per_row), 0), (0, int(per_row), 0), (0, n, 1)]
    epilogue = Epilogue(saturated(number, shift, kind), tuple(map(Operand, views, strides)))
    out = np.zeros((m, n), kind)
    left, target = view_of(a), view_of(out, "output")
    launches = integer_matmul(left, pack_codes(b, isa, rows_hint=m), target, isa, epilogue=epilogue)
    bound = {left.storage: a, target.storage: out, **{v.storage: x for v, x in zip(views, arrays)}}
    Runner(launches, isa, bound)()
    limits = np.iinfo(kind)

    def quantized(x: Array) -> Array:
        whole = np.rint(x) + np.float32(7)
        return np.clip(np.where(np.isnan(whole), limits.min, whole), limits.min, limits.max)

    between = quantized(oracle(a, b).astype(np.float32) * scale) - np.float32(7)
    with np.errstate(all="ignore"):
        want = quantized((between + beside) / step.reshape(-1, 1))
    np.testing.assert_array_equal(out, want.astype(kind))


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize(("kind", "zero"), [(np.uint8, 200), (np.uint8, None), (np.int8, -100), (np.int8, None)])
@pytest.mark.parametrize("cut", [False, True])
def test_numbers_beyond_all_integers(isa: Isa, kind: type, zero: int | None, cut: bool) -> None:
    """What no integer holds becomes the code at that end, and NaN the lowest, in pairs of rows and of vectors too."""
    m, k, n = 5, 8, 83
    a, b = codes(np.uint8, m, k), codes(np.int8, k, n)
    scale = RNG.uniform(1e-3, 1e-2, n).astype(np.float32)
    scale[:6], scale[-6:] = ([np.inf, np.nan, 1e30, -1e30, 1e6, -1e6],) * 2
    numbers, point = view_of(scale), view_of(code := np.full(1, zero or 0, kind))
    number: Expr = Op("cast", (Result(0, DType.int32),), DType.float32)
    number = Op("mul", (number, Load(0, DType.float32)), DType.float32)
    if cut:
        number = Op("max", (number, Const(0, DType.float32)), DType.float32)
    shift = None if zero is None else Op("cast", (Load(1, of(code)),), DType.float32)
    operands = (Operand(numbers, (0, 0, 1)), Operand(point, (0, 0, 0)))
    out = np.zeros((m, n), kind)
    left, target = view_of(a), view_of(out, "output")
    epilogue = Epilogue(saturated(number, shift, kind), operands)
    launches = integer_matmul(left, pack_codes(b, isa, rows_hint=m), target, isa, epilogue=epilogue)
    Runner(launches, isa, {left.storage: a, target.storage: out, numbers.storage: scale, point.storage: code})()
    limits = np.iinfo(kind)
    with np.errstate(all="ignore"):
        want = oracle(a, b).astype(np.float32) * scale
        want = np.rint(np.maximum(want, 0) if cut else want) + np.float32(zero or 0)
    want = np.clip(np.where(np.isnan(want), limits.min, want), limits.min, limits.max)
    np.testing.assert_array_equal(out, want.astype(kind))


def saturated(number: Expr, zero: Expr | None, kind: type) -> Expr:
    """As the lowering of QuantizeLinear writes it."""
    whole = Op("round", (number,), DType.float32)
    if zero is not None:
        whole = Op("add", (whole, zero), DType.float32)
    if kind is np.uint8:
        return Op("cast", (whole,), DType.uint8)
    moved = Op("add", (whole, Const(128.0, DType.float32)), DType.float32)
    flipped = Op("bitxor", (Op("cast", (moved,), DType.uint8), Const(128, DType.uint8)), DType.uint8)
    return Op("bits", (flipped,), DType.int8)


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
def test_table(isa: Isa) -> None:
    table = RNG.permutation(256).astype(np.uint8)
    for size in (1, 63, 64, 200, 40_000):
        x, out = codes(np.uint8, size), np.zeros(size, np.uint8)
        views = [view_of(x), view_of(table), view_of(out, "output")]
        bound = dict(zip([v.storage for v in views], (x, table, out)))
        Runner(table_lookup(*views), isa, bound, split=2)()
        np.testing.assert_array_equal(out, table[x])


def test_temporary_views_are_whole() -> None:
    """Rows that are copied leave room for whole groups."""
    isa = ISAS[-1]
    a = View.temporary(DType.int8, (3, 5))
    out = View.temporary(DType.int32, (3, 2))
    launches = integer_matmul(a, pack_codes(codes(np.int8, 5, 2), isa, rows_hint=3), out, isa)
    assert len(launches) == 2
    assert all(launch.tiles for launch in launches)


def convolved(x: Array, zero: int, w: Array, shape: ConvShape, end: tuple[int, ...]) -> Array:
    """Sums over all taps, in int64; the image is padded with its zero point."""
    pads = [(0, 0), (0, 0), *zip(shape.begin[1:], end)]
    image = np.pad(x.astype(np.int64), pads, constant_values=zero)
    out = np.zeros((shape.n, shape.cout, *shape.out[1:]), np.int64)
    (_, sh, sw), (_, dh, dw) = shape.strides, shape.dilations
    for i in range(shape.kernel[1]):
        for j in range(shape.kernel[2]):
            rows, columns = shape.out[1:]
            part = image[
                :, :, i * dh : i * dh + (rows - 1) * sh + 1 : sh, j * dw : j * dw + (columns - 1) * sw + 1 : sw
            ]
            grouped = part.reshape(shape.n, shape.group, shape.depth, rows, columns)
            taps = w[:, :, i, j].reshape(shape.group, shape.width, shape.depth)
            out += np.einsum("ngcyx,goc->ngoyx", grouped, taps).reshape(out.shape)
    return out


def last(x: Array) -> Array:
    """The same tensor with its channels side by side in memory."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


# image, filters, strides, dilations, pads, groups
CONVS: list[tuple[Any, ...]] = [
    ((2, 3, 11, 9), (16, 3, 3, 3), (2, 2), (1, 1), (1, 1, 1, 1), 1),
    ((1, 24, 6, 7), (20, 24, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    ((1, 17, 5, 5), (70, 17, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    ((2, 8, 9, 8), (12, 4, 3, 2), (1, 2), (2, 1), (0, 2, 1, 0), 2),
    ((1, 4, 3, 3), (5, 4, 5, 5), (1, 1), (1, 1), (2, 3, 2, 1), 1),
    ((1, 40, 10, 12), (33, 40, 3, 3), (1, 1), (2, 2), (2, 2, 2, 2), 1),
    # whole lines of channels, and pixels of four bytes
    ((2, 64, 9, 11), (50, 64, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    ((1, 128, 13, 10), (16, 128, 3, 3), (2, 2), (1, 1), (1, 0, 0, 2), 1),
    ((1, 64, 12, 17), (33, 64, 2, 3), (2, 3), (3, 2), (1, 4, 2, 0), 1),
    ((1, 64, 2, 3), (48, 64, 3, 5), (1, 1), (1, 1), (2, 4, 2, 4), 1),
    ((1, 64, 40, 44), (40, 64, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    ((2, 4, 30, 41), (64, 4, 7, 7), (2, 2), (1, 1), (3, 3, 3, 3), 1),
    ((1, 4, 9, 70), (24, 4, 3, 16), (1, 1), (2, 1), (2, 0, 0, 15), 1),
    # less than a line: a row of taps, a pixel, equal parts of one, and what has none
    ((1, 8, 14, 14), (16, 8, 5, 5), (1, 1), (1, 1), (2, 2, 2, 2), 1),
    ((2, 16, 13, 9), (40, 16, 3, 4), (1, 1), (1, 1), (1, 2, 1, 1), 1),
    ((1, 16, 15, 18), (20, 16, 3, 3), (2, 3), (2, 2), (2, 0, 1, 2), 1),
    ((1, 60, 7, 9), (18, 60, 3, 3), (2, 1), (1, 1), (1, 1, 1, 1), 1),
    ((1, 96, 8, 11), (34, 96, 3, 3), (1, 1), (1, 2), (1, 2, 1, 2), 1),
    ((2, 144, 5, 6), (17, 144, 2, 1), (1, 2), (1, 1), (0, 0, 1, 0), 1),
    ((1, 76, 6, 6), (16, 76, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    # lines of taps that are no whole number of groups, and outputs in a single column
    ((2, 1, 13, 11), (20, 1, 5, 5), (1, 1), (1, 1), (2, 2, 2, 2), 1),
    ((1, 10, 9, 7), (33, 10, 3, 3), (2, 2), (1, 1), (1, 1, 1, 1), 1),
    ((1, 5, 9, 30), (16, 5, 3, 3), (1, 1), (2, 1), (1, 1, 1, 1), 1),
    ((1, 6, 25, 3), (40, 6, 3, 3), (1, 1), (1, 1), (1, 0, 1, 0), 1),
    ((2, 1, 1, 200), (24, 1, 1, 37), (1, 5), (1, 1), (0, 3, 0, 0), 1),
    # 1x1
    ((2, 64, 13, 27), (50, 64, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    ((1, 128, 7, 7), (33, 128, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    ((1, 64, 9, 1), (40, 64, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    ((2, 64, 12, 9), (40, 64, 1, 1), (2, 2), (1, 1), (0, 0, 0, 0), 1),
    ((1, 64, 5, 1), (16, 64, 1, 1), (2, 1), (1, 1), (2, 0, 1, 0), 1),
    ((1, 64, 5, 6), (16, 64, 1, 1), (1, 1), (1, 1), (0, 2, 1, 0), 1),
    ((1, 4, 20, 20), (40, 4, 1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
]


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
def test_convolution(isa: Isa, left: type) -> None:
    right = np.int8 if left is np.uint8 else np.uint8
    for size, filters, strides, dilations, pads, group in CONVS:
        batch, channels, *rest = size
        beside = 8 if left is np.int8 else 0  # channels of a wider tensor, whose pixels do not lie side by side
        x = last(codes(left, batch, channels + beside, *rest))[:, beside:]
        w, zero = codes(right, *filters), codes(left, 1)
        shape = ConvShape.conv(size, filters, strides=strides, dilations=dilations, pads=pads, group=group)
        out = last(np.full((shape.n, shape.cout, *shape.out[1:]), -7, np.int32))
        views = [view_of(x), view_of(zero), view_of(out, "output")]
        for threads in (1, 3):
            packed = pack_filters(w, isa, shape)
            launches = integer_conv(views[0], views[1], packed, views[2], shape, isa, threads=threads)
            Runner(launches, isa, dict(zip([v.storage for v in views], (x, zero, out))), split=threads)()
            moved = w.astype(np.int64) + moved_right(of(w))
            want = convolved(x.astype(np.int64), int(zero[0]), moved, shape, pads[2:])
            np.testing.assert_array_equal(out, want)
            out[...] = -7


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
@pytest.mark.parametrize("bytes_", [False, True], ids=["words", "bytes"])
def test_depthwise(isa: Isa, left: type, bytes_: bool) -> None:
    """Filters less their zero points are words in general, and bytes with zero points in the middle."""
    for channels, size, kernel, strides, dilations, pads in (
        (40, (9, 13), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
        (16, (8, 8), (3, 3), (2, 2), (1, 1), (0, 0, 1, 1)),
        (7, (5, 20), (5, 3), (1, 2), (2, 1), (4, 0, 0, 2)),
        (33, (2, 2), (3, 3), (1, 1), (1, 1), (2, 2, 2, 2)),
        (40, (9, 13), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
        (17, (7, 12), (5, 5), (2, 2), (1, 1), (2, 2, 2, 2)),
        (20, (9, 11), (7, 7), (1, 1), (1, 1), (3, 3, 3, 3)),
        (40, (30, 1), (20, 1), (1, 1), (1, 1), (19, 0, 0, 0)),
        (24, (31, 1), (5, 1), (2, 1), (1, 1), (2, 0, 2, 0)),
        (16, (12, 1), (3, 1), (1, 1), (2, 1), (2, 0, 2, 0)),
    ):
        x, w, zero = last(codes(left, 2, channels, *size)), codes(np.uint8, channels, 1, *kernel), codes(left, 1)
        w_zero = np.full(channels, 128, np.uint8) if bytes_ else codes(np.uint8, channels)
        shape = ConvShape.conv(x.shape, w.shape, strides=strides, dilations=dilations, pads=pads, group=channels)
        out = last(np.full((2, channels, *shape.out[1:]), -7, np.int32))
        views = [view_of(x), view_of(zero), view_of(out, "output")]
        packed = pack_depthwise(w, w_zero, isa, shape)
        launches = integer_depthwise(views[0], views[1], packed, views[2], shape, isa)
        Runner(launches, isa, dict(zip([v.storage for v in views], (x, zero, out))), split=2)()
        centred = w.astype(np.int64) - w_zero.astype(np.int64).reshape(-1, 1, 1, 1)
        np.testing.assert_array_equal(out, convolved(x, int(zero[0]), centred, shape, pads[2:]))


@pytest.mark.parametrize("name", ["neon", "portable"])
def test_code_for_other_processors(name: str) -> None:
    """Kernels for aarch64 compile; nothing here can run them."""
    isa = isas.named(name, "aarch64")
    x, zero = last(codes(np.int8, 1, 24, 6, 6)), codes(np.int8, 1)
    w, thin = codes(np.int8, 8, 24, 3, 3), codes(np.int8, 24, 1, 3, 3)
    views = [view_of(x), view_of(zero)]
    shapes = [ConvShape.conv(x.shape, w.shape), ConvShape.conv(x.shape, thin.shape, group=24)]
    outs = [View.temporary(DType.uint8, (1, s.cout, 4, 4), (0, 2, 3, 1)) for s in shapes]
    launches = integer_conv(*views, pack_filters(w, isa, shapes[0]), outs[0], shapes[0], isa)
    filters = pack_depthwise(thin, np.zeros(1, np.int8), isa, shapes[1])
    launches += integer_depthwise(*views, filters, outs[1], shapes[1], isa)
    specs = {launch.spec for launch in launches}
    specs |= {b.spec for launch in launches for b in launch.buffers if isinstance(b, Code)}
    for spec in specs:
        assert "ret" in assembly(source(spec, isa), isa)
