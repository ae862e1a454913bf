"""Attention, and positions as rotations."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor import reductions
from ranvier.tensor.core import Tensor, as_tensor, beside, wrapped
from ranvier.tensor.elementwise import cos, sin, where
from ranvier.tensor.expr import Array, known
from ranvier.tensor.linalg import matmul
from ranvier.tensor.manipulate import astype, concat, expand_dims, matrix_transpose, reshape
from ranvier.tensor.nn.functional.shape import parts
from ranvier.tensor.nn.functional.sparse import dropout
from ranvier.tensor.nn.generator import Generator
from ranvier.tensor.nn.precision import lowered, raised


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """softmax(query · key / √size + mask) · value, over the last two axes [length, size].

    A mask of truth values says who may be looked at, one of floats is added. ``enable_gqa``: several heads of the query
    (third axis from the end) share one of key and value.
    """
    found, _ = attention_with_weights(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, generator=generator
    )
    return found


def attention_with_weights(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    generator: Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and how much each place looks at each other."""
    q, k, v = lowered(as_tensor(query), as_tensor(key), as_tensor(value))
    if q.ndim < 2 or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ShapeMismatch(f"query {list(q.shape)}, key {list(k.shape)} and value {list(v.shape)} do not fit")
    shared = enable_gqa and q.shape[-3] != k.shape[-3]
    heads, kept = q.shape[:-2], q.shape[:-3]
    if shared:
        own, theirs = q.shape[-3], k.shape[-3]
        if own % theirs:
            raise ShapeMismatch(f"{own} heads of the query do not share {theirs} of key and value evenly")
        q = reshape(q, (*kept, theirs, own // theirs, *q.shape[-2:]))
        k, v = expand_dims(k, axis=-3), expand_dims(v, axis=-3)
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = raised(matmul(q * factor, matrix_transpose(k)))
    if shared:
        scores = reshape(scores, (*heads, *scores.shape[-2:]))
    if is_causal:
        if attn_mask is not None:
            raise InvalidInput("is_causal is a mask itself; give one of the two")
        scores = scores + _constant(causal_mask(*scores.shape[-2:], scores.dtype), scores)
    elif attn_mask is not None:
        scores = masked(scores, as_tensor(attn_mask))
    weights = reductions.softmax(scores, axis=-1)
    used = dropout(weights, dropout_p, generator=generator) if dropout_p > 0.0 else weights
    used = astype(used, v.dtype)
    if shared:
        used = reshape(used, (*kept, theirs, own // theirs, *used.shape[-2:]))
    found = matmul(used, v)
    return (reshape(found, (*heads, *found.shape[-2:])) if shared else found), weights


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores where a mask of truth values allows it (-inf elsewhere), or with one of floats added."""
    if mask.dtype is DType.bool:
        return where(mask, scores, -math.inf)
    return scores + astype(mask, scores.dtype)


@functools.lru_cache(maxsize=16)
def causal_mask(rows: int, columns: int, dtype: DType = DType.float32) -> Array:
    """What is added to scores so that nobody looks ahead."""
    found = np.zeros((rows, columns), dtype.numpy)
    found[np.triu(np.ones((rows, columns), bool), 1)] = -math.inf
    found.flags.writeable = False
    return found


def _constant(array: Array, like: Tensor) -> Tensor:
    return beside(wrapped(known(array, like.dtype)), like)


def rotary_embedding(input: Any, positions: Any = None, base: float = 10000.0, interleaved: bool = False) -> Tensor:
    """Pairs of numbers turned by an angle that grows with the position (the axis before the last).

    Pairs are (k, k + half) of the last axis, or neighbours where ``interleaved``.
    """
    x = as_tensor(input)
    length, size = x.shape[-2:]
    if size % 2:
        raise ShapeMismatch(f"pairs of numbers are turned; the last axis has {size}")
    if positions is None:
        turns = _constant(_angles(length, size, base), astype(x, DType.float32))
    else:
        steps = _constant(_frequencies(size, base), astype(x, DType.float32))
        turns = expand_dims(astype(as_tensor(positions), DType.float32), axis=-1) * steps
    over, up = astype(cos(turns), x.dtype), astype(sin(turns), x.dtype)
    if interleaved:
        pairs = reshape(x, (*x.shape[:-1], size // 2, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        both = [expand_dims(each, axis=-1) for each in (a * over - b * up, b * over + a * up)]
        return reshape(concat(both, axis=-1), x.shape)
    a, b = parts(x, 2)
    return concat([a * over - b * up, b * over + a * up], axis=-1)


@functools.lru_cache(maxsize=16)
def _frequencies(size: int, base: float) -> Array:
    found = (base ** (-np.arange(0, size, 2) / size)).astype(np.float32)
    found.flags.writeable = False
    return found


@functools.lru_cache(maxsize=16)
def _angles(length: int, size: int, base: float) -> Array:
    found = (np.arange(length)[:, None] * base ** (-np.arange(0, size, 2) / size)[None]).astype(np.float32)
    found.flags.writeable = False
    return found


_OF_TENSORS = True
