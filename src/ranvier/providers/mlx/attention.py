"""Attention through mlx's own kernel, and rotary position embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.graph.ir import Node
from ranvier.providers.foreign import is_used
from ranvier.providers.mlx.library import mx, to_mlx
from ranvier.providers.mlx.table import BOOL, FLOATS, INTEGERS, Call, lowers


def _split_heads(x: Any, heads: int | None) -> Any:
    if x.ndim == 4:
        return x
    if not heads:
        raise ValueError("the number of heads is not given")
    return mx.transpose(mx.reshape(x, (*x.shape[:2], heads, -1)), (0, 2, 1, 3))


def _merge_heads(x: Any) -> Any:
    y = mx.transpose(x, (0, 2, 1, 3))
    return mx.reshape(y, (*y.shape[:2], -1))


def _unfit(node: Node) -> str | None:
    if node.attrs.get("softcap", 0.0):
        return "a soft cap is not lowered to mlx"
    if len(node.outputs) > 3 and is_used(node.outputs[3]):
        return "mlx does not show the scores"
    if node.input(6) is not None:
        return "a number of keys per sample is not lowered to mlx"
    if max(node.attrs.get(name, -1) for name in ("left_window_size", "right_window_size")) >= 0:
        return "a window is not lowered to mlx"
    return None


@lowers("Attention", since=23, types=FLOATS | BOOL, refuses=_unfit, wide=True)
def attention(
    call: Call, q: Any, k: Any, v: Any, mask: Any = None, past_key: Any = None, past_value: Any = None
) -> Any:
    queries = _split_heads(q, call.attr("q_num_heads"))
    keys, values = (_split_heads(x, call.attr("kv_num_heads")) for x in (k, v))
    before = 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        keys = mx.concatenate([past_key, keys], axis=2)
        values = mx.concatenate([past_value, values], axis=2)
    time, total = queries.shape[2], keys.shape[2]
    bias = None if mask is None else _additive(mask, total)
    if call.attr("is_causal", 0):
        ahead = np.arange(total) > before + np.arange(time)[:, None]
        hidden = to_mlx(np.where(ahead, np.float32(-np.inf), np.float32(0)))
        bias = hidden if bias is None else bias + hidden
    scale = call.attr("scale")
    y = mx.fast.scaled_dot_product_attention(
        queries,
        keys,
        values,
        scale=1 / math.sqrt(queries.shape[3]) if scale is None else scale,
        mask=None if bias is None else bias.astype(queries.dtype),
    )
    if bias is not None:  # a query that may look at nothing sees zeros
        blind = mx.max(bias, axis=-1, keepdims=True) == -math.inf
        y = mx.where(mx.reshape(blind, (*[1] * (4 - blind.ndim), *blind.shape)), mx.zeros_like(y), y)
    return (_merge_heads(y) if q.ndim == 3 else y), keys, values


def _additive(mask: Any, total: int) -> Any:
    """The mask as numbers to add, as long as the keys: what a short mask does not mention is forbidden."""
    if mask.dtype == mx.bool_:
        mask = mx.where(mask, mx.array(0.0), mx.array(-math.inf))
    short = total - mask.shape[-1] if mask.ndim else 0
    return mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=-math.inf) if short > 0 else mask


@lowers("RotaryEmbedding", since=23, types=FLOATS | INTEGERS, wide=True)
def rotary_embedding(call: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    heads = _split_heads(x, call.attr("num_heads"))
    size = call.attr("rotary_embedding_dim", 0) or heads.shape[3]
    if positions is not None:
        count = cos.shape[0]
        call.require(mx.all(mx.logical_and(positions >= 0, positions < count)), f"a position is outside of {count}")
        within = mx.clip(positions, 0, count - 1)
        cos, sin = mx.take(cos, within, axis=0), mx.take(sin, within, axis=0)
    cos, sin = mx.expand_dims(cos, 1), mx.expand_dims(sin, 1)
    turning, rest = heads[..., :size], heads[..., size:]
    interleaved = call.attr("interleaved", 0)
    if interleaved:
        real, imaginary = turning[..., 0::2], turning[..., 1::2]
    else:
        real, imaginary = turning[..., : size // 2], turning[..., size // 2 :]
    turned = [cos * real - sin * imaginary, sin * real + cos * imaginary]
    if interleaved:
        y = mx.reshape(mx.stack(turned, axis=-1), turning.shape)
    else:
        y = mx.concatenate(turned, axis=-1)
    if rest.shape[-1]:
        y = mx.concatenate([y, rest], axis=-1)
    return _merge_heads(y) if x.ndim == 3 else y
