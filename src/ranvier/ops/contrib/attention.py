"""com.microsoft attention: Attention, QAttention, MultiHeadAttention and its decoder variant.

All of them come down to :class:`Scoring` on ``[batch, heads, sequence, size]`` operands; what differs is how queries,
keys and values arrive, which forms the mask has, and how past keys and values are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, NotSupported, ShapeMismatch
from ranvier.graph.types import Dim, Shape, TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.position import merge_heads, rotate, split_heads
from ranvier.ops.contrib.rules import MICROSOFT, at, plus, rounded, tensor, times
from ranvier.ops.costs import dims, traffic
from ranvier.ops.nn.quantization import by_column, integer_matmul, shifted
from ranvier.ops.operands import scalar
from ranvier.ops.registry import Array, Cost, TypeCall, op
from ranvier.records import dataclass

MASKED = -10000.0  # what a masked score is lowered by, unless the node says otherwise


# -- arithmetic -------------------------------------------------------------------------------------------------------


def softmax(scores: Array) -> Array:
    """Softmax along the last axis; a row without any finite score becomes zero."""
    top = scores.max(axis=-1, keepdims=True, initial=np.finfo(scores.dtype).min)
    weights: Array = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


@dataclass(frozen=True, slots=True)
class Scoring:
    """What stands between the products of queries and keys and their softmax: a scale, a mask, a bias."""

    op: str
    scale: float = 0.0  # 0: the reciprocal of the root of the head size
    mask: Array | None = None
    mask_value: float = MASKED
    bias: Array | None = None
    causal: bool = False

    def attend(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Attention over ``[batch, heads, sequence, size]``, and the scores that went into the softmax."""
        batch, heads, length, size = q.shape
        total = k.shape[2]
        scores: Array = np.matmul(q, k.swapaxes(-1, -2)) * (self.scale or 1 / math.sqrt(size or 1))
        if self.bias is not None:
            bias = self.bias
            fits = bias.ndim == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
            if not fits or bias.shape[2:] != (length, total):
                raise ShapeMismatch(
                    f"{self.op}: attention_bias must be [{batch} or 1, {heads} or 1, {length}, {total}], got "
                    f"{list(bias.shape)}"
                )
            scores = scores + widened(bias)
        added = self.additive_mask(batch, length, total)
        if added is not None:
            scores = scores + added
        return np.asarray(np.matmul(softmax(scores), v)), scores

    def additive_mask(self, batch: int, length: int, total: int) -> Array | None:
        """The mask as something to add to scores ``[batch, heads, length, total]``, or None.

        It may be given as: the number of keys per sequence ``[b]``, the end and the start of the keys ``[2b]``,
        lengths followed by offsets ``[3b + 2]``, 0/1 per key ``[b, total]``, per query and key ``[b, length, total]``
        or per position of the longest sequence ``[b, 1, max, max]``. A mask of shape ``[b, 1]`` says nothing.
        """
        past = total - length
        added: Array | None = None
        if self.mask is not None:
            allowed = _allowed(self.op, self.mask, batch, length, past, total)
            if allowed is not None:
                added = np.where(allowed, np.float32(0), np.float32(self.mask_value))
        if self.causal and length > 1:
            future = np.arange(total) > past + np.arange(length)[:, None]
            added = np.where(future, np.finfo(np.float32).min, np.float32(0) if added is None else added)
        return added


def _allowed(name: str, mask: Array, batch: int, length: int, past: int, total: int) -> Array | None:
    """Which keys a mask lets through, broadcastable to the scores."""
    if mask.ndim == 1 and len(mask) in (batch, 2 * batch, 3 * batch + 2):
        position = np.arange(total)
        inside = position < mask[:batch, None]
        if len(mask) == 2 * batch:
            inside = inside & (position >= mask[batch:, None])
        return np.asarray(inside[:, None, None])
    if mask.shape == (batch, total):
        return np.asarray(mask > 0)[:, None, None]
    if mask.ndim == 2 and mask.shape[0] in (1, batch) and mask.shape[1] == 1:
        return None
    if mask.shape == (batch, length, total):
        return np.asarray(mask > 0)[:, None]
    if mask.ndim == 4 and mask.shape[:2] == (batch, 1) and min(mask.shape[2:]) >= total:
        return np.asarray(mask[:, :, past : past + length, :total] > 0)
    raise ShapeMismatch(
        f"{name}: a mask of shape {list(mask.shape)} does not fit {batch} sequences of {length} queries, {total} keys"
    )


# -- Attention --------------------------------------------------------------------------------------------------------


@op("Attention", domain=MICROSOFT)
def attention(
    x: Array,
    weights: Array,
    bias: Array | None = None,
    mask_index: Array | None = None,
    past: Array | None = None,
    attention_bias: Array | None = None,
    past_sequence_length: Array | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = MASKED,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Sequence[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Array, Array | None]:
    name = "Attention"
    if x.ndim != 3 or weights.ndim != 2 or x.shape[2] != weights.shape[0]:
        raise ShapeMismatch(f"{name}: input {list(x.shape)} and weights {list(weights.shape)} do not multiply")
    projected = np.matmul(widened(x), widened(weights))
    if bias is not None:
        projected = projected + widened(bias)
    q, k, v = _three_parts(name, projected, num_heads, qkv_hidden_sizes)
    filled = None
    if past is not None and past_present_share_buffer:
        if past_sequence_length is None:
            raise InvalidValue(f"{name}: a shared buffer needs past_sequence_length", op=name)
        filled = int(scalar(name, "past_sequence_length", past_sequence_length))
    start = 0 if past is None else past.shape[3] if filled is None else filled
    if do_rotary:
        q, k = (_rotated_by_position(part, start, rotary_embedding_dim) for part in (q, k))
    scoring = Scoring(name, scale, mask_index, mask_filter_value, attention_bias, bool(unidirectional))
    return _attended(scoring, q, k, v, past, filled, x.dtype)


def _three_parts(name: str, projected: Array, heads: int, sizes: Sequence[int] | None) -> list[Array]:
    """Queries, keys and values from one projection, split into heads."""
    width = projected.shape[-1]
    parts = tuple(sizes) if sizes else (width // 3,) * 3
    if len(parts) != 3 or sum(parts) != width or parts[0] != parts[1] or any(p % heads for p in parts):
        raise ShapeMismatch(f"{name}: {width} features do not split into Q, K, V of sizes {list(parts)}, {heads} heads")
    return [split_heads(p, heads) for p in np.split(projected, np.cumsum(parts[:2]), axis=-1)]


def _rotated_by_position(x: Array, start: int, width: int) -> Array:
    """Rotary embedding with the usual frequencies, for nodes that bring no table of angles."""
    half = (width or x.shape[-1]) // 2
    angles = (start + np.arange(x.shape[2]))[:, None] * 10000.0 ** (-np.arange(half) / half)
    return rotate(x, np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype), interleaved=False)


def _attended(
    scoring: Scoring, q: Array, k: Array, v: Array, past: Array | None, filled: int | None, dtype: np.dtype[Any]
) -> tuple[Array, Array | None]:
    """The common end of Attention and QAttention: the heads merged, and the present state."""
    batch, heads, _, size = q.shape
    if past is not None:
        if past.ndim != 5 or past.shape[:3] != (2, batch, heads) or past.shape[4] != size or v.shape != k.shape:
            raise ShapeMismatch(f"{scoring.op}: past {list(past.shape)} is not [2, {batch}, {heads}, past, {size}]")
        k, present_key = extended(scoring.op, past[0], k, filled)
        v, present_value = extended(scoring.op, past[1], v, filled)
    else:
        present_key, present_value = k, v
    present = np.stack((present_key, present_value)) if present_key.shape == present_value.shape else None
    y, _ = scoring.attend(q, k, v)
    return rounded(merge_heads(y), dtype), None if present is None else rounded(present, dtype)


def extended(name: str, past: Array, new: Array, filled: int | None) -> tuple[Array, Array]:
    """Past and new rows one after the other: those to attend to, and the state to hand on.

    Without ``filled`` the state grows. With it, ``past`` is a buffer of which the first ``filled`` rows are used,
    and the state is that buffer with the new rows written behind them.
    """
    if filled is None:
        grown = np.concatenate((widened(past), new), axis=2)
        return grown, grown
    end = filled + new.shape[2]
    if filled < 0 or end > past.shape[2]:
        raise InvalidValue(f"{name}: rows {filled} to {end} do not fit a buffer of {past.shape[2]}", op=name)
    buffer = widened(past).copy()
    buffer[:, :, filled:end] = new
    return buffer[:, :, :end], buffer


@op("QAttention", domain=MICROSOFT)
def qattention(
    x: Array,
    weight: Array,
    bias: Array,
    input_scale: Array,
    weight_scale: Array,
    mask_index: Array | None = None,
    input_zero_point: Array | None = None,
    weight_zero_point: Array | None = None,
    past: Array | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = MASKED,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Array, Array | None]:
    name = "QAttention"
    if past_present_share_buffer:
        raise NotSupported(f"{name}: it has no input that says how much of a shared buffer is used")
    left = x if input_zero_point is None else shifted(x, input_zero_point.reshape(()))
    right = weight if weight_zero_point is None else shifted(weight, by_column(weight_zero_point))
    product = integer_matmul(left, right, np.dtype(np.int32), name).astype(np.float32)
    projected = product * (widened(input_scale).reshape(()) * by_column(widened(weight_scale))) + widened(bias)
    q, k, v = _three_parts(name, projected, num_heads, None)
    if do_rotary:
        q, k = (_rotated_by_position(part, 0 if past is None else past.shape[3], 0) for part in (q, k))
    scoring = Scoring(name, scale, mask_index, mask_filter_value, causal=bool(unidirectional))
    return _attended(scoring, q, k, v, past, None, bias.dtype)


# -- MultiHeadAttention -----------------------------------------------------------------------------------------------


@op("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_sequence_length: Array | None = None,
    cache_indirection: Array | None = None,
    *,
    mask_filter_value: float = MASKED,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Array, Array, Array, Array]:
    name = "MultiHeadAttention"
    filled = _rows_used(name, past_key, past_sequence_length)
    q, k, v = _separate_heads(name, query, key, value, bias, num_heads)
    scoring = Scoring(name, scale, key_padding_mask, mask_filter_value, attention_bias, bool(unidirectional))
    return _multi_head(scoring, q, k, v, past_key, past_value, filled, cache_indirection, query.dtype)


@op("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked_multi_head_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    mask_index: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_sequence_length: Array | None = None,
    beam_width: Array | None = None,
    cache_indirection: Array | None = None,
    bias: Array | None = None,
    *,
    mask_filter_value: float = MASKED,
    num_heads: int,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
) -> tuple[Array, Array, Array, Array]:
    """One decoding step; keys are kept in the plain layout, as ONNX Runtime's CPU provider has them."""
    name = "DecoderMaskedMultiHeadAttention"
    if query.ndim != 3 or query.shape[1] != 1:
        raise ShapeMismatch(f"{name}: expected one query per sequence, got {list(query.shape)}")
    if key is None and value is None:
        if query.shape[2] % 3:
            raise ShapeMismatch(f"{name}: {query.shape[2]} features are not three equal parts")
        query, key, value = np.split(query, 3, axis=-1)
    filled = _rows_used(name, past_key, past_sequence_length) if past_present_share_buffer else None
    q, k, v = _separate_heads(name, query, key, value, bias, num_heads)
    scoring = Scoring(name, scale, mask_index, mask_filter_value, attention_bias)
    return _multi_head(scoring, q, k, v, past_key, past_value, filled, cache_indirection, query.dtype)


def _rows_used(name: str, past: Array | None, length: Array | None) -> int | None:
    return None if past is None or length is None else int(scalar(name, "past_sequence_length", length))


def _separate_heads(
    name: str, query: Array, key: Array | None, value: Array | None, bias: Array | None, heads: int
) -> tuple[Array, Array, Array]:
    """Queries, keys and values as heads, from any of the forms in which they come packed."""
    if key is None and query.ndim == 5 and query.shape[3] == 3:  # [batch, length, heads, 3, size]
        packed = widened(query).transpose(3, 0, 2, 1, 4)
        q, k, v = packed[0], packed[1], packed[2]
    elif key is not None and value is None and key.ndim == 5 and key.shape[3] == 2 and query.ndim == 3:
        packed = widened(key).transpose(3, 0, 2, 1, 4)
        q, k, v = split_heads(widened(query), heads), packed[0], packed[1]
    elif key is None or value is None or query.ndim != 3 or key.ndim != value.ndim or key.ndim not in (3, 4):
        shapes = [None if a is None else list(a.shape) for a in (query, key, value)]
        raise ShapeMismatch(f"{name}: no known form of query, key and value: {shapes}")
    else:
        if query.shape[2] % heads or (key.ndim == 3 and value.shape[2] % heads):
            raise ShapeMismatch(f"{name}: {query.shape[2]} features do not split into {heads} heads")
        q = split_heads(widened(query), heads)
        k, v = (widened(a) if a.ndim == 4 else split_heads(widened(a), heads) for a in (key, value))
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ShapeMismatch(
            f"{name}: queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} do not fit"
        )
    if bias is None:
        return q, k, v
    widths = (q.shape[1] * q.shape[3], k.shape[1] * k.shape[3], v.shape[1] * v.shape[3])
    if bias.shape != (sum(widths),):
        raise ShapeMismatch(f"{name}: the bias must have {sum(widths)} entries, got {list(bias.shape)}")
    # keys and values that come as heads are from an encoder's cache and already have their bias
    parts = np.split(widened(bias), np.cumsum(widths[:2]))
    cached = key is not None and key.ndim == 4
    added = [x if cached and x is not q else x + b.reshape(heads, 1, -1) for x, b in zip((q, k, v), parts)]
    return added[0], added[1], added[2]


def _multi_head(
    scoring: Scoring,
    q: Array,
    k: Array,
    v: Array,
    past_key: Array | None,
    past_value: Array | None,
    filled: int | None,
    cache_indirection: Array | None,
    dtype: np.dtype[Any],
) -> tuple[Array, Array, Array, Array]:
    """Result, present keys, present values and scores."""
    name = scoring.op
    if (past_key is None) != (past_value is None):
        raise InvalidValue(f"{name}: past_key and past_value come together or not at all", op=name)
    batch, heads, length, _ = q.shape
    present_key, present_value = k, v
    if past_key is not None and past_value is not None:
        for past, new in ((past_key, k), (past_value, v)):
            if past.ndim != 4 or past.shape[:2] != (batch, heads) or past.shape[3] != new.shape[3]:
                raise ShapeMismatch(f"{name}: past {list(past.shape)} is not [{batch}, {heads}, past, {new.shape[3]}]")
        k, present_key = extended(name, past_key, k, filled)
        v, present_value = extended(name, past_value, v, filled)
        if cache_indirection is not None:
            k, v = (_through_beams(name, x, cache_indirection, x.shape[2] - length) for x in (k, v))
    y, scores = scoring.attend(q, k, v)
    present_key, present_value = rounded(present_key, dtype), rounded(present_value, dtype)
    return rounded(merge_heads(y), dtype), present_key, present_value, rounded(scores, dtype)


def _through_beams(name: str, rows: Array, indirection: Array, used: int) -> Array:
    """Past rows as each beam saw them: ``indirection[batch, beam, position]`` says which beam a row came from."""
    batch = rows.shape[0]
    beams = indirection.shape[1] if indirection.ndim == 3 else 0
    if not beams or indirection.shape[0] * beams != batch or indirection.shape[2] < used:
        raise ShapeMismatch(f"{name}: cache_indirection {list(indirection.shape)} does not fit {batch} sequences")
    source = indirection.reshape(batch, -1)[:, :used].astype(np.intp)
    if source.size and not (source.min() >= 0 and source.max() < beams):
        raise InvalidValue(f"{name}: cache_indirection names a beam outside [0, {beams})", op=name)
    source = source + (np.arange(batch) // beams * beams)[:, None]
    seen = rows.copy()
    heads = np.arange(rows.shape[1])[None, :, None]
    seen[:, :, :used] = rows[source[:, None, :], heads, np.arange(used)]
    return seen


# -- types and costs --------------------------------------------------------------------------------------------------


def _attention_types(call: TypeCall, bias_at: int, past_at: int) -> list[Type | None]:
    x, weights, past = tensor(call, 0).shape, tensor(call, 1).shape, tensor(call, past_at)
    dtype = tensor(call, bias_at).dtype or tensor(call, 0).dtype
    heads: int = call.attr("num_heads")
    sizes = call.attr("qkv_hidden_sizes")
    width = at(weights, 1)
    hidden: Dim = sizes[2] if sizes else width // 3 if isinstance(width, int) else None
    size: Dim = hidden // heads if isinstance(hidden, int) else None
    shared = bool(call.attr("past_present_share_buffer", 0))
    before: Dim = 0 if call.type(past_at) is None else at(past.shape, 3)
    rows = before if shared and call.type(past_at) is not None else plus(before, at(x, 1))
    present = TensorType(dtype, (2, at(x, 0), heads, rows, size))
    return [TensorType(dtype, (at(x, 0), at(x, 1), hidden)), present]


@attention.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return _attention_types(call, 0, 4)


@qattention.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return _attention_types(call, 2, 8)


@attention.cost
@qattention.cost
def _(call: TypeCall) -> Cost:
    x, weights = dims(call.type(0)), dims(call.type(1))
    present = dims(call.result_types[1]) if len(call.result_types) > 1 else ()
    projection = 2.0 * math.prod(x) * (weights[1] if len(weights) > 1 else 1)
    keys = present[3] if present else x[1] if len(x) > 1 else 1
    hidden = weights[1] // 3 if len(weights) > 1 else 1
    return Cost(projection + 4.0 * math.prod(x[:2]) * keys * hidden, traffic(call))


def _multi_head_types(call: TypeCall, past_at: int) -> Sequence[Type | None]:
    query, key, value = (tensor(call, p) for p in range(3))
    past = tensor(call, past_at).shape
    heads: int = call.attr("num_heads")
    batch, length = at(query.shape, 0), at(query.shape, 1)
    size, value_size, keys = _head_sizes(query.shape, key.shape, value.shape, heads, call)
    shared = call.type(past_at) is not None and call.type(past_at + 2) is not None
    total = plus(0 if call.type(past_at) is None else at(past, 2), keys)
    rows = at(past, 2) if shared else total
    return [
        TensorType(query.dtype, (batch, length, times(value_size, heads))),
        TensorType(query.dtype, (batch, heads, rows, size)),
        TensorType(query.dtype, (batch, heads, rows, value_size)),
        TensorType(query.dtype, (batch, heads, length, None if shared else total)),
    ]


def _head_sizes(
    query: Shape | None, key: Shape | None, value: Shape | None, heads: int, call: TypeCall
) -> tuple[Dim, Dim, Dim]:
    """Size of a query's head, of a value's head, and the number of new keys."""
    if call.type(1) is None:
        if query is not None and len(query) == 5:
            return query[4], query[4], query[1]
        width = at(query, -1)
        size = width // (3 * heads) if isinstance(width, int) else None
        return size, size, at(query, 1)
    width = at(query, 2)
    size = width // heads if isinstance(width, int) else None
    if call.type(2) is None:
        return size, at(key, 4), at(key, 1)
    if value is not None and len(value) == 4:
        return size, value[3], value[2]
    hidden = at(value, 2)
    return size, hidden // heads if isinstance(hidden, int) else None, at(key, 1)


@multi_head_attention.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return _multi_head_types(call, 6)


@decoder_masked_multi_head_attention.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return _multi_head_types(call, 5)


@multi_head_attention.cost
@decoder_masked_multi_head_attention.cost
def _(call: TypeCall) -> Cost:
    y = dims(call.result_types[0]) if call.result_types else ()
    present = dims(call.result_types[1]) if len(call.result_types) > 1 else dims(call.type(1))
    keys = present[2] if len(present) == 4 else present[1] if len(present) > 1 else 1
    return Cost(4.0 * math.prod(y) * keys, traffic(call))
