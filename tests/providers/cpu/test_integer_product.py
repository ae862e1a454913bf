"""Products of quantized matrices on the CPU provider against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from ranvier.errors import RanvierError, ShapeMismatch
from tests.providers.cpu.compare import Array, check, one_node, run

RNG = np.random.default_rng(13)
MICROSOFT = "com.microsoft"
KINDS = [np.uint8, np.int8]


def codes(dtype: type, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return np.asarray(RNG.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype))


def scale(*shape: int) -> Array:
    return np.asarray(RNG.uniform(0.001, 0.01, size=shape).astype(np.float32))


@pytest.mark.parametrize(("left", "right"), list(itertools.product(KINDS, KINDS)))
def test_matmul_integer(left: type, right: type) -> None:
    a, b = codes(left, 9, 27), codes(right, 27, 20)
    check("MatMulInteger", [a, b])
    for zeros in (((), ()), ((9,), (20,)), ((1,), (20,)), ((9,), ())):
        given = [a, b, codes(left, *zeros[0]), codes(right, *zeros[1])]
        check("MatMulInteger", given)
        check("MatMulInteger", given, constant=[1, 3])
    check("MatMulInteger", [a, b, None, codes(right, 20)], constant=[1, 3])


@pytest.mark.parametrize(("left", "right"), list(itertools.product(KINDS, KINDS)))
def test_zero_points_of_a_batch(left: type, right: type) -> None:
    """One for each row, or column, of every matrix."""
    for p, q in (((3, 8), (8, 5)), ((2, 3, 8), (8, 5)), ((2, 3, 8), (2, 8, 5)), ((2, 1, 3, 8), (4, 8, 5))):
        zeros = codes(left, *p[:-1], 1), codes(right, *q[:-2], 1, q[-1])
        given = [codes(left, *p), codes(right, *q), *zeros]
        check("MatMulInteger", given)
        check("MatMulInteger", given, constant=[1, 3])


def test_shapes() -> None:
    zero = codes(np.uint8), codes(np.int8)
    for p, q in (((24,), (24, 5)), ((3, 24), (24,)), ((24,), (24,)), ((2, 3, 4, 8), (3, 8, 6)), ((2, 5, 8), (8, 6))):
        given = [codes(np.uint8, *p), codes(np.int8, *q), *zero]
        check("MatMulInteger", given)
        check("MatMulInteger", given, constant=[1, 3])
    check("MatMulInteger", [codes(np.uint8, 3, 0), codes(np.int8, 0, 4)])
    check("MatMulInteger", [codes(np.uint8, 0, 3), codes(np.int8, 3, 4)])


@pytest.mark.parametrize(("left", "right"), list(itertools.product(KINDS, KINDS)))
def test_qlinear_matmul(left: type, right: type) -> None:
    a, b = codes(left, 2, 5, 16), codes(right, 16, 24)
    for rows, columns in ((), ()), ((), (24,)), ((1,), (1,)), ((5,), (24,)):
        parameters = [scale(*rows), codes(left, *rows), b, scale(*columns), codes(right, *columns)]
        for result in ((), rows):
            given = [a, *parameters, scale(*result) * 300, codes(left, *result)]
            check("QLinearMatMul", given)
            check("QLinearMatMul", given, constant=range(1, 8))


@pytest.mark.parametrize("constant", [[1, 2, 4, 5, 6, 7], range(1, 8)])
def test_depths_whose_sums_need_more_than_32_bits(constant: Sequence[int]) -> None:
    depth = 70_000
    a, b = np.full((3, depth), 255, np.uint8), np.full((depth, 5), 255, np.uint8)
    a[1, ::2], b[:, 2] = 3, RNG.integers(0, 255, depth)
    one, step = np.array(1, np.float32), np.array(255 * depth, np.float32)
    zero, shift = np.array(0, np.uint8), np.array(1, np.uint8)
    model = one_node("QLinearMatMul", [a, one, zero, b, one, shift, step, zero], constant=constant)
    sums = a.astype(np.int64) @ (b.astype(np.int64) - 1)
    assert sums.max() > np.iinfo(np.int32).max
    for provider in ("cpu", "reference"):
        (found,) = run(model, {"x0": a} if 3 in constant else {"x0": a, "x3": b}, provider)
        np.testing.assert_array_equal(found, np.rint(sums / (255 * depth)).astype(np.uint8))


@pytest.mark.parametrize("stored", [True, False])
def test_depths_whose_sums_need_more_than_32_bits_and_become_floats(stored: bool) -> None:
    depth = 70_000
    a, b = np.full((3, depth), 255, np.uint8), np.full((depth, 5), 127, np.int8)
    a[1, ::2], b[:, 2] = 3, RNG.integers(-128, 127, depth)
    one, zero, shift = np.array(1, np.float32), np.array(0, np.uint8), np.array(-128, np.int8)
    added = RNG.integers(-1000, 1000, 5).astype(np.int32)
    sums = a.astype(np.int64) @ (b.astype(np.int64) + 128)
    assert sums.max() > np.iinfo(np.int32).max
    cases = {
        "MatMulIntegerToFloat": ([a, b, one, one, zero, shift, added.astype(np.float32)], 1, sums + added),
        "QGemm": ([a, one, zero, b, one, shift, added], 3, sums + added),
        "DynamicQuantizeMatMul": ([a.astype(np.float32), b, one, shift], 1, sums),
    }
    for name, (given, weight, exact) in cases.items():
        constant = [k for k in range(1, len(given)) if stored or k != weight]
        for found in check(name, given, domain=MICROSOFT, constant=constant, rtol=1e-5):
            np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_zero_points_that_differ_along_the_sum() -> None:
    """They cannot be taken out of it: what the reference makes of them, or refuses, is what comes out."""
    for p, q, zeros in (
        ((5,), (5, 5), ((5,), ())),
        ((3, 5), (5,), ((), (5,))),
        ((3, 5), (5, 5), ((3, 5), ())),
        ((5, 5), (5, 5), ((), (5, 1))),
        ((3, 8), (8, 5), ((1, 5), ())),
        ((3, 8), (8, 5), ((), (3, 1))),
    ):
        given = [codes(np.uint8, *p), codes(np.int8, *q), scale(), scale()]
        given += [codes(np.uint8, *zeros[0]), codes(np.int8, *zeros[1])]
        model = one_node("MatMulIntegerToFloat", given, domain=MICROSOFT)
        feeds = {f"x{k}": x for k, x in enumerate(given)}
        try:
            (expected,) = run(model, feeds, "reference")
        except RanvierError:
            with pytest.raises(RanvierError):
                run(model, feeds, "cpu")
        else:
            np.testing.assert_allclose(run(model, feeds, "cpu")[0], expected, rtol=1e-5)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("depth", [7, 9, 64])
def test_matrices_that_do_not_multiply(depth: int, stored: bool) -> None:
    """Also where both depths come to the same once kernels have padded them."""
    a, b, one = codes(np.uint8, 3, 8), codes(np.int8, depth, 5), np.array(1, np.float32)
    for name, given, weight in (
        ("MatMulIntegerToFloat", [a, b, one, one], 1),
        ("QGemm", [a, one, np.array(3, np.uint8), b, one, np.array(2, np.int8)], 3),
        ("DynamicQuantizeMatMul", [a.astype(np.float32), b, one], 1),
    ):
        constant = [k for k in range(1, len(given)) if stored or k != weight]
        model = one_node(name, given, domain=MICROSOFT, constant=constant)
        feeds = {f"x{k}": x for k, x in enumerate(given) if k not in constant}
        with pytest.raises(ShapeMismatch, match=name):
            run(model, feeds, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_dynamic(kind: type) -> None:
    x = RNG.normal(size=(2, 7, 30)).astype(np.float32)
    w = codes(kind, 30, 21)
    bias = RNG.normal(size=21).astype(np.float32)
    for given in ([x, w, scale()], [x, w, scale(21), codes(kind, 21), bias], [x, w, scale(), codes(kind), bias]):
        check("DynamicQuantizeMatMul", given, domain=MICROSOFT, constant=[1, 2, 3])
        check("DynamicQuantizeMatMul", given, domain=MICROSOFT)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(KINDS, KINDS)))
def test_integer_to_float(left: type, right: type) -> None:
    a, b = codes(left, 6, 20), codes(right, 20, 9)
    bias = RNG.normal(size=9).astype(np.float32)
    check("MatMulIntegerToFloat", [a, b, scale(), scale(9)], domain=MICROSOFT)
    given = [a, b, scale(), scale(9), codes(left), codes(right, 9), bias]
    check("MatMulIntegerToFloat", given, domain=MICROSOFT, constant=[1, 3, 5, 6])


@pytest.mark.parametrize("trans", [(0, 0), (1, 1), (0, 1)])
def test_qgemm(trans: tuple[int, int]) -> None:
    a, b = codes(np.uint8, 6, 20), codes(np.int8, 20, 9)
    a, b = a.T.copy() if trans[0] else a, b.T.copy() if trans[1] else b
    c = RNG.integers(-1000, 1000, 9).astype(np.int32)
    attrs = {"transA": trans[0], "transB": trans[1], "alpha": 0.7}
    base = [a, scale(), codes(np.uint8), b, scale(9), codes(np.int8, 9)]
    for given in (base, [*base, c], [*base, c, scale() * 100, codes(np.uint8)], [*base, None, scale(), codes(np.int8)]):
        check("QGemm", given, attrs, domain=MICROSOFT)
        check("QGemm", given, attrs, domain=MICROSOFT, constant=[3, 4, 5, 6])
    (found,) = check("QGemm", [*base, c, None, codes(np.uint8)], attrs, domain=MICROSOFT)
    assert found.dtype == np.float32  # a zero point alone quantizes nothing
    for k, sizes in ((1, (2,)), (2, (6,)), (7, (0,)), (8, (3,))):
        given = [*base, c, scale(), codes(np.uint8)]
        given[k] = codes(np.uint8, *sizes) if k in (2, 8) else scale(*sizes)
        model = one_node("QGemm", given, attrs, domain=MICROSOFT, constant=[k])
        feeds = {f"x{at}": x for at, x in enumerate(given) if at != k}
        with pytest.raises(RanvierError, match="QGemm"):
            run(model, feeds, "cpu")
