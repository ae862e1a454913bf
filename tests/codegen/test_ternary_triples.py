"""Weights packed three to five bits: the words against their definition, products against NumPy's int64 arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary import form_of
from ranvier.codegen.llvm.ternary.triples import pack_triples, suits_triples
from ranvier.ops.own.bitlinear import pack_codes
from tests.codegen.test_integer import PATHS, path_name
from tests.codegen.test_ternary import is_exact, product

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(24)
HAVING = [isa for isa in PATHS if suits_triples(isa)]
# remainders of K, in words and in what sums of 16 bits hold; panels alone and in twos with columns left over; rows
# alone, in blocks, and left over
SIZES = (
    *((1, 1, 1), (1, 9, 128), (1, 64, 129), (1, 126, 33), (1, 127, 256), (1, 200, 257), (1, 1030, 385), (1, 2048, 40)),
    *((2, 65, 40), (3, 128, 161), (4, 300, 79), (5, 70, 300), (31, 1100, 33), (130, 64, 140)),
)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (128, 9), (130, 35), (257, 36), (300, 100), (128, 4100)])
def test_words(n: int, k: int) -> None:
    """Lane 2i of line l is column 32 l + i of a panel and lane 2i + 1 column 32 l + 16 + i; what is not there is 0."""
    w = RNG.integers(-1, 2, (n, k)).astype(np.int8)
    panels, words = -(-n // 128), -(-k // 9)
    codes = np.zeros((panels * 128, words * 9), int)
    codes[:n, :k] = w + 1
    packed = pack_triples(pack_codes(w), k)
    assert packed.storage.array is not None
    found = packed.storage.array.reshape(panels, words, 4, 32).astype(int)
    for panel, line, lane in np.ndindex(panels, 4, 32):
        column = codes[128 * panel + 32 * line + lane // 2 + 16 * (lane % 2)].reshape(words, 3, 3)
        expected = (column @ [1, 3, 9]) @ [1, 32, 1024]
        np.testing.assert_array_equal(found[panel, :, line, lane], expected)


@pytest.mark.parametrize("isa", HAVING, ids=path_name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_exact(isa: Isa, size: tuple[int, int, int]) -> None:
    is_exact(isa, size, pack_triples)


@pytest.mark.parametrize("isa", HAVING, ids=path_name)
@pytest.mark.parametrize("value", [-128, 127])
@pytest.mark.parametrize("m", [1, 2, 4, 5])
def test_no_sum_leaves_its_bits(isa: Isa, value: int, m: int) -> None:
    """All products have the same sign and the largest size: where 16 bits would be too few, it shows."""
    k, n = 4096, 40
    codes, w = np.full((m, k), value, np.int8), np.ones((n, k), np.int8)
    np.testing.assert_array_equal(product(codes, w, isa, pack=pack_triples), np.full((m, n), 2 * value * k))


@pytest.mark.parametrize("isa", HAVING, ids=path_name)
def test_a_long_k(isa: Isa) -> None:
    """Tables of one row pass what a second-level cache holds."""
    k, n = 100_003, 33
    codes, w = RNG.integers(-128, 128, (3, k)).astype(np.int8), RNG.integers(-1, 2, (n, k)).astype(np.int8)
    expected = codes.astype(np.int64) @ (w.T.astype(np.int64) + 1)
    np.testing.assert_array_equal(product(codes, w, isa, pack=pack_triples), expected)


def test_where_bytes_are_not_multiplied() -> None:
    for isa in PATHS:
        asked = isa.vector_bytes == 64 and not isa.has("avx512vnni")
        for rows_, k, n in ((1, 64, 32), (1, 4096, 4096), (128, 4096, 4096)):
            assert (form_of(isa, rows_, k, n, k * n).name == "ternary triples") == asked
