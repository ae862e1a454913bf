"""Weights packed five to a byte: the bytes against their definition, products against NumPy's int64 arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary import fives
from ranvier.codegen.llvm.ternary.fives import pack_fives, suits_fives
from ranvier.ops.own.bitlinear import pack_codes
from tests.codegen.test_integer import PATHS, path_name
from tests.codegen.test_ternary import is_exact, product

Array = np.ndarray[Any, Any]
LARGE = (4096, 4096, 4096 * 4096)
HAVING = [isa for isa in PATHS if suits_fives(isa, 1, *LARGE)]
# remainders of K, panels alone and in threes with columns left over, all numbers of rows and one more
SIZES = (
    *((1, 1, 1), (1, 16, 80), (1, 63, 81), (1, 200, 161), (1, 1030, 240), (1, 64, 245), (1, 130, 1000)),
    *((2, 65, 40), (3, 128, 161), (3, 300, 79), (4, 70, 85)),
)


def test_bytes() -> None:
    """Every combination of five codes once: columns 0, 16, 32, 48 and 64 of a panel share a byte."""
    combinations = np.array(list(itertools.product(range(3), repeat=5)), np.int8)  # a row is a k
    w = np.zeros((80, 243), np.int8)
    w[::16] = combinations.T - 1
    packed = pack_fives(pack_codes(w), 243)
    assert packed.storage.array is not None
    found = packed.storage.array.view(np.uint8).reshape(-1, 16, 4)[:, 0].reshape(-1)[:243]
    np.testing.assert_array_equal(found, combinations.astype(int) @ [1, 3, 9, 28, 84])
    assert len(set(found.tolist())) == 243


@pytest.mark.parametrize("isa", HAVING, ids=path_name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_exact(isa: Isa, size: tuple[int, int, int]) -> None:
    is_exact(isa, size, pack_fives)


@pytest.mark.parametrize("isa", HAVING, ids=path_name)
@pytest.mark.parametrize("value", [-128, 127])
def test_every_combination_over_a_long_k(isa: Isa, value: int) -> None:
    """Sums of all five columns together pass what int32 holds long before each of them does: that must not show."""
    k = fives.UNSHIFTED_K // 2
    w = np.tile(np.array(list(itertools.product((-1, 0, 1), repeat=5)), np.int8)[:, ::-1].T, (1, k // 243 + 1))[:, :k]
    columns = np.ones((80, k), np.int8)
    columns[::16] = w
    codes = np.full((1, k), value, np.int8)
    expected = value * (columns.sum(axis=1, dtype=np.int64) + k)
    np.testing.assert_array_equal(product(codes, columns, isa, pack=pack_fives)[0], expected)


def test_only_large_weights_and_few_rows() -> None:
    for isa in HAVING:
        assert suits_fives(isa, fives.ROWS, *LARGE)
        assert not suits_fives(isa, fives.ROWS + 1, *LARGE)
        assert not suits_fives(isa, 1, 2048, 2048, 2048 * 2048)  # stays near, where 2 bits are faster
        assert suits_fives(isa, 1, 2048, 2048, 1 << 24)  # does not: others are read before it is read again
        assert not suits_fives(isa, 1, 2048, 100, 1 << 24)  # a second panel would be filled up to 80 columns
    for isa in PATHS:
        assert suits_fives(isa, 1, *LARGE) == (isa.has("avx512vbmi") and isa.has("avx512vnni"))
