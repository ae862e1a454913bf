"""The axis along the lanes, whatever its length: written out, with a known remainder or with any; in place or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import KernelSpec, Launch
from ranvier.codegen.llvm import compiler
from ranvier.codegen.llvm.isa import Isa, named, with_extensions
from ranvier.codegen.llvm.lane_axis import Cover, covered
from ranvier.codegen.llvm.library import source
from ranvier.codegen.llvm.nests import launches
from ranvier.codegen.loops.fold import Fold
from ranvier.codegen.loops.ir import Const, Expr, Final, Load, Map, Nest, Op, Operand, Reduce, Result, Scan
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.varying import Span, follow
from tests.codegen import harness
from tests.codegen.nest_oracle import check
from tests.codegen.written_out import BFLOATS, launches_here

Array = np.ndarray[Any, Any]
# masks and long vectors as AVX-512 has them, put together by the compiler from what is here
MASKED = replace(harness.ISAS[0], name="masked", vector_bytes=64, registers=32, masks=True, extensions=frozenset())
ISAS = pytest.mark.parametrize("isa", [*harness.ISAS, MASKED], ids=lambda i: i.name)
F32 = DType.float32
PIXELS = 37
TYPES = [F32, DType.float64, DType.float16, DType.bfloat16, DType.int8, DType.int32, DType.bool]


def lengths(lanes: int) -> Iterator[int]:
    """One of each kind: parts of a vector, and some vectors with nothing, half of one, a quarter or else behind."""
    yield from {2, 3, max(2, lanes // 2), lanes // 2 + 1, lanes - 1} - {0, 1}
    for whole in (1, 2, 3, 4, 5, 7, 8, 9, 12, 63):
        yield whole * lanes
    for whole in (1, 2, 4, 6, 9, 11):
        yield from {whole * lanes + rest for rest in (lanes // 4, lanes // 2, lanes - 1) if rest}
    yield 64 * lanes + 3


def data(shape: tuple[int, ...], dtype: DType, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * 2 if dtype.is_float else rng.integers(0, 2 if dtype is DType.bool else 100, shape)
    return values.astype(dtype.numpy)


def memory(array: Array, dtype: DType, kind: str = "temp") -> tuple[View, Array]:
    storage = Storage(kind, array.nbytes)  # type: ignore[arg-type]
    return View(storage, dtype, array.shape, tuple(s // array.itemsize for s in array.strides)), array


def scaled(n: int, dtype: DType, in_place: bool, name: str = "mul") -> tuple[Nest, dict[Storage, Array]]:
    """Every pixel's channels times one factor for each."""
    x, values = memory(data((PIXELS, n), dtype, n), dtype, "input" if in_place else "temp")
    factor, factors = memory(data((n,), dtype, n + 1), dtype)
    out = x if in_place else View.temporary(dtype, (PIXELS, n))
    known = {x.storage: values, factor.storage: factors}
    if not in_place:
        known[out.storage] = np.empty((PIXELS, n), dtype.numpy)
    value = Op(name, (Load(0, dtype), Load(1, dtype)), dtype)
    operands = (Operand(x, (n, 1)), Operand(factor, (0, 1)), Operand(out, (n, 1)))
    return Nest((PIXELS, n), operands, (Map(((2, value),)),), label=f"{n} of {dtype}"), known


@ISAS
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
def test_every_length(isa: Isa, dtype: DType, in_place: bool) -> None:
    lanes = isa.lanes(max(4 if dtype.is_float else 1, dtype.numpy.itemsize))
    for n in lengths(lanes):
        nest, known = scaled(n, dtype, in_place, "or" if dtype is DType.bool else "mul")
        check(nest, known, isa, splits=(1, 3), tolerance=1e-2 if dtype is DType.bfloat16 else 0.0)


@ISAS
@pytest.mark.parametrize("fold", ["sum", "max"])
@pytest.mark.parametrize("pixels", [40, 6])
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
def test_folds_over_short_and_long_rows(isa: Isa, fold: Fold, pixels: int, in_place: bool) -> None:
    """Of channels over pixels, added to numbers that may stand where the results go."""
    for n in lengths(isa.lanes(4)):
        if n > 200:
            continue
        x, values = memory(data((8, pixels, n), F32, n), F32)
        start, starts = memory(data((8, n), F32, n + 1), F32, "input")
        out, results = (start, starts) if in_place else memory(np.empty((8, n), np.float32), F32)
        total = Op("add", (Result(0, F32), Load(1, F32)), F32)
        operands = (Operand(x, (pixels * n, n, 1)), Operand(start, (n, 0, 1)), Operand(out, (n, 0, 1)))
        stages = (Reduce(fold, Load(0, F32), F32), Final(((2, total),)))
        nest = Nest((8, pixels, n), operands, stages, frozenset({1}), f"{n}")
        want = starts + (values.sum(1) if fold == "sum" else values.max(1))
        known = {x.storage: values, start.storage: starts, out.storage: results}
        harness.run(launches(nest, isa), isa, known, split=3)
        np.testing.assert_allclose(results, want, rtol=1e-5, atol=1e-5, err_msg=nest.label)


@ISAS
def test_running_sums_in_place(isa: Isa) -> None:
    for n in lengths(isa.lanes(4)):
        if n > 200:
            continue
        x, values = memory(data((PIXELS, n), F32, n), F32, "input")
        operands = (Operand(x, (n, 1)), Operand(x, (n, 1)))
        nest = Nest((PIXELS, n), operands, (Scan("sum", Load(0, F32), 1, F32),), frozenset({0}), f"{n}")
        check(nest, {x.storage: values}, isa, tolerance=1e-4)


@ISAS
def test_what_is_expensive_and_what_has_several_results(isa: Isa) -> None:
    for n in lengths(isa.lanes(4)):
        if n > 200:
            continue
        x, values = memory(data((PIXELS, n), F32, n), F32, "input")
        other = View.temporary(F32, (PIXELS, n))
        value: Expr = Op("tanh", (Op("exp", (Load(0, F32),), F32),), F32)
        stores = ((2, Op("mul", (Load(0, F32), Load(0, F32)), F32)), (1, value))
        operands = tuple(Operand(v, (n, 1)) for v in (x, x, other))
        nest = Nest((PIXELS, n), operands, (Map(stores),), label=f"{n}")
        known = {x.storage: values, other.storage: np.empty((PIXELS, n), np.float32)}
        check(nest, known, isa, tolerance=1e-5)


def kept(n: int, in_place: bool, stored: DType, factor: DType) -> tuple[Nest, dict[Storage, Array]]:
    """Numbers kept in bfloat16, times one for each channel, plus another."""
    nest, known = scaled(n, DType.bfloat16, in_place)
    x, _, out = nest.operands
    other, factors = memory(data((n,), factor, n + 1), factor)
    bias, biases = memory(data((1,), F32, n + 2), F32)
    if stored is not out.dtype:
        out = Operand(View.temporary(stored, (PIXELS, n)), (n, 1))
    known |= {other.storage: factors, bias.storage: biases, out.view.storage: np.empty((PIXELS, n), stored.numpy)}
    if in_place:
        known[x.view.storage] = data((PIXELS, n), DType.bfloat16, n)
    value = Op("fma", (Load(0, F32), Load(1, F32), Load(2, F32)), F32)
    operands = (x, Operand(other, (0, 1)), Operand(bias, (0, 0)), out)
    return Nest((PIXELS, n), operands, (Map(((3, value),)),), label=f"{n} kept"), known


def written(launches: Sequence[Launch]) -> Sequence[Launch]:
    return launches_here(launches, BFLOATS)


@pytest.mark.parametrize("factor", [F32, DType.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
def test_words_of_two(in_place: bool, factor: DType) -> None:
    for n in lengths(32):
        nest, known = kept(n, in_place, DType.bfloat16, factor)
        check(nest, known, BFLOATS, splits=(1, 3), tolerance=1e-2, here=written)


@pytest.mark.parametrize("stored", [F32, DType.bfloat16], ids=str)
def test_sums_of_words_of_two(stored: DType) -> None:
    for n in lengths(32):
        x, values = memory(data((PIXELS, n), DType.bfloat16, n), DType.bfloat16)
        out = View.temporary(stored, (n,))
        stages = Reduce("sum", Load(0, F32), F32), Final(((1, Op("mul", (Result(0, F32), Const(0.25, F32)), F32)),))
        nest = Nest((PIXELS, n), (Operand(x, (n, 1)), Operand(out, (0, 1))), stages, frozenset({0}), f"{n} kept")
        known = {x.storage: values, out.storage: np.empty(n, stored.numpy)}
        check(nest, known, BFLOATS, tolerance=1e-2, here=written)


def test_which_words_are_of_two() -> None:
    def paired(n: int, stored: DType = DType.bfloat16, factor: DType = F32) -> bool:
        nest, _ = kept(n, False, stored, factor)
        return covered(nest, 1, 16, 1, BFLOATS).pairs

    assert [n for n in (8, 16, 24, 32, 40, 88, 200, 232, 288, 300) if paired(n)] == [32, 40, 88, 200, 232, 288]
    assert paired(64, factor=DType.bfloat16) and not paired(64, stored=F32)


def kernels(isa: Isa, lengths: list[int], pixels: int = PIXELS) -> set[KernelSpec]:
    found = set()
    for n in lengths:
        x, factor = View.temporary(F32, (pixels, n)), View.temporary(F32, (n,))
        value = Op("mul", (Load(0, F32), Load(1, F32)), F32)
        operands = (Operand(x, (n, 1)), Operand(factor, (0, 1)), Operand(x, (n, 1)))
        found.add(launches(Nest((pixels, n), operands, (Map(((2, value),)),)), isa)[0].spec)
    return found


def test_lengths_share_kernels() -> None:
    assert len(kernels(MASKED, [17, 25, 31, 32])) == 1
    assert len(kernels(MASKED, [65, 80, 96])) == 1
    assert len(kernels(MASKED, [144, 160, 192, 1008])) == 1
    assert len(kernels(MASKED, list(range(16, 1100)))) == 18
    assert len(kernels(MASKED, [8, 24, 100, 1000], pixels=3)) == 1, "not worth kernels of their own"


def cover(n: Any, pixels: int = PIXELS) -> Cover:
    x = View.temporary(F32, (pixels, 4096))
    operands = (Operand(x, (4096, 1)), Operand(x, (4096, 1)))
    return covered(Nest((pixels, n), operands, (Map(((1, Load(0, F32)),)),)), 1, 16, 1, MASKED)


def test_what_is_known_of_the_end() -> None:
    assert cover(8) == Cover(8, 1, True, 1, False, False, 0)
    assert cover(12) == Cover(8, 2, True, 1, False, False, 0)
    assert cover(40) == Cover(16, 2, True, 2, False, False, 8)
    assert cover(41) == Cover(16, 3, True, 2, False, False, 0)
    assert [cover(n).rest for n in (160, 168, 164, 163)] == [0, 8, 4, None]
    assert not cover(40, pixels=3).together


def test_a_length_that_varies_is_not_part_of_the_code() -> None:
    span = Span(30)
    with follow(span):
        assert cover(span.growing(16, 1)).rest is None
    assert span.calls == 30


def assembly(n: int, dtype: DType, isa: Isa) -> str:
    nest, _ = scaled(n, F32, in_place=True)
    stored = View.temporary(dtype, (PIXELS, n))
    nest = replace(nest, operands=(*nest.operands[:2], Operand(stored, (n, 1))))
    return compiler.assembly(source(launches(nest, isa)[0].spec, isa), isa)


def test_avx512_has_masks_only_where_there_is_no_other_way() -> None:
    isa = with_extensions(named("avx512", "x86_64"), frozenset({"avx512bf16"}))
    for n in (8, 12, 16, 30, 40, 88, 100, 128, 160, 200, 164):
        assert "{%k" not in assembly(n, F32, isa), n
    assert "{%k" in assembly(163, F32, isa)
    for n in (4, 8, 12, 40, 200):
        text = assembly(n, DType.bfloat16, isa)
        assert "vcvtneps2bf16" in text and "vpmovdw" not in text, n
