"""Attention kernels against float64 NumPy: shapes, strides, masks, causality, lengths, every instruction set."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.attention import attention
from ranvier.codegen.llvm.isa import Isa
from tests.codegen.harness import ISAS, Array, run, view_of

each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


def oracle(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    mask: Array | None = None,
    causal: bool = False,
    offset: int | None = None,
    softcap: float = 0.0,
    lengths: Array | None = None,
) -> Array:
    """Row by row in float64; a masked key plays no part, a row without keys is zero."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    out = np.zeros((batch, heads, queries, v.shape[3]))
    if mask is not None and 1 < mask.shape[-1] < keys:
        fill = np.zeros if mask.dtype == np.bool_ else functools.partial(np.full, fill_value=-np.inf)
        longer = fill((*mask.shape[:-1], keys), dtype=mask.dtype)
        longer[..., : mask.shape[-1]] = mask
        mask = longer
    wide = None if mask is None else np.broadcast_to(mask, (batch, heads, queries, keys))
    for b, h, i in np.ndindex(batch, heads, queries):
        group = h // (heads // k.shape[1])
        scores = k[b, group] @ q[b, h, i] * scale
        if softcap:
            scores = np.tanh(scores / softcap) * softcap
        valid = keys if lengths is None else int(lengths[b])
        seen = np.arange(keys) < valid
        if causal:
            first = valid - queries if offset is None else offset
            seen &= np.arange(keys) <= i + first
        if wide is not None:
            row = wide[b, h, i]
            seen &= row if mask.dtype == np.bool_ else ~np.isneginf(row)  # type: ignore[union-attr]
            scores = scores if row.dtype == np.bool_ else scores + row
        if seen.any():
            weights = np.exp(scores[seen] - scores[seen].max())
            out[b, h, i] = weights @ v[b, group][seen] / weights.sum()
    return out


def computed(isa: Isa, q: Array, k: Array, v: Array, out: Array, *, split: int = 1, **options: Any) -> Array:
    views = [view_of(a) for a in (q, k, v, out)]
    bound = {view.storage: a for view, a in zip(views, (q, k, v, out))}
    mask, lengths = options.pop("mask", None), options.pop("lengths", None)
    for name, array in (("mask", mask), ("kv_lengths", lengths)):
        if array is not None:
            options[name] = view_of(array)
            bound[options[name].storage] = array
    out[...] = np.nan
    run(attention(views[0], views[1], views[2], views[3], isa, **options), isa, bound, split=split)
    return out


def operands(
    seed: int,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    size: int,
    v_size: int | None = None,
    *,
    dtype: Any = np.float32,
) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, queries, size)).astype(dtype)
    k = rng.standard_normal((batch, kv_heads, keys, size)).astype(dtype)
    v = rng.standard_normal((batch, kv_heads, keys, v_size or size)).astype(dtype)
    return q, k, v, np.empty((batch, heads, queries, v_size or size), dtype)


def check(
    isa: Isa, arrays: tuple[Array, Array, Array, Array], *, split: int = 1, loose: float = 1.0, **options: Any
) -> None:
    q, k, v, out = arrays
    options.setdefault("scale", 1 / np.sqrt(q.shape[3]))
    found = computed(isa, q, k, v, out, split=split, **options)
    options.pop("threads", None)
    tolerance = loose * (1e-12 if q.dtype == np.float64 else 3e-6)
    np.testing.assert_allclose(found, oracle(q, k, v, **options), rtol=tolerance, atol=tolerance)


@each_isa
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 2, 128, 128, 64),
        (2, 3, 1, 7, 9, 5),
        (1, 4, 2, 33, 70, 80, 32),
        (1, 2, 2, 13, 300, 32, 48),
        (2, 1, 1, 150, 17, 8, 3),
        (1, 1, 1, 1, 1, 1),
        (1, 1, 1, 9, 130, 19, 33),
    ],
    ids=str,
)
def test_shapes(isa: Isa, shape: tuple[int, ...]) -> None:
    check(isa, operands(0, *shape))
    check(isa, operands(1, *shape), causal=True, split=3)


@each_isa
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decode(isa: Isa, dtype: Any) -> None:
    for shape in [(1, 4, 4, 1, 100, 64), (2, 4, 2, 1, 37, 80), (1, 8, 2, 1, 2000, 32), (1, 2, 2, 3, 1100, 24, 64)]:
        check(isa, operands(2, *shape, dtype=dtype), split=2)
        check(isa, operands(3, *shape, dtype=dtype), causal=True)


@each_isa
def test_long_cache_and_many_queries(isa: Isa) -> None:
    check(isa, operands(4, 1, 1, 1, 40, 2000, 16), split=2)
    check(isa, operands(5, 1, 2, 1, 50, 600, 16, dtype=np.float64), causal=True, split=3, threads=4)


@each_isa
@pytest.mark.parametrize("offset", [-20, -1, 0, 5, 60])
def test_causal_offset(isa: Isa, offset: int) -> None:
    check(isa, operands(6, 1, 2, 1, 40, 50, 16), causal=True, offset=offset)
    check(isa, operands(7, 1, 2, 1, 2, 50, 16), causal=True, offset=offset)


@each_isa
@pytest.mark.parametrize("queries", [1, 21])
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_masks_of_every_broadcast(isa: Isa, queries: int, kind: str) -> None:
    rng = np.random.default_rng(8)
    batch, heads, keys = 2, 4, 45
    arrays = operands(9, batch, heads, 2, queries, keys, 16)
    full = (batch, heads, queries, keys)
    for bits in range(16):
        shape = tuple(d if bits >> i & 1 else 1 for i, d in enumerate(full))
        chosen = rng.random(shape) < 0.7
        mask = chosen if kind == "bool" else np.where(chosen, rng.standard_normal(shape), -np.inf).astype(np.float32)
        check(isa, arrays, mask=mask, causal=bits % 2 == 0)
    check(isa, arrays, mask=rng.random(keys) < 0.5)
    short = rng.standard_normal((queries, 20)).astype(np.float32)
    check(isa, arrays, mask=short)


@each_isa
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_key_lengths(isa: Isa, queries: int, dtype: Any) -> None:
    arrays = operands(10, 4, 2, 2, queries, 50, 16)
    lengths = np.array([0, 20, 33, 50], dtype)
    arrays[1][1, :, 20:] = np.nan  # what lies behind the last valid key may be anything
    arrays[2][1, :, 20:] = np.nan
    check(isa, arrays, lengths=lengths)
    check(isa, arrays, lengths=lengths, causal=True)
    check(isa, arrays, lengths=lengths, causal=True, offset=30, softcap=2.0)


@each_isa
@pytest.mark.parametrize("queries", [2, 18])
def test_any_strides(isa: Isa, queries: int) -> None:
    rng = np.random.default_rng(11)
    batch, heads, keys, size = 2, 3, 29, 16
    packed = rng.standard_normal((batch, keys, 3, heads, size)).astype(np.float32)
    q, k, v = (packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    out = np.empty((batch, queries, heads, size), np.float32).transpose(0, 2, 1, 3)
    check(isa, (q[:, :, :queries], k, v, out))
    # head sizes that are not the innermost axis
    q = rng.standard_normal((batch, heads, size, queries)).astype(np.float32).swapaxes(2, 3)
    k = rng.standard_normal((batch, heads, size, keys)).astype(np.float32).swapaxes(2, 3)
    v = rng.standard_normal((size, batch, heads, keys)).astype(np.float32).transpose(1, 2, 3, 0)
    out = np.empty((batch, heads, size, queries), np.float32).swapaxes(2, 3)
    check(isa, (q, k, v, out))


@each_isa
@pytest.mark.parametrize("queries", [1, 30])
def test_softcap_and_extreme_scores(isa: Isa, queries: int) -> None:
    arrays = operands(12, 1, 2, 1, queries, 200, 32)
    check(isa, arrays, softcap=1.5)
    check(isa, arrays, scale=30.0, loose=100)  # scores of hundreds carry their own rounding into the exponent
    check(isa, arrays, scale=-0.5)
    lowest = np.zeros((queries, 200), np.float32)
    lowest[:, ::3] = np.finfo(np.float32).min
    check(isa, arrays, mask=lowest)


@each_isa
@pytest.mark.parametrize("queries", [1, 16])
def test_nan_stays_in_its_rows(isa: Isa, queries: int) -> None:
    q, k, v, out = operands(13, 1, 2, 2, queries, 40, 16)
    q[0, 1, 0, 3] = np.nan
    found = computed(isa, q, k, v, out, scale=0.25)
    assert np.isnan(found[0, 1, 0]).all()
    assert np.isfinite(found[0, 0]).all() and np.isfinite(found[0, 1, 1:]).all()
    # a masked key's NaN score does not count, and neither does a row without keys
    q, k, v, out = operands(14, 1, 1, 1, queries, 40, 16)
    k[0, 0, 7] = np.nan
    mask = np.ones((queries, 40), np.bool_)
    mask[:, 7] = False
    assert np.isfinite(computed(isa, q, k, v, out, scale=0.25, mask=mask)).all()
    nothing = np.full((1, 40), -np.inf, np.float32)
    assert (computed(isa, q, k, v, out, scale=0.25, mask=nothing) == 0).all()


@each_isa
def test_no_keys_and_no_queries(isa: Isa) -> None:
    check(isa, operands(15, 1, 2, 2, 3, 0, 8))
    check(isa, operands(15, 1, 2, 2, 30, 0, 8))
    check(isa, operands(15, 1, 2, 2, 0, 5, 8))


@each_isa
def test_splits_agree_bit_for_bit(isa: Isa) -> None:
    for queries, keys in ((90, 300), (1, 3000)):
        q, k, v, out = operands(16, 2, 4, 2, queries, keys, 32)
        one = computed(isa, q, k, v, out, scale=0.2, causal=True).copy()
        for split in (2, 5):
            assert np.array_equal(one, computed(isa, q, k, v, out, scale=0.2, causal=True, split=split))
