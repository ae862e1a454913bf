"""Operands that are touched between bounds along the lanes: by whole vectors there, and by none beyond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.llvm.library import source
from ranvier.codegen.llvm.nests import launches
from ranvier.codegen.loops.ir import Expr, Final, Index, Load, Map, Nest, Op, Operand, Reduce, Result, Size
from ranvier.codegen.storage import Storage
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.nest_oracle import check, strided
from tests.codegen.test_nests import data, output

Array = np.ndarray[Any, Any]
Memory = dict[Storage, Array]
F32, I64 = DType.float32, DType.int64
ISAS = pytest.mark.parametrize("isa", harness.ISAS, ids=lambda i: i.name)
ROWS = 5
# points before, between and behind the bounds: parts of vectors, some of them, groups of them, and nothing
LENGTHS = [(1, 30, 1), (0, 7, 3), (3, 0, 2), (40, 3, 0), (2, 64, 37), (21, 1, 90), (0, 100, 0), (1, 1, 1)]


def compare(name: str, a: Expr, b: Expr) -> Expr:
    return Op(name, (a, b), DType.bool)


def both(a: Expr, b: Expr) -> Expr:
    return Op("and", (a, b), DType.bool)


def between(first: int, last: int, axis: int = 1) -> Expr:
    return both(compare("ge", Index(axis), Size(first)), compare("lt", Index(axis), Size(last)))


def padded(before: int, size: int, behind: int, dtype: DType = F32) -> tuple[Nest, Memory]:
    """Rows with something at either side, and two rows of it alone."""
    x, storage, values = strided(data((ROWS, size), dtype))
    out, target = output((ROWS + 2, before + size + behind), dtype)
    inside = both(between(1, 1 + ROWS, 0), between(before, before + size))
    loads = Operand(x, x.strides, -before - size, guard=inside, other=True if dtype is DType.bool else 3)
    nest = Nest(out.shape, (loads, Operand(out, out.strides)), (Map(((1, Load(0, dtype)),)),))
    return nest, {storage: values, out.storage: target}


@ISAS
@pytest.mark.parametrize("dtype", [F32, DType.uint8, DType.float16, I64, DType.bool], ids=str)
def test_pads(isa: Isa, dtype: DType) -> None:
    for lengths in LENGTHS:
        check(*padded(*lengths, dtype), isa, splits=(1, 3))


@ISAS
def test_sums_along_padded_rows(isa: Isa) -> None:
    for before, size, behind in LENGTHS:
        x, storage, values = strided(data((ROWS, size)))
        out, target = output((ROWS,))
        loads = Operand(x, x.strides, -before, guard=between(before, before + size), other=0.5)
        stages = (Reduce("sum", Load(0, F32), F32), Final(((1, Result(0, F32)),)))
        nest = Nest((ROWS, before + size + behind), (loads, Operand(out, (1, 0))), stages, frozenset({1}))
        check(nest, {storage: values, out.storage: target}, isa, tolerance=1e-5, splits=(1, 3))


@ISAS
def test_bounds_that_rows_have_of_their_own(isa: Isa) -> None:
    """They are read, and some rows have nothing between them; what is computed knows one of them too."""
    n = 50
    x, storage, values = strided(data((ROWS, n)))
    limits, stored, numbers = strided(np.array([[0, 0], [0, n], [9, 3], [20, 49], [5, 17]], np.int64), 1)
    out, target = output((ROWS, n))
    low, high = (compare(name, Index(1), Load(k, I64)) for name, k in (("ge", 1), ("lt", 2)))
    loads = Operand(x, x.strides, guard=both(low, high), other=-1.0)
    ends = [Operand(limits, (2, 0), k) for k in (0, 1)]
    value = Op("where", (low, Load(0, F32), Op("neg", (Load(0, F32),), F32)), F32)
    nest = Nest((ROWS, n), (loads, *ends, Operand(out, out.strides)), (Map(((3, value),)),))
    check(nest, {storage: values, stored: numbers, out.storage: target}, isa, splits=(1, 2))


@ISAS
@pytest.mark.parametrize("shared", [True, False])
def test_two_operands(isa: Isa, shared: bool) -> None:
    """With one pair of bounds, or each with its own."""
    n = 70
    x, y = strided(data((ROWS, n))), strided(data((ROWS, n), seed=1), 1)
    out, target = output((ROWS, n))
    mine = between(3, 61)
    other = mine if shared else between(20, 68)
    operands = (
        Operand(x[0], x[0].strides, guard=mine, other=2.0),
        Operand(y[0], y[0].strides, guard=other, other=5.0),
        Operand(out, out.strides),
    )
    nest = Nest((ROWS, n), operands, (Map(((2, Op("add", (Load(0, F32), Load(1, F32)), F32)),)),))
    check(nest, {x[1]: x[2], y[1]: y[2], out.storage: target}, isa, splits=(1, 3))


@ISAS
def test_stores_between_bounds(isa: Isa) -> None:
    n = 45
    x, storage, values = strided(data((ROWS, n)))
    out, target = output((ROWS, n))
    stores = Operand(out, out.strides, guard=between(2, 39))
    nest = Nest((ROWS, n), (Operand(x, x.strides), stores), (Map(((1, Load(0, F32)),)),))
    check(nest, {storage: values, out.storage: target}, isa, splits=(1, 3))


@pytest.mark.parametrize(("name", "triple"), [("neon", "aarch64"), ("avx2", "x86_64"), ("avx512", "x86_64")])
def test_lanes_are_looked_at_only_with_masks(name: str, triple: str) -> None:
    isa = named(name, triple)
    for dtype in (F32, DType.uint8):
        (launch,) = launches(padded(1, 30, 1, dtype)[0], isa)
        assert ("llvm.masked.load" in source(launch.spec, isa)) == isa.masks
