"""Attention of a new token whose splits a cluster joins: the source on this processor, and on a GPU itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ranvier.providers.cuda.kernels.cluster_attention import Cut, cluster_attention, suits
from ranvier.providers.cuda.kernels.decode_attention import NewToken
from tests.torch.kernels.checking import DEVICE, Array, close, exact, random
from tests.torch.kernels.twins import Twin, twin

__all__ = ["twin"]


def turned(x: Array, position: int, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Heads [.., D] by definition: pairs are turned by their angle."""
    half = cos.shape[1]
    c, s = cos[position], sin[position]
    out = x.copy()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "dim", "rotary", "interleaved", "dtype", "cut"),
    [
        ((150, 1), 2, 4, 64, 64, False, torch.bfloat16, Cut(2, 2)),  # of which one has nothing in its cache yet
        ((65,), 1, 1, 128, 64, True, torch.float16, Cut(1, 4)),  # half of a head is turned
        ((40,), 1, 8, 64, 64, False, torch.float16, Cut(2, 2)),
        ((97,), 1, 3, 64, 32, True, torch.bfloat16, Cut(2, 4)),  # results that blocks do not share evenly
    ],
)
@pytest.mark.parametrize("head_first", [False, True])
def test_is_attention(
    lengths: tuple[int, ...],
    kv_heads: int,
    group: int,
    dim: int,
    rotary: int,
    interleaved: bool,
    dtype: torch.dtype,
    cut: Cut,
    head_first: bool,
    twin: list[Twin],
) -> None:
    batch, room = len(lengths), max(lengths) + 5
    q = random(1, batch, kv_heads * group, dim, dtype=dtype)
    k, v = (random(seed, batch, kv_heads, dim, dtype=dtype) for seed in (2, 3))
    shape = (batch, kv_heads, room, dim) if head_first else (batch, room, kv_heads, dim)
    caches = [random(seed, *shape, dtype=dtype) for seed in (4, 5)]
    views = [cache.transpose(1, 2) if head_first else cache for cache in caches]
    angles = torch.rand(room, rotary // 2, generator=torch.Generator().manual_seed(6)) * 6.0
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    before = [exact(view) for view in views]
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=DEVICE)
    new = NewToken(k, v, cos, sin, interleaved)
    count = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    cluster_attention(q, views[0], views[1], count, out, new, early=True, cut=cut)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 3e-3
    for b, length in enumerate(lengths):
        turn = (length - 1, exact(cos), exact(sin), interleaved)
        queries, key = turned(exact(q)[b], *turn), turned(exact(k)[b], *turn)
        keys, values = (np.concatenate([c[b, : length - 1], n[None]]) for c, n in zip(before, (key, exact(v)[b])))
        for h in range(kv_heads * group):
            scores = keys[:, h // group] @ queries[h] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            close(out[b, h], weights @ values[:, h // group] / weights.sum(), tolerance)
        close(views[0][b, length - 1], key, tolerance)  # where they belong in the cache
        close(views[1][b, length - 1], exact(v)[b], tolerance)
        assert np.array_equal(exact(views[0])[b, : length - 1], before[0][b, : length - 1])
        assert np.array_equal(exact(views[0])[b, length:], before[0][b, length:])


def test_what_it_declines() -> None:
    q, k = random(1, 1, 4, 64, dtype=torch.bfloat16), random(2, 1, 2, 64, dtype=torch.bfloat16)
    cache = random(3, 1, 32, 2, 64, dtype=torch.bfloat16)
    cos = torch.ones(32, 32, device=DEVICE)
    new = NewToken(k, k, cos, cos)
    assert suits(q, cache, cache, new) is (DEVICE == "cuda")
    assert not suits(q.float(), cache, cache, new)
    assert not suits(q[..., :48], cache[..., :48], cache[..., :48], new)
    assert not suits(q, cache.expand(1, 32, 2, 64).repeat(1, 512, 1, 1), cache, new)  # more blocks have to read it
