"""Rotary embedding of queries and keys, and writing keys and values into the cache, in one launch.

For prompts, and for steps whose attention is somebody else's: one token of a decoding step is turned and stored inside
``decode_attention``. Tokens are ``[B, L]`` rows; each has its position in device memory, which is the place in the
cache and the row of the tables of angles. A negative position marks padding: nothing is stored for it.
"""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import let_next_start, wait_for_inputs
from ranvier.providers.cuda.kernels.jit import blocks, kernel, power_of_two
from ranvier.providers.cuda.kernels.rotary import partner, turned

HEADS_AT_ONCE = 8


@kernel
def _rope_append(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_out: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    length: tl.tensor,
    q_heads: tl.tensor,
    kv_heads: tl.tensor,
    dim: tl.tensor,
    rotary: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    kc_batch: tl.tensor,
    kc_token: tl.tensor,
    kc_head: tl.tensor,
    vc_batch: tl.tensor,
    vc_token: tl.tensor,
    vc_head: tl.tensor,
    table_batch: tl.tensor,
    page: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(q_heads, HEADS)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    position = tl.load(positions + token).to(tl.int64)
    if position >= 0:
        d = tl.arange(0, WIDTH)[None, :]
        other = partner(d, rotary, INTERLEAVED)
        angles = position * (rotary // 2)
        if part < q_parts:
            head = (part * HEADS + tl.arange(0, HEADS))[:, None]
            mask = (head < q_heads) & (d < dim)
            row = q + token * q_token + head * q_head
            value = tl.load(row + d, mask=mask, other=0.0).to(tl.float32)
            beside = tl.load(row + other, mask=mask, other=0.0).to(tl.float32)
            value = turned(value, beside, d, cos + angles, sin + angles, rotary, INTERLEAVED)
            tl.debug_barrier()  # q_out may be q: all partners have been read
            tl.store(q_out + token * out_token + head * out_head + d, value.to(q_out.dtype.element_ty), mask=mask)
        else:
            head = ((part - q_parts) * HEADS + tl.arange(0, HEADS))[:, None]
            mask = (head < kv_heads) & (d < dim)
            row = k + token * k_token + head * k_head
            value = tl.load(row + d, mask=mask, other=0.0).to(tl.float32)
            beside = tl.load(row + other, mask=mask, other=0.0).to(tl.float32)
            value = turned(value, beside, d, cos + angles, sin + angles, rotary, INTERLEAVED)
            plain = tl.load(v + token * v_token + head * v_head + d, mask=mask, other=0.0)
            batch = token // length
            inside = position
            if table is not None:
                batch = tl.load(table + batch * table_batch + position // page).to(tl.int64)
                inside = position % page
            to_k = k_cache + batch * kc_batch + inside * kc_token + head * kc_head + d
            to_v = v_cache + batch * vc_batch + inside * vc_token + head * vc_head + d
            tl.store(to_k, value.to(k_cache.dtype.element_ty), mask=mask)
            tl.store(to_v, plain.to(v_cache.dtype.element_ty), mask=mask)


def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    length: int = 1,
    table: torch.Tensor | None = None,
    interleaved: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """q ``[B * L, heads, D]``, k and v ``[B * L, kv heads, D]``, ``length`` L; caches as ``decode_attention`` has them.

    ``q_out`` may be q itself.
    """
    count, heads, dim = q.shape
    kv_heads = k.shape[1]
    parts = blocks(heads, HEADS_AT_ONCE) + blocks(kv_heads, HEADS_AT_ONCE)
    _rope_append[(count, parts)](
        q,
        k,
        v,
        positions,
        cos,
        sin,
        q_out,
        k_cache,
        v_cache,
        table,
        length,
        heads,
        kv_heads,
        dim,
        2 * cos.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *q_out.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0 if table is None else table.stride(0),
        k_cache.shape[1],
        HEADS=HEADS_AT_ONCE,
        WIDTH=power_of_two(dim),
        INTERLEAVED=interleaved,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    return q_out
