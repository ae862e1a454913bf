"""3x3 convolutions of codes by squares of outputs, against NumPy's int64 arithmetic, on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.integer import pack_squares, squares_conv, suits_squares
from ranvier.codegen.llvm.isa import Isa, named, with_extensions
from ranvier.codegen.loops.ir import Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, of
from tests.codegen.harness import Runner, view_of
from tests.codegen.test_integer import PATHS, convolved, last, path_name

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(36)
ALLOWED = 3e-6  # of large sums, as a share of the largest one
X86 = [isa for isa in PATHS if isa.triple == "x86_64"]
# images, filters and pads: several images, channels and outputs that fill no vector, panels and blocks of several
# kinds, windows outside on any side, images smaller than a square
CASES: list[tuple[tuple[int, ...], int, tuple[int, int, int, int]]] = [
    ((1, 32, 14, 14), 40, (1, 1, 1, 1)),
    ((2, 17, 9, 11), 64, (0, 0, 0, 0)),
    ((1, 41, 13, 6), 17, (0, 1, 2, 1)),
    ((3, 16, 4, 3), 16, (1, 1, 1, 1)),
    ((1, 64, 21, 30), 130, (1, 1, 1, 1)),
]


def codes(kind: type, *shape: int) -> Array:
    ends = np.iinfo(kind)
    return RNG.integers(ends.min, ends.max, shape, endpoint=True).astype(kind)


def filters(count: int, depth: int, kind: type = np.int8) -> Array:
    w = np.clip(np.rint(RNG.standard_normal((count, depth, 3, 3)) * 30), -128, 127).astype(np.int8)
    return w if kind is np.int8 else (w.view(np.uint8) ^ 128)


def squares(
    x: Array,
    w: Array,
    pads: tuple[int, ...],
    zero: int,
    isa: Isa,
    *,
    kind: type = np.int32,
    epilogue: Epilogue | None = None,
    room: int = 0,
    split: int = 1,
    threads: int = 1,
) -> tuple[Array, ConvShape]:
    """Images and results may have room for other channels behind their own."""
    shape = ConvShape.conv(x.shape, w.shape, pads=pads)
    source = last(np.pad(x, ((0, 0), (0, room), (0, 0), (0, 0))))
    result = last(np.full((shape.n, shape.cout + room, *shape.out[1:]), 77, kind))
    nothing = np.full(1, zero, x.dtype)
    whole, target, border = view_of(source), view_of(result, "output"), view_of(nothing)
    image = View(whole.storage, whole.dtype, x.shape, whole.strides)
    out = View(target.storage, target.dtype, (shape.n, shape.cout, *shape.out[1:]), target.strides)
    packed = pack_squares(w, of(x), isa, shape)
    launches = squares_conv(image, border, packed, out, shape, isa, epilogue=epilogue, threads=threads)
    bound = {whole.storage: source, target.storage: result, border.storage: nothing}
    Runner(launches, isa, bound, split=split)()
    assert (result[:, shape.cout :] == 77).all()
    return result[:, : shape.cout], shape


@pytest.mark.parametrize("isa", X86, ids=path_name)
@pytest.mark.parametrize(("left", "zero"), [(np.uint8, 200), (np.int8, -100)])
@pytest.mark.parametrize("case", CASES, ids=["even", "odd", "narrow", "small", "panels"])
def test_sums_of_all_taps(isa: Isa, left: type, zero: int, case: Any) -> None:
    size, count, pads = case
    x, w = codes(left, *size), filters(count, size[1])
    found, shape = squares(x, w, pads, zero, isa, split=2, threads=2)
    np.testing.assert_array_equal(found, convolved(x, zero, w, shape, pads[2:]))


@pytest.mark.parametrize("isa", X86, ids=path_name)
def test_slices_of_channels(isa: Isa) -> None:
    x, w = codes(np.uint8, 2, 24, 9, 9), filters(20, 24)
    found, shape = squares(x, w, (1, 1, 1, 1), 3, isa, room=5)
    np.testing.assert_array_equal(found, convolved(x, 3, w, shape, (1, 1)))


@pytest.mark.parametrize("isa", X86, ids=path_name)
def test_unsigned_filters_are_moved(isa: Isa) -> None:
    """As other convolutions have them: less 128."""
    x, w = codes(np.int8, 1, 20, 8, 8), filters(16, 20, np.uint8)
    found, shape = squares(x, w, (1, 1, 1, 1), 0, isa)
    np.testing.assert_array_equal(found, convolved(x, 0, w.astype(np.int64) - 128, shape, (1, 1)))


@pytest.mark.parametrize("split", [1, 3, 100])
@pytest.mark.parametrize("threads", [1, 4])
def test_any_split_gives_the_same(split: int, threads: int) -> None:
    x, w = codes(np.uint8, 2, 20, 30, 30), filters(130, 20)
    found, shape = squares(x, w, (1, 1, 1, 1), 9, X86[0], split=split, threads=threads)
    np.testing.assert_array_equal(found, convolved(x, 9, w, shape, (1, 1)))


@pytest.mark.parametrize("isa", X86, ids=path_name)
@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.float32])
def test_epilogue(isa: Isa, kind: type) -> None:
    """A bias, a scale of every channel, something added to every output, and codes of it."""
    x, w = codes(np.uint8, 1, 33, 10, 14), filters(39, 33)
    bias, scales = RNG.integers(-5000, 5000, 39).astype(np.int32), RNG.uniform(1e-4, 1e-3, 39).astype(np.float32)
    beside = RNG.standard_normal((10 * 14, 39)).astype(np.float32)
    total = Op("add", (Result(0, DType.int32), Load(0, DType.int32)), DType.int32)
    scaled = Op("mul", (Op("cast", (total,), DType.float32), Load(1, DType.float32)), DType.float32)
    value: Expr = Op("add", (scaled, Load(2, DType.float32)), DType.float32)
    if kind is not np.float32:
        value = Op("cast", (Op("round", (value,), DType.float32),), of(np.zeros((), kind)))
    operands = (
        Operand(View.constant(bias, DType.int32), (0, 0, 1)),
        Operand(View.constant(scales, DType.float32), (0, 0, 1)),
        Operand(View.constant(beside, DType.float32), (0, 39, 1)),
    )
    found, shape = squares(x, w, (1, 1, 1, 1), 100, isa, kind=kind, epilogue=Epilogue(value, operands))
    sums = convolved(x, 100, w, shape, (1, 1)) + bias[None, :, None, None]
    want = sums.astype(np.float32) * scales[None, :, None, None] + beside.T.reshape(1, 39, 10, 14)
    if kind is np.float32:
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
        return
    ends = np.iinfo(kind)
    np.testing.assert_array_equal(found, np.clip(np.rint(want), ends.min, ends.max).astype(kind))


@pytest.mark.parametrize("isa", X86, ids=path_name)
def test_large_sums(isa: Isa) -> None:
    """They are as exact as those of floats."""
    x = np.full((1, 128, 8, 8), 255, np.uint8)
    x[0, ::7, ::3] = 0
    w = np.full((16, 128, 3, 3), 60, np.int8)
    found, shape = squares(x, w, (1, 1, 1, 1), 255, isa)
    want = convolved(x, 255, w, shape, (1, 1))
    assert np.abs(found - want).max() <= np.abs(want).max() * ALLOWED


def test_sums_that_might_not_fit_are_not_packed() -> None:
    """The largest transformed code times the filters of a position, which the ends of either sign decide."""
    isa = X86[0]
    for depth, fits in ((75, True), (76, False)):
        shape = ConvShape.conv((1, depth, 8, 8), (16, depth, 3, 3), pads=(1, 1, 1, 1))
        w = np.full((16, depth, 3, 3), 127, np.int8)
        assert (pack_squares(w, DType.uint8, isa, shape).storage is not None) == fits
    for kind in (np.uint8, np.int8):
        # the largest depth that fits, with codes at the ends: whatever overflows shows
        w = np.full((16, 74, 3, 3), -127, np.int8)
        x = np.where(RNG.random((1, 1, 9, 9)) < 0.5, np.iinfo(kind).min, np.iinfo(kind).max).astype(kind)
        x[0, 0, :6, :6] = _worst(np.iinfo(kind))
        x = np.repeat(x, 74, axis=1)
        found, shape = squares(x, w, (0, 0, 0, 0), 0, isa)
        want = convolved(x, 0, w, shape, (0, 0))
        assert np.abs(found - want).max() <= np.abs(want).max() * ALLOWED


def _worst(ends: Any) -> Array:
    """The square of codes that makes the largest transformed one at the point 2 of both axes."""
    factors = np.outer([0, -2, -1, 2, 1, 0], [0, -2, -1, 2, 1, 0])
    return np.where(factors > 0, ends.max, ends.min)


def test_where_squares_are_quicker() -> None:
    """With VNNI where channels are many and images large; without it everywhere; never beside a matrix unit."""
    vnni = with_extensions(named("avx512", "x86_64"), frozenset({"avx512vnni"}))
    tiles = with_extensions(named("avx512", "x86_64"), frozenset({"avx512vnni", "amx-tile", "amx-int8"}))
    plain, old = named("avx512", "x86_64"), named("avx2", "x86_64")

    def shape(channels: int, size: int, **how: Any) -> ConvShape:
        return ConvShape.conv((1, channels, size, size), (channels, channels, 3, 3), pads=(1, 1, 1, 1), **how)

    assert suits_squares(shape(64, 56), vnni)
    assert not suits_squares(shape(32, 80), vnni)
    assert not suits_squares(shape(512, 7), vnni)  # its filters have to come from far away
    assert suits_squares(shape(32, 80), plain)
    assert suits_squares(shape(16, 40), old)
    assert not suits_squares(shape(64, 56), tiles)
    assert not suits_squares(shape(64, 56), named("neon", "aarch64"))
    for how in ({"strides": (2, 2)}, {"dilations": (2, 2)}):
        assert not suits_squares(shape(64, 56, **how), vnni)
    assert not suits_squares(ConvShape.conv((1, 64, 20, 20), (64, 32, 3, 3), pads=(1, 1, 1, 1), group=2), vnni)
