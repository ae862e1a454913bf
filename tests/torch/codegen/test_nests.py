"""Printed kernels of every kind of stage and access, against NumPy."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("triton")

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
)
from ranvier.codegen.loops.normalize import normalized
from ranvier.codegen.storage import Storage, View
from ranvier.codegen.triton.library import kernel
from ranvier.codegen.triton.schedule import plan
from ranvier.dtypes import DType
from tests.codegen.nest_makers import copy, elementwise, reduction
from tests.codegen.nest_oracle import strided
from tests.codegen.test_nests_random import Random
from tests.torch.codegen.checking import check

Array = np.ndarray[Any, Any]
F32, I64 = DType.float32, DType.int64
SIZES = [1, 31, 33, 1025]


def placed(array: Array) -> tuple[View, dict[Storage, Array]]:
    view, storage, base = strided(array)
    return view, {storage: base}


def output(
    dtype: DType, shape: tuple[int, ...], order: tuple[int, ...] | None = None
) -> tuple[View, dict[Storage, Array]]:
    view = View.temporary(dtype, shape, order)
    return view, {view.storage: np.zeros(math.prod(shape), dtype.numpy)}


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("seed", range(40))
def test_random(seed: int) -> None:
    made = Random(seed)
    nest = made.nest()
    check(nest, made.memory, 1e-4 * math.sqrt(math.prod(nest.extents)))


@pytest.mark.parametrize("n", [0, *SIZES])
def test_elementwise_with_broadcasts(n: int) -> None:
    a, b = numbers(3, n), numbers(n, seed=1)
    (va, ma), (vb, mb), (out, mo) = placed(a), placed(b), output(F32, (3, n))
    nest = elementwise(out, [va, vb], lambda x, y: Op("mul", (Op("add", (x, y), F32), Const(0.5, F32)), F32))
    check(nest, ma | mb | mo)


@pytest.mark.parametrize("shape", [(33, 70), (5, 40, 33), (1, 9, 8), (130, 66)])
@pytest.mark.parametrize("dtype", [F32, DType.float16, DType.int8], ids=str)
def test_transposes_go_through_tiles(shape: tuple[int, ...], dtype: DType) -> None:
    x = (numbers(*shape) * 20).astype(dtype.numpy)
    view, memory = placed(x)
    perm = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    out, more = output(dtype, tuple(shape[p] for p in perm))
    nest = copy(out, view.transposed(perm))
    normal = normalized(nest)
    assert normal is not None and plan(normal).way == "tiled"
    check(nest, memory | more)


def test_gapped_reversed_and_offset_strides() -> None:
    x = numbers(12, 40)[1:10:2, ::-3]
    view, memory = placed(x)
    out, more = output(F32, x.shape)
    check(elementwise(out, [view], lambda v: Op("neg", (v,), F32)), memory | more)


@pytest.mark.parametrize("fold", get_args(Fold))
@pytest.mark.parametrize("shape", [(3, 1), (2, 31), (5, 33), (1, 1025), (300, 5)])
@pytest.mark.parametrize("axis", [0, 1])
def test_folds(fold: Fold, shape: tuple[int, int], axis: int) -> None:
    rng = np.random.default_rng(3)
    dtype = DType.bool if fold in ("and", "or") else F32
    x = rng.integers(0, 2, shape).astype(bool) if dtype is DType.bool else rng.integers(-3, 4, shape).astype(np.float32)
    if fold == "prod":
        x = np.where(x == 0, 1, np.sign(x)).astype(np.float32)
    view, memory = placed(x)
    out, more = output(
        I64 if fold.startswith("arg") else dtype, tuple(1 if a == axis else n for a, n in enumerate(shape))
    )
    check(reduction(out, view, [axis], fold), memory | more)


@pytest.mark.parametrize("fold", ["max", "min", "argmax", "argmin", "argmax_last", "sum"])
def test_folds_see_nan(fold: Fold) -> None:
    x = numbers(6, 50)
    x[1, 7], x[2, [3, 40]], x[3, 0] = np.nan, np.nan, np.inf
    x[4], x[5] = -np.inf, np.inf
    view, memory = placed(x)
    out, more = output(I64 if fold.startswith("arg") else F32, (6, 1))
    check(reduction(out, view, [1], fold), memory | more, 1e-5)


@pytest.mark.parametrize(
    "dtype", [DType.int8, DType.uint8, DType.int32, I64, DType.uint64, DType.bool, DType.float64], ids=str
)
@pytest.mark.parametrize("fold", ["sum", "max", "min", "prod"])
def test_folds_of_types(dtype: DType, fold: Fold) -> None:
    rng = np.random.default_rng(4)
    x = rng.integers(0, 2 if dtype is DType.bool else 100, (4, 37)).astype(dtype.numpy)
    view, memory = placed(x)
    out, more = output(dtype, (4, 1))
    check(reduction(out, view, [1], fold), memory | more, 1e-12)


@pytest.mark.parametrize("rows,length", [(3, 1), (4, 31), (2, 33), (1, 1025), (2, 20000), (1, 140000)])
def test_softmax(rows: int, length: int) -> None:
    view, memory = placed(numbers(rows, length))
    out, more = output(F32, (rows, length))
    check(softmax(view, out), memory | more, 2e-6)


def softmax(view: View, out: View) -> Nest:
    x = Load(0, view.element)
    e = Op("exp", (Op("sub", (x, Result(0, F32)), F32),), F32)
    stages = (Reduce("max", x, F32), Reduce("sum", e, F32), Map(((1, Op("div", (e, Result(1, F32)), F32)),)))
    return Nest(view.shape, (Operand(view, view.strides), Operand(out, out.strides)), stages, frozenset({1}), "softmax")


@pytest.mark.parametrize("axis", [1, 2])
def test_layer_norm_in_one_kernel(axis: int) -> None:
    shape = (3, 40, 24)
    view, memory = placed(numbers(*shape))
    scale, more = placed(numbers(shape[axis], seed=1))
    out, last = output(F32, shape)
    x = Load(0, F32)
    along = tuple(1 if a == axis else 0 for a in range(3))
    count = Const(1 / shape[axis], F32)
    mean = Op("mul", (Result(0, F32), count), F32)
    apart = Op("sub", (x, mean), F32)
    spread = Op("add", (Op("mul", (Result(1, F32), count), F32), Const(1e-5, F32)), F32)
    value = Op("mul", (Op("mul", (apart, Op("rsqrt", (spread,), F32)), F32), Load(1, F32)), F32)
    stages = (Reduce("sum", x, F32), Reduce("sum", Op("mul", (apart, apart), F32), F32), Map(((2, value),)))
    operands = (Operand(view, view.strides), Operand(scale, along), Operand(out, out.strides))
    nest = Nest(shape, operands, stages, frozenset({axis}), "layer norm")
    assert len(kernel(nest).calls) == 1
    check(nest, memory | more | last, 1e-5)


def test_what_a_stage_stored_can_be_loaded_by_the_next() -> None:
    view, memory = placed(numbers(5, 33))
    middle, more = output(F32, (5, 33))
    total, last = output(F32, (5, 1))
    doubled = Op("add", (Load(0, F32), Load(0, F32)), F32)
    operands = (Operand(view, view.strides), Operand(middle, middle.strides), Operand(total, (1, 0)))
    stages = (Map(((1, doubled),)), Reduce("sum", Load(1, F32), F32), Final(((2, Result(1, F32)),)))
    nest = Nest((5, 33), operands, stages, frozenset({1}))
    assert "debug_barrier" in kernel(nest).source
    check(nest, memory | more | last, 1e-5)


def test_gather_of_guarded_rows() -> None:
    table, ids = numbers(9, 20), np.array([3, -1, 8, 0, 12], np.int64)
    (vt, mt), (vi, mi), (out, mo) = placed(table), placed(ids), output(F32, (5, 20))
    row = Load(1, I64)
    inside = Op("and", (Op("ge", (row, Const(0, I64)), DType.bool), Op("lt", (row, Size(9)), DType.bool)), DType.bool)
    operands = (
        Operand(vt, (0, 1), at=Op("mul", (row, Size(20)), I64), guard=inside, other=7),
        Operand(vi, (1, 0)),
        Operand(out, out.strides),
    )
    check(Nest((5, 20), operands, (Map(((2, Load(0, F32)),)),), label="gather"), mt | mi | mo)


@pytest.mark.parametrize("padding", [0, 1])
def test_pooling_windows(padding: int) -> None:
    """Max over 3 x 3 windows with a step of 2; outside of the picture stands the identity."""
    n, h, w = 6, 11, 13
    x = numbers(n, h, w)
    view, memory = placed(x)
    oh, ow = (h + 2 * padding - 3) // 2 + 1, (w + 2 * padding - 3) // 2 + 1
    out, more = output(F32, (n, oh, ow))

    def at(outer: int, inner: int) -> Expr:
        moved = Op("add", (Op("mul", (Index(outer), Const(2, I64)), I64), Index(inner)), I64)
        return Op("sub", (moved, Const(padding, I64)), I64)

    tests = [Op("ge", (at(1, 3), Const(0, I64)), DType.bool), Op("lt", (at(1, 3), Size(h)), DType.bool)]
    tests += [Op("ge", (at(2, 4), Const(0, I64)), DType.bool), Op("lt", (at(2, 4), Size(w)), DType.bool)]
    guard: Expr = tests[0]
    for test in tests[1:]:
        guard = Op("and", (guard, test), DType.bool)
    operands = (
        Operand(view, (h * w, 2 * w, 2, w, 1), -padding * (w + 1), guard=guard, other=-math.inf),
        Operand(out, (*out.strides, 0, 0)),
    )
    stages = (Reduce("max", Load(0, F32), F32), Final(((1, Result(0, F32)),)))
    check(Nest((n, oh, ow, 3, 3), operands, stages, frozenset({3, 4}), "pool"), memory | more)


@pytest.mark.parametrize("fold", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_scans(fold: Any, exclusive: bool, reverse: bool, axis: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.choice([-1.0, 1.0, 2.0] if fold != "prod" else [-1.0, 1.0], (5, 37)).astype(np.float32)
    view, memory = placed(x)
    out, more = output(F32, x.shape)
    stage = Scan(fold, Load(0, F32), 1, F32, exclusive, reverse)
    operands = (Operand(view, view.strides), Operand(out, out.strides))
    check(Nest(x.shape, operands, (stage,), frozenset({axis}), "scan"), memory | more)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_long_scans_carry_over(exclusive: bool, reverse: bool) -> None:
    x = np.random.default_rng(5).integers(-2, 3, (1, 20011)).astype(np.int32)
    view, memory = placed(x)
    out, more = output(DType.int32, x.shape)
    stage = Scan("sum", Load(0, DType.int32), 1, DType.int32, exclusive, reverse)
    operands = (Operand(view, view.strides), Operand(out, out.strides))
    check(Nest(x.shape, operands, (stage,), frozenset({1}), "scan"), memory | more)


@pytest.mark.parametrize(
    "shape,axes", [((70000, 3), (0,)), ((2, 150000), (1,)), ((400, 40, 11), (0, 2)), ((262144,), (0,))]
)
def test_few_long_rows_are_folded_in_parts(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(6).integers(-3, 4, shape).astype(np.float32)
    view, memory = placed(x)
    out, more = output(F32, tuple(1 if a in axes else n for a, n in enumerate(shape)))
    nest = reduction(out, view, list(axes), "sum")
    made = kernel(nest)
    assert len(made.calls) > 1 and made.temporaries
    check(nest, memory | more, made=made)


def test_half_and_bfloat_compute_in_float() -> None:
    for dtype, tolerance in ((DType.float16, 1e-3), (DType.bfloat16, 8e-3)):
        x = numbers(4, 33).astype(dtype.numpy)
        view, memory = placed(x)
        out, more = output(dtype, x.shape)
        nest = elementwise(out, [view], lambda v, d=dtype: Op("mul", (Op("exp", (v,), d), v), d))
        check(nest, memory | more, tolerance)


def test_narrow_storage_of_wide_values() -> None:
    """A float32 value kept as bfloat16: loads widen, stores round once."""
    x = numbers(4, 33).astype(DType.bfloat16.numpy)
    base = Storage("temp", x.nbytes, stands_for=F32)
    view, out = View.dense(base, DType.bfloat16, x.shape), View.narrowed(F32, DType.bfloat16, x.shape, None)
    nest = elementwise(out, [view], lambda v: Op("add", (Load(0, F32), Const(1.0, F32)), F32))
    check(nest, {base: x, out.storage: np.zeros_like(x)})


def test_one_structure_has_one_text() -> None:
    texts = set()
    for rows, length in ((3, 100), (7, 90), (50, 70)):
        made = kernel(softmax(View.temporary(F32, (rows, length)), View.temporary(F32, (rows, length))))
        texts.add(made.source)
    assert len(texts) == 1


def test_positions_are_wide_where_they_have_to_be() -> None:
    shape = (1 << 20, 1 << 12)
    nest = copy(View.temporary(DType.int8, shape), View.temporary(DType.int8, shape))
    assert "int64" in kernel(nest).source
    small = copy(View.temporary(DType.int8, (64, 64)), View.temporary(DType.int8, (64, 64)))
    assert "int64" not in kernel(small).source
