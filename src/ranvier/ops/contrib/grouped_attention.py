"""com.microsoft attention over a key/value cache in which several query heads share one key head.

GroupQueryAttention attends to everything before a token or to a window of it, SparseAttention to listed blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import InvalidValue, NotSupported, ShapeMismatch
from ranvier.graph.types import Dim, TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.contrib.normalization import rms_norm
from ranvier.ops.contrib.position import angles_at, merge_heads, rotate, split_heads
from ranvier.ops.contrib.rules import MICROSOFT, at, rounded, tensor
from ranvier.ops.costs import dims, traffic
from ranvier.ops.nn.quantization import saturate_to
from ranvier.ops.operands import scalar
from ranvier.ops.registry import Array, Call, Cost, TypeCall, op
from ranvier.varying import whole

# -- arithmetic -------------------------------------------------------------------------------------------------------


def _grouped_heads(
    name: str, query: Array, key: Array | None, value: Array | None, heads: int, kv_heads: int
) -> tuple[Array, Array, Array]:
    """Queries, keys and values as heads; all three come packed into ``query`` when there is no key."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise InvalidValue(f"{name}: {heads} query heads do not share {kv_heads} key heads evenly", op=name)
    if query.ndim != 3 or (key is None) != (value is None):
        raise ShapeMismatch(f"{name}: expected a query of rank 3, and key and value together or not at all")
    if key is None or value is None:
        if query.shape[2] % (heads + 2 * kv_heads):
            raise ShapeMismatch(f"{name}: {query.shape[2]} features are not {heads} + 2 x {kv_heads} heads")
        packed = split_heads(widened(query), heads + 2 * kv_heads)
        return packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    if query.shape[2] % heads or key.shape != value.shape or key.shape[2] * heads != query.shape[2] * kv_heads:
        raise ShapeMismatch(
            f"{name}: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit "
            f"{heads} and {kv_heads} heads"
        )
    return (
        split_heads(widened(query), heads),
        split_heads(widened(key), kv_heads),
        split_heads(widened(value), kv_heads),
    )


def _grown(name: str, past: Array | None, new: Array, before: Array, rows: int) -> Array:
    """A cache of ``rows`` rows: per sequence the first ``before`` rows of the past, the new ones, then zeros."""
    batch, heads, _, size = new.shape
    present = np.zeros(checked_shape((batch, heads, rows, size), new.dtype, name), new.dtype)
    if past is not None:
        if past.shape[:2] != (batch, heads) or past.shape[3:] != (size,):
            raise ShapeMismatch(f"{name}: past {list(past.shape)} is not [{batch}, {heads}, past, {size}]")
        for b, start in enumerate(before):
            if start > past.shape[2]:
                raise InvalidValue(f"{name}: sequence {b} needs {start} past rows, there are {past.shape[2]}", op=name)
            present[b, :, :start] = past[b, :, :start]
    return _written(name, present, new, before)


def _written(name: str, cache: Array, new: Array, before: Array) -> Array:
    """``cache`` with the new rows of each sequence written from row ``before`` on."""
    count = new.shape[2]
    for b, start in enumerate(before):
        if start + count > cache.shape[2]:
            raise InvalidValue(
                f"{name}: sequence {b} needs {start + count} rows, the cache has {cache.shape[2]}", op=name
            )
        cache[b, :, start : start + count] = new[b]
    return cache


def _grouped_attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float,
    *,
    softcap: float = 0.0,
    bias: Array | None = None,
    sink: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Result ``[batch, heads, length, size]``, scores and weights; what is not ``visible`` gets no weight.

    ``sink`` is one more score per head that takes its share of the weight and has no value.
    """
    batch, heads, length, size = q.shape
    kv_heads, total = k.shape[1], k.shape[2]
    shared = heads // kv_heads * length  # the queries that share a key head stand behind each other
    queries = q.reshape(batch, kv_heads, shared, size)
    products: Array = np.matmul(queries, k.swapaxes(-1, -2)) * (scale or 1 / math.sqrt(size or 1))
    scores = products.reshape(batch, heads, length, total)
    if softcap > 0:
        scores = np.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + widened(bias)
    hidden = np.where(visible, scores, -np.inf)
    top = hidden.max(axis=-1, keepdims=True, initial=np.finfo(np.float32).min)
    if sink is not None:
        top = np.maximum(top, sink)
    weights: Array = np.exp(hidden - top)
    whole = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        whole = whole + np.exp(sink - top)
    weights = weights / np.where(whole == 0, 1, whole)
    y = np.matmul(weights.reshape(batch, kv_heads, shared, total), v).reshape(batch, heads, length, v.shape[-1])
    return y, np.where(visible, scores, 0), weights


def _lengths(name: str, lengths: Array, batch: int, least: int) -> Array:
    if lengths.size != batch:
        raise ShapeMismatch(f"{name}: expected one key length per sequence ({batch}), got {list(lengths.shape)}")
    totals = lengths.reshape(-1).astype(np.int64)
    if batch and totals.min() < least:
        raise InvalidValue(f"{name}: a sequence of {int(totals.min())} keys is shorter than {least}", op=name)
    return totals


# -- GroupQueryAttention ----------------------------------------------------------------------------------------------


@op("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    seqlens_k: Array,
    total_sequence_length: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    *,
    causal: int = 1,
    do_rotary: int = 0,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = -1,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
    ctx: Call,
) -> tuple[Array, Array, Array, Array | None]:
    name = "GroupQueryAttention"
    if sliding_window_cache:
        raise NotSupported(f"{name}: sliding_window_cache=1; use a cache of full length with local_window_size")
    q, k, v = _grouped_heads(name, query, key, value, num_heads, kv_num_heads)
    batch, _, length, size = q.shape
    total = int(scalar(name, "total_sequence_length", total_sequence_length))
    prompt = length == total
    totals = _lengths(name, seqlens_k, batch, 0 if prompt else length - 1) + 1
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = rms_norm(q, q_norm_weight, qk_norm_epsilon)[0], rms_norm(k, k_norm_weight, qk_norm_epsilon)[0]
    first = np.zeros_like(totals) if prompt or past_key is None else totals - length  # position of the first query
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise InvalidValue(f"{name}: do_rotary needs cos_cache and sin_cache", op=name)
        positions = _rotary_positions(first, length, position_ids, prompt)
        cos, sin = angles_at(name, positions, cos_cache, sin_cache)
        q = rotate(q, cos, sin, bool(rotary_interleaved))
        k = rotate(k, cos, sin, bool(rotary_interleaved)) if k.shape[2] else k

    # new keys are appended behind the past; a call without any attends to a cache that another layer filled
    before = totals if past_key is not None and not k.shape[2] else first
    rows = max(total, 0 if past_key is None else past_key.shape[2])
    caches = []
    for new, past, scales, kind in ((k, past_key, k_scale, k_quant_type), (v, past_value, v_scale, v_quant_type)):
        codec = _CacheCodec(name, kind, kv_cache_bit_width, scales, past, query.dtype, (kv_num_heads, size))
        present = _grown(name, past, codec.encode(new), before, rows)
        caches.append((present, codec.decode(present[:, :, :total])))
    (present_key, keys), (present_value, values) = caches

    position = np.arange(total)
    end = np.minimum(first[:, None] + np.arange(length) + 1, totals[:, None]) if causal else totals[:, None]
    visible = position < end[:, None, :, None]
    if local_window_size >= 0:
        visible = visible & (position >= (end - local_window_size)[:, None, :, None])
    sink = None if head_sink is None else widened(head_sink).reshape(-1, 1, 1)
    if sink is None and smooth_softmax == 1:
        sink = np.zeros((1, 1, 1), np.float32)
    if attention_bias is not None and attention_bias.shape[2:] != (length, total):
        raise ShapeMismatch(f"{name}: attention_bias must end in [{length}, {total}], got {list(attention_bias.shape)}")
    y, scores, weights = _grouped_attention(
        q, keys, values, visible, scale, softcap=softcap, bias=attention_bias, sink=sink
    )
    wanted = {1: scores, 2: weights}.get(qk_output) if ctx.wants(3) else None
    qk = None if wanted is None else rounded(wanted, query.dtype)
    return rounded(merge_heads(y), query.dtype), present_key, present_value, qk


def _rotary_positions(first: Array, length: int, given: Array | None, prompt: bool) -> Array:
    """Positions ``[batch or 1, length]``: those given, of which a prompt uses only the very first, or counted."""
    if given is None:
        return np.asarray(first[:, None] + np.arange(length))
    return given.reshape(-1)[:1, None] + np.arange(length) if prompt else given


class _CacheCodec:
    """How rows are stored in a cache: as they are, or as 8- or 4-bit codes with a scale per tensor or channel."""

    def __init__(
        self,
        name: str,
        kind: str,
        bits: int,
        scales: Array | None,
        past: Array | None,
        dtype: np.dtype[Any],
        heads_and_size: tuple[int, int],
    ) -> None:
        if kind not in ("NONE", "PER_TENSOR", "PER_CHANNEL"):
            raise InvalidValue(f"{name}: unknown cache quantization {kind!r}", op=name)
        self.bits = bits if kind != "NONE" else 0
        self.size = heads_and_size[1]
        codes = {0: dtype, 4: np.dtype(np.uint8), 8: np.dtype(np.int8)}
        if self.bits not in codes or (self.bits and scales is None):
            raise InvalidValue(f"{name}: a {kind} cache needs scales and a width of 4 or 8 bits, got {bits}", op=name)
        self.dtype = codes[self.bits] if past is None else past.dtype
        self.scale: Array = np.ones((), np.float32)
        if self.bits and scales is not None:
            shape = (heads_and_size[0], 1, heads_and_size[1]) if kind == "PER_CHANNEL" else ()
            if scales.size != math.prod(shape):
                raise ShapeMismatch(f"{name}: {kind} scales must be {math.prod(shape)} numbers, got {scales.size}")
            self.scale = scales.reshape(shape)

    def encode(self, rows: Array) -> Array:
        if not self.bits:
            return rounded(rows, self.dtype)
        real = rows / np.where(self.scale == 0, 1, self.scale)
        if self.bits == 4:  # two codes to a byte, the even one low, stored as code + 8
            codes = saturate_to(real, None, DType.int4).astype(np.int8) + 8
            codes = np.pad(codes, [(0, 0)] * 3 + [(0, self.size % 2)]).astype(np.uint8)
            return np.asarray(codes[..., 0::2] | (codes[..., 1::2] << 4))
        if of(self.dtype).is_integer:
            return saturate_to(real, None, of(self.dtype))
        largest = float(ml_dtypes.finfo(self.dtype).max)
        return rounded(np.clip(real, -largest, largest), self.dtype)

    def decode(self, stored: Array) -> Array:
        if not self.bits:
            return widened(stored)
        if self.bits == 4:
            pairs = np.stack((stored & 15, stored >> 4), axis=-1).reshape(*stored.shape[:-1], 2 * stored.shape[-1])
            stored = pairs[..., : self.size].astype(np.int8) - 8
        return np.asarray(stored.astype(np.float32) * self.scale)


# -- SparseAttention --------------------------------------------------------------------------------------------------


@op("SparseAttention", domain=MICROSOFT)
def sparse_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array,
    past_value: Array,
    block_row_indices: Array,
    block_col_indices: Array,
    total_sequence_length: Array,
    key_total_sequence_lengths: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    *,
    do_rotary: int = 0,
    kv_num_heads: int,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sparse_block_size: int,
) -> tuple[Array, Array, Array]:
    name = "SparseAttention"
    q, k, v = _grouped_heads(name, query, key, value, num_heads, kv_num_heads)
    batch, _, length, _ = q.shape
    total = int(scalar(name, "total_sequence_length", total_sequence_length))
    prompt = length == total
    totals = _lengths(name, key_total_sequence_lengths, batch, 0 if prompt else length)
    first = np.zeros_like(totals) if prompt else totals - length
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise InvalidValue(f"{name}: do_rotary needs cos_cache and sin_cache", op=name)
        cos, sin = angles_at(name, first[:, None] + np.arange(length), cos_cache, sin_cache)
        q, k = (rotate(x, cos, sin, bool(rotary_interleaved)) for x in (q, k))
    for past in (past_key, past_value):
        if past.ndim != 4 or past.shape[:2] != k.shape[:2] or past.shape[3] != k.shape[3]:
            raise ShapeMismatch(f"{name}: a cache of shape {list(past.shape)} does not take keys {list(k.shape)}")
    present_key, present_value = _written(name, past_key.copy(), k, first), _written(name, past_value.copy(), v, first)

    layouts = _block_layouts(name, block_row_indices, block_col_indices)
    if num_heads % len(layouts):
        raise ShapeMismatch(f"{name}: {num_heads} heads do not share {len(layouts)} layouts evenly")
    position = np.arange(total)
    at_query = first[:, None] + np.arange(length)
    blocks = layouts.shape[1] * sparse_block_size
    if max(total, int(at_query.max(initial=0)) + 1) > blocks:
        raise ShapeMismatch(f"{name}: {total} keys do not fit the {blocks} that the blocks cover")
    # [layouts, batch, length, total] -> [batch, heads, length, total]: the layouts go round over the heads
    listed = layouts[:, (at_query // sparse_block_size)[:, :, None], position // sparse_block_size]
    listed = np.tile(listed.swapaxes(0, 1), (1, num_heads // len(layouts), 1, 1))
    visible = listed & (position <= at_query[:, None, :, None])
    y, _, _ = _grouped_attention(
        q, widened(present_key[:, :, :total]), widened(present_value[:, :, :total]), visible, scale
    )
    return rounded(merge_heads(y), query.dtype), present_key, present_value


def _block_layouts(name: str, row_indices: Array, column_indices: Array) -> Array:
    """Block masks ``[layouts, blocks, blocks]`` from their compressed rows."""
    if row_indices.ndim != 2 or column_indices.ndim != 2 or len(row_indices) != len(column_indices):
        raise ShapeMismatch(
            f"{name}: block indices must be two matrices with a row per layout, got {list(row_indices.shape)} and "
            f"{list(column_indices.shape)}"
        )
    blocks = row_indices.shape[1] - 1
    counts = np.diff(row_indices, axis=1)
    ends = row_indices[:, -1:]
    if (counts < 0).any() or (row_indices[:, 0] != 0).any() or (ends > column_indices.shape[1]).any():
        raise InvalidValue(f"{name}: block_row_indices must rise from 0 to the number of listed blocks", op=name)
    layouts = np.zeros(checked_shape((len(row_indices), blocks, blocks), np.bool_, name), bool)
    for layout, count, columns in zip(layouts, counts, column_indices):
        listed = columns[: count.sum()]
        if listed.size and not (listed.min() >= 0 and listed.max() < blocks):
            raise InvalidValue(f"{name}: a listed block is outside [0, {blocks})", op=name)
        layout[np.repeat(np.arange(blocks), count), listed] = True
    return layouts


# -- types and costs --------------------------------------------------------------------------------------------------


def _grouped_result(call: TypeCall) -> TensorType:
    """The type of the first output: the query's, without the packed keys and values."""
    query = tensor(call, 0)
    heads, kv_heads = int(call.attr("num_heads")), int(call.attr("kv_num_heads"))
    width = at(query.shape, 2)
    if call.type(1) is None:
        width = width // (heads + 2 * kv_heads) * heads if isinstance(width, int) else None
    return TensorType(query.dtype, (at(query.shape, 0), at(query.shape, 1), width))


@group_query_attention.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    result = _grouped_result(call)
    assert result.shape is not None
    batch, length, width = result.shape
    heads, kv_heads = int(call.attr("num_heads")), int(call.attr("kv_num_heads"))
    size: Dim = width // heads if isinstance(width, int) else None
    known = call.value(6)
    total: Dim = None if known is None else whole(known.reshape(-1)[0])
    past = tensor(call, 3)
    kinds = [past.dtype, tensor(call, 4).dtype]
    rows = total
    if call.type(3) is not None:
        before = at(past.shape, 2)
        rows = max(total, before) if isinstance(total, int) and isinstance(before, int) else None
        size = at(past.shape, 3) if past.shape is not None else size
    elif call.attr("k_quant_type", "NONE") == "NONE":
        kinds = [result.dtype, result.dtype]
    else:
        four = call.attr("kv_cache_bit_width", 0) == 4
        kinds = [DType.uint8 if four else DType.int8] * 2
        size = (size + 1) // 2 if four and isinstance(size, int) else size
    states = [TensorType(kind, (batch, kv_heads, rows, size)) for kind in kinds]
    return [result, *states, TensorType(result.dtype, (batch, heads, length, total))]


@sparse_attention.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [_grouped_result(call), call.type(3), call.type(4)]


@group_query_attention.cost
@sparse_attention.cost
def _(call: TypeCall) -> Cost:
    y = dims(call.result_types[0]) if call.result_types else dims(call.type(0))
    cache = dims(call.result_types[1]) if len(call.result_types) > 1 else ()
    return Cost(4.0 * math.prod(y) * (cache[2] if len(cache) == 4 else 1), traffic(call))
