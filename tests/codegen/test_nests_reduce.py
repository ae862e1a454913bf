"""Nests with rows: reductions over every set of axes, softmax, normalisation, pooling and scans, against NumPy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.nests import launches
from ranvier.codegen.loops.ir import (
    Const,
    Expr,
    Final,
    Fold,
    Index,
    Load,
    Map,
    Nest,
    Op,
    Operand,
    Reduce,
    Result,
    Scan,
    Size,
    Stage,
)
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.nest_makers import reduction
from tests.codegen.nest_oracle import check, strided
from tests.codegen.test_nests import data, output

Array = np.ndarray[Any, Any]
ISAS = pytest.mark.parametrize("isa", harness.ISAS, ids=lambda i: i.name)
F32, I64 = DType.float32, DType.int64
FOLDS: list[Fold] = ["sum", "prod", "max", "min"]
ARGS: list[Fold] = ["argmax", "argmin", "argmax_last", "argmin_last"]


def f(name: str, *args: Expr) -> Op:
    return Op(name, args, args[-1].dtype)


def reduced(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if a in axes else n for a, n in enumerate(shape))


def reduce_check(
    isa: Isa, source: Array, axes: tuple[int, ...], *folds: Fold, tolerance: float = 1e-5, **more: Any
) -> None:
    """All the folds in one nest (they are independent stages), each to an output of its own."""
    view, storage, memory = strided(source)
    operands = [Operand(view, view.strides)]
    memories: dict[Any, Array] = {storage: memory}
    stages: list[Stage] = []
    stores: list[tuple[int, Expr]] = []
    for number, fold in enumerate(folds):
        dtype = I64 if fold.startswith("arg") else view.dtype
        out, target = output(reduced(source.shape, axes), dtype)
        memories[out.storage] = target
        stages.append(Reduce(fold, Load(0, view.dtype), dtype))
        stores.append((len(operands), Result(number, dtype)))
        operands.append(Operand(out, tuple(0 if a in axes else s for a, s in enumerate(out.strides))))
    nest = Nest(source.shape, tuple(operands), (*stages, Final(tuple(stores))), frozenset(axes))
    check(nest, memories, isa, tolerance=tolerance, **more)


@ISAS
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 33, 17), (70, 3, 2), (1, 19, 1)])
def test_every_set_of_axes(isa: Isa, shape: tuple[int, ...]) -> None:
    x = data(shape)
    for count in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), count):
            reduce_check(isa, x, axes, "sum", "max", splits=(1, 3))
            reduce_check(isa, x.transpose(2, 0, 1), axes, "sum")
            reduce_check(isa, x[::-1, :, ::-1], axes, "argmax")


@ISAS
def test_every_length(isa: Isa) -> None:
    lanes = isa.lanes(4)
    for n in [*range(1, 2 * lanes + 2), 4 * lanes, 4 * lanes + 1, 9 * lanes + 5]:
        reduce_check(isa, data((3, n)), (1,), *FOLDS, "argmax")
        reduce_check(isa, data((5, n)), (0,), "sum")
        reduce_check(isa, data((n,)), (0,), "min")


@ISAS
@pytest.mark.parametrize("dtype", list(map(DType, (2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16))), ids=str)
def test_every_type(isa: Isa, dtype: DType) -> None:
    x = data((4, 45), dtype)
    tolerance = {DType.float16: 4e-3, DType.bfloat16: 3e-2}.get(dtype, 1e-12)
    folds: list[Fold] = ["and", "or"] if dtype is DType.bool else ["sum", "prod", "max", "argmin"]
    for axes in ((1,), (0,)):
        reduce_check(isa, x, axes, *folds, tolerance=tolerance)


@ISAS
def test_sums_of_halves_accumulate_in_float(isa: Isa) -> None:
    x = np.ones((1, 5000), np.float16)
    view, storage, memory = strided(x)
    out, target = output((1, 1), DType.float16)
    harness.run(
        launches(reduction(out, view, (1,), "sum"), isa),
        isa,
        {storage: memory.view(np.uint8).reshape(-1), out.storage: target.view(np.uint8)},
    )
    assert target[0] == 5000


@ISAS
def test_ties_and_nan(isa: Isa) -> None:
    rng = np.random.default_rng(0)
    for n in (1, 5, 16, 37, 300):
        x = rng.integers(0, 3, (6, n)).astype(np.float32)
        x[3] = -np.inf
        x[4] = np.inf
        y = x.copy()
        y[rng.random(y.shape) < 0.1] = np.nan
        for values in (x, y):
            reduce_check(isa, values, (1,), *ARGS, "max", "min")
            reduce_check(isa, np.ascontiguousarray(values.T), (0,), *ARGS, "max", "min")


@ISAS
def test_empty_rows_give_identities(isa: Isa) -> None:
    for fold, want in (("sum", 0.0), ("prod", 1.0), ("max", -np.inf), ("min", np.inf)):
        view, storage, memory = strided(data((3, 0)))
        out, target = output((3, 1))
        made = launches(reduction(out, view, (1,), fold), isa)  # type: ignore[arg-type]
        harness.run(made, isa, {storage: memory.reshape(-1).view(np.uint8), out.storage: target.view(np.uint8)})
        assert (target == want).all()


def softmax(x: View, out: View, axis: int) -> Nest:
    load = Load(0, F32)
    e = f("exp", f("sub", load, Result(0, F32)))
    stages: tuple[Stage, ...] = (
        Reduce("max", load, F32),
        Reduce("sum", e, F32),
        Map(((1, f("div", f("exp", f("sub", load, Result(0, F32))), Result(1, F32))),)),
    )
    return Nest(x.shape, (Operand(x, x.strides), Operand(out, out.strides)), stages, frozenset({axis}), "softmax")


@ISAS
def test_softmax(isa: Isa) -> None:
    for n in (1, 2, 15, 16, 17, 100, 1000, 2000):
        for shape, axis in (((3, n), 1), ((n, 5), 0), ((2, n, 19), 1)):
            x = strided(data(shape))
            out, target = output(shape)
            nest = softmax(x[0], out, axis)
            check(nest, {x[1]: x[2], out.storage: target}, isa, tolerance=1e-6, splits=(1, 2))


def test_softmax_computes_exp_once() -> None:
    from ranvier.codegen.llvm.library import source

    isa = harness.ISAS[0]
    x, out = View.temporary(F32, (8, 1000)), View.temporary(F32, (8, 1000))
    launch = launches(softmax(x, out, 1), isa)[0]
    assert launch.scratch >= 4000
    twice = launches(softmax(View.temporary(F32, (8, 1 << 20)), View.temporary(F32, (8, 1 << 20)), 1), isa)[0]
    assert twice.scratch == 0
    assert len(source(launch.spec, isa)) < len(source(twice.spec, isa))


@ISAS
@pytest.mark.parametrize("columns", [1, 3, 4, 7, 8, 12, 16, 17, 24, 32, 33, 64, 100, 127, 128, 129])
def test_rows_that_stay_in_registers(isa: Isa, columns: int) -> None:
    """Also where numbers are infinite or none, and where the result takes the place of what was read."""
    numbers = data((7, columns))
    numbers[2, columns // 2], numbers[3, -1], numbers[4, 0] = np.nan, np.inf, -np.inf
    for source in (numbers, data((2, 3, columns))):
        x, out = strided(source), output(source.shape)
        check(softmax(x[0], out[0], source.ndim - 1), {x[1]: x[2], out[0].storage: out[1]}, isa, tolerance=1e-6)
    there = strided(numbers)
    check(softmax(there[0], there[0], 1), {there[1]: there[2]}, isa, tolerance=1e-6)
    lanes = isa.lanes(4)
    x, result = View.temporary(F32, (7, columns)), View.temporary(F32, (7, columns))
    held = lanes > 1 and columns <= 8 * lanes and (columns % lanes == 0 or isa.masks)
    if (held and columns >= 16) or columns > 8 * lanes:  # of fewer columns, lanes may lie along the rows' axis
        assert (launches(softmax(x, result, 1), isa)[0].scratch == 0) == held, "elsewhere exponentials wait in scratch"


def layer_norm(x: View, scale: View, bias: View, out: View, axes: tuple[int, ...]) -> Nest:
    load = Load(0, F32)
    count = math.prod(x.shape[a] for a in axes)
    size = Op("cast", (Size(count),), F32)
    mean = f("div", Result(0, F32), size)
    centred = f("sub", load, mean)
    variance = f("div", Result(1, F32), size)
    scaled = f("mul", centred, f("rsqrt", f("add", variance, Const(1e-5, F32))))
    value = f("add", f("mul", scaled, Load(1, F32)), Load(2, F32))
    stages: tuple[Stage, ...] = (
        Reduce("sum", load, F32),
        Reduce("sum", f("mul", centred, centred), F32),
        Map(((3, value),)),
        Final(((4, mean),)),
    )
    saved = tuple(0 if a in axes else s for a, s in enumerate(View.temporary(F32, reduced(x.shape, axes)).strides))
    means = View.temporary(F32, reduced(x.shape, axes))
    operands = (
        Operand(x, x.strides),
        *(Operand(v.expanded(x.shape), v.expanded(x.shape).strides) for v in (scale, bias)),
        Operand(out, out.strides),
        Operand(means, saved),
    )
    return Nest(x.shape, operands, stages, frozenset(axes), "layer norm")


@ISAS
def test_layer_norm(isa: Isa) -> None:
    cases: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = [
        ((4, n), (1,), None) for n in (1, 3, 16, 50, 768, 1999)
    ]
    cases += [((2, 6, 5, 7), (2, 3), None), ((2, 6, 5, 7), (1, 2, 3), None), ((2, 20, 5, 7), (2, 3), (0, 2, 3, 1))]
    cases += [((2, 20, 5, 7), (1,), None), ((2, 20, 5, 7), (1,), (0, 2, 3, 1))]
    for shape, axes, order in cases:
        x = strided(data(shape))
        view = x[0]
        if order is not None:
            memory_order = tuple(shape[a] for a in order)
            x = strided(data(memory_order))
            view = x[0].transposed(tuple(order.index(a) for a in range(len(shape))))
        size = reduced(shape, tuple(a for a in range(len(shape)) if a not in axes))
        scale, bias = strided(data(size, seed=1)), strided(data(size, seed=2))
        out, target = output(shape, F32, order)
        nest = layer_norm(view, scale[0], bias[0], out, axes)
        means = nest.operands[4].view
        memory = {x[1]: x[2], scale[1]: scale[2], bias[1]: bias[2], out.storage: target}
        memory[means.storage] = np.empty(means.size, np.float32)
        check(nest, memory, isa, tolerance=2e-5, splits=(1, 3))


@ISAS
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [F32, DType.uint8], ids=str)
def test_pooling(isa: Isa, channels_last: bool, stride: int, dtype: DType) -> None:
    """Windows over padded borders: axes n, c, y, x and the window's two row axes. A vector of bytes has many lanes,
    and a guard that is the same for all of them."""
    n, c, h, w = 2, 21 if dtype is F32 else 150, 9, 11
    oh, ow = (h + 2 - 3) // stride + 1, (w + 2 - 3) // stride + 1
    order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    x = strided(data(tuple((n, c, h, w)[a] for a in order), dtype))
    view = x[0].transposed(tuple(order.index(a) for a in range(4)))
    out, target = output((n, c, oh, ow), dtype, order)
    lowest = -math.inf if dtype is F32 else 0
    inside: Expr | None = None
    for axis, window, size in ((2, 4, h), (3, 5, w)):
        at = Op("add", (Op("mul", (Index(axis), Size(stride)), I64), Index(window)), I64)
        low, high = Op("ge", (at, Size(1)), DType.bool), Op("lt", (at, Size(size + 1)), DType.bool)
        both = Op("and", (low, high), DType.bool)
        inside = both if inside is None else Op("and", (inside, both), DType.bool)
    sn, sc, sh, sw = view.strides
    loads = Operand(view, (sn, sc, sh * stride, sw * stride, sh, sw), -sh - sw, guard=inside, other=lowest)
    fold: Fold
    for fold in ("max", "sum"):
        stages: tuple[Stage, ...] = (Reduce(fold, Load(0, dtype), dtype), Final(((1, Result(0, dtype)),)))
        loads = Operand(loads.view, loads.strides, loads.offset, guard=inside, other=lowest if fold == "max" else 0)
        nest = Nest((n, c, oh, ow, 3, 3), (loads, Operand(out, (*out.strides, 0, 0))), stages, frozenset({4, 5}))
        check(nest, {x[1]: x[2], out.storage: target}, isa, tolerance=1e-6, splits=(1, 4))


@ISAS
@pytest.mark.parametrize("dtype", [F32, I64], ids=str)
def test_scans(isa: Isa, dtype: DType) -> None:
    """Along the contiguous axis and across it; every combination of direction and of what is counted, on some shape."""
    variants = itertools.cycle(
        [("sum", False, False), ("sum", True, True), ("prod", True, False), ("max", False, True), ("sum", True, False)]
    )
    for shape, axis in (((3, 17), 1), ((40, 3), 1), ((17, 40), 0), ((2, 9, 5), 1), ((7,), 0), ((33, 1), 1)):
        x = strided(data(shape, dtype))
        for fold, exclusive, reverse in itertools.islice(variants, 2):
            out, target = output(shape, dtype)
            stage = Scan(fold, Load(0, dtype), 1, dtype, exclusive, reverse)  # type: ignore[arg-type]
            nest = Nest(shape, (Operand(x[0], x[0].strides), Operand(out, out.strides)), (stage,), frozenset({axis}))
            check(nest, {x[1]: x[2], out.storage: target}, isa, tolerance=1e-5, splits=(1, 2))


@ISAS
def test_huge_rows(isa: Isa) -> None:
    """Few results of much work are cut into parts; the parts do not depend on the number of threads."""
    for shape, axes in (((300_007,), (0,)), ((2, 200_000), (1,)), ((200_003, 5), (0,)), ((3, 40_000, 5), (1, 2))):
        x = data(shape)
        reduce_check(isa, x, axes, "sum", "max", "min", tolerance=3e-4, splits=(1, 3))
    x = data((200_000,))
    a, b = ([(m.spec, m.dims, m.tiles) for m in _sum_launches(x, isa, threads)] for threads in (1, 8))
    assert a == b
    assert max(t for _, _, t in a) >= 4
    s = strided(data((150_000,)))
    out, target = output((150_000,))
    check(softmax(s[0], out, 0), {s[1]: s[2], out.storage: target}, isa, tolerance=1e-6)


def _sum_launches(x: Array, isa: Isa, threads: int) -> Any:
    view, _, _ = strided(x)
    return launches(reduction(output((1,))[0], view, (0,), "sum"), isa, threads)


@ISAS
def test_long_columns_are_shared_out(isa: Isa) -> None:
    """Sums over many rows into few columns: lanes run over the columns, parts over the rows."""
    reduce_check(isa, data((5000, 64)), (0,), "sum", tolerance=1e-3, splits=(1, 2))
    view = View.temporary(F32, (5000, 64))
    assert max(m.tiles for m in launches(reduction(output((1, 64))[0], view, (0,), "sum"), isa)) >= 4
