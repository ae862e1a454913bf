"""Nests that are alike share their launches, and only those."""

from __future__ import annotations

import numpy as np

from ranvier.codegen.launch import At
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.isa import available
from ranvier.codegen.llvm.nest_memo import likeness
from ranvier.codegen.loops.ir import Const, Load, Map, Nest, Op, Operand, Size
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType

ISA = available()[0]
F32, F64 = DType.float32, DType.float64


def view(n: int = 64, dtype: DType = F32, offset: int = 0, storage: Storage | None = None) -> View:
    return View(storage or Storage.temporary(1024), dtype, (n,), (1,), offset)


def copy_nest(source: View, target: View, factor: float = 2.0) -> Nest:
    value = Op("mul", (Load(0, F32), Const(factor, F32)), F32)
    return Nest((64,), (Operand(source, (1,)), Operand(target, (1,))), (Map(((1, value),)),), label="x")


def test_other_memory_is_filled_in() -> None:
    first = copy_nest(view(), view())
    source, target = view(offset=5), view(offset=7)
    second = copy_nest(source, target)
    assert likeness(first, ISA) == likeness(second, ISA)
    (a,), (b,) = nests.launches(first, ISA), nests.launches(second, ISA)
    assert a.spec is b.spec and a.dims == b.dims and a.tiles == b.tiles
    assert b.buffers == (At(source.storage, 20), At(target.storage, 28)) and b.writes == (target.storage,)


def test_what_makes_a_difference() -> None:
    shared = Storage.temporary(1024)
    plain = copy_nest(view(), view())
    others = [
        copy_nest(view(), view(), 3.0),
        copy_nest(view(storage=shared), view(storage=shared)),  # in place
        Nest((32,), plain.operands, plain.stages),
        Nest((64,), (Operand(plain.operands[0].view, (2,)), plain.operands[1]), plain.stages),
        Nest((64,), (Operand(plain.operands[0].view, (1,), at=Size(3)), plain.operands[1]), plain.stages),
        Nest((64,), (Operand(plain.operands[0].view, (1,), at=Size(4)), plain.operands[1]), plain.stages),
    ]
    keys = [likeness(n, ISA) for n in [plain, *others]]
    assert len(set(keys)) == len(keys)


def test_operands_of_one_place_are_told_by_bytes() -> None:
    shared = Storage.temporary(1024)

    def nest(a: int, b: int) -> Nest:
        value = Op("add", (Load(0, F32), Op("cast", (Load(1, F64),), F32)), F32)
        target = View(Storage.temporary(1024), F32, (8,), (1,))
        reads = (view(8, F32, a, shared), view(8, F64, b, shared))
        return Nest((8,), (*(Operand(v, (1,)) for v in reads), Operand(target, (1,))), (Map(((2, value),)),))

    same_byte, apart = nest(4, 2), nest(8, 2)
    assert likeness(same_byte, ISA) != likeness(apart, ISA)
    for each in (same_byte, apart):
        (launch,) = nests.launches(each, ISA)
        offsets = {b.offset for b in launch.buffers if isinstance(b, At) and b.storage is shared}
        expected = {(o.view.offset) * o.dtype.numpy.itemsize for o in each.operands[:2]}
        assert offsets == expected


def test_signs_of_zero_and_nan_are_apart() -> None:
    keys = {likeness(copy_nest(view(), view(), f), ISA) for f in (0.0, -0.0, 1.0, float("inf"))}
    assert len(keys) == 4
    assert np.isnan(float("nan")) and likeness(copy_nest(view(), view(), float("nan")), ISA) == likeness(
        copy_nest(view(), view(), float("nan")), ISA
    )
