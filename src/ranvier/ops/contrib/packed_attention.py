"""com.microsoft attention over packed batches: sequences of different length behind each other, without padding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.attention import MASKED, Scoring
from ranvier.ops.contrib.position import merge_heads, split_heads
from ranvier.ops.contrib.rules import MICROSOFT, at, plus, rounded, tensor, times
from ranvier.ops.costs import dims, traffic
from ranvier.ops.registry import Array, Cost, TypeCall, op


def _sequences(name: str, cumulative: Array, tokens: int) -> Iterator[tuple[int, slice]]:
    """The tokens of each sequence."""
    bounds = cumulative.reshape(-1).astype(np.int64)
    if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise InvalidValue(f"{name}: cumulative_sequence_length must rise from 0 to {tokens}", op=name)
    for k in range(len(bounds) - 1):
        yield k, slice(int(bounds[k]), int(bounds[k + 1]))


def _packed(
    name: str, q: Array, k: Array, v: Array, heads: int, cumulative: Array, bias: Array | None, scale: float
) -> Array:
    """Attention of ``[tokens, features]`` operands, each sequence to itself."""
    if any(x.shape[1] % heads for x in (q, k, v)) or q.shape != k.shape or len(v) != len(q):
        raise ShapeMismatch(
            f"{name}: Q {list(q.shape)}, K {list(k.shape)} and V {list(v.shape)} do not fit {heads} heads"
        )
    y = np.empty(v.shape, q.dtype)
    for index, part in _sequences(name, cumulative, len(q)):
        local = bias
        if bias is not None:
            length = part.stop - part.start
            local = bias[index : index + 1] if len(bias) > 1 else bias
            local = local[:, :, :length, :length]
        own = [split_heads(x[None, part], heads) for x in (q, k, v)]
        y[part] = merge_heads(Scoring(name, scale, bias=local).attend(*own)[0])[0]
    return y


@op("PackedAttention", domain=MICROSOFT)
def packed_attention(
    x: Array,
    weights: Array,
    bias: Array,
    token_offset: Array,
    cumulative_sequence_length: Array,
    attention_bias: Array | None = None,
    *,
    num_heads: int,
    qkv_hidden_sizes: Sequence[int] | None = None,
    scale: float = 0.0,
) -> Array:
    name = "PackedAttention"
    if x.ndim != 2 or weights.ndim != 2 or x.shape[1] != weights.shape[0] or bias.shape != weights.shape[1:]:
        raise ShapeMismatch(
            f"{name}: input {list(x.shape)}, weights {list(weights.shape)} and bias {list(bias.shape)} do not fit"
        )
    projected = np.matmul(widened(x), widened(weights)) + widened(bias)
    parts = tuple(qkv_hidden_sizes) if qkv_hidden_sizes else (weights.shape[1] // 3,) * 3
    if len(parts) != 3 or sum(parts) != weights.shape[1]:
        raise ShapeMismatch(f"{name}: {weights.shape[1]} features are not Q, K and V of sizes {list(parts)}")
    q, k, v = np.split(projected, np.cumsum(parts[:2]), axis=-1)
    return rounded(_packed(name, q, k, v, num_heads, cumulative_sequence_length, attention_bias, scale), x.dtype)


@op("PackedMultiHeadAttention", domain=MICROSOFT)
def packed_multi_head_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    bias: Array | None,
    token_offset: Array,
    cumulative_sequence_length: Array,
    attention_bias: Array | None = None,
    *,
    mask_filter_value: float = MASKED,
    num_heads: int,
    scale: float = 0.0,
) -> Array:
    name = "PackedMultiHeadAttention"
    if key is None and value is None and query.ndim == 4 and query.shape[2] == 3:  # [tokens, heads, 3, size]
        packed = widened(query).transpose(2, 0, 1, 3).reshape(3, len(query), -1)
        q, k, v = packed[0], packed[1], packed[2]
    elif key is not None and value is not None and query.ndim == key.ndim == value.ndim == 2:
        q, k, v = widened(query), widened(key), widened(value)
    else:
        raise ShapeMismatch(f"{name}: expected Q, K and V [tokens, features], or all of them [tokens, heads, 3, size]")
    if bias is not None:
        widths = [p.shape[1] for p in (q, k, v)]
        if bias.shape != (sum(widths),):
            raise ShapeMismatch(f"{name}: the bias must have {sum(widths)} entries, got {list(bias.shape)}")
        own = np.split(widened(bias), np.cumsum(widths[:2]))
        q, k, v = q + own[0], k + own[1], v + own[2]
    return rounded(_packed(name, q, k, v, num_heads, cumulative_sequence_length, attention_bias, scale), query.dtype)


@op("RemovePadding", domain=MICROSOFT)
def remove_padding(x: Array, sequence_token_count: Array) -> tuple[Array, Array, Array, Array]:
    """Real tokens of padded sequences, where they and the padding stood, cumulative lengths and the longest."""
    counts = sequence_token_count.reshape(-1)
    if x.ndim != 3 or len(counts) != x.shape[0] or (counts < 0).any() or (counts > x.shape[1]).any():
        raise ShapeMismatch(f"RemovePadding: counts {counts.tolist()} do not fit an input of shape {list(x.shape)}")
    real = np.arange(x.shape[1]) < counts[:, None]
    offsets = np.argsort(~real.reshape(-1), kind="stable").astype(np.int32)
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return x[real], offsets.reshape(real.shape), ends, np.array([counts.max(initial=0)], np.int32)


@op("RestorePadding", domain=MICROSOFT)
def restore_padding(x: Array, token_offset: Array) -> Array:
    """Packed tokens back where they stood, zeros where the padding was."""
    if x.ndim != 2 or token_offset.ndim != 2 or len(x) > token_offset.size:
        raise ShapeMismatch(f"RestorePadding: {list(x.shape)} does not fit offsets {list(token_offset.shape)}")
    places = token_offset.reshape(-1)[: len(x)]
    if places.size and not (places.min() >= 0 and places.max() < token_offset.size):
        raise InvalidValue(f"RestorePadding: an offset is outside [0, {token_offset.size})", op="RestorePadding")
    y = np.zeros((token_offset.size, x.shape[1]), x.dtype)
    y[places] = x
    return y.reshape(*token_offset.shape, x.shape[1])


# -- types and costs --------------------------------------------------------------------------------------------------


@packed_attention.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, width, sizes = tensor(call, 0), at(tensor(call, 1).shape, 1), call.attr("qkv_hidden_sizes")
    hidden: Dim = sizes[2] if sizes else width // 3 if isinstance(width, int) else None
    return [TensorType(x.dtype, (at(x.shape, 0), hidden))]


@packed_multi_head_attention.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    query, value = tensor(call, 0), tensor(call, 2).shape
    hidden = times(at(query.shape, 1), at(query.shape, 3)) if call.type(2) is None else at(value, 1)
    return [TensorType(query.dtype, (at(query.shape, 0), hidden))]


def _attention_flops(call: TypeCall, offsets_at: int) -> float:
    """An upper bound: every sequence as long as the longest."""
    y = dims(call.result_types[0]) if call.result_types else ()
    offsets = dims(call.type(offsets_at))
    return 4.0 * math.prod(y) * (offsets[1] if len(offsets) == 2 else 1)


@packed_attention.cost
def _(call: TypeCall) -> Cost:
    x, weights = dims(call.type(0)), dims(call.type(1))
    projection = 2.0 * math.prod(x) * (weights[1] if len(weights) == 2 else 1)
    return Cost(projection + _attention_flops(call, 3), traffic(call))


@packed_multi_head_attention.cost
def _(call: TypeCall) -> Cost:
    return Cost(_attention_flops(call, 4), traffic(call))


@remove_padding.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = tensor(call, 0)
    batch, length, hidden = (at(x.shape, k) for k in range(3))
    numbers = [TensorType(DType.int32, shape) for shape in ((batch, length), (plus(batch, 1),), (1,))]
    return [TensorType(x.dtype, (None, hidden)), *numbers]


@restore_padding.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, offsets = tensor(call, 0), tensor(call, 1).shape
    return [TensorType(x.dtype, (at(offsets, 0), at(offsets, 1), at(x.shape, 1)))]
