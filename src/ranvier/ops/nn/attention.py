"""Attention, its linear relative, FlexAttention and rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.ir import Graph
from ranvier.ops.accumulate import wide, widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.costs import dims, traffic
from ranvier.ops.pulse import pulse
from ranvier.ops.registry import Array, Call, Cost, TypeCall, op


def _split_heads(x: Array, heads: int | None, name: str, what: str) -> Array:
    """``[batch, time, heads * size]`` as ``[batch, heads, time, size]``; four axes stay as they are."""
    if x.ndim == 4:
        if heads is not None and heads != x.shape[1]:
            raise ShapeMismatch(f"{name}: {what} {list(x.shape)} has {x.shape[1]} heads, not {heads}")
        return x
    if x.ndim != 3 or heads is None or heads < 1 or x.shape[2] % heads:
        raise ShapeMismatch(
            f"{name}: {what} must be [batch, heads, time, size], or [batch, time, hidden] with a number of heads that "
            f"divides hidden; got {list(x.shape)} and {heads} heads"
        )
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _merge_heads(x: Array) -> Array:
    """``[batch, heads, time, size]`` as ``[batch, time, heads * size]``."""
    batch, heads, time, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, time, heads * size)


def _check_heads(q: Array, k: Array, v: Array, name: str) -> None:
    fits = (
        q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and k.shape[2] == v.shape[2]
        and q.shape[3] == k.shape[3]
    )
    if not fits:
        raise ShapeMismatch(
            f"{name}: Q {list(q.shape)}, K {list(k.shape)} and V {list(v.shape)} do not fit as [batch, heads, time, "
            "size]: one batch, K and V of equal heads and time, Q's heads a multiple of theirs, Q's size that of K"
        )


def _grouped(q: Array, kv: Array, product: Callable[[Array, Array], Any]) -> Array:
    """``product`` of every query head with the key/value head its group shares, which is not copied for it."""
    batch, heads = q.shape[:2]
    groups = kv.shape[1]
    if heads == groups:
        return np.asarray(product(q, kv))
    shared = product(q.reshape(batch, groups, heads // groups, *q.shape[2:]), kv[:, :, None])
    return np.asarray(shared).reshape(batch, heads, *shared.shape[3:])


def _scaled_scores(q: Array, k: Array, scale: float | None) -> Array:
    """``q kᵀ`` times the scale. Half of it goes on either side, so that a product of halves cannot overflow."""
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if factor < 0:  # has no square root to share
        return _grouped(q * q.dtype.type(factor), k, lambda a, b: a @ b.swapaxes(-1, -2))
    half = q.dtype.type(math.sqrt(factor))
    return _grouped(q * half, k * half, lambda a, b: a @ b.swapaxes(-1, -2))


def _softmax(scores: Array) -> Array:
    """Over the last axis, in place. A row without any finite score becomes zeros."""
    if scores.size == 0:
        return scores
    top = scores.max(axis=-1, keepdims=True)
    scores -= np.where(np.isneginf(top), 0, top)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= np.where(total == 0, 1, total)
    return scores


def _precision(dtype: np.dtype[Any], softmax_precision: int | None, name: str) -> np.dtype[Any]:
    """At least float32, wider where the operands are or the model asks for it."""
    if softmax_precision in (None, 0):
        return wide(dtype)
    if softmax_precision not in (1, 10, 11, 16):
        raise InvalidValue(f"{name}: softmax_precision must be 1, 10, 11 or 16, got {softmax_precision}", op=name)
    asked = dtypes.from_onnx(softmax_precision).numpy
    return max(wide(dtype), wide(asked), key=lambda d: d.itemsize)


@op("Attention", since=23)
def attention(
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    ctx: Call,
) -> tuple[Array | None, ...]:
    name = "Attention"
    if not 0 <= qk_matmul_output_mode <= 3:
        raise InvalidValue(f"{name}: qk_matmul_output_mode must be 0 to 3, got {qk_matmul_output_mode}", op=name)
    if min(left_window_size, right_window_size) < -1:
        raise InvalidValue(
            f"{name}: window sizes must be -1 or more, got {left_window_size} and {right_window_size}", op=name
        )
    if (past_key is None) != (past_value is None):
        raise InvalidValue(f"{name}: past_key and past_value must be given together", op=name)
    if past_key is not None and nonpad_kv_seqlen is not None:
        raise InvalidValue(f"{name}: nonpad_kv_seqlen and past_key cannot be given together", op=name)
    packed = q.ndim == 3
    queries = _split_heads(q, q_num_heads, name, "Q")
    keys = _with_past(_split_heads(k, kv_num_heads, name, "K"), past_key, name)
    values = _with_past(_split_heads(v, kv_num_heads, name, "V"), past_value, name)
    _check_heads(queries, keys, values, name)
    shape = (*queries.shape[:3], keys.shape[2])
    precision = _precision(q.dtype, softmax_precision, name)
    checked_shape(shape, precision, name)
    bias = _bias(
        shape,
        attn_mask,
        0 if past_key is None else past_key.shape[2],
        nonpad_kv_seqlen,
        0 if is_causal else -1,
        left_window_size,
        right_window_size,
    )
    scores = _scaled_scores(widened(queries), widened(keys), scale)
    wanted = qk_matmul_output_mode if ctx.wants(3) else None
    shown = scores.astype(q.dtype) if wanted == 0 else None
    if softcap:
        scores = np.tanh(scores / scores.dtype.type(softcap)) * scores.dtype.type(softcap)
    if wanted == 1:
        shown = scores.astype(q.dtype)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype, copy=False)
    if wanted == 2:
        shown = scores.astype(q.dtype)
    weights = _softmax(scores.astype(precision, copy=False))
    if bias is not None:  # NaN scores must not survive in a row that no key may enter
        weights = np.where(np.isneginf(bias.max(axis=-1, keepdims=True, initial=-np.inf)), 0, weights)
    if wanted == 3:
        shown = weights.astype(q.dtype)
    y = _grouped(weights.astype(wide(q.dtype), copy=False), widened(values), np.matmul).astype(q.dtype, copy=False)
    return _merge_heads(y) if packed else y, keys, values, shown


def _with_past(fresh: Array, past: Array | None, name: str) -> Array:
    if past is None:
        return fresh
    if past.ndim != 4 or (*past.shape[:2], past.shape[3]) != (*fresh.shape[:2], fresh.shape[3]):
        raise ShapeMismatch(f"{name}: a past state {list(past.shape)} cannot go before {list(fresh.shape)}")
    return np.concatenate([past, fresh], axis=2)


def _bias(
    shape: tuple[int, ...],
    mask: Array | None,
    past: int,
    valid: Array | None,
    ahead: int,
    left: int,
    right: int,
) -> Array | None:
    """What is added to the scores: the mask, and minus infinity where a query may not look.

    ``valid`` is the number of real keys per sample. ``ahead`` is 0 for causal attention and -1 for no such limit,
    like ``left`` and ``right``, which bound the distance to either side.
    """
    batch, _, time, total = shape
    if valid is not None and valid.shape != (batch,):
        raise ShapeMismatch(f"Attention: nonpad_kv_seqlen must be [{batch}], got {list(valid.shape)}")
    bias = None if mask is None else _additive(mask, shape)
    allowed: Array | None = None
    if ahead >= 0 or left >= 0 or right >= 0:
        # the position of each query among the keys, per sample where the samples differ
        first = np.asarray(past) if valid is None else (valid.astype(np.int64) - time).reshape(batch, 1, 1, 1)
        distance = np.arange(total) - (first + np.arange(time)[:, None])
        allowed = np.ones(distance.shape, np.bool_)
        if ahead >= 0:
            allowed &= distance <= ahead
        if right >= 0:
            allowed &= distance <= right
        if left >= 0:
            allowed &= distance >= -left
    if valid is not None:
        real = np.arange(total) < valid.reshape(batch, 1, 1, 1)
        allowed = real if allowed is None else allowed & real
    if allowed is None:
        return bias
    return np.where(allowed, np.float32(0) if bias is None else bias, np.float32(-np.inf))


def _additive(mask: Array, shape: tuple[int, ...]) -> Array:
    """The mask as numbers to add, as long as the keys: what a short mask does not mention is forbidden."""
    total = shape[-1]
    if mask.dtype == np.bool_:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    else:
        mask = mask.astype(np.float32) if mask.dtype.kind in "iu" else widened(mask)
    if mask.ndim and mask.shape[-1] < total:
        longer = np.full((*mask.shape[:-1], total), -np.inf, mask.dtype)
        longer[..., : mask.shape[-1]] = mask
        mask = longer
    if mask.ndim > 4 or any(m not in (1, s) for m, s in zip(mask.shape[::-1], shape[::-1])):
        raise ShapeMismatch(f"Attention: attn_mask {list(mask.shape)} does not broadcast to {list(shape)}")
    return mask


@op("FlexAttention", domain="ai.onnx.preview")
def flex_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    prob_mod: Graph | None = None,
    scale: float | None = None,
    score_mod: Graph | None = None,
    softmax_precision: int | None = None,
    ctx: Call,
) -> Array:
    name = "FlexAttention"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeMismatch(f"{name}: needs four axes, got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
    _check_heads(q, k, v, name)
    precision = _precision(q.dtype, softmax_precision, name)
    asked = precision if softmax_precision in (None, 0) else dtypes.from_onnx(softmax_precision).numpy
    scores = _scaled_scores(widened(q), widened(k), scale).astype(precision, copy=False)
    if score_mod is not None:
        scores = _modified(ctx, score_mod, scores.astype(asked, copy=False)).astype(precision)
    weights = _softmax(scores)
    if prob_mod is not None:
        weights = _modified(ctx, prob_mod, weights.astype(asked, copy=False)).astype(precision)
    return _grouped(weights, v.astype(precision, copy=False), np.matmul).astype(q.dtype, copy=False)


def _modified(ctx: Call, body: Graph, scores: Array) -> Array:
    changed = np.asarray(ctx.run(body, [scores])[0])
    if changed.shape != scores.shape:
        raise ShapeMismatch(
            f"FlexAttention: graph {body.name!r} turned scores {list(scores.shape)} into {list(changed.shape)}"
        )
    return changed


@attention.cost
@flex_attention.cost
def _attention_cost(call: TypeCall) -> Cost:
    """Two products per query and key, and about eight operations for the softmax between them."""
    q, k, v = (dims(call.type(i)) for i in range(3))
    time_axis = 2 if len(q) == 4 else 1
    if len(q) <= time_axis or len(k) <= time_axis:
        return Cost(0.0, traffic(call))
    past = dims(call.type(4))
    keys = k[time_axis] + (past[2] if len(past) == 4 else 0)
    pairs = q[0] * q[time_axis] * keys
    heads = q[1] if len(q) == 4 else call.attr("q_num_heads", 1)
    kv_heads = k[1] if len(k) == 4 else call.attr("kv_num_heads", 1)
    q_width = heads * q[3] if len(q) == 4 else q[2]
    v_size = v[-1] if len(v) == 4 else (v[-1] // max(kv_heads, 1) if v else 1)
    return Cost(pairs * (2.0 * q_width + 2.0 * heads * v_size + 8.0 * heads), traffic(call))


@op("LinearAttention", since=27)
def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    past_state: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    kv_num_heads: int,
    q_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array]:
    """A matrix per head remembers keys and values; ``chunk_size`` is a hint for other implementations."""
    name = "LinearAttention"
    if update_rule not in ("linear", "gated", "delta", "gated_delta"):
        raise InvalidValue(
            f"{name}: update_rule must be linear, gated, delta or gated_delta, got {update_rule!r}", op=name
        )
    for what, given, needed in (("decay", decay, "gated" in update_rule), ("beta", beta, "delta" in update_rule)):
        if (given is not None) != needed:
            raise InvalidValue(f"{name}: {update_rule} {'needs' if needed else 'takes no'} {what}", op=name)
    if query.ndim != 3 or key.ndim != 3 or value.ndim != 3:
        raise ShapeMismatch(f"{name}: query, key and value need three axes, got {query.ndim}, {key.ndim}, {value.ndim}")
    q = widened(_split_heads(query, q_num_heads, name, "query"))
    k = widened(_split_heads(key, kv_num_heads, name, "key"))
    v = widened(_split_heads(value, kv_num_heads, name, "value"))
    _check_heads(q, k, v, name)
    if q.shape[2] != k.shape[2]:
        raise ShapeMismatch(f"{name}: query and key must have one length, got {q.shape[2]} and {k.shape[2]}")
    batch, heads, time, k_size = k.shape
    state = (batch, heads, k_size, v.shape[3])
    if past_state is not None and past_state.shape != state:
        raise ShapeMismatch(f"{name}: past_state must be {list(state)}, got {list(past_state.shape)}")
    memory = np.zeros(state, k.dtype) if past_state is None else widened(past_state)
    keep = None if decay is None else np.exp(_per_step(decay, (heads, heads * k_size), k, "decay"))
    rate = None if beta is None else _per_step(beta, (heads, 1), k, "beta")
    factor = q.dtype.type(scale or 1 / math.sqrt(k_size))
    y = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    for t in range(time):
        pulse(f"step {t}")
        if keep is not None:
            memory = memory * keep[:, :, t, :, None]
        write, row = v[:, :, t], k[:, :, t]
        if rate is not None:
            recalled = (row[:, :, None] @ memory)[:, :, 0]
            write = rate[:, :, t] * (write - recalled)
        memory = memory + row[..., None] * write[:, :, None]
        y[:, :, t : t + 1] = _grouped(q[:, :, t : t + 1] * factor, memory, np.matmul)
    kept = query.dtype if past_state is None else past_state.dtype
    return _merge_heads(y).astype(query.dtype, copy=False), memory.astype(kept, copy=False)


def _per_step(gate: Array, widths: tuple[int, int], k: Array, what: str) -> Array:
    """A gate ``[batch, time, width]`` as ``[batch, heads or 1, time, size or 1]``."""
    batch, heads, time, _ = k.shape
    if gate.shape[:-1] != (batch, time) or gate.shape[-1] not in widths:
        raise ShapeMismatch(
            f"LinearAttention: {what} must be [{batch}, {time}, {widths[0]} or {widths[1]}], got {list(gate.shape)}"
        )
    return _split_heads(widened(gate), min(heads, gate.shape[-1]), "LinearAttention", what)


@linear_attention.cost
def _linear_attention_cost(call: TypeCall) -> Cost:
    """Per step and head: decay, recall, write and read one matrix."""
    q, k, v = (dims(call.type(i)) for i in range(3))
    if len(q) < 3 or len(k) < 3 or len(v) < 3:
        return Cost(0.0, traffic(call))
    heads, q_heads = max(call.attr("kv_num_heads", 1), 1), max(call.attr("q_num_heads", 1), 1)
    matrix = (k[2] // heads) * (v[2] // heads)
    return Cost(q[0] * q[1] * matrix * (5.0 * heads + 2.0 * q_heads), traffic(call))


@op("RotaryEmbedding", since=23)
def rotary_embedding(
    x: Array,
    cos_cache: Array,
    sin_cache: Array,
    position_ids: Array | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """Turn pairs of features by an angle that grows with the position."""
    name = "RotaryEmbedding"
    heads = _split_heads(x, num_heads or None, name, "X")
    size = rotary_embedding_dim or heads.shape[3]
    if size % 2 or not 0 <= size <= heads.shape[3]:
        raise InvalidValue(f"{name}: cannot turn {size} of {heads.shape[3]} features in pairs", op=name)
    cos = _angles(cos_cache, position_ids, heads, size // 2, "cos_cache")
    sin = _angles(sin_cache, position_ids, heads, size // 2, "sin_cache")
    turning = widened(heads[..., :size])
    pairs = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, size // 2), slice(size // 2, None))
    real, imaginary = (turning[..., p] for p in pairs)
    y = heads.copy()
    y[..., :size][..., pairs[0]] = cos * real - sin * imaginary
    y[..., :size][..., pairs[1]] = sin * real + cos * imaginary
    return _merge_heads(y) if x.ndim == 3 else y


def _angles(cache: Array, positions: Array | None, heads: Array, half: int, what: str) -> Array:
    """The cache's rows for every token, ``[batch, 1, time, half]``."""
    batch, _, time, _ = heads.shape
    if positions is not None:
        if cache.ndim != 2 or positions.shape != (batch, time):
            raise ShapeMismatch(
                f"RotaryEmbedding: with position_ids [{batch}, {time}] the {what} has two axes, got "
                f"{list(positions.shape)} and {list(cache.shape)}"
            )
        bad = positions[(positions < 0) | (positions >= len(cache))]
        if bad.size:
            raise InvalidValue(
                f"RotaryEmbedding: position {bad.flat[0]} is out of range for a {what} of {len(cache)} rows",
                op="RotaryEmbedding",
            )
        cache = cache[positions]
    if cache.shape != (batch, time, half):
        raise ShapeMismatch(f"RotaryEmbedding: {what} must be [{batch}, {time}, {half}], got {list(cache.shape)}")
    return widened(cache)[:, None]
