"""com.microsoft operators that say where tokens stand: rotary embeddings and relative position biases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.contrib.activation import sigmoid, with_bias
from ranvier.ops.contrib.rules import MICROSOFT, at, rounded, same_as, tensor
from ranvier.ops.operands import scalar
from ranvier.ops.registry import Array, TypeCall, op


def split_heads(x: Array, heads: int) -> Array:
    """``[batch, sequence, heads * size]`` as ``[batch, heads, sequence, size]``."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads if heads else 0).transpose(0, 2, 1, 3)


def merge_heads(x: Array) -> Array:
    """``[batch, heads, sequence, size]`` as ``[batch, sequence, heads * size]``."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


# -- rotary embeddings ------------------------------------------------------------------------------------------------


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Turn pairs of the first ``2 * cos.shape[-1]`` features of ``[..., sequence, size]`` by per-position angles.

    The partner of a feature stands beside it (interleaved) or half the rotated width further.
    """
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ShapeMismatch(f"rotary embedding: {half} angles do not fit heads of size {x.shape[-1]}")
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    turned = x.copy()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned


def angles_at(name: str, positions: Array, *caches: Array) -> list[Array]:
    """Rows of the cosine and sine tables for ``[batch or 1, sequence]`` positions, with an axis for the heads."""
    limit = min(len(c) for c in caches)
    if positions.size and not (positions.min() >= 0 and positions.max() < limit):
        raise InvalidValue(
            f"{name}: positions {int(positions.min())} to {int(positions.max())} are not all in [0, {limit})", op=name
        )
    return [widened(c)[positions][:, None] for c in caches]


def _rotary(
    name: str, x: Array, cos: Array, sin: Array, num_heads: int, rotary_embedding_dim: int, interleaved: int
) -> Array:
    """Check the shapes, find the heads, turn them. ``cos`` and ``sin`` are ``[batch or 1, 1, sequence, half]``."""
    if x.ndim == 4:
        heads = x
    else:
        size = x.shape[2] // num_heads if num_heads else rotary_embedding_dim or 2 * cos.shape[-1]
        if not size or x.shape[2] % size:
            raise ShapeMismatch(f"{name}: a hidden size of {x.shape[2]} does not split into heads of size {size}")
        heads = split_heads(x, x.shape[2] // size)
    width = rotary_embedding_dim or heads.shape[-1]
    if cos.shape[-1] * 2 != width:
        raise ShapeMismatch(f"{name}: the caches hold {cos.shape[-1]} angles, expected {width // 2}")
    y = rotate(widened(heads), cos, sin, bool(interleaved))
    return rounded(y if x.ndim == 4 else merge_heads(y), x.dtype)


@op("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(
    x: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Array:
    _check_rotary("RotaryEmbedding", x, cos_cache, sin_cache)
    length = x.shape[-2]
    if position_ids.size == 1 and position_ids.ndim < 2:  # the position of the first token of every sequence
        positions = (int(position_ids.reshape(())) + np.arange(length))[None]
    elif position_ids.shape == (x.shape[0], length):
        positions = position_ids
    else:
        raise ShapeMismatch(
            f"RotaryEmbedding: position_ids must be [1] or [{x.shape[0]}, {length}], got {list(position_ids.shape)}"
        )
    cos, sin = angles_at("RotaryEmbedding", positions, cos_cache, sin_cache)
    return _rotary("RotaryEmbedding", x, cos, sin, num_heads, rotary_embedding_dim, interleaved)


@op("MRotaryEmbedding", domain=MICROSOFT)
def mrotary_embedding(
    x: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    mrope_layout: int = 0,
    mrope_section: Sequence[int],
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Array:
    """Rotary embedding whose angles come from three positions per token: time, height and width."""
    name = "MRotaryEmbedding"
    _check_rotary(name, x, cos_cache, sin_cache)
    half = cos_cache.shape[1]
    if position_ids.shape != (3, x.shape[0], x.shape[-2]):
        raise ShapeMismatch(
            f"{name}: position_ids must be [3, {x.shape[0]}, {x.shape[-2]}], got {list(position_ids.shape)}"
        )
    if len(mrope_section) != 3 or min(mrope_section) < 0 or sum(mrope_section) != half:
        raise InvalidValue(
            f"{name}: mrope_section {list(mrope_section)} must be 3 sizes that add up to {half}", op=name
        )
    stream = np.repeat(np.arange(3), mrope_section)
    if mrope_layout == 1:
        stream = np.zeros(half, np.intp)
        stream[1 : 3 * mrope_section[1] : 3] = 1
        stream[2 : 3 * mrope_section[2] : 3] = 2
    elif mrope_layout:
        raise InvalidValue(f"{name}: mrope_layout must be 0 or 1, got {mrope_layout}", op=name)
    angles = angles_at(name, position_ids.reshape(-1, x.shape[-2]), cos_cache, sin_cache)
    # [3 * batch, 1, sequence, half]: take every column from its own stream
    cos, sin = (
        np.take_along_axis(a.reshape(3, x.shape[0], 1, x.shape[-2], half), stream[None, None, None, None], 0)[0]
        * float(scale)
        for a in angles
    )
    return _rotary(name, x, cos, sin, num_heads, rotary_embedding_dim, interleaved)


def _check_rotary(name: str, x: Array, cos_cache: Array, sin_cache: Array) -> None:
    if x.ndim not in (3, 4):
        raise ShapeMismatch(f"{name}: expected an input of rank 3 or 4, got {list(x.shape)}")
    if cos_cache.ndim != 2 or cos_cache.shape != sin_cache.shape:
        raise ShapeMismatch(
            f"{name}: the caches must be two matrices of one shape, got {list(cos_cache.shape)} and "
            f"{list(sin_cache.shape)}"
        )


@op("GemmaRotaryEmbedding", domain=MICROSOFT)
def gemma_rotary_embedding(emb: Array, q: Array, q_rot: Array, k: Array, k_rot: Array) -> tuple[Array, Array]:
    """Rotation of queries and keys whose partner features were already exchanged; ``emb`` holds the angles."""
    cos, sin = np.cos(emb)[:, None].astype(q.dtype), np.sin(emb)[:, None].astype(q.dtype)
    return rounded(q * cos + q_rot * sin, q.dtype), rounded(k * cos + k_rot * sin, k.dtype)


# -- relative positions -----------------------------------------------------------------------------------------------


@op("RelativePositionBias", domain=MICROSOFT)
def relative_position_bias(
    bias_table: Array, query_length: Array, key_length: Array, *, is_bidirectional: int = 0, max_distance: int
) -> Array:
    """A bias per head and distance: exact for near tokens, in buckets of logarithmic width for far ones."""
    name = "RelativePositionBias"
    queries, keys = int(scalar(name, "query_length", query_length)), int(scalar(name, "key_length", key_length))
    buckets, heads = bias_table.shape
    checked_shape((1, heads, queries, keys), bias_table.dtype, name)
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    span = buckets // 2 if is_bidirectional else buckets
    exact = span // 2
    if exact < 1 or max_distance <= exact:
        raise InvalidValue(f"{name}: max_distance {max_distance} does not fit {buckets} buckets", op=name)
    far = np.abs(distance) if is_bidirectional else np.maximum(-distance, 0)
    ratio = np.log(np.maximum(far, exact).astype(np.float32) / exact) / np.float32(math.log(max_distance / exact))
    spread = exact + (ratio * (span - exact)).astype(np.int64)
    bucket = np.where(far < exact, far, np.minimum(spread, span - 1))
    if is_bidirectional:
        bucket = bucket + np.where(distance > 0, span, 0)
    # the table is stored by head in spite of its declared shape
    return bias_table.reshape(heads, buckets)[:, bucket][None]


@op("GatedRelativePositionBias", domain=MICROSOFT)
def gated_relative_position_bias(
    query_layer: Array,
    query_bias: Array,
    rel_pos: Array,
    weight: Array,
    bias: Array,
    eco_a: Array,
    token_offset: Array | None = None,
    *,
    num_heads: int,
) -> Array:
    """A relative position bias, scaled per query by two gates computed from it."""
    name = "GatedRelativePositionBias"
    query = with_bias(name, query_layer, query_bias)
    if token_offset is not None:  # packed tokens: put each where it was before the padding was removed
        padded = np.broadcast_to(widened(query_bias), (token_offset.size, query.shape[-1])).copy()
        padded[token_offset.reshape(-1)[: len(query)]] = query
        query = padded.reshape(*token_offset.shape, query.shape[-1])
    if query.ndim != 3 or query.shape[2] % num_heads or bias.size % 2:
        raise ShapeMismatch(f"{name}: query {list(query.shape)} does not split into {num_heads} heads")
    linear = np.matmul(split_heads(query, num_heads), widened(weight)) + widened(bias)
    update, reset = np.split(sigmoid(linear.reshape(*linear.shape[:3], 2, bias.size // 2).sum(axis=-1)), 2, axis=-1)
    gate = update * (reset * widened(eco_a) - 1.0) + 2.0
    return rounded(gate * widened(rel_pos), query_layer.dtype)


# -- types ------------------------------------------------------------------------------------------------------------

for _op in (rotary_embedding, mrotary_embedding):
    _op.infer(same_as(0))


@gemma_rotary_embedding.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [call.type(1), call.type(3)]


@relative_position_bias.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    table = tensor(call, 0)
    lengths = (None if v is None else int(v.reshape(())) for v in (call.value(1), call.value(2)))
    return [TensorType(table.dtype, (1, at(table.shape, 1), *lengths))]


@gated_relative_position_bias.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    query, positions, offsets = tensor(call, 0), tensor(call, 2).shape, tensor(call, 6).shape
    batch = at(query.shape, 0) if call.type(6) is None else at(offsets, 0)
    return [TensorType(query.dtype, (batch, call.attr("num_heads"), at(positions, 2), at(positions, 3)))]
