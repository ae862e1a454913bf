"""Convolutions of bfloat16 against float64 ones of the same rounded operands: only sums and one rounding may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.conv import (
    ConvShape,
    Packed,
    conv,
    conv_dynamic,
    conv_transpose,
    pack_transposed,
    pack_weights,
    packing,
    takes_any_layout,
    takes_bfloat,
    transposed_takes_bfloat,
)
from ranvier.codegen.llvm.conv.bfloat_plan import plan_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.test_conv import (
    DEPTHWISE,
    GROUPED,
    NARROW,
    OTHER_RANKS,
    POINTWISE,
    SPATIAL,
    THIN,
    Case,
    bound,
    channels_last,
    names,
    reference,
)
from tests.codegen.test_conv_transpose import TRANSPOSED, reference_transposed
from tests.codegen.written_out import BFLOATS, launches_here

Array = np.ndarray[Any, Any]
F32, BF16 = DType.float32, DType.bfloat16
BFLOAT = BF16.numpy


def without(isa: Isa, *names: str) -> Isa:
    """The same machine with fewer instructions."""
    features = ",".join(part for part in isa.features.split(",") if part.lstrip("+") not in names)
    return replace(isa, features=features, extensions=isa.extensions - set(names))


_BEST = harness.ISAS[0]
_VECTORS = without(_BEST, "amx-tile", "amx-int8", "amx-bf16")
_PATHS = {
    "tiles": _BEST,
    "pairs": without(_VECTORS, "avx512fp16"),
    "slow pairs": _VECTORS,
    "widened": without(_VECTORS, "avx512bf16"),
    **{isa.name: isa for isa in harness.ISAS[1:]},
}
_NEEDS = {"tiles": "amx-bf16", "pairs": "avx512bf16", "slow pairs": "avx512fp16"}
PATHS = {name: isa for name, isa in _PATHS.items() if name not in _NEEDS or isa.has(_NEEDS[name])}
QUICK = [name for name in PATHS if name in ("tiles", "pairs")]


HELD: list[Any] = []  # kernels stay compiled from test to test


def execute(launches: Sequence[Launch], isa: Isa, memory: dict[Any, Array], split: int = 1) -> None:
    if isa is BFLOATS:
        isa, launches = harness.ISAS[0], launches_here(launches, BFLOATS)
    runner = harness.Runner(launches, isa, memory, split=split, poison=0xFF)
    runner()
    HELD.append(runner.kernels)


@pytest.fixture(params=PATHS.values(), ids=PATHS.keys())
def isa(request: pytest.FixtureRequest) -> Isa:
    found: Isa = request.param
    return found


def compare(found: Array, want: Array, sums: Array) -> None:
    """``sums``: the size of what was added up, by output."""
    bound = 2e-6 * np.maximum(1.0, sums)
    if found.dtype == BFLOAT:
        bound = bound + np.abs(want) * 2.0**-8
    with np.errstate(invalid="ignore"):
        off = np.abs(found.astype(np.float64) - want) - bound
    assert not (off > 0).any(), f"off by {np.nanmax(off)} beyond rounding"
    np.testing.assert_array_equal(np.isnan(found.astype(np.float64)), np.isnan(want))
    endless = np.isinf(want)
    np.testing.assert_array_equal(found[endless].astype(np.float64), want[endless])


def run_case(
    case: Case,
    isa: Isa,
    *,
    stored: DType = BF16,
    result: DType = BF16,
    planar: bool = False,
    room: int = 0,
    split: int = 1,
    threads: int = 2,
    spoilt: bool = False,
    epilogue: Epilogue | None = None,
    bias: Array | None = None,
) -> list[Launch]:
    """``bias``: what the epilogue adds to each channel, if there is one."""
    rng = np.random.default_rng(sum(case.x) + case.cout)
    x = rng.standard_normal(case.x).astype(BFLOAT)
    if spoilt:  # corners, where padding is near, and the last channel, where a row's padding is
        x[(0, -1, *(0,) * case.rank)], x[(-1, 0, *(-1,) * case.rank)] = np.nan, np.inf
    w = case.weights(rng, BFLOAT).astype(np.float32)
    with np.errstate(invalid="ignore"):
        want = reference(case, x.astype(np.float64), w)
        sums = np.nan_to_num(reference(case, np.abs(x.astype(np.float64)), np.abs(w)), posinf=0.0)
    want = want if bias is None else want + bias.reshape(-1, *(1,) * case.rank)
    shape = case.shape(w)
    x = x.astype(stored.numpy)
    source = x if planar else channels_last(x, room, room)
    target = channels_last(np.full(want.shape, np.nan, result.numpy), room, room)
    (x_view, x_data), (out, out_data) = bound(source, "input"), bound(target, "output")
    packed = pack_weights(w, isa, shape, dtype=BF16, winograd=False)
    launches = conv(x_view, packed, out, shape, isa, threads=threads, epilogue=epilogue)
    execute(launches, isa, {x_view.storage: x_data, out.storage: out_data}, split=split)
    compare(target, want, sums)
    if room:
        beside = np.moveaxis(out_data.reshape(*np.moveaxis(target, 1, -1).shape[:-1], -1), -1, 0)
        assert np.isnan(beside[:room].astype(np.float32)).all(), "wrote before its channels"
        assert np.isnan(beside[-room:].astype(np.float32)).all(), "wrote behind its channels"
    return launches


ALL = [*POINTWISE, *SPATIAL, *GROUPED, *DEPTHWISE, *THIN, *NARROW, *OTHER_RANKS]
LARGER = [
    Case((1, 64, 9, 11), 96, (1, 1)),
    Case((2, 96, 5, 7), 33, (1, 1)),
    Case((1, 64, 2, 2), 40, (1, 1)),
    Case((1, 64, 14, 14), 48, (3, 3), pads=(1, 1, 1, 1)),
    Case((2, 40, 13, 30), 50, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    Case((1, 32, 17, 16), 64, (3, 3), strides=(2, 3), dilations=(3, 2), pads=(2, 1, 2, 2)),
    Case((1, 24, 9, 9), 64, (5, 5), pads=(2, 2, 2, 2)),
    Case((1, 128, 6, 6), 64, (3, 3), pads=(1, 1, 1, 1), group=2),
    Case((1, 800, 9, 9), 40, (1, 1)),
    Case((1, 810, 5, 9), 17, (1, 1), strides=(2, 2)),
    Case((1, 20, 12, 12), 96, (3, 3), dilations=(2, 3), pads=(2, 3, 2, 3)),
    Case((1, 3, 30, 30), 40, (11, 11), strides=(4, 4), pads=(2, 2, 2, 2)),
    Case((1, 3, 9, 40), 40, (3, 17), pads=(1, 8, 1, 8)),
    Case((1, 65, 300), 31, (5,), pads=(2, 2)),
    Case((1, 64, 40), 32, (3,), dilations=(4,), pads=(4, 4)),
    # depthwise, by two vectors of channels at a time: alone, and with some left
    Case((1, 64, 12, 10), 64, (3, 3), pads=(1, 1, 1, 1), group=64),
    Case((1, 32, 9, 15), 32, (3, 3), pads=(1, 1, 1, 1), group=32),
    Case((2, 96, 7, 9), 96, (5, 5), strides=(2, 2), pads=(2, 2, 2, 2), group=96),
    Case((1, 77, 8, 13), 77, (3, 3), dilations=(2, 2), pads=(2, 2, 2, 2), group=77),
    Case((1, 64, 4, 30), 64, (1, 15), pads=(0, 7, 0, 7), group=64),
    Case((1, 48, 4, 5, 6), 48, (3, 3, 3), pads=(1, 1, 1, 1, 1, 1), group=48),
]


@pytest.mark.parametrize("case", [*ALL, *LARGER], ids=names([*ALL, *LARGER]))
def test_against_float64(isa: Isa, case: Case) -> None:
    run_case(case, isa, split=3)


WINDOWS = [
    Case((1, 64, 5, 10), 64, (3, 3), pads=(1, 1, 1, 1), group=64),
    Case((2, 32, 4, 9), 32, (5, 5), strides=(2, 2), pads=(2, 2, 2, 2), group=32),
    Case((1, 40, 3, 24), 40, (5, 5), pads=(2, 2, 2, 2), group=40),
]


@pytest.mark.parametrize("case", WINDOWS, ids=names(WINDOWS))
def test_windows_over_words_of_two(case: Case) -> None:
    """Kernels of AVX-512, whatever processor runs them."""
    bias = np.random.default_rng(3).standard_normal(case.cout).astype(np.float32)
    value = Op("add", (Result(0, F32), Load(0, F32)), F32)
    epilogue = Epilogue(value, (Operand(View.constant(bias, F32), (0, 0, 1)),))
    for result in (BF16, F32):
        run_case(case, BFLOATS, result=result, epilogue=epilogue, bias=bias)


SOME = [
    *(POINTWISE[0], POINTWISE[1], SPATIAL[1], GROUPED[1], DEPTHWISE[1], THIN[1], NARROW[0], NARROW[1]),
    *(LARGER[0], LARGER[4]),
]


@pytest.mark.parametrize("case", SOME, ids=names(SOME))
def test_results_in_float32(isa: Isa, case: Case) -> None:
    run_case(case, isa, result=F32)


@pytest.mark.parametrize("case", SOME, ids=names(SOME))
def test_slices_of_channels(isa: Isa, case: Case) -> None:
    """Input and output are slices of wider buffers; what lies beside the output stays."""
    run_case(case, isa, room=5)


@pytest.mark.parametrize("case", [*SOME, *LARGER], ids=names([*SOME, *LARGER]))
def test_nan_and_infinity_stay_where_they_are(isa: Isa, case: Case) -> None:
    """What is multiplied beyond an image, a window or the last channel is nothing, not something times zero."""
    run_case(case, isa, spoilt=True)


@pytest.mark.parametrize("split", [1, 2, 1000])
@pytest.mark.parametrize("case", SOME, ids=names(SOME))
def test_any_split_gives_the_same(case: Case, split: int) -> None:
    run_case(case, _BEST, split=split, threads=16)


@pytest.mark.parametrize("stored", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", THIN, ids=names(THIN))
def test_images_as_users_have_them(case: Case, stored: DType) -> None:
    """Few channels that lie apart, stored in either type: woven and rounded as they are copied."""
    for isa in PATHS.values():
        if takes_bfloat(case.shape(np.zeros((case.cout, case.x[1], *case.kernel))), isa):
            assert takes_any_layout(case.shape(np.zeros((case.cout, case.x[1], *case.kernel))))
            run_case(case, isa, stored=stored, planar=True, split=2, threads=8)


@pytest.mark.parametrize("path", QUICK)
@pytest.mark.parametrize("case", [SPATIAL[1], LARGER[0], LARGER[3]], ids=names([SPATIAL[1], LARGER[0], LARGER[3]]))
def test_inputs_in_float32_are_rounded(path: str, case: Case) -> None:
    run_case(case, PATHS[path], stored=F32)


@pytest.mark.parametrize("path", QUICK)
def test_every_remainder(path: str) -> None:
    """Of channels in and out, of widths and of heights, drawn at random."""
    rng = np.random.default_rng(11)
    for _ in range(40):
        cin, cout, height, width, kernel, stride = rng.integers((1, 1, 1, 1, 1, 1), (75, 70, 12, 40, 4, 3))
        pad = int(rng.integers(0, kernel))
        case = Case(
            (1, int(cin), int(height + kernel), int(width + kernel)),
            int(cout),
            (int(kernel),) * 2,
            strides=(int(stride),) * 2,
            pads=(pad, 0, 1, pad),
        )
        run_case(case, PATHS[path], split=2, threads=int(rng.integers(1, 5)))


@pytest.mark.parametrize("path", QUICK)
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 12, 40, 9), 12, (7, 1), pads=(51, 0, 51, 0), dilations=(17, 1)),  # copied whole
        Case((2, 40, 60, 90), 20, (3, 3), pads=(24, 24, 24, 24), dilations=(24, 24)),  # bands of rows
        Case((1, 300, 21, 30), 33, (3, 3), pads=(12, 12, 12, 12), dilations=(12, 12)),
        Case((1, 64, 70, 70), 16, (5, 2), pads=(0, 3, 40, 0), dilations=(11, 4)),
        Case((1, 6, 90, 120), 48, (5, 5), pads=(30, 30, 30, 30), dilations=(15, 1)),  # windows are gathered
        Case((1, 3, 80, 200), 16, (3, 3), pads=(20, 1, 20, 1), dilations=(20, 1)),  # strips
        Case((1, 64, 50, 50), 16, (3, 3), strides=(2, 2), pads=(12, 12, 12, 12), dilations=(13, 13)),
    ],
)
def test_taps_that_are_far_apart(path: str, case: Case) -> None:
    run_case(case, PATHS[path], split=2, threads=2)
    run_case(case, PATHS[path])


def test_rows_of_taps_far_apart_are_copied_alone() -> None:
    """The copy of a block does not hold what lies between the rows of taps, unless that is all of a small image."""
    far = Case((1, 512, 33, 33), 64, (3, 3), pads=(24, 24, 24, 24), dilations=(24, 24))
    small = Case((1, 12, 128, 62), 12, (7, 1), pads=(51, 0, 51, 0), dilations=(17, 1))
    for case, least, most in ((far, 0.2, 0.4), (small, 0.8, 1.0)):
        shape = case.shape(np.zeros((case.cout, case.x[1], *case.kernel)))
        sides = np.zeros(case.x, BFLOAT), np.zeros((1, case.cout, *shape.out[1:]), BFLOAT)
        (x, _), (out, _) = (bound(channels_last(each), kind) for each, kind in zip(sides, ("input", "output")))
        plan, _, _ = plan_of(x, out, shape, None, 1 << 16, 1)
        assert least * (1 << 20) < plan.scratch < most * (1 << 20)


def test_rows_too_long_for_a_block() -> None:
    """A row of outputs whose input is more than a block takes is cut."""
    run_case(Case((1, 128, 9000), 32, (3,), pads=(1, 1)), _BEST, split=2)


def epilogue_case(bias: Array, added: View) -> Epilogue:
    total: Expr = Op("add", (Op("add", (Result(0, F32), Load(0, F32)), F32), Load(1, F32)), F32)
    value = Op("mul", (Op("max", (total, Const(0.0, F32)), F32), Op("tanh", (Load(1, F32),), F32)), F32)
    images, channels, *spatial = added.strides
    return Epilogue(
        value, (Operand(View.constant(bias, F32), (0, 0, 1)), Operand(added, (images, spatial[-1], channels)))
    )


@pytest.mark.parametrize("stored", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", SOME, ids=names(SOME))
def test_epilogue_in_float32(isa: Isa, case: Case, stored: DType) -> None:
    """A bias and a summand that is read where the result is written, its memory being the result's where it fits."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(case.x).astype(BFLOAT)
    w = case.weights(rng, BFLOAT).astype(np.float32)
    bias = rng.standard_normal(case.cout).astype(np.float32)
    product = reference(case, x.astype(np.float64), w)
    more = rng.standard_normal(product.shape).astype(stored.numpy)
    shape = case.shape(w)
    wide = more.astype(np.float64)
    want = np.maximum(product + bias.reshape(-1, *(1,) * case.rank) + wide, 0) * np.tanh(wide)
    source, addend = channels_last(x), channels_last(more)
    (x_view, x_data), (added, added_data) = bound(source, "input"), bound(addend, "output")
    epilogue = epilogue_case(bias, added)
    packed = pack_weights(w, isa, shape, dtype=BF16, winograd=False)
    launches = conv(x_view, packed, added, shape, isa, epilogue=epilogue, threads=2)
    execute(launches, isa, {x_view.storage: x_data, added.storage: added_data}, split=2)
    sums = reference(case, np.abs(x.astype(np.float64)), np.abs(w))
    compare(addend, want, sums + np.abs(wide))


@pytest.mark.parametrize("result", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", TRANSPOSED, ids=names(TRANSPOSED))
def test_transposed(isa: Isa, case: Case, result: DType) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal(case.x).astype(BFLOAT)
    w = case.weights(rng, BFLOAT, transposed=True).astype(np.float32)
    shape = case.shape_transposed(w)
    want = reference_transposed(case, x.astype(np.float64), w)
    sums = reference_transposed(case, np.abs(x.astype(np.float64)), np.abs(w))
    source, target = channels_last(x), channels_last(np.full(want.shape, np.nan, result.numpy))
    (x_view, x_data), (out, out_data) = bound(source, "input"), bound(target, "output")
    packed = pack_transposed(w, isa, shape, dtype=BF16)
    launches = conv_transpose(x_view, packed, out, shape, isa, threads=2)
    execute(launches, isa, {x_view.storage: x_data, out.storage: out_data}, split=2)
    compare(target, want, sums)
    if transposed_takes_bfloat(shape, isa):
        assert all(p.kind.startswith("bfloat") or p.kind == "depthwise" for p in packed)


def test_weights_of_the_graph_meet_widened_inputs(isa: Isa) -> None:
    case = SPATIAL[1]
    rng = np.random.default_rng(8)
    x, w = rng.standard_normal(case.x).astype(BFLOAT), case.weights(rng, np.float32)
    want = reference(case, x.astype(np.float64), w)
    source, target = channels_last(x), channels_last(np.full(want.shape, np.nan, np.float32))
    (x_view, x_data), (out, out_data), (w_view, w_data) = (
        *(bound(source, "input"), bound(target, "output")),
        bound(w, "input"),
    )
    launches = conv_dynamic(x_view, w_view, out, case.shape(w), isa)
    execute(launches, isa, {x_view.storage: x_data, out.storage: out_data, w_view.storage: w_data})
    compare(target, want, reference(case, np.abs(x.astype(np.float64)), np.abs(w)))


def test_which_kernels_multiply_in_bfloat16() -> None:
    plain = ConvShape.conv((1, 64, 8, 8), (64, 64, 3, 3), pads=(1, 1, 1, 1))
    deep = ConvShape.conv((1, 64, 4, 8, 8), (64, 64, 3, 3, 3), pads=(1,) * 6)
    each = ConvShape.conv((1, 64, 8, 8), (64, 1, 3, 3), pads=(1, 1, 1, 1), group=64)
    for name, isa in PATHS.items():
        assert takes_bfloat(plain, isa) == (name in QUICK)
        assert not takes_bfloat(deep, isa)
        assert takes_bfloat(each, isa)
        kinds = [packing(shape, isa, dtype=BF16, winograd=False) for shape in (plain, deep, each)]
        assert kinds == ["bfloat lines" if name in QUICK else "gemm", "gemm", "depthwise"]


def test_packed_weights_are_half_as_large() -> None:
    if not QUICK:
        pytest.skip("no bfloat16 products here")
    w = np.ones((64, 64, 3, 3), np.float32)
    shape = ConvShape.conv((1, 64, 8, 8), w.shape, pads=(1, 1, 1, 1))
    narrow: Packed = pack_weights(w, PATHS[QUICK[0]], shape, dtype=BF16)
    assert narrow.storage.nbytes == w.nbytes // 2
