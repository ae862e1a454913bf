"""Attention in the forms of ONNX Runtime's domain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue
from ranvier.graph.ir import Node
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.ops.attention import angles, in_one_kernel, in_steps, merge_heads, rotated, split_heads
from ranvier.providers.cuda.ops.integer_products import by_column, exact_product
from ranvier.providers.cuda.ops.products import product
from ranvier.providers.cuda.ops.quantization import less
from ranvier.providers.cuda.table import CONTRIB, FLOATS, Call, lowers

_TYPES = FLOATS | {DType.int32, DType.int64, DType.bool}
_MASKED = -10000.0


def _added(call: Call, mask: Any, bias: Any, shape: tuple[int, int, int], causal: bool, device: Any) -> Any:
    """What is added to scores ``[batch, heads, length, total]``: a bias, a mask in any of its forms, the future."""
    batch, length, total = shape
    past = total - length
    added = None if bias is None else bias.float()
    allowed = None if mask is None else _allowed(mask, batch, length, past, total)
    if allowed is not None:
        hidden = torch.where(allowed, 0.0, call.attr("mask_filter_value", _MASKED))
        added = hidden if added is None else added + hidden
    if causal and length > 1:
        future = torch.arange(total, device=device) > past + torch.arange(length, device=device)[:, None]
        none = torch.zeros((), device=device) if added is None else added
        added = torch.where(future, torch.finfo(torch.float32).min, none)
    return added


def _allowed(mask: Any, batch: int, length: int, past: int, total: int) -> Any:
    position = torch.arange(total, device=mask.device)
    if mask.ndim == 1 and mask.shape[0] in (batch, 2 * batch, 3 * batch + 2):
        inside = position < mask[:batch, None]
        if mask.shape[0] == 2 * batch:
            inside = inside & (position >= mask[batch:, None])
        return inside[:, None, None]
    if tuple(mask.shape) == (batch, total):
        return (mask > 0)[:, None, None]
    if mask.ndim == 2 and mask.shape[1] == 1:
        return None
    if tuple(mask.shape) == (batch, length, total):
        return (mask > 0)[:, None]
    if mask.ndim == 4:
        return mask[:, :, past : past + length, :total] > 0
    raise InvalidValue(f"a mask of shape {list(mask.shape)} does not fit {length} queries and {total} keys")


def _attended(call: Call, q: Any, k: Any, v: Any, mask: Any, bias: Any, causal: bool, *, shown: bool = False) -> Any:
    given = call.attr("scale", 0.0)
    scale = given or 1 / math.sqrt(q.shape[3] or 1)
    if causal and mask is None and bias is None and q.shape[2] == k.shape[2] and not shown:
        return in_one_kernel(call, q, k, v, None, scale, True), None
    added = _added(call, mask, bias, (q.shape[0], q.shape[2], k.shape[2]), causal, q.device)
    if shown:
        y, _, _, scores, _ = in_steps(q, k, v, added, scale, 0.0)
        return y, scores
    wide = None if added is None else added.expand(*q.shape[:3], k.shape[2])
    return in_one_kernel(call, q, k, v, wide, scale, False), None


def _extended(past: Any, new: Any, filled: int | None) -> tuple[Any, Any]:
    """Rows to attend to, and the state to hand on."""
    if filled is None:
        grown = torch.cat([past, new], dim=2)
        return grown, grown
    end = filled + new.shape[2]
    if filled < 0 or end > past.shape[2]:
        raise InvalidValue(f"rows {filled} to {end} do not fit a buffer of {past.shape[2]}")
    buffer = past.clone()
    buffer[:, :, filled:end] = new
    return buffer[:, :, :end], buffer


@lowers("Attention", domain=CONTRIB, types=_TYPES, host=(6,))
def attention(
    call: Call,
    x: Any,
    weights: Any,
    bias: Any = None,
    mask: Any = None,
    past: Any = None,
    added: Any = None,
    past_length: Array | None = None,
) -> Any:
    projected = product(call, x, weights)
    if bias is not None:
        projected = projected + bias
    filled = None
    if past is not None and call.flag("past_present_share_buffer") and past_length is not None:
        filled = int(past_length.reshape(-1)[0])
    return _by_projection(call, projected, mask, past, added, filled)


def _by_projection(call: Call, projected: Any, mask: Any, past: Any, added: Any, filled: int | None) -> Any:
    """Attention over queries, keys and values beside each other; ``filled``: of a past with room, the rows in use."""
    heads, width = call.attr("num_heads"), projected.shape[-1]
    sizes = list(call.attr("qkv_hidden_sizes") or [width // 3] * 3)
    q, k, v = (split_heads(part, heads) for part in projected.split(sizes, dim=-1))
    start = 0 if past is None else past.shape[3] if filled is None else filled
    if call.flag("do_rotary"):
        q, k = (_by_position(call, part, start, call.attr("rotary_embedding_dim", 0)) for part in (q, k))
    present_key, present_value = k, v
    if past is not None:
        k, present_key = _extended(past[0], k, filled)
        v, present_value = _extended(past[1], v, filled)
    y, _ = _attended(call, q, k, v, mask, added, call.flag("unidirectional"))
    return merge_heads(y), torch.stack([present_key, present_value]) if call.wants(1) else None


def _shared(node: Node) -> str | None:
    shared = node.attrs.get("past_present_share_buffer", 0)
    return "it has no input that says how much of a shared buffer is used" if shared else None


@lowers("QAttention", domain=CONTRIB, types=_TYPES | {DType.int8, DType.uint8}, refuses=_shared)
def quantized_attention(
    call: Call,
    x: Any,
    weights: Any,
    bias: Any,
    x_scale: Any,
    weight_scale: Any,
    mask: Any = None,
    x_zero: Any = None,
    weight_zero: Any = None,
    past: Any = None,
) -> Any:
    left = less(x, None if x_zero is None else x_zero.reshape(()))
    total = exact_product(left, less(weights, None if weight_zero is None else by_column(weight_zero)))
    scale = x_scale.float().reshape(()) * by_column(weight_scale.float())
    projected = (total.float() * scale + bias.float()).to(bias.dtype)
    return _by_projection(call, projected, mask, past, None, None)


def _by_position(call: Call, x: Any, start: int, width: int) -> Any:
    half = (width or x.shape[-1]) // 2
    turns = (start + np.arange(x.shape[2]))[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos = call.constant(lambda: np.cos(turns).astype(np.float32))
    sin = call.constant(lambda: np.sin(turns).astype(np.float32))
    return rotated(x, cos, sin, False)


def _beams(node: Node) -> str | None:
    return "beams are not lowered to torch" if node.input(9) is not None else None


@lowers("MultiHeadAttention", domain=CONTRIB, types=_TYPES, host=(8,), refuses=_beams)
def multi_head_attention(
    call: Call,
    query: Any,
    key: Any = None,
    value: Any = None,
    bias: Any = None,
    mask: Any = None,
    added: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    past_length: Array | None = None,
    beams: Any = None,
) -> Any:
    heads = call.attr("num_heads")
    if key is None and query.ndim == 5:  # [batch, length, heads, 3, size]
        q, k, v = query.permute(3, 0, 2, 1, 4).unbind(0)
    elif key is not None and value is None and key.ndim == 5:
        q = split_heads(query, heads)
        k, v = key.permute(3, 0, 2, 1, 4).unbind(0)
    else:
        q, k, v = (split_heads(x, heads) for x in (query, key, value))
    if bias is not None:
        widths = [x.shape[1] * x.shape[3] for x in (q, k, v)]
        cached = key is not None and key.ndim == 4  # from an encoder, with its bias already
        parts = [b.reshape(heads, 1, -1) for b in bias.split(widths)]
        q = q + parts[0]
        if not cached:
            k, v = k + parts[1], v + parts[2]
    present_key, present_value = k, v
    if past_key is not None and past_value is not None:
        filled = None if past_length is None else int(past_length.reshape(-1)[0])
        k, present_key = _extended(past_key, k, filled)
        v, present_value = _extended(past_value, v, filled)
    y, scores = _attended(call, q, k, v, mask, added, call.flag("unidirectional"), shown=call.wants(3))
    return merge_heads(y), present_key, present_value, scores


def _refused(node: Node) -> str | None:
    if node.attrs.get("sliding_window_cache", 0):
        return "a cache that slides is not lowered to torch"
    if any(node.attrs.get(name, "NONE") != "NONE" for name in ("k_quant_type", "v_quant_type")):
        return "a cache of codes is not lowered to torch"
    return None


@lowers("GroupQueryAttention", domain=CONTRIB, types=_TYPES, host=(6,), refuses=_refused)
def group_query_attention(
    call: Call,
    query: Any,
    key: Any,
    value: Any,
    past_key: Any,
    past_value: Any,
    lengths: Any,
    total_length: Array,
    cos_cache: Any = None,
    sin_cache: Any = None,
    position_ids: Any = None,
    added: Any = None,
    sink: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
) -> Any:
    heads, kv_heads = call.attr("num_heads"), call.attr("kv_num_heads")
    if key is None:
        packed = split_heads(query, heads + 2 * kv_heads)
        q, k, v = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    else:
        q, k, v = split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)
    if q_norm is not None and k_norm is not None:
        epsilon = call.attr("qk_norm_epsilon", 1e-6)
        q, k = _normal(q, q_norm, epsilon), _normal(k, k_norm, epsilon)
    length, total = q.shape[2], int(total_length.reshape(-1)[0])
    prompt = length == total
    totals = lengths.reshape(-1).to(torch.int64) + 1
    first = torch.zeros_like(totals) if prompt or past_key is None else totals - length
    if call.flag("do_rotary"):
        steps = torch.arange(length, device=q.device)
        positions = first[:, None] + steps
        if position_ids is not None:
            positions = position_ids.reshape(-1)[:1, None] + steps if prompt else position_ids
        cos, sin = angles(call, positions, cos_cache, sin_cache)
        q = rotated(q, cos, sin, call.flag("rotary_interleaved"))
        k = rotated(k, cos, sin, call.flag("rotary_interleaved")) if k.shape[2] else k
    before = totals if past_key is not None and not k.shape[2] else first
    rows = max(total, 0 if past_key is None else past_key.shape[2])
    call.require(((before >= 0) & (before + k.shape[2] <= rows)).all(), f"a sequence does not fit {rows} rows")
    present_key = _grown(past_key, k, before, rows)
    present_value = _grown(past_value, v, before, rows)
    keys, values = present_key[:, :, :total], present_value[:, :, :total]
    end = totals[:, None]
    if call.flag("causal", 1):
        end = torch.minimum(first[:, None] + torch.arange(length, device=q.device) + 1, totals[:, None])
    position = torch.arange(total, device=q.device)
    visible = position < end[:, None, :, None]
    if call.attr("local_window_size", -1) >= 0:
        visible = visible & (position >= (end - call.attr("local_window_size"))[:, None, :, None])
    bias = torch.where(visible, torch.zeros((), device=q.device) if added is None else added.float(), -math.inf)
    bias = bias.expand(q.shape[0], heads, length, total)
    scale = call.attr("scale", 0.0) or 1 / math.sqrt(q.shape[3] or 1)
    cap = call.attr("softcap", 0.0)
    if sink is None and call.attr("smooth_softmax", -1) == 1:
        sink = torch.zeros(1, 1, 1, device=q.device)
    elif sink is not None:
        sink = sink.float().reshape(-1, 1, 1)
    if sink is None and not cap and not call.wants(3):
        y = in_one_kernel(call, q, keys, values, bias, scale, False)
        return merge_heads(y), present_key, present_value
    y, _, _, biased, weights = in_steps(q, keys, values, bias, scale, cap, sink)
    scores = torch.where(visible, biased, torch.zeros_like(biased))
    shown = {1: scores, 2: weights}.get(call.attr("qk_output", 0)) if call.wants(3) else None
    return merge_heads(y), present_key, present_value, shown


def _normal(x: Any, weight: Any, epsilon: float) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def _grown(past: Any, new: Any, before: Any, rows: int) -> Any:
    """A cache: of each sequence the first ``before`` rows of the past, the new ones, then zeros."""
    batch, heads, count, size = new.shape
    position = torch.arange(rows, device=new.device)
    present = new.new_zeros(batch, heads, rows, size)
    if past is not None:
        kept = (
            past[:, :, :rows]
            if past.shape[2] >= rows
            else torch.cat([past, past.new_zeros(batch, heads, rows - past.shape[2], size)], dim=2)
        )
        present = torch.where((position < before[:, None])[:, None, :, None], kept, present)
    if not count:
        return present
    at = (before[:, None] + torch.arange(count, device=new.device)).clamp(0, rows - 1)
    return present.scatter(2, at[:, None, :, None].expand_as(new), new)


@lowers("RotaryEmbedding", domain=CONTRIB, types=_TYPES)
def rotary_embedding(call: Call, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
    length = x.shape[-2]
    if positions.numel() == 1 and positions.ndim < 2:
        positions = (positions.reshape(()) + torch.arange(length, device=x.device))[None]
    cos, sin = angles(call, positions, cos, sin)
    if x.ndim == 4:
        heads = x
    else:
        number = call.attr("num_heads", 0)
        size = x.shape[2] // number if number else call.attr("rotary_embedding_dim", 0) or 2 * cos.shape[-1]
        heads = split_heads(x, x.shape[2] // size)
    y = rotated(heads, cos, sin, call.flag("interleaved"))
    return y if x.ndim == 4 else merge_heads(y)
