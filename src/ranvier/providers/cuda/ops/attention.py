"""Attention through torch's own kernels, which keep the matrix of scores out of memory; in plain steps where somebody
wants to see it, or where a cap stands between scores and softmax. Rotary position embeddings."""

from __future__ import annotations

import math
from typing import Any

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue
from ranvier.graph.ir import Node
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.table import BOOL, FLOATS, INTEGERS, Call, lowers

_TYPES = FLOATS | BOOL | INTEGERS


def split_heads(x: Any, heads: int | None) -> Any:
    """``[batch, time, heads * size]`` as ``[batch, heads, time, size]``; four axes stay as they are."""
    if x.ndim == 4:
        return x
    if not heads or x.shape[2] % heads:
        raise InvalidValue(f"{list(x.shape)} does not split into {heads} heads")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def merge_heads(x: Any) -> Any:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def in_one_kernel(call: Call, q: Any, k: Any, v: Any, bias: Any, scale: float, causal: bool) -> Any:
    """softmax(q kᵀ · scale + bias) v; a query that may look at nothing sees zeros. ``bias`` is added to scores."""
    dtype = q.dtype
    if dtype == torch.float32 and call.low is not None:
        q, k, v = (x.to(call.low) for x in (q, k, v))
    elif q.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        q, k, v = (x.float() for x in (q, k, v))
    mask = None if bias is None else bias.to(q.dtype)
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if mask is not None:
        y = torch.where(bias.amax(dim=-1, keepdim=True) == -math.inf, torch.zeros_like(y), y)
    return y.to(dtype)


def in_steps(q: Any, k: Any, v: Any, bias: Any, scale: float, cap: float, sink: Any = None) -> tuple[Any, ...]:
    """The result, and what stands between: scores, capped ones, those with the bias, and the weights."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(wide) for x in (q, k, v))
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.matmul(q * scale, k.mT)
    capped = torch.tanh(scores / cap) * cap if cap else scores
    biased = capped if bias is None else capped + bias.to(wide)
    top = biased.amax(dim=-1, keepdim=True) if biased.shape[-1] else biased.new_zeros(*biased.shape[:-1], 1)
    if sink is not None:
        top = torch.maximum(top, sink)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    weights = torch.exp(biased - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    weights = weights / torch.where(total == 0, torch.ones_like(total), total)
    if bias is not None and bias.shape[-1]:
        weights = torch.where(bias.amax(dim=-1, keepdim=True) == -math.inf, torch.zeros_like(weights), weights)
    return torch.matmul(weights, v), scores, capped, biased, weights


def _additive(mask: Any, total: int, like: Any) -> Any:
    """The mask as numbers to add, as long as the keys: what a short mask does not mention is forbidden."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf)
    mask = mask.to(torch.float64 if like.dtype == torch.float64 else torch.float32)
    short = total - mask.shape[-1] if mask.ndim else 0
    return functional.pad(mask, (0, short), value=-math.inf) if short > 0 else mask


def window(call: Call, time: int, total: int, first: Any, causal: bool, left: int, right: int, device: Any) -> Any:
    """Which keys each query may look at; None: all. ``first`` is the first query's place among the keys."""
    if not causal and left < 0 and right < 0:
        return None
    distance = torch.arange(total, device=device) - (first + torch.arange(time, device=device)[:, None])
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        allowed = allowed & (distance <= 0)
    if right >= 0:
        allowed = allowed & (distance <= right)
    if left >= 0:
        allowed = allowed & (distance >= -left)
    return allowed


@lowers("Attention", since=23, types=_TYPES)
def attention(
    call: Call,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    lengths: Any = None,
) -> Any:
    queries = split_heads(q, call.attr("q_num_heads"))
    keys, values = (split_heads(x, call.attr("kv_num_heads")) for x in (k, v))
    before = 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        keys, values = torch.cat([past_key, keys], dim=2), torch.cat([past_value, values], dim=2)
    time, total = queries.shape[2], keys.shape[2]
    causal = call.flag("is_causal")
    left, right = call.attr("left_window_size", -1), call.attr("right_window_size", -1)
    given = call.attr("scale")
    scale = 1 / math.sqrt(queries.shape[3]) if given is None else given
    cap = call.attr("softcap", 0.0)
    shown = call.wants(3)
    plain = not shown and not cap and call.attr("softmax_precision") != 11
    if plain and causal and mask is None and lengths is None and left < 0 and right < 0 and time == total:
        y = in_one_kernel(call, queries, keys, values, None, scale, True)
        return (merge_heads(y) if q.ndim == 3 else y), keys, values
    bias = None if mask is None else _additive(mask, total, q)
    first = before if lengths is None else (lengths.to(torch.int64) - time).reshape(-1, 1, 1, 1)
    allowed = window(call, time, total, first, causal, left, right, q.device)
    if lengths is not None:
        real = torch.arange(total, device=q.device) < lengths.reshape(-1, 1, 1, 1)
        allowed = real if allowed is None else allowed & real
    if allowed is not None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        none = torch.zeros((), dtype=wide, device=q.device) if bias is None else bias
        bias = torch.where(allowed, none, -math.inf)
    if plain:
        if bias is not None:
            bias = bias.expand(*queries.shape[:3], total)
        y = in_one_kernel(call, queries, keys, values, bias, scale, False)
        return (merge_heads(y) if q.ndim == 3 else y), keys, values
    y, *between = in_steps(queries, keys, values, bias, scale, cap)
    return (merge_heads(y) if q.ndim == 3 else y), keys, values, between[call.attr("qk_matmul_output_mode", 0)]


def rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Pairs of the first ``2 · cos.shape[-1]`` features turned by an angle for each position."""
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    wide = turning.float() if turning.dtype in (torch.float16, torch.bfloat16) else turning
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).reshape(turning.shape)
    else:
        a, b = wide[..., :half], wide[..., half:]
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    y = y.to(x.dtype)
    return torch.cat([y, rest], dim=-1) if rest.shape[-1] else y


def angles(call: Call, positions: Any, *caches: Any) -> list[Any]:
    """Rows of the tables of cosines and sines, with an axis for the heads."""
    count = min(cache.shape[0] for cache in caches)
    positions = positions.to(torch.int64)
    call.require(((positions >= 0) & (positions < count)).all(), f"a position is outside of [0, {count})")
    within = positions.clamp(0, count - 1)
    return [cache[within].unsqueeze(1) for cache in caches]


@lowers("RotaryEmbedding", since=23, types=FLOATS | {DType.int64, DType.int32})
def rotary_embedding(call: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    heads = split_heads(x, call.attr("num_heads"))
    size = call.attr("rotary_embedding_dim", 0) or heads.shape[3]
    if positions is not None:
        cos, sin = angles(call, positions, cos, sin)
    else:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    y = rotated(heads, cos[..., : size // 2], sin[..., : size // 2], call.flag("interleaved"))
    return merge_heads(y) if x.ndim == 3 else y


@lowers("LinearAttention", since=27, wide=True)
def linear_attention(
    call: Call, query: Any, key: Any, value: Any, past: Any = None, decay: Any = None, beta: Any = None
) -> Any:
    """A matrix for each head remembers keys and values, step by step."""
    heads = call.attr("kv_num_heads")
    q, k, v = split_heads(query, call.attr("q_num_heads")), split_heads(key, heads), split_heads(value, heads)
    batch, _, time, size = k.shape
    memory = k.new_zeros(batch, heads, size, v.shape[3]) if past is None else past
    keep = None if decay is None else torch.exp(split_heads(decay, min(heads, decay.shape[-1])))
    rate = None if beta is None else split_heads(beta, min(heads, beta.shape[-1]))
    factor = call.attr("scale", 0.0) or 1 / math.sqrt(size)
    steps = []
    for t in range(time):
        if keep is not None:
            memory = memory * keep[:, :, t, :, None]
        write, row = v[:, :, t], k[:, :, t]
        if rate is not None:
            write = rate[:, :, t] * (write - torch.matmul(row[:, :, None], memory)[:, :, 0])
        memory = memory + row[..., None] * write[:, :, None]
        shared = memory if q.shape[1] == heads else memory.repeat_interleave(q.shape[1] // heads, dim=1)
        steps.append(torch.matmul(q[:, :, t : t + 1] * factor, shared))
    y = torch.cat(steps, dim=2) if steps else q.new_zeros(*q.shape[:3], v.shape[3])
    return merge_heads(y), memory


def _modified(node: Node) -> str | None:
    if any(node.attrs.get(name) is not None for name in ("score_mod", "prob_mod")):
        return "graphs that change the scores are not lowered to torch"
    return None


@lowers("FlexAttention", domain="ai.onnx.preview", refuses=_modified)
def flex_attention(call: Call, q: Any, k: Any, v: Any) -> Any:
    given = call.attr("scale")
    return in_one_kernel(call, q, k, v, None, 1 / math.sqrt(q.shape[3]) if given is None else given, False)
