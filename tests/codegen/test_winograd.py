"""Winograd convolutions against the independent float64 one, and their rounding error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.conv import ConvShape, conv, dynamic, pack_weights, packing
from ranvier.codegen.llvm.conv import winograd as kernels
from ranvier.codegen.llvm.conv.transforms import filter_transform
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.loops.ir import Epilogue, Expr
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.test_conv import (
    EPILOGUES,
    ISA_IDS,
    Case,
    bound,
    channels_last,
    evaluated,
    execute,
    operands_for,
    reference,
)

Array = np.ndarray[Any, Any]
F32 = DType.float32
# what typical layers may lose against exact arithmetic, as a share of the largest output
ALLOWED = {2: 2e-6, 4: 1e-5, 6: 3e-5}


@pytest.fixture(params=harness.ISAS, ids=ISA_IDS)
def isa(request: pytest.FixtureRequest) -> Isa:
    found: Isa = request.param
    return found


def run_case(
    case: Case, m: int, isa: Isa, *, expr: Expr | None = None, split: int = 1, threads: int = 1, room: int = 0
) -> float:
    """The largest error as a share of the largest output."""
    rng = np.random.default_rng(sum(case.x))
    x = np.maximum(rng.standard_normal(case.x), 0).astype(np.float32)
    w = case.weights(rng, np.float32)
    w /= np.float32(np.sqrt(9 * case.x[1]))
    shape = case.shape(w)
    want = reference(case, x, w)
    epilogue = None
    if expr is not None:
        operands, values = operands_for(want.shape, rng)
        want = evaluated(expr, want, values)
        epilogue = Epilogue(expr, tuple(operands))
    source = channels_last(x, room, room)
    target = channels_last(np.full(want.shape, np.nan, np.float32), room, room)
    (x_view, x_data), (out, out_data) = bound(source, "input"), bound(target, "output")
    packed = kernels.pack(w, isa, shape, F32, m)
    launches = conv(x_view, packed, out, shape, isa, epilogue=epilogue, threads=threads)
    execute(launches, isa, {x_view.storage: x_data, out.storage: out_data}, split=split)
    return float(np.abs(target - want).max() / np.abs(want).max())


CASES = [
    Case((1, 32, 14, 14), 40, (3, 3), pads=(1, 1, 1, 1)),
    Case((2, 17, 9, 11), 64, (3, 3)),
    Case((1, 40, 13, 6), 7, (3, 3), pads=(0, 1, 2, 1)),
    Case((3, 5, 4, 3), 16, (3, 3), pads=(1, 1, 1, 1)),
]


@pytest.mark.parametrize("m", [2, 4, 6])
@pytest.mark.parametrize("case", CASES, ids=["even", "odd", "narrow", "small"])
def test_against_float64(isa: Isa, case: Case, m: int) -> None:
    assert run_case(case, m, isa, split=2, threads=2) < ALLOWED[m]


@pytest.mark.parametrize("m", [2, 4, 6])
@pytest.mark.parametrize("name", ["residual", "silu"])
def test_epilogue(isa: Isa, name: str, m: int) -> None:
    assert run_case(CASES[2], m, isa, expr=EPILOGUES[name]) < ALLOWED[m]


@pytest.mark.parametrize("m", [2, 4, 6])
def test_slices_of_channels(isa: Isa, m: int) -> None:
    assert run_case(CASES[0], m, isa, room=3) < ALLOWED[m]


@pytest.mark.parametrize("split", [1, 3, 100])
def test_any_split_gives_the_same(split: int) -> None:
    case = Case((2, 20, 30, 30), 130, (3, 3), pads=(1, 1, 1, 1))
    assert run_case(case, 4, harness.ISAS[0], split=split, threads=4) < ALLOWED[4]


def test_depth_keeps_the_bound() -> None:
    """Rounding grows with the number of channels; the deepest usual layers must still hold."""
    for channels in (256, 512):
        case = Case((1, channels, 8, 8), 32, (3, 3), pads=(1, 1, 1, 1))
        assert run_case(case, 4, harness.ISAS[0]) < ALLOWED[4]
        assert run_case(case, 2, harness.ISAS[0]) < ALLOWED[2]


def test_opt_out() -> None:
    isa = harness.ISAS[0]
    shape = ConvShape.conv((1, 64, 56, 56), (64, 64, 3, 3), pads=(1, 1, 1, 1))
    assert packing(shape, isa).startswith("winograd")
    assert packing(shape, isa, winograd=False) == "gemm"
    w = np.zeros((64, 64, 3, 3), np.float32)
    assert pack_weights(w, isa, shape, winograd=False).kind == "gemm"


@pytest.mark.parametrize("m", [2, 4, 6])
def test_filters_of_a_constant_image(m: int) -> None:
    """Each position is a polynomial product: the transformed filter of one tap is an outer product of powers."""
    w = np.zeros((3, 3, 1))
    w[1, 2, 0] = 1.0
    found = (filter_transform(m, np.float64) @ w.reshape(9, 1)).reshape(m + 2, m + 2)
    assert np.linalg.matrix_rank(found) == 1
    assert not found[-1].any()  # the tap of the middle row does not reach infinity


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=["even", "odd", "narrow", "small"])
def test_weights_transformed_at_run(isa: Isa, case: Case, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "packing", lambda *_, **__: f"winograd{m}")
    rng = np.random.default_rng(sum(case.x))
    x = rng.standard_normal(case.x).astype(np.float32)
    w = case.weights(rng, np.float32)
    w /= np.float32(np.sqrt(9 * case.x[1]))
    want = reference(case, x, w)
    target = channels_last(np.full(want.shape, np.nan, np.float32))
    (x_view, x_data), (w_view, w_data) = bound(channels_last(x), "input"), bound(w, "input")
    out, out_data = bound(target, "output")
    launches = dynamic.conv_dynamic(x_view, w_view, out, case.shape(w), isa, winograd=True, threads=2)
    assert any("winograd" in each.spec.name for each in launches)
    memory = {x_view.storage: x_data, w_view.storage: w_data, out.storage: out_data}
    execute(launches, isa, memory, split=2)
    assert np.abs(target - want).max() < ALLOWED[m] * np.abs(want).max()


def test_packing_at_run_counts() -> None:
    """Few pixels: transforming the weights would take longer than multiplying with them."""
    few = ConvShape.conv((1, 64, 8, 8), (64, 64, 3, 3), pads=(1, 1, 1, 1))
    wide = named("avx512", "x86_64")
    assert packing(few, wide).startswith("winograd")
    assert packing(few, wide, packed_at_run=True) == "gemm"


@pytest.mark.parametrize(
    "size, channels, wide, narrow",
    [(28, 128, "winograd4", "winograd4"), (7, 512, "winograd2", "winograd4"), (4, 512, "gemm", "winograd2")],
)
def test_slower_arithmetic_saves_more_of_it(size: int, channels: int, wide: str, narrow: str) -> None:
    """The same bytes of weights weigh less beside products that take longer."""
    shape = ConvShape.conv((1, channels, size, size), (channels, channels, 3, 3), pads=(1, 1, 1, 1))
    assert packing(shape, named("avx512", "x86_64")) == wide
    assert packing(shape, named("neon", "aarch64")) == narrow
