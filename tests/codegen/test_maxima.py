"""Max pooling of channels that lie together, and of such that do not, against a plain definition."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ranvier.codegen.llvm.conv.maxima import maxima
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType, of
from tests.codegen.harness import ISAS, POISON, Runner, aligned

Array = np.ndarray[Any, Any]
TYPES = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int8)]
SPECIAL = (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0)


def image(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Array:
    """[n, h, w, c]; of floats some are special."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(dtype)
    found = rng.normal(size=shape).astype(dtype)
    for value in SPECIAL:
        found[rng.random(shape) < 0.02] = value
    return found


def defined(x: Array, shape: ConvShape) -> Array:
    """Windows one by one: the largest of what they have of the image, NaN where there is one."""
    (_, oh, ow), (_, kh, kw), (_, sh, sw), (_, up, left) = shape.out, shape.kernel, shape.strides, shape.begin
    found = np.empty((shape.n, oh, ow, shape.cout), x.dtype)
    for i, j in np.ndindex(oh, ow):
        top, start = i * sh - up, j * sw - left
        window = x[:, max(top, 0) : top + kh, max(start, 0) : start + kw].reshape(shape.n, -1, shape.cout)
        found[:, i, j] = window.astype(np.float64).max(axis=1).astype(x.dtype)
    return found


def pooled(x: Array, shape: ConvShape, isa: Isa, gap: int = 0, split: int = 1) -> Array | None:
    """By the kernel, into pixels that lie ``gap`` elements apart; None if it takes no such pool."""
    n, h, w, c = x.shape
    (_, oh, ow), wide = shape.out, c + gap
    held = aligned(x.nbytes)
    held.view(x.dtype)[:] = x.reshape(-1)
    target = aligned(n * oh * ow * wide * x.itemsize)
    stores = [Storage("input", held.nbytes, index=k) for k in range(2)]
    view = View(stores[0], of(x), (n, c, h, w), (h * w * c, 1, w * c, c))
    out = View(stores[1], of(x), (n, c, oh, ow), (oh * ow * wide, 1, ow * wide, wide))
    launch = maxima(view, out, shape, isa)
    if launch is None:
        return None
    Runner([launch], isa, dict(zip(stores, (held, target))), split=split)()
    found = target.view(x.dtype).reshape(n, oh, ow, wide)
    assert (found[..., c:].view(np.uint8) == POISON).all()
    return found[..., :c]


def pooled_apart(x: Array, shape: ConvShape, isa: Isa, gap: int = 0, split: int = 1) -> Array | None:
    """The same of channels that lie one behind the other, into ones whose rows lie ``gap`` elements apart."""
    n, h, w, c = x.shape
    (_, oh, ow), wide = shape.out, shape.out[2] + gap
    held, target = aligned(x.nbytes), aligned(n * c * oh * wide * x.itemsize)
    held.view(x.dtype)[:] = x.transpose(0, 3, 1, 2).reshape(-1)
    stores = [Storage("input", held.nbytes, index=k) for k in range(2)]
    view = View(stores[0], of(x), (n, c, h, w), (c * h * w, h * w, w, 1))
    out = View(stores[1], of(x), (n, c, oh, ow), (c * oh * wide, oh * wide, wide, 1))
    launch = maxima(view, out, shape, isa)
    if launch is None:
        return None
    Runner([launch], isa, dict(zip(stores, (held, target))), split=split)()
    found = target.view(x.dtype).reshape(n, c, oh, wide)
    assert (found[..., ow:].view(np.uint8) == POISON).all()
    return found[..., :ow].transpose(0, 2, 3, 1)


def shaped(n: int, c: int, size: Any, kernel: Any, strides: Any, begin: Any, out: Any) -> ConvShape:
    return ConvShape(
        n=n,
        group=c,
        cin=c,
        cout=c,
        size=(1, *size),
        out=(1, *out),
        kernel=(1, *kernel),
        strides=(1, *strides),
        dilations=(1, 1, 1),
        begin=(0, *begin),
    )


@pytest.mark.parametrize("isa", ISAS, ids=lambda i: i.name)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_pools(isa: Isa, dtype: np.dtype[Any], data: st.DataObject) -> None:
    def two(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.integers(low, high)), data.draw(st.integers(low, high))

    n, c = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 3, 8, 17, 24, 64, 70]))
    size, kernel, strides = two(1, 14), data.draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (5, 2), (1, 4)])), two(1, 3)
    begin = tuple(data.draw(st.integers(0, k - 1)) for k in kernel)
    end = tuple(data.draw(st.integers(0, k - 1)) for k in kernel)
    up = data.draw(st.booleans())  # a last window that leaves the borders
    rest = [a + b + e - k for a, b, e, k in zip(size, begin, end, kernel)]
    out = [(-(-r // s) if up else r // s) + 1 for r, s in zip(rest, strides)]
    assume(all(r >= 0 for r in rest) and all((o - 1) * s - b < a for o, s, b, a in zip(out, strides, begin, size)))
    shape = shaped(n, c, size, kernel, strides, begin, out)
    x = image((n, *size, c), dtype, data.draw(st.integers(0, 99)))
    how = isa, data.draw(st.sampled_from([0, 5])), data.draw(st.sampled_from([1, 3]))
    together = data.draw(st.booleans())
    got = (pooled if together else pooled_apart)(x, shape, *how)
    if got is None:  # every second pixel of lines, all inside
        inside = all((o - 1) * s + k <= a for o, s, k, a in zip(out, strides, kernel, size))
        assert not together and strides[1] > 1 and inside and not any(begin)
        return
    with np.errstate(invalid="ignore"):
        want = defined(x, shape)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def test_others_are_left_to_loops() -> None:
    x = View(Storage("input", 0), DType.float32, (1, 4, 8, 8), (256, 1, 32, 4))
    out = View(Storage("input", 0), DType.float32, (1, 4, 8, 8), (256, 1, 32, 4))
    usual = shaped(1, 4, (8, 8), (3, 3), (1, 1), (1, 1), (8, 8))
    assert maxima(x, out, usual, ISAS[0]) is not None
    planes = View(x.storage, DType.float32, x.shape, (256, 64, 8, 1))
    assert maxima(planes, out, usual, ISAS[0]) is None
    assert maxima(planes, planes, usual, ISAS[0]) is not None
    steps = View(x.storage, DType.float32, (1, 4, 4, 4), (64, 16, 4, 1))
    assert maxima(planes, steps, shaped(1, 4, (8, 8), (2, 2), (2, 2), (0, 0), (4, 4)), ISAS[0]) is None
    wide = View(x.storage, DType.float64, x.shape, x.strides)
    assert maxima(wide, wide, usual, ISAS[0]) is None
    beside = shaped(1, 4, (8, 8), (3, 3), (1, 1), (3, 1), (8, 8))  # first windows lie above the image
    assert maxima(x, out, beside, ISAS[0]) is None
