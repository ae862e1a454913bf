"""Integers of 6 and 8 bits that are positions in a known table: found, packed in 4 bits, and the same products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.coded import Coding, Groups, pack_coded
from ranvier.codegen.llvm.coded.held import held, looks_up
from ranvier.codegen.llvm.coded.lookup import positions
from ranvier.codegen.llvm.coded.tables import table_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.ops.contrib.levels import WHOLE_TABLES
from ranvier.ops.contrib.weight_only import packed, unpacked
from tests.codegen.harness import ISAS
from tests.codegen.test_coded import product, rows, ways

Array = np.ndarray[Any, Any]
N, K = 70, 192  # more rows than are looked at first
CASES = [(table, bits) for table in WHOLE_TABLES for bits in (6, 8) if abs(table).max() < 1 << (bits - 1)]
cases = pytest.mark.parametrize(("table", "bits"), CASES, ids=[f"{t[1]:g} in {bits} bits" for t, bits in CASES])


def codes_of(table: Array, bits: int, used: slice = slice(None)) -> Array:
    rng = np.random.default_rng(bits)
    return (rng.choice(table[used], (N, K)) + (1 << (bits - 1))).astype(np.uint8)


@cases
def test_codes_that_are_in_a_table(table: Array, bits: int) -> None:
    codes = codes_of(table, bits)
    found = table_of(packed(codes, bits), bits, K, ISAS[0])
    assert found is not None
    at = positions(found, bits)[codes]
    np.testing.assert_array_equal(np.array(found)[at], codes.astype(int) - (1 << (bits - 1)))
    assert table_of(packed(codes, bits).reshape(7, 10, -1), bits, K, ISAS[0]) == found  # of experts
    some = table_of(packed(codes_of(table, bits, slice(1, 4)), bits), bits, K, ISAS[0])
    assert some is not None  # not all levels need be there


@cases
def test_one_code_that_is_not(table: Array, bits: int) -> None:
    codes = codes_of(table, bits)
    codes[-1, -1] = 0  # the least there is
    assert table_of(packed(codes, bits), bits, K, ISAS[0]) is None
    assert table_of(packed(codes, bits), bits, K - 1, ISAS[0]) is not None  # behind the last of K there may be anything
    codes[-1, -1], codes[0, 0] = codes[0, 0], 0
    assert table_of(packed(codes, bits), bits, K, ISAS[0]) is None


def test_no_codes_and_any_codes() -> None:
    assert table_of(np.empty((0, 4), np.uint8), 8, 4, ISAS[0]) is None
    assert table_of(np.random.default_rng(0).integers(0, 256, (4, 64)).astype(np.uint8), 8, 64, ISAS[0]) is None


@ways
@cases
def test_they_are_held_in_four_bits(isa: Isa, table: Array, bits: int) -> None:
    """Where bytes are multiplied."""
    stored = packed(codes_of(table, bits), bits)
    coding = held(bits, isa, stored, K)
    assert (coding.kind, coding.bits) == (("levels", 4) if looks_up(isa) else ("integers", bits))
    other = held(bits, isa, packed(np.zeros((N, K), np.uint8), bits), K)
    assert other == Coding(bits)


@ways
@cases
@pytest.mark.parametrize("m", [1, 3, 20])
def test_products_are_those_of_the_integers(isa: Isa, table: Array, bits: int, m: int) -> None:
    """Sums of integers are exact, in whatever form they are."""
    stored = packed(codes_of(table, bits), bits)
    rng = np.random.default_rng(m)
    scales, zeros = rng.uniform(0.01, 0.1, (N, K // 32)).astype(np.float32), rng.integers(-3, 4, (N, K // 32))
    a = rows(m, K)

    def with_coding(coding: Coding, zeros: Array | None) -> Array:
        about = (coding, N, Groups.even(K, 32, coding), scales, zeros, isa)
        made = pack_coded(lambda first, last: stored[first:last], *about, filled=True, bits=bits)
        return product(a, made, isa, accuracy="int8")

    for less in (None, zeros.astype(np.float64)):
        found = with_coding(held(bits, isa, stored, K), less)
        if looks_up(isa):
            np.testing.assert_array_equal(found, with_coding(Coding(bits), less))
        weights = unpacked(stored, bits).astype(np.float64) - (1 << (bits - 1))
        weights = (weights - (0 if less is None else np.repeat(less, 32, axis=1))) * np.repeat(scales, 32, axis=1)
        expected = a @ weights.T
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * np.abs(expected).max())
