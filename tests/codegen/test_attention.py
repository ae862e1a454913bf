"""Attention kernels against float64 NumPy: shapes, strides, masks, causality, lengths, every instruction set."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import Code, Launch
from ranvier.codegen.llvm import compiler, library
from ranvier.codegen.llvm.attention import attention
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.storage import Storage
from ranvier.ops.nn import attention as reference
from ranvier.ops.registry import Call
from tests.codegen.harness import ISAS, Array, Runner, view_of

each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
_kept: list[object] = []  # kernels of earlier cases: most cases share them, and each is compiled once


def run(launches: Sequence[Launch], isa: Isa, bound: Mapping[Storage, Array], *, split: int = 1) -> None:
    runner = Runner(launches, isa, bound, split=split)
    _kept.append(runner.kernels)
    runner()


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
    left_window: int = -1,
    right_window: int = -1,
) -> Array:
    """The whole score matrix in float64; a masked key plays no part, a row without keys is zero."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    k, v = (np.repeat(a, heads // a.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("bhid,bhjd->bhij", q, k) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    valid = np.full(batch, keys) if lengths is None else lengths.astype(np.int64)
    key, query = np.arange(keys), np.arange(queries)[:, None]
    seen = np.broadcast_to(key < valid[:, None, None, None], scores.shape).copy()
    position = query + (valid - queries if offset is None else np.full(batch, offset))[:, None, None, None]
    if causal:
        seen &= key <= position
    if left_window >= 0:
        seen &= key >= position - left_window
    if right_window >= 0:
        seen &= key <= position + right_window
    if mask is not None:
        if 1 < mask.shape[-1] < keys:
            seen[..., mask.shape[-1] :] = False
            mask = np.pad(mask, [*[(0, 0)] * (mask.ndim - 1), (0, keys - mask.shape[-1])])
        seen &= mask if mask.dtype == np.bool_ else ~np.isneginf(mask)
        scores = scores if mask.dtype == np.bool_ else scores + np.where(np.isneginf(mask), 0, mask)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.where(seen, np.exp(scores - np.where(np.isneginf(top), 0, top)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    # values behind the last key that counts may be anything, so they are left out rather than multiplied by zero
    counted = np.where(np.any(seen, axis=2, keepdims=True).swapaxes(2, 3), v, 0)
    return np.asarray(weights / np.where(total == 0, 1, total) @ counted)


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
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decode_of_values_that_do_not_fill_vectors(isa: Isa, dtype: Any) -> None:
    """No element behind the last one is read, and none behind the results is written."""
    for shape in [(1, 4, 4, 1, 129, 8), (2, 2, 1, 2, 7, 3, 5), (1, 2, 2, 1, 1500, 20, 41), (1, 1, 1, 1, 3, 1, 17)]:
        check(isa, operands(20, *shape, dtype=dtype), split=2)
        q, k, v, out = operands(21, *shape, dtype=dtype)
        around = np.full(out.size + 64, 7, dtype)
        inside = around[32 : 32 + out.size].reshape(out.shape)
        check(isa, (q, at_the_end(k), at_the_end(v), inside), causal=True)
        assert (around[:32] == 7).all() and (around[32 + out.size :] == 7).all()


def at_the_end(array: Array) -> Array:
    """A copy, behind which lies memory that nobody may read."""
    page = mmap.PAGESIZE
    room = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, room + page)
    whole = np.frombuffer(memory, np.uint8)
    if sys.platform != "win32":
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(ctypes.c_void_p(whole.ctypes.data + room), ctypes.c_size_t(page), 0) == 0
    found = whole[room - array.nbytes : room].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


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
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("window", [-1, 4])
def test_lengths_beyond_the_keys_place_the_queries(isa: Isa, queries: int, window: int) -> None:
    """As the operator says it: the position of a query is the length less the queries, whatever keys there are."""
    q, k, v, out = operands(31, 5, 2, 1, queries, 37, 16)
    lengths = np.array([37, 39, 500, 0, -2], np.int64)
    found = computed(
        isa, q, k, v, out, scale=0.25, causal=True, offset=None, lengths=lengths, left_window=window, split=3
    )
    wide = [a.astype(np.float64) for a in (q, k, v)]
    want = reference.attention.body(
        *wide, None, None, None, lengths, is_causal=1, scale=0.25, left_window_size=window, ctx=Call()
    )[0]
    np.testing.assert_allclose(found, want, rtol=3e-6, atol=3e-6)


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
@pytest.mark.parametrize("queries", [2, 70])
def test_windows(isa: Isa, queries: int) -> None:
    arrays = operands(22, 2, 2, 1, queries, 700, 16)
    for left, right in ((0, 0), (5, -1), (-1, 3), (300, 20), (10, 700)):
        check(isa, arrays, left_window=left, right_window=right, offset=600)
    lengths = np.array([3, 650])
    check(isa, arrays, left_window=9, causal=True, lengths=lengths, split=2)
    check(isa, arrays, left_window=9, offset=2000)  # nobody sees anything
    mask = np.random.default_rng(23).standard_normal((queries, 700)).astype(np.float32)
    check(isa, arrays, left_window=40, mask=mask, scale=-0.2, causal=True)


@each_isa
def test_values_far_apart(isa: Isa) -> None:
    packed = np.random.default_rng(19).standard_normal((1, 200, 3, 2, 48)).astype(np.float32)
    q, k, v = (packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    check(isa, (q, k, v, np.empty((1, 200, 2, 48), np.float32).transpose(0, 2, 1, 3)), causal=True)


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


@each_isa
@pytest.mark.parametrize("queries", [1, 10])
def test_against_the_reference_operator(isa: Isa, queries: int) -> None:
    """ONNX's own corners: a past, lengths of the cache with causality, a softcap, rows that see nothing."""
    q, k, v, out = operands(17, 3, 4, 2, queries, 24, 16)
    wide = [a.astype(np.float64) for a in (q, k, v)]
    past = [a[:, :, :14] for a in wide[1:]]
    fresh = [a[:, :, 14:] for a in wide[1:]]
    mask = np.random.default_rng(18).random((queries, 24)) < 0.3
    mask[0] = False
    lengths = np.array([4, 24, 12])

    def operator(*arguments: Array | None, **attrs: Any) -> Array:
        return np.asarray(reference.attention.body(*arguments, ctx=Call(), **attrs)[0])

    found = computed(isa, q, k, v, out, scale=0.25, causal=True, offset=14)
    expected = operator(wide[0], *fresh, None, *past, is_causal=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    found = computed(isa, q, k, v, out, scale=0.25, causal=True, lengths=lengths)
    expected = operator(*wide, None, None, None, lengths, is_causal=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    found = computed(isa, q, k, v, out, scale=0.3, mask=mask, softcap=1.5)
    expected = operator(*wide, mask, scale=0.3, softcap=1.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert (found[:, :, 0] == 0).all()


def test_emits_for_aarch64() -> None:
    isa = named("neon", "aarch64")
    q, k, v, out = (view_of(a) for a in operands(20, 1, 2, 2, 40, 40, 16))
    one, cache, values, result = (view_of(a) for a in operands(21, 1, 2, 2, 1, 4000, 16))
    launches = attention(q, k, v, out, isa, scale=1.0, causal=True)
    launches += attention(one, cache, values, result, isa, scale=1.0)
    specs = {b.spec for launch in launches for b in launch.buffers if isinstance(b, Code)}
    for spec in specs | {launch.spec for launch in launches}:
        assert compiler.compile_object(library.source(spec, isa), isa)
