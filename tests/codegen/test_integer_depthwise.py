"""Depthwise convolutions of codes against their definition: images lower than windows, borders, signs, zero points."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.integer import integer_depthwise, pack_depthwise
from ranvier.codegen.llvm.isa import Isa
from tests.codegen.harness import Runner, view_of
from tests.codegen.test_integer import PATHS, codes, convolved, last, path_name
from tests.codegen.written_out import BYTES, launches_here

Array = np.ndarray[Any, Any]
# filters less their zero points are words in general, and bytes with zero points in the middle
WAYS = [*((isa, bytes_) for isa in PATHS for bytes_ in (False, True)), (BYTES, True)]
NAMES = [f"{path_name(isa)} {'bytes' if bytes_ else 'words'}" for isa, bytes_ in WAYS]
HERE = PATHS[0]


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
    views = [view_of(x), view_of(point), view_of(out, "output")]
    launches = integer_depthwise(views[0], views[1], packed, views[2], shape, isa)
    if isa is BYTES:
        launches = launches_here(launches)
    Runner(
        launches, HERE if isa is BYTES else isa, dict(zip([v.storage for v in views], (x, point, out))), split=split
    )()
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
