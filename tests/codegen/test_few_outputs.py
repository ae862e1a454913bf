"""Convolutions with filters larger than their results (gradients by weights) against an independent float64 one."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.codegen.llvm.conv import ConvShape, conv_few_outputs, has_few_outputs, squares_backwards
from ranvier.codegen.llvm.isa import Isa
from tests.codegen import harness
from tests.codegen.test_conv import ISA_IDS, Case, bound, execute, reference

CASES = {
    "stride one": Case((20, 3, 8, 9), 17, (8, 9), pads=(1, 1, 1, 1)),
    "no pads": Case((16, 2, 10, 10), 16, (8, 8)),
    "stride two": Case((9, 4, 10, 10), 24, (5, 5), dilations=(2, 2), pads=(1, 1, 0, 0)),
    "dilated": Case((5, 3, 12, 12), 7, (8, 8), strides=(2, 2)),
    "one tap": Case((24, 4, 6, 6), 10, (6, 6)),
    "one tap, stride two": Case((24, 4, 7, 7), 10, (4, 4), dilations=(2, 2)),
    "thin": Case((3, 4, 12, 12), 16, (8, 8)),
    "a line": Case((6, 3, 40), 5, (36,), pads=(1, 1)),
}


@pytest.fixture(params=harness.ISAS, ids=ISA_IDS)
def isa(request: pytest.FixtureRequest) -> Isa:
    found: Isa = request.param
    return found


def error(case: Case, isa: Isa, *, innermost: bool, winograd: bool, square: int = 0) -> float:
    """The largest error as a share of the largest result; operands with their first axis innermost, or row-major."""
    rng = np.random.default_rng(sum(case.x))
    x = rng.standard_normal(case.x).astype(np.float32)
    w = case.weights(rng, np.float32)
    want = reference(case, x, w)
    if innermost:
        x, w = (np.moveaxis(np.ascontiguousarray(np.moveaxis(each, 0, -1)), -1, 0) for each in (x, w))
    target = np.swapaxes(np.full((want.shape[1], want.shape[0], *want.shape[2:]), np.nan, np.float32), 0, 1)
    (x_view, x_data), (w_view, w_data), (out, out_data) = (
        *(bound(each, "input") for each in (x, w)),
        bound(target, "output"),
    )
    shape: ConvShape = case.shape(w)
    assert has_few_outputs(shape)
    if square:
        launches = squares_backwards.launches(x_view, w_view, out, shape, isa, 2, square)
    else:
        launches = conv_few_outputs(x_view, w_view, out, shape, isa, threads=2, winograd=winograd)
    memory = {x_view.storage: x_data, w_view.storage: w_data, out.storage: out_data}
    execute(launches, isa, memory, split=2)
    return float(np.abs(target - want).max() / np.abs(want).max())


@pytest.mark.parametrize("innermost", [True, False], ids=["channels last", "planar"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_by_windows(isa: Isa, case: Case, innermost: bool) -> None:
    assert error(case, isa, innermost=innermost, winograd=False) < 2e-6


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("name", ["stride one", "no pads"])
def test_by_squares(isa: Isa, name: str, m: int) -> None:
    assert error(CASES[name], isa, innermost=True, winograd=True, square=m) < {2: 2e-6, 4: 1e-5}[m]


def test_which_way() -> None:
    def of(batch: int, channels: int, size: int) -> ConvShape:
        return ConvShape.conv((channels, batch, size, size), (channels, batch, size, size), pads=(1, 1, 1, 1))

    assert squares_backwards.square(of(32, 64, 32)) == 4
    assert squares_backwards.square(of(32, 8, 32)) == 0, "channels do not fill a vector"
    strided = ConvShape.conv((64, 32, 32, 32), (64, 32, 16, 16), dilations=(2, 2), pads=(1, 1, 0, 0))
    assert has_few_outputs(strided) and squares_backwards.square(strided) == 0
    assert not has_few_outputs(ConvShape.conv((8, 16, 9, 9), (16, 16, 3, 3))), "an ordinary convolution"
