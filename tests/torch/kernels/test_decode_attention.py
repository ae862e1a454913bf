"""Attention of one token over a cache: splits, groups, pages, windows, and appending the token on the way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.providers.cuda.kernels.decode_attention import NewToken, Workspace, decode_attention
from tests.torch.kernels.checking import DEVICE, Array, attention, close, exact, poisoned, random, rope

TOKENS = 16


def wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int | None = None, **more: float
) -> Array:
    rows = []
    for b, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        if length == 0:
            rows.append(np.zeros(q.shape[1:]))
            continue
        part = slice(first, length)
        scale = more.get("scale", 1 / math.sqrt(q.shape[-1]))
        rows.append(attention(exact(q[b]), exact(k[b, part]), exact(v[b, part]), scale, more.get("softcap")))
    return np.stack(rows)


def on_device(lengths: list[int]) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (8, 2), (10, 2)]),
    st.lists(st.integers(0, 70), min_size=1, max_size=3),
    st.sampled_from([1, 2, 5]),
    st.booleans(),
    st.sampled_from([None, 9, 40]),
)
def test_splits_do_not_change_the_result(
    heads: tuple[int, int], lengths: list[int], splits: int, fused: bool, window: int | None
) -> None:
    batch = len(lengths)
    q = random(1, batch, heads[0], 24)
    k, v = random(2, batch, 72, heads[1], 24), random(3, batch, 72, heads[1], 24)
    out = poisoned(batch, heads[0], 24)
    decode_attention(q, k, v, on_device(lengths), out, splits=splits, fused=fused, window=window, tokens=TOKENS)
    close(out, wanted(q, k, v, lengths, window))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 4])
def test_halves(dtype: torch.dtype, group: int) -> None:
    q = random(1, 1, 2 * group, 32, dtype=dtype)
    k, v = random(2, 1, 40, 2, 32, dtype=dtype), random(3, 1, 40, 2, 32, dtype=dtype)
    out = poisoned(1, 2 * group, 32, dtype=dtype)
    decode_attention(q, k, v, on_device([40]), out, splits=2, tokens=TOKENS)
    close(out, wanted(q, k, v, [40]))


def test_softcap_scale_and_heads_first() -> None:
    q = random(1, 1, 4, 16, scale=3.0)
    k, v = random(2, 1, 2, 33, 16, scale=3.0).transpose(1, 2), random(3, 1, 2, 33, 16).transpose(1, 2)
    out = poisoned(1, 4, 16)
    decode_attention(q, k, v, on_device([33]), out, splits=2, softcap=5.0, scale=0.7, tokens=TOKENS)
    close(out, wanted(q, k, v, [33], softcap=5.0, scale=0.7))


@pytest.mark.parametrize("fused", [True, False])
def test_more_splits_than_are_read_at_once(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranvier.providers.cuda.kernels.decode_attention.JOINED_AT_ONCE", 128)
    q, k, v = random(1, 1, 4, 16), random(2, 1, 90, 1, 16), random(3, 1, 90, 1, 16)
    out = poisoned(1, 4, 16)
    decode_attention(q, k, v, on_device([90]), out, splits=5, fused=fused, tokens=TOKENS)
    close(out, wanted(q, k, v, [90]))


@pytest.mark.parametrize("group", [1, 4])
def test_pages(group: int) -> None:
    lengths, page = [37, 5, 48], 8
    q = random(1, 3, 2 * group, 16)
    k, v = random(2, 3, 48, 2, 16), random(3, 3, 48, 2, 16)
    order = torch.from_numpy(np.random.default_rng(4).permutation(18)).to(DEVICE)
    pages_k, pages_v = torch.empty(18, page, 2, 16, device=DEVICE), torch.empty(18, page, 2, 16, device=DEVICE)
    pages_k[order], pages_v[order] = k.reshape(18, page, 2, 16), v.reshape(18, page, 2, 16)
    table = order.to(torch.int32).reshape(3, 6)
    out = poisoned(3, 2 * group, 16)
    decode_attention(q, pages_k, pages_v, on_device(lengths), out, splits=3, table=table, tokens=TOKENS)
    close(out, wanted(q, k, v, lengths))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotary", [16, 8])
def test_new_token(interleaved: bool, paged: bool, rotary: int) -> None:
    lengths = [34, 1]
    q, new_k, new_v = random(1, 2, 8, 16), random(2, 2, 2, 16), random(3, 2, 2, 16)
    k, v = random(4, 2, 40, 2, 16), random(5, 2, 40, 2, 16)
    angles = np.random.default_rng(6).uniform(-3, 3, (40, rotary // 2))
    cos, sin = (torch.from_numpy(f(angles).astype(np.float32)).to(DEVICE) for f in (np.cos, np.sin))
    positions = np.array(lengths) - 1
    turned_q = rope(exact(q), positions, exact(cos), exact(sin), interleaved)
    turned_k = rope(exact(new_k), positions, exact(cos), exact(sin), interleaved)
    want_k, want_v = exact(k), exact(v)
    for b, position in enumerate(positions):
        want_k[b, position], want_v[b, position] = turned_k[b], exact(new_v)[b]
    for b, position in enumerate(positions):  # nobody has written there yet
        k[b, position] = v[b, position] = float("nan")
    table = torch.arange(10, dtype=torch.int32, device=DEVICE).reshape(2, 5) if paged else None
    cache_k, cache_v = (k.reshape(10, 8, 2, 16), v.reshape(10, 8, 2, 16)) if paged else (k, v)
    out = poisoned(2, 8, 16)
    new = NewToken(new_k, new_v, cos, sin, interleaved)
    decode_attention(q, cache_k, cache_v, on_device(lengths), out, splits=3, new=new, table=table, tokens=TOKENS)
    heads = [attention(turned_q[b], want_k[b, :n], want_v[b, :n], 0.25) for b, n in enumerate(lengths)]
    close(out, np.stack(heads))
    close(k, want_k)
    close(v, want_v)


def test_workspace_serves_step_after_step() -> None:
    q, k, v = random(1, 2, 4, 16), random(2, 2, 64, 1, 16), random(3, 2, 64, 1, 16)
    workspace = Workspace.empty(2, 4, 1, 16, 4, DEVICE)
    workspace.partial.fill_(float("nan"))
    workspace.stats.fill_(float("nan"))
    for lengths in ([64, 3], [17, 64]):
        out = poisoned(2, 4, 16)
        decode_attention(q, k, v, on_device(lengths), out, splits=4, workspace=workspace, tokens=TOKENS)
        close(out, wanted(q, k, v, lengths))
        assert not workspace.arrived.any()
