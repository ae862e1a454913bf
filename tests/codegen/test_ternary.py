"""Ternary products against NumPy's int64 arithmetic, on every instruction set and without extensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary import Packed, row_bytes, ternary_matmul, token_codes
from ranvier.codegen.llvm.ternary.dots import PairDots, dots_of
from ranvier.codegen.llvm.ternary.pack import pack_ternary
from ranvier.codegen.llvm.ternary.tiles import suits_tiles
from ranvier.codegen.loops.ir import Epilogue, Load, Op, Operand, Result
from ranvier.dtypes import DType
from ranvier.ops.own.bitlinear import pack_codes, quantized_tokens
from tests.codegen.harness import Runner, view_of
from tests.codegen.test_integer import PATHS, path_name

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(21)
# remainders of every step of K, panels alone and in pairs with columns left over, rows of every kind of kernel
SIZES = (
    *((1, 1, 1), (1, 16, 32), (1, 63, 33), (1, 200, 97), (1, 1030, 64), (1, 64, 130)),
    *((2, 65, 40), (3, 128, 31), (4, 70, 65), (5, 1, 3), (7, 130, 64)),
    *((16, 64, 32), (31, 1100, 33), (33, 192, 17), (70, 65, 65), (260, 64, 40), (513, 70, 5)),
)


def weights(n: int, k: int) -> Array:
    return RNG.integers(-1, 2, (n, k)).astype(np.int8)


def rows(codes: Array) -> Array:
    """Codes as the kernels find them: padded with zeros."""
    padded = np.zeros((codes.shape[0], row_bytes(codes.shape[1])), np.int8)
    padded[:, : codes.shape[1]] = codes
    return padded


def product(
    codes: Array,
    w: Array,
    isa: Isa,
    *,
    pack: Callable[[Array, int], Packed] | None = None,
    split: int = 1,
    threads: int = 1,
    out: Array | None = None,
) -> Array:
    """By weights in words of 16 k, unless another form is given."""
    m, (n, k) = codes.shape[0], w.shape
    packed = (pack or partial(pack_ternary, isa=isa))(pack_codes(w), k)
    given = rows(codes)
    out = np.full((m, n), -1, np.int32) if out is None else out
    a, y = view_of(given), view_of(out, "output")
    launches = ternary_matmul(a, packed, y, isa, threads=threads)
    Runner(launches, isa, {a.storage: given, y.storage: out}, split=split)()
    return out


def is_exact(isa: Isa, size: tuple[int, int, int], pack: Callable[[Array, int], Packed] | None = None) -> None:
    """A product of random codes and weights, whole and in tiles, against NumPy's."""
    m, k, n = size
    w, codes = weights(n, k), RNG.integers(-128, 128, (m, k)).astype(np.int8)
    expected = codes.astype(np.int64) @ (w.T.astype(np.int64) + 1)
    np.testing.assert_array_equal(product(codes, w, isa, pack=pack), expected)
    np.testing.assert_array_equal(product(codes, w, isa, pack=pack, split=3, threads=2), expected)


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_exact(isa: Isa, size: tuple[int, int, int]) -> None:
    is_exact(isa, size)


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("value", [-128, 127])
@pytest.mark.parametrize("m", [1, 3, 8, 11])
def test_no_sum_saturates(isa: Isa, value: int, m: int) -> None:
    """All products have the same sign and the largest size: where 16 bits would be too few, it shows."""
    k, n = 4096, 40
    codes, w = np.full((m, k), value, np.int8), np.ones((n, k), np.int8)
    np.testing.assert_array_equal(product(codes, w, isa), np.full((m, n), 2 * value * k))


def test_paths_differ() -> None:
    """The tests above meet every way of multiplying that this machine has."""
    kinds = {(dots_of(isa), suits_tiles(isa)) for isa in PATHS}
    assert len(kinds) >= 2
    if any(isa.name == "avx2" for isa in PATHS):
        assert any(found is PairDots for found, _ in kinds)


def test_rows_of_the_result_may_lie_apart() -> None:
    for isa in PATHS:
        for m in (1, 3, 9):
            w, codes = weights(37, 50), RNG.integers(-128, 128, (m, 50)).astype(np.int8)
            room = np.full((m, 60), -1, np.int32)
            product(codes, w, isa, out=room[:, 10:47])
            np.testing.assert_array_equal(room[:, 10:47], codes.astype(np.int64) @ (w.T.astype(np.int64) + 1))
            assert (room[:, :10] == -1).all() and (room[:, 47:] == -1).all()


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("m", [1, 6, 40])
def test_epilogue(isa: Isa, m: int) -> None:
    k, n = 90, 45
    w, codes = weights(n, k), RNG.integers(-128, 128, (m, k)).astype(np.int8)
    sums, steps = codes.sum(axis=1, dtype=np.int32)[:, None], RNG.random((1, n)).astype(np.float32)
    given, out = rows(codes), np.full((m, n), -1, np.float32)
    views = [view_of(x) for x in (given, sums, steps)]
    y = view_of(out, "output")
    total = Op("sub", (Result(0, DType.int32), Load(0, DType.int32)), DType.int32)
    value = Op("mul", (Op("cast", (total,), DType.float32), Load(1, DType.float32)), DType.float32)
    epilogue = Epilogue(value, (Operand(views[1], (0, 1, 0)), Operand(views[2], (0, 0, 1))))
    packed = pack_ternary(pack_codes(w), k, isa)
    launches = ternary_matmul(views[0], packed, y, isa, epilogue=epilogue)
    bound = {v.storage: x for v, x in zip(views, (given, sums, steps), strict=True)}
    Runner(launches, isa, {**bound, y.storage: out})()
    expected = (codes.astype(np.int64) @ w.T.astype(np.int64)).astype(np.float32) * steps
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("k", [1, 15, 64, 100, 259, 1024])
def test_token_codes(isa: Isa, k: int) -> None:
    x = (RNG.standard_normal((5, k)) * 10.0 ** RNG.integers(-7, 7, (5, 1))).astype(np.float32)
    x[1] = 0
    x[2, 0] = -1e30
    codes, factors = np.full((5, row_bytes(k)), 99, np.int8), np.zeros((5, 1), np.float32)
    sums = np.zeros((5, 1), np.int32)
    arrays = (x, codes, factors, sums)
    views = [view_of(a) for a in arrays]
    launches = token_codes(*views, 1e-5, 1)
    Runner(launches, isa, {v.storage: a for v, a in zip(views, arrays, strict=True)}, split=2)()
    expected, factor = quantized_tokens(x)
    np.testing.assert_array_equal(codes[:, :k], expected)
    assert not codes[:, k:].any()
    np.testing.assert_array_equal(factors, factor)
    np.testing.assert_array_equal(sums[:, 0], expected.sum(axis=1, dtype=np.int32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_factors_show_what_is_no_number(bad: float) -> None:
    """A token with a NaN or an infinity has a factor that makes all of its results NaN."""
    x = np.ones((1, 40), np.float32)
    x[0, 33] = bad
    arrays = (x, np.zeros((1, row_bytes(40)), np.int8), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int32))
    for isa in PATHS:
        views = [view_of(a) for a in arrays]
        Runner(token_codes(*views, 1e-5, 1), isa, {v.storage: a for v, a in zip(views, arrays, strict=True)})()
        factor = arrays[2][0, 0]
        assert np.isnan(factor) if np.isnan(bad) else factor == 0
