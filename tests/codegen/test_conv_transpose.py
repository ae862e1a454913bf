"""Transposed convolutions against scattering every input pixel in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.conv import conv_transpose, conv_transpose_dynamic, pack_transposed, plan
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Expr, Load
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.test_conv import (
    BIASED,
    EPILOGUES,
    ISA_IDS,
    Case,
    bound,
    channels_last,
    compare,
    evaluated,
    execute,
    names,
    op,
    operands_for,
)

Array = np.ndarray[Any, Any]


@pytest.fixture(params=harness.ISAS, ids=ISA_IDS)
def isa(request: pytest.FixtureRequest) -> Isa:
    found: Isa = request.param
    return found


def reference_transposed(case: Case, x: Array, w: Array) -> Array:
    """By scattering: every input pixel adds its kernel to the output."""
    rank, g = case.rank, case.group
    strides, dilations = case.full(case.strides, 1), case.full(case.dilations, 1)
    pads, extra = case.full(case.pads, 0, 2), case.full(case.extra, 0)
    size = x.shape[2:]
    span = [s * (i - 1) + (k - 1) * d + 1 + e for s, i, k, d, e in zip(strides, size, case.kernel, dilations, extra)]
    n, cin = x.shape[:2]
    out = np.zeros((n, g, case.cout // g, *span))
    xs = x.astype(np.float64).reshape(n, g, cin // g, *size)
    ws = w.astype(np.float64).reshape(g, cin // g, case.cout // g, *case.kernel)
    for tap in np.ndindex(*case.kernel):
        where = tuple(slice(t * d, t * d + s * (i - 1) + 1, s) for t, d, s, i in zip(tap, dilations, strides, size))
        made = np.einsum("ngi...,gio->ngo...", xs, ws[(slice(None), slice(None), slice(None), *tap)])
        out[(slice(None), slice(None), slice(None), *where)] += made
    out = out.reshape(n, case.cout, *span)
    return out[(slice(None), slice(None), *(slice(pads[i], span[i] - pads[rank + i]) for i in range(rank)))]


TRANSPOSED = [
    Case((1, 16, 7, 7), 24, (2, 2), strides=(2, 2)),
    Case((2, 17, 6, 5), 9, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1), extra=(1, 1)),
    Case((1, 8, 5, 5), 16, (4, 4), strides=(2, 2), pads=(1, 1, 1, 1)),
    Case((1, 8, 5, 5), 8, (3, 3), pads=(1, 1, 1, 1)),
    Case((1, 6, 4, 5), 8, (3, 3), strides=(3, 2), dilations=(2, 2), pads=(0, 1, 1, 0)),
    Case((1, 5, 4, 4), 7, (2, 2), strides=(3, 3), extra=(2, 1)),
    Case((1, 12, 5, 6), 8, (3, 3), strides=(2, 2), group=4),
    Case((1, 10, 5, 6), 10, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1), group=10),
    Case((1, 3, 6, 6), 5, (3, 3), strides=(2, 2)),
    Case((1, 24, 9, 9), 1, (2, 2), strides=(2, 2)),
    Case((2, 10, 4, 5), 23, (3, 2), strides=(3, 2)),
    Case((1, 3, 4, 5), 5, (2, 2), strides=(2, 2)),
    Case((1, 20, 3, 4, 3), 6, (2, 1, 2), strides=(2, 1, 2)),
    Case((1, 6, 9), 4, (4,), strides=(2,), pads=(1, 1)),
    Case((1, 5, 3, 4, 3), 6, (3, 2, 3), strides=(2, 1, 2), pads=(1, 0, 1, 1, 0, 1), extra=(1, 0, 0)),
    Case((1, 4, 3, 3), 4, (2, 2), strides=(2, 2), dilations=(2, 2)),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["constant", "dynamic"])
@pytest.mark.parametrize("case", TRANSPOSED, ids=names(TRANSPOSED))
def test_transposed(isa: Isa, case: Case, dynamic: bool) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal(case.x).astype(np.float32)
    w = case.weights(rng, np.float32, transposed=True)
    shape = case.shape_transposed(w)
    acc = reference_transposed(case, x, w)
    assert acc.shape[2:] == shape.out[3 - case.rank :]
    operands, values = operands_for(acc.shape, rng)
    expr = EPILOGUES["residual"]
    want = evaluated(expr, acc, values)
    source, target = channels_last(x), channels_last(np.full(want.shape, np.nan, np.float32))
    (x_view, x_data), (out, out_data) = bound(source, "input"), bound(target, "output")
    memory = {x_view.storage: x_data, out.storage: out_data}
    epilogue = Epilogue(expr, tuple(operands))
    if dynamic:
        w_view, w_data = bound(w, "input")
        memory[w_view.storage] = w_data
        launches = conv_transpose_dynamic(x_view, w_view, out, shape, isa, epilogue=epilogue)
    else:
        packed = pack_transposed(w, isa, shape)
        launches = conv_transpose(x_view, packed, out, shape, isa, epilogue=epilogue, threads=2)
    execute(launches, isa, memory, split=2)
    compare(target, want)


MASKS = [
    Case((1, 24, 9, 9), 1, (2, 2), strides=(2, 2)),
    Case((2, 33, 7, 3), 1, (2, 2), strides=(2, 2)),  # tiles of many lines
    Case((1, 16, 2, 90), 1, (2, 2), strides=(2, 2)),  # and of parts of one
    Case((2, 20, 5, 6), 1, (1, 2), strides=(1, 2)),
    Case((1, 20, 5, 6), 1, (3, 4), strides=(3, 4)),
    Case((1, 17, 3, 4, 5), 1, (2, 1, 2), strides=(2, 1, 2)),
    Case((1, 19, 11), 1, (4,), strides=(4,)),
]
STILL: dict[str, tuple[Expr, list[int]]] = {
    "silu": (EPILOGUES["silu"], [0]),
    "a number for each image": (op("mul", BIASED, Load(1, DType.float32)), [0, 2]),
}


@pytest.fixture
def elements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements of a line rows were found to give."""
    found: list[int] = []
    before = plan.taps_abreast

    def noted(*given: Any) -> int:
        found.append(before(*given))
        return found[-1]

    monkeypatch.setattr(plan, "taps_abreast", noted)
    return found


def finished(case: Case, isa: Isa, name: str) -> None:
    """Compare what becomes of the sums."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal(case.x).astype(np.float32)
    w = case.weights(rng, np.float32, transposed=True)
    shape = case.shape_transposed(w)
    acc = reference_transposed(case, x, w)
    every, numbers = operands_for(acc.shape, rng)
    expr, used = STILL[name]
    want = evaluated(expr, acc, [numbers[k] for k in used])
    source, target = channels_last(x), channels_last(np.full(want.shape, np.nan, np.float32))
    (x_view, x_data), (out, out_data) = bound(source, "input"), bound(target, "output")
    epilogue = Epilogue(expr, tuple(every[k] for k in used))
    launches = conv_transpose(x_view, pack_transposed(w, isa, shape), out, shape, isa, epilogue=epilogue, threads=2)
    execute(launches, isa, {x_view.storage: x_data, out.storage: out_data}, split=2)
    compare(target, want)


@pytest.mark.parametrize("name", STILL)
@pytest.mark.parametrize("case", MASKS, ids=names(MASKS))
def test_one_channel_along_lines(isa: Isa, case: Case, name: str, elements: list[int]) -> None:
    finished(case, isa, name)
    if isa.lanes(4) == 16:
        assert elements == [case.kernel[-1]]  # and nothing by dot products, which are never asked


def test_lines_that_are_not_along_vectors(elements: list[int]) -> None:
    """Several channels, and lines of three taps: piece by piece."""
    isa = harness.ISAS[0]
    for case in (Case((1, 24, 5, 6), 2, (2, 2), strides=(2, 2)), Case((1, 16, 5, 6), 1, (1, 3), strides=(1, 3))):
        finished(case, isa, "silu")
    assert not any(elements)
