"""Attention of one new token for each sequence over a cache of keys and values, contiguous or in pages.

A step reads all keys and values once and computes next to nothing, so the context is cut into ``splits`` that separate
programs read at the same time, each a tile ahead of what it computes. A program holds all query heads that share a key
head, so the cache is read once for them; from a group of four on, their products are matrix products with rows padded
to 16. Each program leaves its largest score, its sum and its accumulated values; whoever of a sequence's programs ends
last puts them together, which saves a launch (``fused=False`` uses a launch: for devices on which the order of memory
is in doubt).

With ``new`` the token's key and value are not in the cache yet: queries and key are turned by their position here, and
the program that holds the last split writes key and value and starts from them, so a step has one launch for all of it.

Caches are ``[sequences, positions, heads, D]`` by their strides, or ``[pages, positions of a page, heads, D]`` with a
``table`` of each sequence's pages. Lengths are read from device memory and count the new token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import capped, let_next_start, matrix_product, wait_for_inputs
from ranvier.providers.cuda.kernels.jit import kernel, power_of_two
from ranvier.providers.cuda.kernels.rotary import partner, turned

NOTHING = tl.constexpr(-1e30)  # a score that adds nothing, without the arithmetic of infinities
JOINED_AT_ONCE = 8192  # numbers of splits that 128 threads read together
DOT_FROM = 4  # query heads of a key head from which on a padded matrix product is cheaper


@kernel
def _join(
    partial: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    to: tl.tensor,
    out_head: tl.tensor,
    dim: tl.tensor,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Results of HEADS heads from ``first`` on (numbered over all sequences) out of what their splits left.

    Splits are read AT_ONCE together: one after the other, each would wait for memory by itself.
    """
    member = tl.arange(0, MEMBERS)
    mine = member < HEADS
    row = first + member
    lane = tl.arange(0, LANES)
    at = stats + (row[:, None] * SPLITS + lane[None, :]) * 2
    mask = mine[:, None] & (lane[None, :] < SPLITS)
    most = tl.load(at, mask=mask, other=NOTHING, cache_modifier=".cg")
    sums = tl.load(at + 1, mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.max(most, axis=1)
    total = tl.sum(sums * tl.exp2(most - top[:, None]), axis=1)
    d = tl.arange(0, WIDTH)
    result = tl.zeros((MEMBERS, WIDTH), tl.float32)
    for begin in tl.static_range(0, LANES, AT_ONCE):
        split = begin + tl.arange(0, AT_ONCE)
        there = mine[:, None] & (split[None, :] < SPLITS)
        place = row[:, None] * SPLITS + split[None, :]
        weight = tl.load(stats + place * 2, mask=there, other=NOTHING, cache_modifier=".cg")
        share = tl.load(
            partial + place[:, :, None] * dim + d[None, None, :],
            mask=there[:, :, None] & (d < dim)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        result += tl.sum(share * tl.exp2(weight - top[:, None])[:, :, None], axis=1)
    result = tl.where(total[:, None] > 0.0, result / tl.where(total > 0.0, total, 1.0)[:, None], 0.0)
    at_out = out + to + member[:, None] * out_head + d[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=mine[:, None] & (d < dim)[None, :])


@kernel
def _tile(
    cache: tl.tensor,
    table: tl.tensor,
    batch: tl.tensor,
    table_batch: tl.tensor,
    page: tl.tensor,
    step_batch: tl.tensor,
    step_token: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    d: tl.tensor,
    dim: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Rows of one head from token ``first`` on, up to ``end``; ``cache`` points at the head."""
    token = first + tl.arange(0, TOKENS)
    there = token < end
    if table is not None:
        base = tl.load(table + batch * table_batch + token // page, mask=there, other=0).to(tl.int64)
        inside = (token % page).to(tl.int64)
        at = base * step_batch + inside * step_token
    else:
        at = batch * step_batch + token.to(tl.int64) * step_token
    return tl.load(cache + at[:, None] + d[None, :], mask=there[:, None] & (d < dim)[None, :], other=0.0)


@kernel
def _decode(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    new_k: tl.tensor,
    new_v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    stats: tl.tensor,
    arrived: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    dim: tl.tensor,
    rotary: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    k_batch: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_batch: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    new_k_batch: tl.tensor,
    new_k_head: tl.tensor,
    new_v_batch: tl.tensor,
    new_v_head: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    table_batch: tl.tensor,
    page: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
    LANES: tl.constexpr,
    DOT: tl.constexpr,
    APPEND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FUSED: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    split = tl.program_id(0)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    let_next_start(PDL)
    if not EARLY:
        wait_for_inputs(PDL)
    length = tl.load(lengths + batch).to(tl.int32)
    begin = 0
    if window is not None:
        begin = tl.maximum(length - window, 0)
    piece = tl.cdiv(tl.cdiv(length - begin, SPLITS), TOKENS) * TOKENS
    start = begin + split * piece
    end = tl.minimum(start + piece, length)
    newest = length - 1
    stored = tl.minimum(end, newest) if APPEND else end  # the new token is not in the cache

    d = tl.arange(0, WIDTH)
    of_keys = k_cache + head * k_head
    of_values = v_cache + head * v_head
    keys = _tile(of_keys, table, batch, table_batch, page, k_batch, k_token, start, stored, d, dim, TOKENS)
    values = _tile(of_values, table, batch, table_batch, page, v_batch, v_token, start, stored, d, dim, TOKENS)
    if EARLY:
        wait_for_inputs(PDL)
    in_head = d < dim
    member = tl.arange(0, HEADS)
    mine = member < GROUP
    query = q + batch * q_batch + (head * GROUP + member)[:, None] * q_head
    q_mask = mine[:, None] & in_head[None, :]
    queries = tl.load(query + d[None, :], mask=q_mask, other=0.0).to(tl.float32)
    if APPEND:
        other = partner(d, rotary, INTERLEAVED)
        angles = newest.to(tl.int64) * (rotary // 2)
        beside = tl.load(query + other[None, :], mask=q_mask, other=0.0).to(tl.float32)
        queries = turned(queries, beside, d[None, :], cos + angles, sin + angles, rotary, INTERLEAVED)
        from_k = new_k + batch * new_k_batch + head * new_k_head
        k_value = tl.load(from_k + d, mask=in_head, other=0.0).to(tl.float32)
        k_beside = tl.load(from_k + other, mask=in_head, other=0.0).to(tl.float32)
        key_here = turned(k_value, k_beside, d, cos + angles, sin + angles, rotary, INTERLEAVED)
        key_here = key_here.to(k_cache.dtype.element_ty)
        value_here = tl.load(new_v + batch * new_v_batch + head * new_v_head + d, mask=in_head, other=0.0)
        value_here = value_here.to(v_cache.dtype.element_ty)
        owner = (newest >= start) & (newest < end)
        if owner:
            if table is not None:
                where = tl.load(table + batch * table_batch + newest // page).to(tl.int64)
                inside = newest % page
            else:
                where = batch
                inside = newest
            tl.store(
                k_cache + where * k_batch + inside.to(tl.int64) * k_token + head * k_head + d, key_here, mask=in_head
            )
            tl.store(
                v_cache + where * v_batch + inside.to(tl.int64) * v_token + head * v_head + d, value_here, mask=in_head
            )
    if DOT:
        queries = queries.to(k_cache.dtype.element_ty)

    most = tl.full((HEADS,), NOTHING, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    gathered = tl.zeros((HEADS, WIDTH), tl.float32)
    if APPEND:
        score = tl.sum(queries.to(tl.float32) * key_here.to(tl.float32)[None, :], axis=1) * scale
        if cap is not None:
            score = capped(score, cap)
        most = tl.where(owner, score * 1.4426950408889634, NOTHING)
        total = tl.where(owner, 1.0, total)
        gathered = tl.where(owner, value_here.to(tl.float32)[None, :] + gathered, 0.0)
    for first in range(start, stored, TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < stored
        ahead = first + TOKENS
        next_keys = _tile(of_keys, table, batch, table_batch, page, k_batch, k_token, ahead, stored, d, dim, TOKENS)
        next_values = _tile(of_values, table, batch, table_batch, page, v_batch, v_token, ahead, stored, d, dim, TOKENS)
        if DOT:
            scores = matrix_product(queries, tl.trans(keys), tl.zeros((HEADS, TOKENS), tl.float32))
        else:
            scores = tl.sum(queries[:, None, :] * keys.to(tl.float32)[None, :, :], axis=2)
        scores *= scale
        if cap is not None:
            scores = capped(scores, cap)
        scores = tl.where(there[None, :], scores * 1.4426950408889634, NOTHING)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.where(there[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        keep = tl.exp2(most - higher)
        total = total * keep + tl.sum(weights, axis=1)
        gathered *= keep[:, None]
        if DOT:
            gathered = matrix_product(weights.to(values.dtype), values, gathered)
        else:
            gathered += tl.sum(weights[:, :, None] * values.to(tl.float32)[None, :, :], axis=1)
        most = higher
        keys = next_keys
        values = next_values

    to = batch * out_batch + (head * GROUP + member) * out_head
    if SPLITS == 1:
        result = tl.where(total[:, None] > 0.0, gathered / tl.where(total > 0.0, total, 1.0)[:, None], 0.0)
        tl.store(out + to[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=q_mask)
    else:
        row = (batch * kv_heads + head) * GROUP + member
        here = row * SPLITS + split
        tl.store(partial + here[:, None] * dim + d[None, :], gathered, mask=q_mask)
        tl.store(stats + here * 2, most, mask=mine)
        tl.store(stats + here * 2 + 1, total, mask=mine)
        if FUSED:
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + batch * kv_heads + head
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if before == SPLITS - 1:
                to_first = batch * out_batch + head * GROUP * out_head
                first_row = (batch * kv_heads + head) * GROUP
                _join(
                    partial, stats, out, first_row, to_first, out_head, dim,
                    GROUP, SPLITS, AT_ONCE, MEMBERS, LANES, WIDTH,
                )  # fmt: skip
                tl.store(counter, 0)  # as the next replay needs it


@kernel
def _combine(
    partial: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    dim: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    to = (row // heads) * out_batch + (row % heads) * out_head
    _join(partial, stats, out, row, to, out_head, dim, 1, SPLITS, AT_ONCE, 1, LANES, WIDTH)


@dataclass(frozen=True)
class NewToken:
    """Keys and values of the step ``[B, kv heads, D]``, not turned yet; angles ``[positions, rotary / 2]``."""

    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


@dataclass(frozen=True)
class Workspace:
    """What splits leave for whoever joins them. Counters must be 0 before the first step and are 0 after each."""

    partial: torch.Tensor
    stats: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def empty(batch: int, heads: int, kv_heads: int, dim: int, splits: int, device: torch.device | str) -> Workspace:
        return Workspace(
            torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=device),
            torch.empty((batch, heads, splits, 2), dtype=torch.float32, device=device),
            torch.zeros((batch, kv_heads), dtype=torch.int32, device=device),
        )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: Workspace | None = None,
    splits: int = 1,
    new: NewToken | None = None,
    table: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    tokens: int = 64,
    warps: int = 4,
    stages: int = 2,
    fused: bool = True,
    pdl: bool = False,
    early: bool = False,
) -> torch.Tensor:
    """q and out ``[B, heads, D]``; see the module for the rest. ``workspace`` is needed for more than one split.

    ``early``: lengths and what the cache holds without the new token are older than the launch before this one, so
    that with ``pdl`` they are read before it has ended."""
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    if splits > 1 and workspace is None:
        workspace = Workspace.empty(batch, heads, kv_heads, dim, splits, q.device)
    partial, stats, arrived = (
        (workspace.partial, workspace.stats, workspace.arrived) if workspace else (None, None, None)
    )
    dot = group >= DOT_FROM
    width = max(16, power_of_two(dim))
    rows = max(16, power_of_two(group)) if dot else power_of_two(group)
    lanes = power_of_two(splits)
    members = power_of_two(group)
    new_steps = (new.k.stride(0), new.k.stride(1), new.v.stride(0), new.v.stride(1)) if new else (0, 0, 0, 0)
    _decode[(splits, kv_heads, batch)](
        q,
        k_cache,
        v_cache,
        table,
        lengths,
        new.k if new else None,
        new.v if new else None,
        new.cos if new else None,
        new.sin if new else None,
        out,
        partial,
        stats,
        arrived,
        1.0 / math.sqrt(dim) if scale is None else scale,
        softcap,
        window,
        dim,
        2 * new.cos.shape[1] if new else 0,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *new_steps,
        out.stride(0),
        out.stride(1),
        0 if table is None else table.stride(0),
        k_cache.shape[1],
        GROUP=group,
        HEADS=rows,
        WIDTH=width,
        TOKENS=tokens,
        SPLITS=splits,
        AT_ONCE=max(1, min(lanes, JOINED_AT_ONCE // (members * width))),
        MEMBERS=members,
        LANES=lanes,
        DOT=dot,
        APPEND=new is not None,
        INTERLEAVED=new is not None and new.interleaved,
        FUSED=fused,
        PDL=pdl,
        EARLY=pdl and early and new is not None,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    if splits > 1 and not fused:
        _combine[(batch * heads,)](
            partial,
            stats,
            out,
            heads,
            dim,
            out.stride(0),
            out.stride(1),
            SPLITS=splits,
            AT_ONCE=max(1, min(lanes, JOINED_AT_ONCE // 4 // width)),
            LANES=lanes,
            WIDTH=width,
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )
    return out
