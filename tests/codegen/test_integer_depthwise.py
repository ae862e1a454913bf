"""Depthwise convolutions of codes against their definition: images lower than windows, borders, signs, zero points."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.integer import integer_depthwise, pack_depthwise
from ranvier.codegen.llvm.isa import Isa, with_extensions
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import Storage
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS, Runner, view_of
from tests.codegen.test_integer import PATHS, RNG, codes, convolved, last, path_name
from tests.codegen.written_out import BYTES, launches_here

Array = np.ndarray[Any, Any]
# rows are brought together by two instructions where one does not exist
_FEWER = [with_extensions(i, i.extensions - {"avx512vbmi"}) for i in ISAS if i.has("avx512vbmi")]
# filters less their zero points are words in general, and bytes with zero points in the middle
WAYS = [*((isa, bytes_) for isa in (*PATHS, *_FEWER) for bytes_ in (False, True)), (BYTES, True)]
NAMES = [f"{path_name(isa)} {'bytes' if bytes_ else 'words'}" for isa, bytes_ in WAYS]
HERE = PATHS[0]


def launched(
    isa: Isa,
    x: Array,
    zero: Array,
    packed: Any,
    out: Array,
    shape: ConvShape,
    split: int = 1,
    epilogue: Epilogue | None = None,
    beside: dict[Storage, Array] | None = None,
) -> None:
    views = [view_of(x), view_of(zero), view_of(out, "output")]
    launches = integer_depthwise(views[0], views[1], packed, views[2], shape, isa, epilogue=epilogue)
    if isa is BYTES:
        isa, launches = HERE, launches_here(launches)
    bound = dict(zip([v.storage for v in views], (x, zero, out)))
    Runner(launches, isa, bound | (beside or {}), split=split)()


def check(
    isa: Isa,
    x: Array,
    zero: int,
    w: Array,
    w_zero: Array,
    packed: Any = None,
    *,
    strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int, int, int] = (0, 0, 0, 0),
    split: int = 1,
) -> Any:
    """Compares all sums; returns the packed filters."""
    point = np.full(1, zero, x.dtype)
    shape = ConvShape.conv(x.shape, w.shape, strides=strides, pads=pads, group=w.shape[0])
    out = last(np.full((shape.n, shape.cout, *shape.out[1:]), -7, np.int32))
    packed = packed or pack_depthwise(w, w_zero, isa, shape)
    launched(isa, x, point, packed, out, shape, split)
    centred = w.astype(np.int64) - w_zero.astype(np.int64).reshape(-1, 1, 1, 1)
    np.testing.assert_array_equal(out, convolved(x, zero, centred, shape, pads[2:]), f"{shape}")
    return packed


@pytest.mark.parametrize(("isa", "bytes_"), WAYS, ids=NAMES)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (6, 2)], ids=str)
def test_heights(isa: Isa, bytes_: bool, left: type, kernel: tuple[int, int]) -> None:
    """Images of any height by one packing of the filters, with rows of windows above and below them, or none."""
    channels, width, limits = 19, 9, np.iinfo(left)
    w = codes(np.uint8, channels, 1, *kernel)
    w_zero = np.full(channels, 128, np.uint8) if bytes_ else codes(np.uint8, channels)
    reach = kernel[0] - 1
    pads = sorted({(0, 0), (reach // 2, reach // 2), (0, reach), (reach, 1), (reach + 2, reach + 3)})
    zeros = itertools.cycle((int(limits.min), int(limits.max), 3, int(limits.max) // 2 + 1))
    packed = None
    for height, down, (above, below) in itertools.product((1, 2, 3, 4, 6), (1, 2), pads):
        if height + above + below >= kernel[0]:
            x = last(codes(left, 1, channels, height, width))
            sides = (above, 1, below, kernel[1] // 2)
            packed = check(isa, x, next(zeros), w, w_zero, packed, strides=(down, 1), pads=sides, split=2)


@pytest.mark.parametrize(("isa", "bytes_"), WAYS, ids=NAMES)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
def test_lines_and_blocks(isa: Isa, bytes_: bool, left: type) -> None:
    """Lines that share rows, an odd number of them too, in several blocks, of two images, by any cut of the tiles."""
    for channels, size, kernel, strides, pads, split in (
        (70, (7, 61), (3, 3), (1, 1), (1, 1, 1, 1), 5),
        (300, (5, 11), (3, 3), (1, 2), (1, 0, 1, 2), 3),
        (33, (11, 30), (5, 5), (1, 1), (2, 2, 2, 2), 4),
        (48, (9, 27), (5, 5), (2, 2), (2, 2, 2, 2), 1),
        (16, (6, 3), (5, 5), (2, 1), (2, 2, 2, 2), 2),
        (20, (5, 2), (2, 3), (1, 1), (0, 1, 1, 1), 1),
        (16, (3, 4), (3, 3), (5, 2), (4, 4, 4, 4), 1),  # some windows meet no row
    ):
        x, w = last(codes(left, 2, channels, *size)), codes(np.uint8, channels, 1, *kernel)
        w_zero = np.full(channels, 128, np.uint8) if bytes_ else codes(np.uint8, channels)
        check(isa, x, int(codes(left, 1)[0]), w, w_zero, strides=strides, pads=pads, split=split)


@pytest.mark.parametrize(("isa", "bytes_"), WAYS, ids=NAMES)
@pytest.mark.parametrize("size", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_nothing_but_padding(isa: Isa, bytes_: bool, size: tuple[int, int]) -> None:
    """An image without pixels: all that windows meet is the zero point."""
    x, w = np.zeros((1, 16, *size), np.uint8), codes(np.uint8, 16, 1, 3, 3)
    w_zero = np.full(16, 128 if bytes_ else 7, np.uint8)
    check(isa, last(x), 99, w, w_zero, pads=(2, 2, 2, 2))


@pytest.mark.parametrize(("isa", "bytes_"), WAYS, ids=NAMES)
def test_volumes(isa: Isa, bytes_: bool) -> None:
    """Windows of one slice of a volume: as many images, one behind the other, and one before them of zero points."""
    x, w, zero = codes(np.uint8, 1, 24, 3, 5, 6), codes(np.uint8, 24, 1, 1, 3, 3), codes(np.uint8, 1)
    w_zero = np.full(24, 128, np.uint8) if bytes_ else codes(np.uint8, 24)
    shape = ConvShape.conv(x.shape, w.shape, pads=(1, 1, 1, 0, 1, 1), group=24)
    x = np.ascontiguousarray(x.transpose(0, 2, 3, 4, 1)).transpose(0, 4, 1, 2, 3)
    out = np.full((1, 4, 5, 6, 24), -7, np.int32).transpose(0, 4, 1, 2, 3)
    launched(isa, x, zero, pack_depthwise(w, w_zero, isa, shape), out, shape)
    slices = np.concatenate([np.full((1, 24, 5, 6), zero[0], np.uint8), x[0].transpose(1, 0, 2, 3)])
    centred = w[:, :, 0].astype(np.int64) - w_zero.astype(np.int64).reshape(-1, 1, 1, 1)
    flat = ConvShape.conv(slices.shape, centred.shape, pads=(1, 1, 1, 1), group=24)
    np.testing.assert_array_equal(out[0].transpose(1, 0, 2, 3), convolved(slices, int(zero[0]), centred, flat, (1, 1)))


@pytest.mark.parametrize(("isa", "bytes_"), WAYS, ids=NAMES)
@pytest.mark.parametrize("channels", [31, 32, 40, 48, 56, 88])
def test_last_channels(isa: Isa, bytes_: bool, channels: int) -> None:
    """Codes of all channels are stored, however many are left behind whole vectors; a residual is read where results
    are written."""
    x, w, zero = last(codes(np.uint8, 1, channels, 3, 9)), codes(np.uint8, channels, 1, 3, 3), codes(np.uint8, 1)
    w_zero = np.full(channels, 128, np.uint8) if bytes_ else codes(np.uint8, channels)
    bias = RNG.integers(-90, 90, channels).astype(np.int32)
    shape = ConvShape.conv(x.shape, w.shape, pads=(1, 1, 1, 1), group=channels)
    packed = pack_depthwise(w, w_zero, isa, shape)
    centred = w.astype(np.int64) - w_zero.astype(np.int64).reshape(-1, 1, 1, 1)
    sums = convolved(x, int(zero[0]), centred, shape, (1, 1)) + bias.reshape(1, -1, 1, 1)
    whole: Expr = Op("add", (Result(0, DType.int32), Load(0, DType.int32)), DType.int32)
    for residual in (False, True):
        out = last(codes(np.uint8, 1, channels, 3, 9))
        start, numbers, target = out.astype(np.int64), view_of(bias), view_of(out, "output")
        operands, value = [Operand(numbers, (0, 0, 1))], whole
        if residual:  # of another view of the same memory
            operands.append(Operand(target, (out.strides[0], channels, 1)))
            value = Op("add", (whole, Op("cast", (Load(1, DType.uint8),), DType.int32)), DType.int32)
        value = Op("bitand", (value, Const(255, DType.int32)), DType.int32)
        epilogue = Epilogue(Op("cast", (value,), DType.uint8), tuple(operands))
        launched(isa, x, zero, packed, out, shape, 2, epilogue, {numbers.storage: bias, target.storage: out})
        np.testing.assert_array_equal(out, (sums + residual * start) & 255)
