"""Products and convolutions of 16-bit codes against NumPy's int64 arithmetic, on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.integer import (
    multiplies_words,
    pack_word_filters,
    pack_words,
    suits_words,
    sums_fit,
    word_conv,
    word_matmul,
)
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, of
from tests.codegen.harness import ISAS, Runner, view_of

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(16)
SIZES = ((1, 1, 1), (1, 64, 40), (7, 13, 5), (20, 13, 67), (5, 24, 1), (40, 36, 17), (3, 0, 4), (33, 300, 128))
MASKED = [isa for isa in ISAS if isa.masks]  # windows of words are read with masks


def path_name(isa: Isa) -> str:
    return isa.key


def words(*shape: int) -> Array:
    """Codes, the ends among them."""
    x = RNG.integers(-(1 << 15), 1 << 15, shape).astype(np.int16)
    flat = x.reshape(-1)
    if flat.size > 4:
        flat[:2], flat[2:4] = -(1 << 15), (1 << 15) - 1
    return x


def weights(depth: int, *shape: int, dtype: type = np.int16) -> Array:
    """Weights whose sums of ``depth`` terms fit, as nearly as may be."""
    most = min(np.iinfo(dtype).max, max(1, 65535 // max(1, depth)))
    return RNG.integers(-most, most + 1, shape).astype(dtype)


def product(a: Array, b: Array, isa: Isa, *, split: int = 1, threads: int = 1) -> Array:
    out = np.full((*a.shape[:-1], b.shape[-1]), -77, np.int32)
    left, target = view_of(a), view_of(out, "output")
    packed = pack_words(b, isa, rows_hint=a.shape[-2])
    launches = word_matmul(left, packed, target, isa, threads=threads)
    Runner(launches, isa, {left.storage: a, target.storage: out}, split=split)()
    return out


@pytest.mark.parametrize("isa", ISAS, ids=path_name)
@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_products(isa: Isa, dtype: type) -> None:
    for m, k, n in SIZES:
        a, b = words(m, k), weights(k, k, n, dtype=dtype)
        assert sums_fit(b)
        np.testing.assert_array_equal(product(a, b, isa), a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize("isa", ISAS, ids=path_name)
def test_largest_sums(isa: Isa) -> None:
    """Sums that reach the ends of 32 bits, and weights with one more."""
    b = np.full((2, 3), 32767, np.int16)
    a = np.array([[-32768, -32768], [32767, 32767]], np.int16)
    assert sums_fit(b)
    np.testing.assert_array_equal(product(a, b, isa), a.astype(np.int64) @ b.astype(np.int64))
    assert not sums_fit(np.array([[32767], [32767], [2]], np.int16))
    assert sums_fit(np.array([[32767], [32767], [1]], np.int16))
    assert not sums_fit(np.array([[-32768], [-32768]], np.int16))


@pytest.mark.parametrize("isa", ISAS, ids=path_name)
def test_batches_strides_and_shares(isa: Isa) -> None:
    a, b = words(2, 3, 5, 25), weights(25, 25, 20)
    np.testing.assert_array_equal(product(a, b, isa), a.astype(np.int64) @ b.astype(np.int64))
    wide = words(40, 64)
    for part in (wide[:, 4:44], wide[::2, :40], wide[:, 1:42], wide[:, ::2], wide.T[:20, :8], wide[:3, 1:42]):
        right = weights(part.shape[1], part.shape[1], 33)
        np.testing.assert_array_equal(product(part, right, isa), part.astype(np.int64) @ right.astype(np.int64))
    a, b = words(70, 600), weights(600, 600, 50)
    for split, threads in ((1, 1), (3, 2), (5, 4)):
        np.testing.assert_array_equal(
            product(a, b, isa, split=split, threads=threads), a.astype(np.int64) @ b.astype(np.int64)
        )


@pytest.mark.parametrize("isa", ISAS, ids=path_name)
def test_epilogue(isa: Isa) -> None:
    a, b = words(19, 48), weights(48, 48, 37)
    scale, bias = RNG.uniform(1e-7, 1e-6, 37).astype(np.float32), RNG.standard_normal(37).astype(np.float32)
    out = np.zeros((19, 37), np.float32)
    views, target = [view_of(x) for x in (a, scale, bias)], view_of(out, "output")
    number: Expr = Op("cast", (Result(0, DType.int32),), DType.float32)
    number = Op("mul", (number, Load(0, DType.float32)), DType.float32)
    number = Op("add", (number, Load(1, DType.float32)), DType.float32)
    epilogue = Epilogue(number, (Operand(views[1], (0, 0, 1)), Operand(views[2], (0, 0, 1))))
    launches = word_matmul(views[0], pack_words(b, isa, rows_hint=19), target, isa, epilogue=epilogue)
    Runner(launches, isa, dict(zip([v.storage for v in views], (a, scale, bias))) | {target.storage: out}, split=2)()
    want = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.float32) * scale + bias
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)


_SHAPES = (
    ((1, 16, 9, 7), (20, 16, 1, 1), {}),
    ((2, 8, 9, 7), (5, 8, 3, 3), {"pads": (1, 1, 1, 1)}),
    ((1, 3, 17, 15), (33, 3, 3, 3), {"strides": (2, 2), "pads": (0, 1, 1, 1)}),
    ((1, 1, 12, 12), (7, 1, 5, 5), {"pads": (2, 2, 2, 2)}),
    ((1, 6, 11, 10), (4, 6, 3, 2), {"dilations": (2, 2), "pads": (1, 0, 2, 1)}),
    ((1, 5, 14), (18, 5, 4), {"strides": (3,), "pads": (2, 1)}),
    ((1, 12, 8, 8), (9, 12, 1, 1), {"strides": (2, 2)}),
)


@pytest.mark.parametrize("isa", MASKED, ids=path_name)
@pytest.mark.parametrize("zero", [0, -7001])
def test_convolutions(isa: Isa, zero: int) -> None:
    for size, filters, how in _SHAPES:
        x, w = words(*size), weights(int(np.prod(filters[1:])), *filters)
        shape = ConvShape.conv(size, filters, **how)
        want = convolved(x, w, zero, how, shape)
        for threads in (1, 3):
            last, nothing = np.ascontiguousarray(np.moveaxis(x, 1, -1)), np.array([zero], np.int16)
            out = np.zeros((size[0], *want.shape[2:], filters[0]), np.int32)
            image, border, target = channels_last(last), view_of(nothing), channels_last(out, "output")
            launches = word_conv(image, border, pack_word_filters(w, isa, shape), target, shape, isa, threads=threads)
            bound = {image.storage: last, border.storage: nothing, target.storage: out}
            Runner(launches, isa, bound, split=threads)()
            np.testing.assert_array_equal(np.moveaxis(out, -1, 1), want, err_msg=f"{size} {filters} {how}")


def channels_last(array: Array, kind: str = "input") -> View:
    """[N, …, C] as the [N, C, …] that it stands for."""
    moved = np.moveaxis(array, -1, 1)
    steps = tuple(step // array.itemsize for step in moved.strides)
    return View(view_of(array, kind).storage, of(array), moved.shape, steps)


def convolved(x: Array, w: Array, zero: int, how: dict[str, Any], shape: ConvShape) -> Array:
    """Tap by tap over the image with its border."""
    rank = x.ndim - 2
    strides, dilations = (how.get(name, (1,) * rank) for name in ("strides", "dilations"))
    pads = how.get("pads", (0,) * 2 * rank)
    wide = np.pad(x, ((0, 0), (0, 0), *zip(pads[:rank], pads[rank:])), constant_values=zero).astype(np.int64)
    out = shape.out[3 - rank :]
    total = np.zeros((x.shape[0], w.shape[0], *out), np.int64)
    for tap in np.ndindex(*w.shape[2:]):
        at = tuple(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in zip(tap, dilations, out, strides))
        total += np.einsum("nc...,oc->no...", wide[(slice(None), slice(None), *at)], w[(..., *tap)].astype(np.int64))
    return total


def test_who_multiplies_them() -> None:
    one = ConvShape.conv((1, 8, 9, 9), (8, 8, 3, 3))
    for isa in ISAS:
        assert suits_words(one, isa) == multiplies_words(isa)
        assert multiplies_words(isa) == (isa.has("avx512vnni") and isa.masks)
        groups = ConvShape.conv((1, 8, 9, 9), (8, 4, 3, 3), group=2)
        assert not suits_words(groups, isa)
        assert not suits_words(ConvShape.conv((1, 8, 9, 9, 9), (8, 8, 3, 3, 3)), isa)
        assert not suits_words(ConvShape.conv((1, 3, 9, 9), (8, 3, 3, 3), dilations=(2, 2)), isa)  # half a group
