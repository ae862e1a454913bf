"""Nests that are done another way than as they stand: results across their operands, rows by tables that are lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops import pieces
from ranvier.codegen.loops.across import along_operands
from ranvier.codegen.loops.ir import Const, Expr, Index, Load, Map, Nest, Op, Operand, Size
from ranvier.codegen.loops.pieces import by_pieces
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.nest_makers import elementwise
from tests.codegen.nest_oracle import check, strided

Array = np.ndarray[Any, Any]
ISAS = pytest.mark.parametrize("isa", harness.ISAS, ids=lambda i: i.name)
F32, I64 = DType.float32, DType.int64
RNG = np.random.default_rng(4)


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return (RNG.standard_normal(shape) * 3).astype(dtype)


# -- results across their operands ------------------------------------------------------------------------------------


@ISAS
@pytest.mark.parametrize("perm", [(0, 2, 1), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
def test_results_across_operands(isa: Isa, perm: tuple[int, ...], dtype: Any) -> None:
    memory: dict[Storage, Array] = {}

    def held(array: Array) -> View:
        view, storage, array = strided(array, len(memory))
        memory[storage] = array
        return view

    x, bias, other = numbers(17, 33, 40, dtype=dtype), numbers(40, dtype=dtype), numbers(17, 33, 40, dtype=dtype)
    out = held(np.zeros([x.shape[p] for p in perm], dtype))
    inputs = [held(x), held(bias), held(other)]
    turned = [inputs[0].transposed(perm), inputs[1].expanded(x.shape).transposed(perm), inputs[2].transposed(perm)]

    def value(a: Expr, b: Expr, c: Expr) -> Expr:
        return Op("max", (Op("add", (a, b), a.dtype), c), a.dtype)

    nest = elementwise(out, turned, value)
    apart = along_operands(nest)
    assert apart is not None and len(apart[1].operands) == 2
    assert len(nests.launches(nest, isa)) == 2
    check(nest, memory, isa)


def test_nests_that_stay_whole() -> None:
    def view(*shape: int) -> View:
        return View.temporary(F32, shape)

    def double(a: Expr, *_: Expr) -> Expr:
        return Op("mul", (a, Const(2.0, F32)), F32)

    def whole(out: View, *inputs: View) -> bool:
        return along_operands(elementwise(out, inputs, double)) is None

    assert not whole(view(128, 96), view(96, 128).transposed((1, 0)))
    assert whole(view(128, 96), view(128, 96))
    assert whole(view(128, 8), view(8, 128).transposed((1, 0))), "a short side"
    assert whole(view(40, 40), view(40, 40).transposed((1, 0))), "all of it stays near"
    mixed = [view(128, 96), view(96, 128).transposed((1, 0))]
    assert whole(view(128, 96), *mixed), "operands of either kind"
    assert along_operands(elementwise(view(128, 96), [view(96, 128).transposed((1, 0))], lambda a: a)) is None


# -- rows by tables ---------------------------------------------------------------------------------------------------

TABLES = {
    "reflect": np.pad(np.arange(90), (20, 31), mode="reflect"),
    "edge": np.pad(np.arange(90), (20, 31), mode="edge"),
    "wrap": np.pad(np.arange(90), (20, 31), mode="wrap"),
    "one before": np.pad(np.arange(90), (1, 0), mode="reflect"),
    "backwards": np.arange(90)[::-1].copy(),
    "steps": np.arange(0, 90, 2),
    "halves": np.repeat(np.arange(45), 2),
    "anything": np.random.default_rng(1).integers(0, 90, 100),
    "one alone": np.array([*range(30), 80, *range(5, 40)]),
}


def looked_up(table: Array, rows: Array, dtype: Any, more: Expr | None = None) -> tuple[Nest, dict[Storage, Array]]:
    """``out[i, j] = 2 * x[rows[i], table[j]]``"""
    source = numbers(40, 90, dtype=dtype)
    kind = DType.float32 if dtype is np.float32 else DType.int32
    memory: dict[Storage, Array] = {}
    operands: list[Operand] = []
    extents = (len(rows), len(table))
    at: Expr = Op("add", (Load(1, I64), Load(2, I64)), I64)
    if more is not None:
        at = Op("add", (at, more), I64)
    held = Storage.temporary(source.nbytes)
    memory[held] = source
    operands.append(Operand(View.dense(held, kind, source.shape), (0, 0), at=at))
    for places, strides in ((rows * 90, (1, 0)), (table, (0, 1))):
        known = View.constant(np.asarray(places, np.int64), I64)
        memory[known.storage] = np.asarray(places, np.int64)
        operands.append(Operand(known, strides))
    made = np.zeros(extents, dtype)
    target = Storage.temporary(made.nbytes)
    memory[target] = made
    operands.append(Operand(View.dense(target, kind, extents), (extents[1], 1)))
    value = Op("add", (Load(0, kind), Load(0, kind)), kind)
    return Nest(extents, tuple(operands), (Map(((3, value),)),)), memory


@ISAS
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_rows_by_tables(isa: Isa, name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_POINTS", 0)
    nest, memory = looked_up(TABLES[name], np.array([3, 0, 39, 7, 7]), dtype)
    few = by_pieces(nest)
    assert (few is None) == (name in ("halves", "anything", "one alone"))
    if few is not None:
        assert all(each.extents[0] == 5 for each in few)
        assert sum(each.extents[1] for each in few) == len(TABLES[name])
        assert len(few) <= 4
    check(nest, memory, isa)


def test_tables_that_are_not_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(8)
    nest, _ = looked_up(TABLES["edge"], rows, np.float32)
    assert by_pieces(nest) is None, "so little stays one launch"
    monkeypatch.setattr(pieces, "_POINTS", 0)
    assert by_pieces(nest) is not None
    nest, _ = looked_up(TABLES["edge"], rows, np.float32, Op("mod", (Index(1), Size(2)), I64))
    assert by_pieces(nest) is None, "the column itself takes part"


@ISAS
def test_random_tables(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of lines of any slope, with and without jumps between them."""
    monkeypatch.setattr(pieces, "_POINTS", 0)
    monkeypatch.setattr(pieces, "_LEAST", 1)
    rng = np.random.default_rng(9)
    seen = set()
    for _ in range(60):
        parts: list[Array] = []
        for _ in range(int(rng.integers(1, 6))):
            length, slope = int(rng.integers(1, 9)), int(rng.integers(-2, 3))
            parts.append(np.clip(rng.integers(20, 70) + slope * np.arange(length), 0, 89))
        nest, memory = looked_up(np.concatenate(parts), np.array([1, 5]), np.float32)
        few = by_pieces(nest)
        seen.add(few is None)
        for each in few or ():
            assert all(step.at is None or not _columns(each, step) for step in each.operands)
        check(nest, memory, isa)
    assert False in seen


def _columns(nest: Nest, operand: Operand) -> bool:
    """Whether an operand's places are looked up along the columns."""
    terms = [operand.at]
    while terms:
        term = terms.pop()
        if isinstance(term, Op):
            terms += term.args
        elif isinstance(term, Load) and nest.operands[term.operand].strides[1]:
            return True
    return False
