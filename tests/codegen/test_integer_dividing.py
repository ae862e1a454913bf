"""Codes of numbers that are divided by a known scale: those of a quotient rounded correctly, every one."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.integer import integer_conv, integer_matmul, pack_codes, pack_filters
from ranvier.codegen.llvm.integer.dividing import in_parts, parts_of
from ranvier.codegen.llvm.integer.finish import integer_finish
from ranvier.codegen.llvm.integer.reach import fits_integers
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, of
from tests.codegen.harness import Runner, view_of
from tests.codegen.test_integer import PATHS, codes, last, oracle, path_name, saturated

Array = np.ndarray[Any, Any]
FLOAT, INT = DType.float32, DType.int32
ONE, COLUMNS = (0, 0, 0), (0, 0, 1)


def rounded(x: Fraction) -> Fraction:
    """The float32 nearest to a number, worked out in whole numbers."""
    if x == 0:
        return x
    exponent = 0
    while abs(x) * Fraction(2) ** -exponent >= 2**24:
        exponent += 1
    while abs(x) * Fraction(2) ** -exponent < 2**23:
        exponent -= 1
    return round(x * Fraction(2) ** -exponent) * Fraction(2) ** exponent


@settings(max_examples=60)
@given(st.floats(2.0**-20, 2.0**10, width=32), st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_both_parts_of_a_reciprocal_give_the_codes_of_a_quotient(scale: float, zero: int, seed: int) -> None:
    parts = parts_of(scale, -zero, 255 - zero)
    if parts is None:
        return
    first, second = map(Fraction, parts)
    rng = np.random.default_rng(seed)
    halves = rng.integers(-zero - 1, 256 - zero, 30) + 0.5
    numbers = (halves * scale).astype(np.float32)
    numbers += np.spacing(numbers) * rng.integers(-12, 13, len(numbers)).astype(np.float32)
    for x in (*numbers, np.float32(rng.normal() * 300 * scale)):
        want = np.rint(x / np.float32(scale))
        exact = Fraction(float(x))
        found = round(rounded(exact * first + rounded(exact * second)))
        low, high = -zero, 255 - zero
        assert min(max(found, low), high) == min(max(int(want), low), high), x


def test_most_scales_have_such_parts() -> None:
    scales = np.random.default_rng(3).uniform(1e-4, 2, 300).astype(np.float32)
    assert sum(parts_of(float(scale), 0, 255) is not None for scale in scales) > 290
    assert parts_of(0.0, 0, 255) is None
    assert parts_of(float("nan"), 0, 255) is None


def requantized(kind: type, zero: int, *, leaky: bool = False) -> Expr:
    """Operands: a bias, a scale for each column, the scale of results, their zero point."""
    total = Op("cast", (Op("add", (Result(0, INT), Load(0, INT)), INT),), FLOAT)
    number: Expr = Op("mul", (total, Load(1, FLOAT)), FLOAT)
    if leaky:
        below = Op("lt", (number, Const(0.0, FLOAT)), DType.bool)
        number = Op("where", (below, Op("mul", (number, Const(0.25, FLOAT)), FLOAT), number), FLOAT)
    step = Load(2, FLOAT)
    quotient = Op("quotient", (number, step, Op("reciprocal", (step,), FLOAT)), FLOAT)
    return saturated(quotient, Op("cast", (Load(3, of(np.zeros(1, kind))),), FLOAT), kind)


def definition(sums: Array, operands: list[Array], kind: type, leaky: bool) -> Array:
    bias, scales, step, zero = operands
    number = (sums.astype(np.int64) + bias).astype(np.float32) * scales
    if leaky:
        number = np.where(number < 0, number * np.float32(0.25), number)
    ends = np.iinfo(kind)
    return np.clip(np.rint(number / step[0]) + np.float32(zero[0]), ends.min, ends.max).astype(kind)


def given_operands(columns: int, reach: int, kind: type, rng: np.random.Generator) -> list[Array]:
    step = rng.uniform(0.01, 0.2, 1).astype(np.float32)
    scales = (rng.uniform(0.5, 2, columns) * step * 300 / reach).astype(np.float32)
    ends = np.iinfo(kind)
    return [
        rng.integers(-reach, reach, columns).astype(np.int32),
        scales,
        step,
        codes(kind, 5)[4:] // 2 + ends.max // 4,
    ]


def placed(arrays: list[Array]) -> tuple[Operand, ...]:
    strides = (COLUMNS, COLUMNS, ONE, ONE)
    return tuple(Operand(View.constant(each, of(each)), place) for each, place in zip(arrays, strides))


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("leaky", [False, True], ids=["plain", "leaky"])
def test_products_become_the_codes_of_the_definition(isa: Isa, kind: type, leaky: bool) -> None:
    rng = np.random.default_rng(5)
    for m, k, n in ((1, 9, 5), (3, 40, 24), (9, 8, 16), (14, 36, 72), (6, 130, 33), (7, 20, 130)):
        a, b = codes(kind, m, k), codes(np.int8, k, n)
        out = np.full((m, n), 77, kind)
        operands = given_operands(n, 3000 * k, kind, rng)
        packed = pack_codes(b, isa, rows_hint=m)
        left, target = view_of(a), view_of(out, "output")
        epilogue = Epilogue(requantized(kind, 3, leaky=leaky), placed(operands))
        launches = integer_matmul(left, packed, target, isa, epilogue=epilogue)
        Runner(launches, isa, {left.storage: a, target.storage: out})()
        np.testing.assert_array_equal(out, definition(oracle(a, b), operands, kind, leaky))


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
def test_convolutions_become_the_codes_of_the_definition(isa: Isa, left: type) -> None:
    rng = np.random.default_rng(6)
    for channels, columns in ((4, 24), (16, 96), (7, 40), (32, 16), (8, 3)):
        x, w, zero = last(codes(left, 2, channels, 7, 9)), codes(np.int8, columns, channels, 1, 1), codes(left, 1)
        out = last(np.full((2, columns, 7, 9), 77, left))
        shape = ConvShape.conv(x.shape, w.shape)
        views = [view_of(x), view_of(zero), view_of(out, "output")]
        operands = given_operands(columns, 3000 * channels, left, rng)
        epilogue = Epilogue(requantized(left, 3), placed(operands))
        launches = integer_conv(*views[:2], pack_filters(w, isa, shape), views[2], shape, isa, epilogue=epilogue)
        Runner(launches, isa, dict(zip([v.storage for v in views], (x, zero, out))))()
        sums = np.einsum("ncyx,oc->nyxo", x.astype(np.int64), w[:, :, 0, 0].astype(np.int64))
        want = definition(sums, operands, left, False)
        np.testing.assert_array_equal(out.transpose(0, 2, 3, 1), want)


def test_what_is_known_of_sums_decides() -> None:
    """Numbers that may be too large, or are none, keep their bounds; so does what is divided by a scale of the run."""
    rng = np.random.default_rng(7)
    operands = placed(given_operands(16, 1000, np.uint8, rng))
    value = requantized(np.uint8, 3)
    small, large = np.full(16, 1000), np.full(16, 1 << 60)
    assert fits_integers(value, operands, small) and not fits_integers(value, operands, large)
    assert in_parts(value, operands) is not None
    given = view_of(np.zeros(1, np.float32))
    unknown = (*operands[:2], Operand(given, ONE), operands[3])
    assert in_parts(value, unknown) is None and not fits_integers(value, unknown, small)
    epilogue = Epilogue(value, operands)
    kinds = {integer_finish(epilogue, DType.uint8, (16, 1), reach).spec.key[-2:] for reach in (small, large, None)}
    assert kinds == {(True, True), (False, False)}
