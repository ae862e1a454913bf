"""Convolutions against an independent one: windows of the padded input, contracted in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import Code, Launch
from ranvier.codegen.llvm.compiler import compile_object
from ranvier.codegen.llvm.conv import (
    ConvShape,
    conv,
    conv_dynamic,
    pack_weights,
    packing,
    takes_any_layout,
)
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.llvm.library import source
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen import harness

Array = np.ndarray[Any, Any]
F32 = DType.float32
ISA_IDS = [isa.name for isa in harness.ISAS]


HELD: list[Any] = []  # kernels stay compiled from test to test


def execute(launches: Sequence[Launch], isa: Isa, memory: dict[Any, Array], split: int = 1) -> None:
    runner = harness.Runner(launches, isa, memory, split=split)
    runner()
    HELD.append(runner.kernels)


@pytest.fixture(params=harness.ISAS, ids=ISA_IDS)
def isa(request: pytest.FixtureRequest) -> Isa:
    found: Isa = request.param
    return found


@dataclass(frozen=True)
class Case:
    x: tuple[int, ...]
    cout: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    group: int = 1
    extra: tuple[int, ...] = ()  # output_padding of a transposed one

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def full(self, values: tuple[int, ...], filler: int, count: int = 1) -> tuple[int, ...]:
        return values or (filler,) * (count * self.rank)

    def weights(self, rng: np.random.Generator, dtype: Any, *, transposed: bool = False) -> Array:
        cin = self.x[1]
        channels = (cin, self.cout // self.group) if transposed else (self.cout, cin // self.group)
        return rng.standard_normal((*channels, *self.kernel)).astype(dtype)

    def shape(self, w: Array) -> ConvShape:
        return ConvShape.conv(
            self.x, w.shape, strides=self.strides, dilations=self.dilations, pads=self.pads, group=self.group
        )

    def shape_transposed(self, w: Array) -> ConvShape:
        return ConvShape.transpose(
            self.x,
            w.shape,
            strides=self.strides,
            dilations=self.dilations,
            pads=self.pads,
            output_padding=self.extra,
            group=self.group,
        )


def reference(case: Case, x: Array, w: Array) -> Array:
    rank = case.rank
    strides, dilations = case.full(case.strides, 1), case.full(case.dilations, 1)
    pads = case.full(case.pads, 0, 2)
    spatial = tuple(range(2, 2 + rank))
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *((pads[i], pads[rank + i]) for i in range(rank))])
    extent = [(k - 1) * d + 1 for k, d in zip(case.kernel, dilations)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, extent, axis=spatial)
    every = (slice(None), slice(None), *(slice(None, None, s) for s in strides))
    windows = windows[(*every, *(slice(None, None, d) for d in dilations))]
    n, g = x.shape[0], case.group
    windows = windows.reshape(n, g, x.shape[1] // g, *windows.shape[2:])
    weights = w.astype(np.float64).reshape(g, w.shape[0] // g, *w.shape[1:])
    out, taps = "abc"[:rank], "xyz"[:rank]
    made = np.einsum(f"ngi{out}{taps},goi{taps}->ngo{out}", windows, weights, optimize=True)
    return np.asarray(made.reshape(n, w.shape[0], *made.shape[3:]))


def channels_last(array: Array, room: int = 0, before: int = 0) -> Array:
    """The same values with channels innermost; with ``room``, as a slice of a buffer with more channels."""
    n, c, *spatial = array.shape
    whole = np.full((n, *spatial, before + c + room), np.nan, array.dtype)
    view = np.moveaxis(whole[..., before : before + c], -1, 1)
    view[...] = array
    return view


def base_of(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def bound(array: Array, kind: str) -> tuple[View, Array]:
    """A view of an array that may be a slice, and the buffer behind it."""
    whole = base_of(array)
    view = harness.view_of(array, kind)
    skip = (array.ctypes.data - whole.ctypes.data) // array.itemsize
    return View(view.storage, view.dtype, view.shape, view.strides, skip), whole


def compare(found: Array, want: Array, terms: int = 1, sums: Array | None = None) -> None:
    """Equal to within rounding, which grows with the size of the ``sums`` and the root of their number of terms."""
    scale = max(1.0, float(np.abs(want if sums is None else sums).max())) if want.size else 1.0
    bound = max(2e-6, 1e-7 * float(np.sqrt(terms))) if found.dtype == np.float32 else 1e-14
    np.testing.assert_allclose(found, want, rtol=0, atol=bound * scale)


def run_case(
    case: Case,
    isa: Isa,
    *,
    dtype: Any = np.float32,
    split: int = 1,
    threads: int = 2,
    room: int = 0,
    planar: bool = False,
    dynamic: bool = False,
) -> None:
    rng = np.random.default_rng(sum(case.x))
    x = rng.standard_normal(case.x).astype(dtype)
    w = case.weights(rng, dtype)
    want = reference(case, x, w)
    shape = case.shape(w)
    source = x if planar else channels_last(x, room, room)
    target = channels_last(np.full(want.shape, np.nan, dtype), room, room)
    x_view, x_data = bound(source, "input")
    out, out_data = bound(target, "output")
    memory = {x_view.storage: x_data, out.storage: out_data}
    if dynamic:
        w_view, w_data = bound(w, "input")
        memory[w_view.storage] = w_data
        launches = conv_dynamic(x_view, w_view, out, shape, isa, threads=threads)
    else:
        packed = pack_weights(w, isa, shape, winograd=False)
        launches = conv(x_view, packed, out, shape, isa, threads=threads)
    execute(launches, isa, memory, split=split)
    compare(target, want, shape.depth * shape.taps)
    if room:
        outside = np.moveaxis(out_data.reshape(*np.moveaxis(target, 1, -1).shape[:-1], -1), -1, 0)
        assert np.isnan(outside[:room]).all() and np.isnan(outside[-room:]).all(), "wrote beside its channels"


POINTWISE = [
    Case((1, 64, 7, 7), 64, (1, 1)),
    Case((2, 40, 5, 3), 100, (1, 1)),
    Case((1, 17, 9, 4), 7, (1, 1)),
    Case((1, 100, 1, 1), 24, (1, 1)),
    Case((1, 24, 15, 15), 17, (1, 1), strides=(2, 2)),
    Case((1, 16, 6, 6), 1, (1, 1), pads=(1, 0, 1, 2)),
]
SPATIAL = [
    Case((1, 16, 14, 14), 24, (3, 3), pads=(1, 1, 1, 1)),
    Case((2, 7, 9, 8), 40, (3, 3), pads=(0, 1, 2, 1)),
    Case((1, 24, 11, 10), 17, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    Case((1, 17, 13, 13), 16, (5, 5), strides=(3, 2), pads=(2, 2, 2, 2)),
    Case((1, 16, 12, 12), 64, (3, 3), dilations=(2, 3), pads=(2, 3, 2, 3)),
    Case((1, 8, 9, 20), 16, (1, 7), pads=(0, 3, 0, 3)),
    Case((1, 8, 20, 9), 16, (7, 1), pads=(3, 0, 3, 0)),
    Case((1, 5, 4, 4), 3, (4, 4)),
    Case((1, 6, 3, 3), 8, (3, 3), pads=(3, 3, 3, 3)),
]
GROUPED = [
    Case((1, 32, 8, 8), 32, (3, 3), pads=(1, 1, 1, 1), group=4),
    Case((2, 12, 7, 7), 20, (3, 3), strides=(2, 2), group=4),
    Case((1, 6, 5, 5), 4, (1, 1), group=2),
]
DEPTHWISE = [
    Case((1, 16, 14, 14), 16, (3, 3), pads=(1, 1, 1, 1), group=16),
    Case((2, 40, 9, 7), 40, (3, 3), pads=(1, 1, 1, 1), group=40),
    Case((1, 24, 13, 11), 24, (3, 3), strides=(2, 2), pads=(0, 0, 1, 1), group=24),
    Case((1, 17, 10, 12), 17, (5, 5), pads=(2, 2, 2, 2), group=17),
    Case((1, 100, 8, 8), 100, (7, 7), pads=(3, 3, 3, 3), group=100),
    Case((1, 7, 9, 9), 7, (3, 3), dilations=(2, 2), pads=(2, 2, 2, 2), group=7),
    Case((1, 3, 2, 2), 3, (3, 3), pads=(1, 1, 1, 1), group=3),
    Case((1, 9, 6, 6), 27, (3, 3), pads=(1, 1, 1, 1), group=9),
    Case((1, 5, 4, 30), 5, (1, 15), pads=(0, 7, 0, 7), group=5),
    Case((2, 21, 30, 1), 21, (20, 1), pads=(10, 0, 9, 0), group=21),  # a signal along the height
    Case((1, 12, 31, 1), 24, (3, 1), strides=(2, 1), dilations=(2, 1), pads=(1, 0, 2, 0), group=12),
    Case((1, 37, 4, 200), 37, (3, 3), pads=(1, 1, 1, 1), group=37),  # rows of which a line of channels fills a cache
]
THIN = [
    Case((1, 4, 9, 8), 1, (3, 3), pads=(1, 1, 1, 1)),
    Case((1, 3, 30, 31), 16, (7, 7), strides=(2, 2), pads=(3, 3, 3, 3)),
    Case((2, 3, 20, 37), 24, (3, 3), pads=(1, 1, 1, 1)),
    Case((1, 1, 19, 40), 40, (5, 5), pads=(2, 2, 2, 2)),
    Case((1, 4, 12, 12), 7, (3, 3), strides=(2, 1), dilations=(2, 2), pads=(1, 2, 1, 2)),
    Case((1, 2, 16, 16), 17, (4, 4), strides=(4, 4)),
    Case((1, 3, 5, 5), 8, (1, 1), pads=(1, 1, 1, 1)),
    Case((2, 3, 41, 98), 16, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),  # tiles that end with a line
    Case((1, 3, 4, 9000), 16, (3, 3), pads=(1, 1, 1, 1)),  # a line is more than a strip
    Case((1, 2, 19, 60), 33, (3, 2), strides=(1, 2), dilations=(2, 1), pads=(0, 1, 2, 0)),
    Case((1, 4, 45, 50), 20, (31, 31), pads=(3, 2, 0, 1)),  # a panel that is worked through in chunks
    Case((1, 3, 6, 60), 24, (3, 3), pads=(4, 7, 4, 6)),  # windows that do not meet the image
    Case((2, 1, 9, 65), 72, (3, 5), strides=(2, 3), dilations=(2, 1), pads=(2, 2, 2, 2)),
]
NARROW = [
    Case((1, 64, 9, 10), 1, (3, 3), pads=(1, 1, 1, 1)),
    Case((2, 35, 7, 5), 3, (1, 1)),
    Case((1, 24, 8, 8), 2, (5, 3), strides=(2, 1), pads=(2, 1, 2, 1)),
    Case((1, 40, 5, 5, 4), 1, (3, 3, 3), pads=(1, 1, 1, 1, 1, 1)),
]
OTHER_RANKS = [
    Case((1, 1, 900), 16, (10,), strides=(5,)),
    Case((2, 24, 50), 40, (3,), pads=(1, 1)),
    Case((1, 16, 40), 16, (5,), pads=(2, 2), group=16),
    Case((1, 8, 4, 5, 6), 12, (3, 3, 3), pads=(1, 1, 1, 1, 1, 1)),
    Case((1, 3, 6, 6, 6), 8, (3, 3, 3), strides=(1, 2, 2), pads=(1, 0, 1, 1, 2, 0)),
    Case((1, 10, 4, 6, 5), 10, (3, 3, 3), strides=(2, 1, 1), pads=(1, 1, 1, 1, 1, 1), group=10),
]


def names(cases: Sequence[Case]) -> list[str]:
    return ["-".join("x".join(map(str, part)) for part in (c.x, (c.cout, *c.kernel))) for c in cases]


@pytest.mark.parametrize("case", POINTWISE, ids=names(POINTWISE))
def test_pointwise(isa: Isa, case: Case) -> None:
    run_case(case, isa, split=2)


@pytest.mark.parametrize("case", SPATIAL, ids=names(SPATIAL))
def test_spatial(isa: Isa, case: Case) -> None:
    run_case(case, isa, split=3)


@pytest.mark.parametrize("case", GROUPED, ids=names(GROUPED))
def test_grouped(isa: Isa, case: Case) -> None:
    run_case(case, isa, split=2)


@pytest.mark.parametrize("case", DEPTHWISE, ids=names(DEPTHWISE))
def test_depthwise(isa: Isa, case: Case) -> None:
    run_case(case, isa, split=5)


@pytest.mark.parametrize("case", THIN, ids=names(THIN))
def test_thin(isa: Isa, case: Case) -> None:
    """Few input channels: the input as a user has it (NCHW), and channels-last."""
    run_case(case, isa, planar=True, split=2, threads=8)
    run_case(case, isa, planar=False, split=1, threads=1)


def test_planes_are_read_where_they_lie(isa: Isa) -> None:
    shape = ConvShape.conv((1, 3, 64, 64), (32, 3, 3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    packed = pack_weights(np.zeros((32, 3, 3, 3), np.float32), isa, shape)
    out = View.temporary(DType.float32, (1, 32, 32, 32), (0, 2, 3, 1))
    kernels = []
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        x = View.temporary(DType.float32, (1, 3, 64, 64), order)
        kernels += [launch.spec.name for launch in conv(x, packed, out, shape, isa)]
    assert kernels[0] == "conv planes 3x3 stride 2" and "planes" not in kernels[1]


def test_what_is_added_in_place_is_added_once(isa: Isa) -> None:
    """The result lies where the summand does: no pixel may be computed a second time."""
    case = Case((1, 3, 9, 37), 16, (3, 3), pads=(1, 1, 1, 1))
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal(case.x).astype(np.float32), case.weights(rng, np.float32)
    want = reference(case, x, w)
    more = rng.standard_normal(want.shape).astype(np.float32)
    want += more
    shape, target = case.shape(w), channels_last(more)
    (x_view, x_data), (out, out_data) = bound(x, "input"), bound(target, "output")
    images, channels, *spatial = out.strides
    value = Op("add", (Result(0, F32), Load(0, F32)), F32)
    epilogue = Epilogue(value, (Operand(out, (images, spatial[-1], channels)),))
    launches = conv(x_view, pack_weights(w, isa, shape), out, shape, isa, epilogue=epilogue)
    harness.run(launches, isa, {x_view.storage: x_data, out.storage: out_data})
    compare(target, want, case.x[1] * 9)


@pytest.mark.parametrize("case", NARROW, ids=names(NARROW))
def test_few_outputs(isa: Isa, case: Case) -> None:
    run_case(case, isa, split=2)


@pytest.mark.parametrize("case", OTHER_RANKS, ids=names(OTHER_RANKS))
def test_one_and_three_dimensions(isa: Isa, case: Case) -> None:
    run_case(case, isa, split=2)


LOW = [  # fewer rows than the kernel has
    *(Case((2, 24, h, 13), 24, (5, 5), pads=(2, 2, 2, 2), group=24) for h in (1, 2, 3, 4)),
    Case((1, 40, 3, 24), 40, (5, 5), strides=(2, 1), pads=(2, 2, 2, 2), group=40),
    Case((1, 16, 1, 16), 16, (3, 3), pads=(1, 1, 1, 1), group=16),
    Case((1, 33, 2, 9), 33, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1), group=33),
    Case((1, 20, 3, 8), 20, (7, 7), pads=(6, 3, 5, 3), group=20),
    Case((1, 20, 4, 30), 20, (3, 3), pads=(4, 4, 4, 4), dilations=(4, 4), group=20),
    Case((1, 20, 5, 12), 20, (3, 3), pads=(4, 1, 4, 1), dilations=(4, 1), group=20),
]


@pytest.mark.parametrize("case", LOW, ids=names(LOW))
def test_depthwise_over_low_pictures(isa: Isa, case: Case) -> None:
    run_case(case, isa, split=2)
    run_case(case, isa, dynamic=True)


SOME = [POINTWISE[1], SPATIAL[1], GROUPED[1], DEPTHWISE[1], THIN[1], NARROW[1]]


@pytest.mark.parametrize("case", SOME, ids=names(SOME))
def test_slices_of_channels(isa: Isa, case: Case) -> None:
    """Input and output are slices of wider buffers; what lies beside the output stays."""
    run_case(case, isa, room=5)


@pytest.mark.parametrize("case", SOME, ids=names(SOME))
def test_float64(case: Case) -> None:
    run_case(case, harness.ISAS[0], dtype=np.float64)


@pytest.mark.parametrize("split", [1, 2, 7, 1000])
@pytest.mark.parametrize("case", SOME, ids=names(SOME))
def test_any_split_gives_the_same(case: Case, split: int) -> None:
    run_case(case, harness.ISAS[0], split=split, threads=16)


@pytest.mark.parametrize("case", [*SOME, DEPTHWISE[7]], ids=names([*SOME, DEPTHWISE[7]]))
def test_weights_of_the_graph(isa: Isa, case: Case) -> None:
    run_case(case, isa, dynamic=True, split=2)


def test_many_blocks_of_columns_and_pixels() -> None:
    """Weights past the second cache are worked through block by block, and along their depth in chunks."""
    run_case(Case((2, 256, 6, 5), 200, (3, 3), pads=(1, 1, 1, 1)), harness.ISAS[0], threads=4, split=3)


def test_empty() -> None:
    isa = harness.ISAS[0]
    w = np.zeros((4, 8, 3, 3), np.float32)
    shape = ConvShape.conv((0, 8, 5, 5), w.shape)
    x, out = View.temporary(F32, (0, 8, 5, 5)), View.temporary(F32, (0, 4, 3, 3))
    assert conv(x, pack_weights(w, isa, shape), out, shape, isa) == []


def test_layout_is_checked() -> None:
    isa = harness.ISAS[0]
    w = np.zeros((4, 8, 3, 3), np.float32)
    shape = ConvShape.conv((1, 8, 5, 5), w.shape)
    assert not takes_any_layout(shape)
    x, out = View.temporary(F32, (1, 8, 5, 5)), View.temporary(F32, (1, 4, 3, 3), (0, 2, 3, 1))
    with pytest.raises(ValueError, match="channels-last"):
        conv(x, pack_weights(w, isa, shape), out, shape, isa)


def test_nan_and_infinity_stay_where_they_are(isa: Isa) -> None:
    case = SPATIAL[0]
    rng = np.random.default_rng(3)
    x = rng.standard_normal(case.x).astype(np.float32)
    x[0, 2, 4, 5], x[0, 3, 10, 10] = np.nan, np.inf
    w = case.weights(rng, np.float32)
    shape = case.shape(w)
    with np.errstate(invalid="ignore"):
        want = reference(case, x, w)
    source, target = channels_last(x), channels_last(np.zeros(want.shape, np.float32))
    (x_view, x_data), (out, out_data) = bound(source, "input"), bound(target, "output")
    launches = conv(x_view, pack_weights(w, isa, shape, winograd=False), out, shape, isa)
    execute(launches, isa, {x_view.storage: x_data, out.storage: out_data})
    np.testing.assert_array_equal(np.isnan(target), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(target), np.isinf(want))


# -- epilogues ------------------------------------------------------------------------------------------------------


def op(name: str, *args: Expr) -> Op:
    return Op(name, args, F32)


ACC = Result(0, F32)
BIASED = op("add", ACC, Load(0, F32))
EPILOGUES = {
    "relu6": op("min", op("max", BIASED, Const(0.0, F32)), Const(6.0, F32)),
    "residual": op("max", op("add", BIASED, Load(1, F32)), Const(0.0, F32)),
    "silu": op("mul", BIASED, op("sigmoid", BIASED)),
    "scaled": op("add", op("mul", BIASED, Load(1, F32)), Load(2, F32)),
}


def evaluated(expr: Expr, acc: Array, operands: list[Array]) -> Array:
    if isinstance(expr, Result):
        return acc
    if isinstance(expr, Load):
        return operands[expr.operand]
    if isinstance(expr, Const):
        return np.asarray(float(expr.value))
    assert isinstance(expr, Op)
    args = [evaluated(a, acc, operands) for a in expr.args]
    functions: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    if expr.name == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-args[0])))
    return np.asarray(functions[expr.name](*args))


EPILOGUE_CASES = [
    Case((2, 20, 6, 5), 40, (1, 1)),
    Case((2, 8, 6, 7), 23, (3, 3), pads=(1, 1, 1, 1)),
    Case((1, 21, 8, 9), 21, (3, 3), pads=(1, 1, 1, 1), group=21),
    Case((1, 3, 12, 12), 18, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    Case((2, 33, 5, 5), 1, (3, 3), pads=(1, 1, 1, 1)),
    Case((1, 33, 7, 3), 2, (1, 1)),
    Case((1, 1600, 3, 3), 20, (1, 1)),
]


def operands_for(out_shape: tuple[int, ...], rng: np.random.Generator) -> tuple[list[Operand], list[Array]]:
    """A bias, a residual like the output, and one number per image and channel that lies strided."""
    n, c, *spatial = out_shape
    bias = rng.standard_normal(c).astype(np.float32)
    residual = channels_last(rng.standard_normal(out_shape).astype(np.float32))
    scale = rng.standard_normal((n, c, 3)).astype(np.float32)
    pixels = int(np.prod(spatial))
    flat = np.ascontiguousarray(np.moveaxis(residual, 1, -1)).reshape(n, pixels, c)
    operands = [
        Operand(View.constant(bias, F32), (0, 0, 1)),
        Operand(View.constant(flat, F32), (pixels * c, c, 1)),
        Operand(View.constant(scale, F32), (3 * c, 0, 3), offset=1),
    ]
    ones = (1,) * len(spatial)
    values = [bias.reshape(1, c, *ones), residual, scale[:, :, 1].reshape(n, c, *ones)]
    return operands, [v.astype(np.float64) for v in values]


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("case", EPILOGUE_CASES, ids=names(EPILOGUE_CASES))
def test_epilogue(isa: Isa, case: Case, name: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal(case.x).astype(np.float32)
    w = case.weights(rng, np.float32)
    shape = case.shape(w)
    acc = reference(case, x, w)
    operands, values = operands_for(acc.shape, rng)
    want = evaluated(EPILOGUES[name], acc, values)
    source, target = channels_last(x), channels_last(np.full(want.shape, np.nan, np.float32))
    (x_view, x_data), (out, out_data) = bound(source, "input"), bound(target, "output")
    epilogue = Epilogue(EPILOGUES[name], tuple(operands))
    launches = conv(x_view, pack_weights(w, isa, shape), out, shape, isa, epilogue=epilogue, threads=2)
    execute(launches, isa, {x_view.storage: x_data, out.storage: out_data}, split=2)
    compare(target, want, shape.depth * shape.taps, acc)


def test_a_product_where_dots_are_short() -> None:
    """Few columns are no reason for dot products where summing up their lanes takes longer than idle ones."""
    isa = named("avx512", "x86_64")
    kinds = [packing(ConvShape.conv((1, c, 9, 9), (o, c, 1, 1)), isa) for c, o in ((24, 4), (24, 2), (256, 4), (64, 1))]
    assert kinds == ["gemm", "gemm", "narrow", "narrow"]
    assert packing(ConvShape.conv((1, 24, 9, 9), (2, 24, 3, 3)), isa) == "narrow"


def test_keys_hold_no_sizes() -> None:
    """Another size of the same layer is the same code."""
    isa = harness.ISAS[0]
    specs = []
    for size in (28, 30):
        w = np.zeros((64, 32, 3, 3), np.float32)
        shape = ConvShape.conv((1, 32, size, size), w.shape, pads=(1, 1, 1, 1))
        x, out = (View.temporary(F32, (1, c, size, size), (0, 2, 3, 1)) for c in (32, 64))
        launches = conv(x, pack_weights(w, isa, shape, winograd=False), out, shape, isa)
        specs.append([launch.spec for launch in launches])
    assert specs[0] == specs[1]


def test_code_for_another_architecture() -> None:
    """Every kernel can be written for aarch64 too."""
    neon = named("neon", "aarch64")
    for case in SOME:
        w = np.zeros((case.cout, case.x[1] // case.group, *case.kernel), np.float32)
        shape = case.shape(w)
        x = View.temporary(F32, case.x, (0, 2, 3, 1))
        out = View.temporary(F32, (case.x[0], case.cout, *shape.out[1:]), (0, 2, 3, 1))
        for launch in conv(x, pack_weights(w, neon, shape), out, shape, neon):
            for spec in {launch.spec, *(b.spec for b in launch.buffers if isinstance(b, Code))}:
                assert len(compile_object(source(spec, neon), neon)) > 0
