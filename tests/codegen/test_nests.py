"""Elementwise nests: every stride pattern, remainder, guard and gather, against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.nests import launches
from ranvier.codegen.loops.ir import Const, Expr, Index, Load, Map, Nest, Op, Operand, Size
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.nest_makers import copy, elementwise
from tests.codegen.nest_oracle import check, strided

Array = np.ndarray[Any, Any]
ISAS = pytest.mark.parametrize("isa", harness.ISAS, ids=lambda i: i.name)
F32 = DType.float32


def output(shape: tuple[int, ...], dtype: DType = F32, order: tuple[int, ...] | None = None) -> tuple[View, Array]:
    view = View.temporary(dtype, shape, order)
    return view, np.empty(max(1, math.prod(shape)), dtype.numpy)


def data(shape: tuple[int, ...], dtype: DType = F32, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if dtype.is_float:
        return rng.normal(size=shape).astype(dtype.numpy)
    return rng.integers(0, 2 if dtype is DType.bool else 100, shape).astype(dtype.numpy)


def add(x: Expr, y: Expr) -> Expr:
    return Op("add", (x, y), x.dtype)


@ISAS
@pytest.mark.parametrize("dtype", [F32, DType.float64, DType.float16, DType.int8, DType.int64, DType.bool], ids=str)
def test_every_remainder(isa: Isa, dtype: DType) -> None:
    lanes = isa.lanes(max(4, dtype.numpy.itemsize))
    for n in [*range(2 * lanes + 2), 4 * lanes + 3, 8 * lanes + 1]:
        a, b = (strided(data((n,), dtype, k)) for k in (1, 2))
        out, memory = output((n,), dtype)
        nest = elementwise(out, [a[0], b[0]], add)
        check(nest, {a[1]: a[2], b[1]: b[2], out.storage: memory}, isa)


@ISAS
def test_broadcasting_and_strides(isa: Isa) -> None:
    rng = np.random.default_rng(0)
    for trial in range(24):
        rank = int(rng.integers(1, 5))
        shape = tuple(int(rng.choice([1, 2, 3, 5, 17, 33])) for _ in range(rank))
        inputs = []
        for k in range(2):
            stretched = tuple(1 if rng.random() < 0.3 else n for n in shape)
            base = data(tuple(n * 2 for n in stretched), F32, trial * 2 + k)
            cut = tuple(slice(0, n) if rng.random() < 0.5 else slice(0, 2 * n, 2) for n in stretched)
            picked = base[cut]
            flipped = tuple(slice(None, None, -1) if rng.random() < 0.2 else slice(None) for _ in shape)
            inputs.append(strided(picked[flipped]))
        order = tuple(int(i) for i in rng.permutation(rank))
        out, memory = output(shape, F32, order)
        nest = elementwise(out, [v for v, _, _ in inputs], add)
        check(nest, {**{s: a for _, s, a in inputs}, out.storage: memory}, isa, splits=(1, 3))


@ISAS
@pytest.mark.parametrize("dtype", list(map(DType, (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16))), ids=str)
def test_copies_of_every_type(isa: Isa, dtype: DType) -> None:
    for source in (
        data((7, 5, 19), dtype).transpose(2, 0, 1),
        data((13, 70), dtype)[::2, 3:],
        data((3, 40), dtype)[:, ::-1],
    ):
        view, storage, memory = strided(source)
        out, target = output(source.shape, dtype)
        check(copy(out, view), {storage: memory, out.storage: target}, isa, splits=(1, 2))
        out, target = output(source.shape, F32 if dtype is not F32 else DType.bool)
        check(copy(out, view), {storage: memory, out.storage: target}, isa, tolerance=1e-6)


@ISAS
def test_in_place_and_many_tiles(isa: Isa) -> None:
    x = data((300, 1031))
    for split in (1, 2, 5):
        storage = Storage("input", x.nbytes)
        view = View.dense(storage, F32, x.shape)
        bias = strided(data((1031,), seed=3))
        nest = elementwise(view, [view, bias[0]], add)
        made = launches(nest, isa)
        assert made[0].tiles > 5
        here = x.copy()
        harness.run(made, isa, {storage: here.view(np.uint8), bias[1]: bias[2].view(np.uint8)}, split=split)
        np.testing.assert_array_equal(here, x + bias[2])


@ISAS
def test_padding_by_guard(isa: Isa) -> None:
    """Guards that vary along the lanes, and guards that do not."""
    for h, w in ((4, 5), (9, 40), (1, 1)):
        source = strided(data((3, h, w)))
        out, memory = output((3, h + 3, w + 4))
        inside = None
        for axis, before, size in ((1, 1, h), (2, 2, w)):
            low = Op("ge", (Index(axis), Size(before)), DType.bool)
            high = Op("lt", (Index(axis), Size(before + size)), DType.bool)
            both = Op("and", (low, high), DType.bool)
            inside = both if inside is None else Op("and", (inside, both), DType.bool)
        loads = Operand(source[0], (h * w, w, 1), -w - 2, guard=inside, other=2.5)
        nest = Nest(out.shape, (loads, Operand(out, out.strides)), (Map(((1, Load(0, F32)),)),))
        check(nest, {source[1]: source[2], out.storage: memory}, isa, splits=(1, 4))


@ISAS
@pytest.mark.parametrize("dtype", [F32, DType.int8, DType.float16, DType.int64], ids=str)
def test_gathers(isa: Isa, dtype: DType) -> None:
    """Rows picked by a tensor (the position stays along the lanes), and elements picked one by one."""
    table = strided(data((50, 21), dtype))
    rows = strided(np.random.default_rng(1).integers(0, 50, 30))
    out, memory = output((30, 21), dtype)
    pick = Op("mul", (Load(1, DType.int64), Size(21)), DType.int64)
    operands = (Operand(table[0], (0, 1), at=pick), Operand(rows[0], (1, 0)), Operand(out, (21, 1)))
    nest = Nest((30, 21), operands, (Map(((2, Load(0, dtype)),)),))
    memories = {table[1]: table[2], rows[1]: rows[2], out.storage: memory}
    check(nest, memories, isa, splits=(1, 3))

    columns = strided(np.random.default_rng(2).integers(0, 21, (50, 37)))
    out, memory = output((50, 37), dtype)
    operands = (
        Operand(table[0], (21, 0), at=Load(1, DType.int64)),
        Operand(columns[0], (37, 1)),
        Operand(out, (37, 1)),
    )
    nest = Nest((50, 37), operands, (Map(((2, Load(0, dtype)),)),))
    check(nest, {table[1]: table[2], columns[1]: columns[2], out.storage: memory}, isa)


@ISAS
def test_scatter_and_guarded_store(isa: Isa) -> None:
    source = strided(data((6, 35)))
    places = strided(np.random.default_rng(2).permutation(70)[:35])
    out, memory = output((6, 70))
    even = Op("eq", (Op("mod", (Index(1), Size(2)), DType.int64), Const(0, DType.int64)), DType.bool)
    operands = (
        Operand(source[0], (35, 1)),
        Operand(places[0], (0, 1)),
        Operand(out, (70, 0), at=Load(1, DType.int64), guard=even),
    )
    nest = Nest((6, 35), operands, (Map(((2, Load(0, F32)),)),))
    check(nest, {source[1]: source[2], places[1]: places[2], out.storage: memory}, isa)


@ISAS
def test_several_outputs_and_index_values(isa: Isa) -> None:
    a = strided(data((5, 18)))
    first, m1 = output((5, 18))
    second, m2 = output((5, 18), DType.int64)
    x = Load(0, F32)
    number = Op("add", (Op("mul", (Index(0), Size(18)), DType.int64), Index(1)), DType.int64)
    stores = ((1, Op("mul", (x, x), F32)), (2, number))
    nest = Nest((5, 18), (Operand(a[0], (18, 1)), Operand(first, (18, 1)), Operand(second, (18, 1))), (Map(stores),))
    check(nest, {a[1]: a[2], first.storage: m1, second.storage: m2}, isa, tolerance=1e-6)


@ISAS
def test_single_points_and_nothing(isa: Isa) -> None:
    a = strided(data(()))
    out, memory = output(())
    check(elementwise(out, [a[0], a[0]], add), {a[1]: a[2], out.storage: memory}, isa)
    empty, _ = output((3, 0, 2))
    source = strided(data((1,)))
    assert launches(elementwise(empty, [source[0]], lambda x: x), isa) == []


def test_sizes_are_not_part_of_the_code() -> None:
    isa = harness.ISAS[0]
    keys = set()
    for shape in ((4, 8, 1600), (5, 9, 3333), (64, 3, 2107)):
        a, b = View.temporary(F32, shape), View.temporary(F32, (shape[1], 1))
        keys.add(launches(elementwise(View.temporary(F32, shape), [a, b], add), isa)[0].spec)
    assert len(keys) == 1


def test_contiguous_work_becomes_one_loop() -> None:
    isa = harness.ISAS[0]
    shape = (4, 8, 16)
    made = launches(elementwise(View.temporary(F32, shape), [View.temporary(F32, shape)], lambda x: x), isa)
    flat = launches(elementwise(View.temporary(F32, (9,)), [View.temporary(F32, (9,))], lambda x: x), isa)
    assert made[0].spec == flat[0].spec
    assert made[0].traffic == 2 * 4 * 512


@ISAS
@pytest.mark.parametrize("dtype", [DType.uint8, DType.float16, F32, DType.int64], ids=str)
def test_transposes(isa: Isa, dtype: DType) -> None:
    cases: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        *(((n, m), (1, 0)) for n in (2, 8, 15, 16, 33, 130) for m in (3, 16, 31, 300)),
        *(((3, 20, 40), (0, 2, 1)), ((5, 17, 33), (2, 1, 0))),
        *(((2, 3, 18, 19), (0, 2, 3, 1)), ((20, 3, 4, 40), (3, 1, 2, 0))),
    ]
    for shape, perm in cases:
        x = strided(data(shape, dtype))
        view = x[0].transposed(perm)
        out, target = output(view.shape, dtype)
        nest = copy(out, view)
        check(nest, {x[1]: x[2], out.storage: target}, isa, splits=(1, 3))
    wide = launches(copy(View.temporary(F32, (64, 64)), View.temporary(F32, (64, 64)).transposed((1, 0))), isa)
    assert wide[0].spec.name.startswith("transpose")


def test_large_transposes_bypass_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not the target is aligned, and with edges."""
    monkeypatch.setattr("ranvier.codegen.llvm.transpose._STREAM", 0)
    for isa in harness.ISAS:
        for shift in (0, 4):
            source = data((64, 70))
            x = strided(source)
            out, _ = output((70, 64))
            target = harness.aligned(out.nbytes, shift=shift)
            harness.run(
                launches(copy(out, x[0].transposed((1, 0))), isa), isa, {x[1]: x[2].view(np.uint8), out.storage: target}
            )
            np.testing.assert_array_equal(target.view(np.float32).reshape(70, 64), source.T)


@ISAS
def test_conflicting_layouts(isa: Isa) -> None:
    """Elementwise work whose operands are contiguous along different axes."""
    for n, m in ((40, 50), (130, 200)):
        a, b = strided(data((n, m))), strided(data((m, n), seed=1))
        out, target = output((m, n))
        nest = elementwise(out, [a[0].transposed((1, 0)), b[0]], add)
        check(nest, {a[1]: a[2], b[1]: b[2], out.storage: target}, isa, splits=(1, 3))


def test_nests_print_readably() -> None:
    from ranvier.codegen.loops.text import text

    a, b = View.temporary(F32, (4, 8)), View.temporary(F32, (8,))
    shown = text(
        elementwise(View.temporary(F32, (4, 8)), [a, b], lambda x, y: add(Op("exp", (x,), F32), y), label="node")
    )
    assert "# node" in shown
    assert "for i0 < 4, i1 < 8:" in shown
    assert "t2 = exp(t0) + t1" in shown


def test_emits_for_arm() -> None:
    from ranvier.codegen.llvm import compiler, library
    from ranvier.codegen.llvm.isa import named

    isa = named("neon", "aarch64")
    shape = (5, 40)
    nests = [
        elementwise(View.temporary(F32, shape), [View.temporary(F32, shape), View.temporary(F32, (40,))], add),
        copy(View.temporary(F32, shape), View.temporary(F32, (40, 5)).transposed((1, 0))),
        copy(View.temporary(DType.float16, shape), View.temporary(F32, shape)),
    ]
    for nest in nests:
        assembly = compiler.assembly(library.source(launches(nest, isa)[0].spec, isa), isa)
        assert "ret" in assembly


@ISAS
def test_strides_beyond_32_bits(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes so far apart that their distances need 64 bits."""
    monkeypatch.setattr("ranvier.codegen.llvm.schedule._WIDE", 2)
    x = strided(data((40, 7)))
    out, target = output((40,))
    column = View(x[1], F32, (40,), (7,), 3)
    check(elementwise(out, [column, column], add), {x[1]: x[2], out.storage: target}, isa)


@ISAS
@pytest.mark.parametrize("dtype", [F32, DType.float16, DType.uint16, DType.int8, DType.int64, DType.bool], ids=str)
def test_every_second_element(isa: Isa, dtype: DType) -> None:
    """What is read with a stride of two, up to the last element of its memory, whole and behind a guard."""
    lanes = isa.lanes(dtype.numpy.itemsize)
    for n in [*range(1, 2 * lanes + 2, 3), 4 * lanes + 3, 8 * lanes + 1]:
        view, storage, memory = strided(data((2 * n - 1,), dtype, n)[::2])
        out, written = output((n,), dtype)
        check(copy(out, view), {storage: memory, out.storage: written}, isa)
        before = Op("lt", (Index(0), Size(n // 2)), DType.bool)
        operands = Operand(view, (2,), guard=before, other=1), Operand(out, (1,))
        nest = Nest((n,), operands, (Map(((1, Load(0, dtype)),)),))
        check(nest, {storage: memory, out.storage: written}, isa)
