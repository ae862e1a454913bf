"""Weights packed four columns to a byte: the bytes against their definition, products against NumPy's int64
arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary import form_of
from ranvier.codegen.llvm.ternary.fours import pack_fours, suits_fours
from ranvier.codegen.llvm.ternary.panels import Block
from ranvier.ops.own.bitlinear import pack_codes
from tests.codegen.test_integer import PATHS, path_name
from tests.codegen.test_ternary import is_exact, product

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(25)
HAVING = [isa for isa in PATHS if suits_fours(isa, 64)]
# remainders of K; halves of panels left out and columns left over; rows in blocks of every size, even and uneven, and
# as many as want bytes
SIZES = (
    *((1, 1, 1), (1, 16, 16), (1, 63, 33), (1, 200, 97), (1, 1030, 64), (1, 64, 130)),
    *((2, 65, 40), (3, 128, 31), (4, 70, 65), (5, 1, 3), (6, 64, 20), (7, 130, 64), (9, 65, 24), (11, 70, 17)),
    *((15, 64, 8), (16, 64, 32), (17, 65, 8), (31, 1100, 33), (33, 192, 17), (70, 65, 65), (260, 64, 40)),
)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 4), (17, 35), (33, 64), (300, 100), (16, 4100)])
def test_bytes(n: int, k: int) -> None:
    """Byte b of lane l is k = 4 q + b of the columns l, 4 + l, 8 + l and 12 + l of a panel; what is not there is 0."""
    w = RNG.integers(-1, 2, (n, k)).astype(np.int8)
    panels, deep = -(-n // 16), -(-k // 64) * 64
    codes = np.zeros((panels * 16, deep), int)
    codes[:n, :k] = w + 1
    packed = pack_fours(pack_codes(w), k)
    assert packed.storage.array is not None
    found = packed.storage.array.view(np.int8).reshape(panels, deep // 4, 4, 4)
    columns = codes.reshape(panels, 4, 4, deep // 4, 4)
    expected = np.einsum("f,pflqb->pqlb", [1, 4, 16, -64], columns)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("isa", HAVING, ids=path_name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_exact(isa: Isa, size: tuple[int, int, int]) -> None:
    is_exact(isa, size, pack_fours)


@pytest.mark.parametrize("isa", HAVING, ids=path_name)
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("k", [1 << 17, (1 << 17) + 1])
def test_the_longest_sums(isa: Isa, m: int, k: int) -> None:
    """Of four columns together they pass what int32 holds, and each of them does not; beyond, weights lie otherwise."""
    codes, w = np.full((m, k), 127, np.int8), np.ones((17, k), np.int8)
    w[::3] = -1
    found = product(codes, w, isa, pack=form_of(isa, m, k, 17, k * 17).pack)
    np.testing.assert_array_equal(found, codes.astype(np.int64) @ (w.T.astype(np.int64) + 1))


def test_where_signed_bytes_are_multiplied() -> None:
    for isa in PATHS:
        for m, k, n in ((1, 64, 32), (1, 4096, 4096), (128, 4096, 4096)):
            assert (form_of(isa, m, k, n, k * n).name == "ternary fours") == isa.has("dotprod")
        assert form_of(isa, 1, (1 << 17) + 1, 8, 1 << 20).name != "ternary fours"


@pytest.mark.parametrize("most", [3, 5, 8])
def test_blocks_hold_every_row_once(most: int) -> None:
    for m in range(1, 70):
        block = Block.of(m, most)
        assert block.rows <= most
        whole = block.whole(m)
        small = m - whole
        assert whole % block.rows == 0 and (small % (block.rows - 1) == 0 if block.uneven else small == 0)
