"""What is known of sums and codes before they are computed: shorter code, and the same results to the last one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.integer import integer_matmul, pack_codes
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of
from ranvier.codegen.llvm.integer.finish import integer_finish
from ranvier.codegen.llvm.integer.reach import by_additions, largest, stays_near, used
from ranvier.codegen.llvm.integer.shortcuts import shortened
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result, walk
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, of
from tests.codegen.harness import Runner, view_of
from tests.codegen.test_integer import PATHS, codes, oracle, path_name, saturated
from tests.codegen.test_integer_dots import NEON, loops, requantized, text_of

Array = np.ndarray[Any, Any]
FLOAT, INT = DType.float32, DType.int32
ALL = {kind: np.arange(np.iinfo(kind).min, np.iinfo(kind).max + 1).astype(kind) for kind in (np.int8, np.uint8)}
ONE = (0, 0, 0)  # strides of a number for all


def number(value: Any, dtype: DType = FLOAT) -> Operand:
    return Operand(View.constant(np.array([value], dtype.numpy), dtype), ONE)


def as_float(code: Expr) -> Expr:
    return Op("cast", (code,), FLOAT)


def ratio(x: Expr, scale: Expr) -> Expr:
    return Op("quotient", (x, scale, Op("reciprocal", (scale,), FLOAT)), FLOAT)


def code_of_sum(kind: type) -> Expr:
    """The sum of codes as a code again, with operands 0 (its factor) and 1 (its zero point)."""
    made = Op("mul", (as_float(Result(0, INT)), Load(0, FLOAT)), FLOAT)
    return saturated(made, as_float(Load(1, of(np.zeros(1, kind)))), kind)


def scaled(code: Expr, zero: int, scale: int) -> Expr:
    """A code, less a zero point, times a scale: operands by their positions."""
    return Op("mul", (Op("sub", (as_float(code), as_float(Load(zero, code.dtype))), FLOAT), Load(scale, FLOAT)), FLOAT)


def all_codes(
    isa: Isa, kind: type, want: Array, value: Expr, operands: list[Operand], given: dict[Any, Array]
) -> None:  # fmt: skip
    """Results where row i has the i-th code as its sum, in every column, are those of the definition."""
    columns = want.shape[1]
    a = np.zeros((256, 4), kind)
    a[:, 0] = ALL[kind]
    b = np.zeros((4, columns), np.int8)
    b[0] = 1
    out = np.zeros((256, columns), kind)
    av, ov = view_of(a), view_of(out, "output")
    packed = pack_codes(b, isa, rows_hint=256)
    launches = integer_matmul(av, packed, ov, isa, epilogue=Epilogue(value, tuple(operands)))
    Runner(launches, isa, {av.storage: a, ov.storage: out, **given})()
    if dot_of(isa) is SIGNED and "quotient" not in names(shortened(value, tuple(operands), columns)[0]):
        np.testing.assert_array_equal(out, want)
    else:  # a multiplication and an addition that are rounded once may go to the other side of a middle
        assert np.abs(out.astype(int) - want).max() <= 1


def names(value: Expr) -> set[str]:
    return {each.name for each in walk(value) if isinstance(each, Op)}


def firsts(kind: type, zero: int) -> Array:
    """The sums of :func:`all_codes` as codes with a zero point, less the zero point."""
    ends = np.iinfo(kind)
    made: Array = np.clip(ALL[kind].astype(np.float32) + zero, ends.min, ends.max) - np.float32(zero)
    return made


def quantized(x: Array, scale: np.float32, zero: int, kind: type) -> Array:
    ends = np.iinfo(kind)
    made: Array = np.clip(np.rint(x / scale) + np.float32(zero), ends.min, ends.max).astype(kind)
    return made


SCALES = [  # of two codes and their sum: any, equal ones, and such that many sums lie halfway between two codes
    *(tuple(np.random.default_rng(seed).uniform(0.01, 0.1, 3).astype(np.float32)) for seed in range(6)),
    (0.02, 0.02, 0.03),
    (0.25, 0.5, 0.5),
    (0.1, 0.1, 0.2),
]


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("cut", [False, True])
def test_all_pairs_of_codes(isa: Isa, kind: type, cut: bool) -> None:
    dtype = of(np.zeros(1, kind))
    right = np.broadcast_to(ALL[kind], (256, 256)).copy()
    zeros = (3, -7, 5) if kind is np.int8 else (130, 121, 99)
    for scales in SCALES:
        one, two, three = map(np.float32, scales)
        rv = view_of(right)
        operands = [number(1.0), number(zeros[0], dtype), number(one), number(zeros[1], dtype)]
        operands += [number(two), Operand(rv, (0, 256, 1)), number(three), number(zeros[2], dtype)]
        total: Expr = Op("add", (scaled(code_of_sum(kind), 1, 2), scaled(Load(5, dtype), 3, 4)), FLOAT)
        if cut:
            total = Op("max", (total, Const(0, FLOAT)), FLOAT)
        value = saturated(ratio(total, Load(6, FLOAT)), as_float(Load(7, dtype)), kind)
        a = firsts(kind, zeros[0])[:, None] * one
        b = (right.astype(np.float32) - np.float32(zeros[1])) * two
        want = np.maximum(a + b, np.float32(0)) if cut else a + b
        all_codes(isa, kind, quantized(want, three, zeros[2], kind), value, operands, {rv.storage: right})


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_all_codes_with_numbers_of_columns(isa: Isa, kind: type) -> None:
    dtype = of(np.zeros(1, kind))
    for seed, n in ((0, 5), (1, 67), (2, 300)):
        rng = np.random.default_rng(seed)
        column = rng.normal(0, 2, n).astype(np.float32)
        column[0] = 0
        one, two = (np.float32(x) for x in rng.uniform(0.01, 0.1, 2))
        zeros = (11, -3) if kind is np.int8 else (140, 100)
        operands = [number(1.0), number(zeros[0], dtype), number(one)]
        operands += [Operand(View.constant(column, FLOAT), (0, 0, 1)), number(two), number(zeros[1], dtype)]
        total = Op("add", (Load(3, FLOAT), scaled(code_of_sum(kind), 1, 2)), FLOAT)
        value = saturated(ratio(total, Load(4, FLOAT)), as_float(Load(5, dtype)), kind)
        want = column + firsts(kind, zeros[0])[:, None] * one
        all_codes(isa, kind, quantized(want, two, zeros[1], kind), value, operands, {})


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
def test_all_codes_divided(isa: Isa) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        one, by, two = (np.float32(x) for x in (rng.uniform(0.05, 0.1), rng.uniform(2, 9), rng.uniform(0.005, 0.01)))
        operands = [number(1.0), number(4, DType.int8), number(one), number(by), number(two)]
        total = Op("div", (scaled(code_of_sum(np.int8), 1, 2), Load(3, FLOAT)), FLOAT)
        value = saturated(ratio(total, Load(4, FLOAT)), None, np.int8)
        want = firsts(np.int8, 4) * one / by
        coded = np.broadcast_to(quantized(want, two, 0, np.int8)[:, None], (256, 16))
        all_codes(isa, np.int8, coded, value, operands, {})


def pair(one: float, two: float, three: float) -> tuple[Expr, list[Operand]]:
    operands = [number(1.0), number(0, DType.int8), number(0, DType.int8), number(one), number(two), number(three)]
    operands.append(Operand(View.temporary(DType.int8, (4, 4)), (0, 4, 1)))
    total = Op("add", (scaled(code_of_sum(np.int8), 2, 3), scaled(Load(6, DType.int8), 2, 4)), FLOAT)
    return saturated(ratio(total, Load(5, FLOAT)), None, np.int8), operands


def test_most_scales_have_a_shortcut() -> None:
    rng = np.random.default_rng(5)
    taken = 0
    for _ in range(20):
        value, operands = pair(*rng.uniform(0.01, 0.1, 3))
        short, more = shortened(value, tuple(operands), 4)
        taken += "quotient" not in names(short)
        # the definition stays where there is none
        assert short == value or ("fma" in names(short) and len(more) == len(operands) + 2)
    assert taken >= 15


@pytest.mark.parametrize("scales", [(np.inf, 0.1, 0.1), (0.1, 0.1, 0.0), (1e-30, 0.1, 0.1), (1e30, 1e30, 1.0)])
def test_odd_scales_have_none(scales: tuple[float, float, float]) -> None:
    value, operands = pair(*scales)
    assert shortened(value, tuple(operands), 4) == (value, tuple(operands))


def test_scales_of_the_run_have_none() -> None:
    value, operands = pair(0.0213, 0.0377, 0.0451)
    assert shortened(value, tuple(operands), None)[0] != value
    for k in (3, 4, 5):
        given = [*operands]
        given[k] = Operand(View.temporary(FLOAT, (1,)), ONE)
        assert shortened(value, tuple(given), 4)[0] == value


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("k", [255, 256, 260, 1100])
def test_sums_at_their_ends(isa: Isa, kind: type, k: int) -> None:
    """The largest sums there are, around 2²², made numbers around the ends of codes and of 16 bits."""
    ends = np.iinfo(kind)
    a = np.stack([np.full(k, ends.min), np.full(k, ends.max), *codes(kind, 15, k)]).astype(kind)
    b = np.stack([np.full(k, -128), np.full(k, 127), np.zeros(k), *codes(np.int8, 21, k)], axis=1).astype(np.int8)
    n = b.shape[1]
    add = np.random.default_rng(k).integers(-200, 200, n).astype(np.int32)
    most = np.abs(oracle(a, b)).max()
    for largest_number in (90.0, 300.0, 32_300.0, 32_800.0, 1e6, 1e30):
        scale = np.full(n, largest_number / most, np.float32)
        point = codes(kind, 1)
        operands = [Operand(View.constant(add, INT), (0, 0, 1)), Operand(View.constant(scale, FLOAT), (0, 0, 1))]
        operands.append(number(int(point[0]), of(point)))
        total = Op("add", (Result(0, INT), Load(0, INT)), INT)
        made = Op("mul", (as_float(total), Load(1, FLOAT)), FLOAT)
        value = saturated(made, as_float(Load(2, of(point))), kind)
        out = np.zeros((len(a), n), kind)
        av, ov = view_of(a), view_of(out, "output")
        packed = pack_codes(b, isa, rows_hint=len(a))
        launches = integer_matmul(av, packed, ov, isa, epilogue=Epilogue(value, tuple(operands)))
        Runner(launches, isa, {av.storage: a, ov.storage: out})()
        np.testing.assert_array_equal(out, requantized(oracle(a, b) + add, scale, kind, int(point[0])))


def test_what_is_known_of_numbers() -> None:
    sums = np.array([100, 1 << 21, 1 << 22])
    bias = Operand(View.constant(np.array([-7, 5, 0], np.int32), INT), (0, 0, 1))
    scale, unknown = number(0.5), Operand(View.temporary(FLOAT, (3,)), (0, 0, 1))
    total = Op("add", (Result(0, INT), Load(0, INT)), INT)
    made = Op("mul", (as_float(total), Load(1, FLOAT)), FLOAT)
    found = largest(made, (bias, scale), sums)
    assert found is not None
    assert found.tolist() == [53.5, 1048578.5, 2097152.0]
    assert largest(made, (bias, unknown), sums) is None
    value = saturated(made, None, np.uint8)
    assert stays_near(value, (bias, number(1e-3)), sums)
    assert not stays_near(value, (bias, number(1e-2)), sums)
    assert not stays_near(value, (bias, number(np.nan)), sums)
    # one sum of the three is too large for an addition
    assert by_additions(value, (bias, scale), sums) == (value, (bias, scale))
    short, operands = used(*by_additions(value, (bias, scale), sums // 2))
    assert len(operands) == 2
    assert "bits" in names(short)


def test_codes_without_conversions() -> None:
    """Sums become codes without the instructions that take one unit for two cycles."""
    n = 8
    operands = (
        Operand(View.constant(np.arange(n, dtype=np.int32), INT), (0, 0, 1)),
        Operand(View.constant(np.full(n, 1e-3, np.float32), FLOAT), (0, 0, 1)),
        number(3, DType.int8),
    )
    total = Op("add", (Result(0, INT), Load(0, INT)), INT)
    made = Op("mul", (as_float(total), Load(1, FLOAT)), FLOAT)
    epilogue = Epilogue(saturated(made, as_float(Load(2, DType.int8)), np.int8), operands)
    slow = ("scvtf", "fcvtns", "fmaxnm")
    for reach, some in ((np.full(n, 1 << 20), False), (None, True)):
        spec = integer_finish(epilogue, DType.int8, (n, 1), reach, shortens=reach is not None).spec
        longest = max(loops(text_of(spec, NEON)), key=len)
        assert any(each in longest for each in slow) == some


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_batches_finished_together(isa: Isa, kind: type) -> None:
    """Matrices with factors that are tensors of the run, transposed; what belongs to columns lies apart."""
    for entries, m, k, n in ((1, 16, 20, 24), (3, 37, 64, 33), (2, 130, 7, 70)):
        rng = np.random.default_rng(m)
        a, b = codes(kind, entries, m, k), codes(kind, n, entries, k).transpose(1, 2, 0)
        columns = rng.integers(-9, 9, (n, entries)).astype(np.int32).T
        scale = np.float32(rng.uniform(1e-4, 1e-3))
        out = np.zeros((entries, m, n), kind)
        av, bv, cv, ov = view_of(a), view_of(b), view_of(columns), view_of(out, "output")
        total = Op("add", (Result(0, INT), Load(0, INT)), INT)
        made = Op("mul", (as_float(total), Load(1, FLOAT)), FLOAT)
        operands = (Operand(cv, (cv.strides[0], 0, cv.strides[1])), number(scale))
        epilogue = Epilogue(saturated(made, None, kind), operands)
        for threads in (1, 2):
            out[...] = 77
            launches = integer_matmul(av, bv, ov, isa, epilogue=epilogue, threads=threads)
            bound = {av.storage: a, bv.storage: b, cv.storage: columns, ov.storage: out}
            Runner(launches, isa, bound, split=threads)()
            np.testing.assert_array_equal(out, requantized(oracle(a, b) + columns[:, None], scale, kind, 0))
