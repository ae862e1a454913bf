"""com.microsoft normalizations, with the residual sums, embeddings and activations that are fused into them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Shape, TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.activation import sigmoid
from ranvier.ops.contrib.rules import MICROSOFT, at, rounded, same_as, tensor
from ranvier.ops.operands import normal_axis
from ranvier.ops.registry import Array, Call, TypeCall, get, op

Normalized = tuple[Array, Array, Array]  # result, mean, reciprocal of the standard deviation


def layer_norm(x: Array, gamma: Array, beta: Array | None, epsilon: float) -> Normalized:
    """``x`` standardized along its last axis, in the type of ``x``."""
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    inverse = 1 / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + epsilon)
    y = centred * inverse * gamma.astype(x.dtype, copy=False)
    return y if beta is None else y + beta.astype(x.dtype, copy=False), mean, inverse


def rms_norm(x: Array, gamma: Array | None, epsilon: float) -> tuple[Array, Array]:
    """``x`` divided by its root mean square along the last axis, and the reciprocal of that."""
    inverse = 1 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon)
    y = x * inverse
    return y if gamma is None else y * gamma.astype(x.dtype, copy=False), inverse


# -- skip connections -------------------------------------------------------------------------------------------------


def _residual(name: str, x: Array, skip: Array, gamma: Array, *vectors: Array | None) -> Array:
    """``x + skip``, checked: the skip may lack the batch axis or have one of size 1."""
    if not x.ndim or x.shape[-1:] != gamma.shape:
        raise ShapeMismatch(
            f"{name}: gamma must be a vector of the last axis of {list(x.shape)}, got {list(gamma.shape)}"
        )
    for vector in vectors:
        if vector is not None and vector.shape != gamma.shape:
            raise ShapeMismatch(f"{name}: expected vectors of size {gamma.size}, got {list(vector.shape)}")
    if skip.shape != x.shape and skip.shape not in (x.shape[1:], (1, *x.shape[1:])):
        raise ShapeMismatch(f"{name}: skip {list(skip.shape)} does not fit input {list(x.shape)}")
    return np.asarray(widened(x) + widened(skip))


@op("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    x: Array,
    skip: Array,
    gamma: Array,
    beta: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Array, Array, Array, Array]:
    total = _residual("SkipLayerNormalization", x, skip, gamma, beta, bias)
    if bias is not None:
        total = total + widened(bias)
    y, mean, inverse = layer_norm(total, gamma, beta, epsilon)
    return rounded(y, x.dtype), rounded(mean, _FLOAT32), rounded(inverse, _FLOAT32), rounded(total, x.dtype)


@op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    x: Array, skip: Array, gamma: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, Array | None, Array, Array]:
    total = _residual("SkipSimplifiedLayerNormalization", x, skip, gamma, bias)
    if bias is not None:
        total = total + widened(bias)
    y, inverse = rms_norm(total, gamma, epsilon)
    return rounded(y, x.dtype), None, rounded(inverse, _FLOAT32), rounded(total, x.dtype)


def _simplified_layer_normalization(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array]:
    start = normal_axis("SimplifiedLayerNormalization", axis, x.ndim)
    if scale.shape != x.shape[start:]:
        raise ShapeMismatch(
            f"SimplifiedLayerNormalization: scale must be {list(x.shape[start:])}, got {list(scale.shape)}"
        )
    rows = widened(x).reshape(*x.shape[:start], scale.size)
    y, inverse = rms_norm(rows, scale.reshape(-1), epsilon)
    kept = (*x.shape[:start], *(1,) * (x.ndim - start))
    return rounded(y.reshape(x.shape), scale.dtype), rounded(inverse.reshape(kept), of(int(stash_type)).numpy)


# ONNX Runtime's exporter writes this operator into the standard's domain, where the standard does not define it.
simplified_layer_normalization = op("SimplifiedLayerNormalization")(_simplified_layer_normalization)
contrib_simplified_layer_normalization = op("SimplifiedLayerNormalization", domain=MICROSOFT)(
    _simplified_layer_normalization
)


@op("LayerNormalization")
def early_layer_normalization(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    ctx: Call,
) -> tuple[Array, ...]:
    """The standard's operator before the standard had it: ONNX Runtime fuses it into models of any opset."""
    attrs = {"axis": axis, "epsilon": epsilon, "stash_type": stash_type}
    return get("", "LayerNormalization", 17).run((x, scale, bias), attrs, ctx)


# -- gates and branches -----------------------------------------------------------------------------------------------


@op("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_norm(x: Array, scale: Array, gate: Array, *, activation: str = "silu", epsilon: float = 1e-5) -> Array:
    if gate.shape != x.shape or not x.ndim or not scale.size or x.shape[-1] % scale.size:
        raise ShapeMismatch(
            f"GatedRMSNorm: X {list(x.shape)} needs a gate of its shape and a scale whose length divides its last "
            f"axis, got {list(gate.shape)} and {list(scale.shape)}"
        )
    if activation not in ("silu", "swish", "sigmoid"):
        raise InvalidValue(f"GatedRMSNorm: activation must be silu, swish or sigmoid, got {activation!r}")
    rows = widened(x).reshape(*x.shape[:-1], x.shape[-1] // scale.size, scale.size)
    y, _ = rms_norm(rows, scale.reshape(-1), epsilon)
    wide = widened(gate)
    opened = sigmoid(wide) if activation == "sigmoid" else wide * sigmoid(wide)
    return rounded(y.reshape(x.shape) * opened, x.dtype)


@op("BranchwiseRMSNorm", domain=MICROSOFT)
def branchwise_rms_norm(x: Array, scale: Array | None = None, *, epsilon: float = 1e-5, num_branches: int = 0) -> Array:
    if num_branches < 0 or x.ndim < (1 if num_branches else 2) or (num_branches and x.shape[-1] % num_branches):
        raise ShapeMismatch(f"BranchwiseRMSNorm: X {list(x.shape)} does not split into {num_branches} branches")
    grouped = widened(x)
    if num_branches:
        grouped = grouped.reshape(*x.shape[:-1], num_branches, x.shape[-1] // num_branches)
    branches, width = grouped.shape[-2:]
    if scale is not None and scale.size not in (width, branches * width):
        raise ShapeMismatch(
            f"BranchwiseRMSNorm: scale must hold {width} or {branches * width} values, got {list(scale.shape)}"
        )
    y, _ = rms_norm(grouped, None if scale is None else scale.reshape(-1, width), epsilon)
    return rounded(y.reshape(x.shape), x.dtype)


# -- embeddings -------------------------------------------------------------------------------------------------------


@op("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(
    input_ids: Array,
    segment_ids: Array | None,
    word_embedding: Array,
    position_embedding: Array,
    segment_embedding: Array | None,
    gamma: Array,
    beta: Array,
    mask: Array | None = None,
    position_ids: Array | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
    ctx: Call,
) -> tuple[Array, Array | None, Array | None]:
    name = "EmbedLayerNormalization"
    total = summed_embeddings(
        name, input_ids, segment_ids, word_embedding, position_embedding, segment_embedding, position_ids
    )
    y, _, _ = layer_norm(widened(total), gamma, beta, epsilon)
    index = mask_lengths(mask, input_ids.shape[0]) if ctx.wants(1) else None
    return rounded(y, word_embedding.dtype), index, rounded(total, word_embedding.dtype) if ctx.wants(2) else None


def summed_embeddings(
    name: str,
    input_ids: Array,
    segment_ids: Array | None,
    word_embedding: Array,
    position_embedding: Array,
    segment_embedding: Array | None,
    position_ids: Array | None,
) -> Array:
    """The sum of word, position and segment embeddings ``[batch, sequence, hidden]``."""
    if input_ids.ndim != 2:
        raise ShapeMismatch(f"{name}: input_ids must be [batch, sequence], got {list(input_ids.shape)}")
    positions = np.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
    total = looked_up(name, "word", word_embedding, input_ids)
    total = total + looked_up(name, "position", position_embedding, positions)
    if segment_ids is not None and segment_embedding is not None:
        total = total + looked_up(name, "segment", segment_embedding, segment_ids)
    return total


def looked_up(name: str, what: str, table: Array, ids: Array) -> Array:
    """Rows of an embedding table, wide enough to be summed."""
    if ids.size and not (ids.min() >= 0 and ids.max() < table.shape[0]):
        raise InvalidValue(f"{name}: a {what} index is outside [0, {table.shape[0]})", op=name)
    return widened(table[ids])


def mask_lengths(mask: Array | None, batch: int) -> Array:
    """How many tokens of each sequence are not padding; zeros where there is no mask."""
    return np.zeros(batch, np.int32) if mask is None else (mask == 1).sum(axis=1, dtype=np.int32)


# -- groups of channels -----------------------------------------------------------------------------------------------


def _group_norm(
    name: str, x: Array, gamma: Array, beta: Array, groups: int, activation: int, epsilon: float, last: int
) -> Array:
    """Group normalization of a float32 image, and the activation numbered 1: SiLU."""
    channels = x.shape[-1 if last else 1] if x.ndim > 2 else 0
    if groups < 1 or not channels or channels % groups or gamma.shape != (channels,) or beta.shape != (channels,):
        raise ShapeMismatch(
            f"{name}: {groups} groups, gamma {list(gamma.shape)} and beta {list(beta.shape)} do not fit the channels "
            f"of {list(x.shape)}"
        )
    if activation not in (0, 1):
        raise InvalidValue(f"{name}: activation must be 0 (none) or 1 (SiLU), got {activation}", op=name)
    planar = np.moveaxis(x, -1, 1) if last else x
    rows = planar.reshape(x.shape[0], groups, channels // groups * math.prod(planar.shape[2:]))
    ones = np.ones(rows.shape[-1], x.dtype)
    y = layer_norm(rows, ones, None, epsilon)[0].reshape(planar.shape)
    per_channel = (channels,) + (1,) * (x.ndim - 2)
    y = y * widened(gamma).reshape(per_channel) + widened(beta).reshape(per_channel)
    if activation:
        y = y * sigmoid(y)
    return np.ascontiguousarray(np.moveaxis(y, 1, -1)) if last else y


@op("GroupNorm", domain=MICROSOFT)
def group_norm(
    x: Array,
    gamma: Array,
    beta: Array,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> Array:
    y = _group_norm("GroupNorm", widened(x), gamma, beta, groups, activation, epsilon, channels_last)
    return rounded(y, x.dtype)


@op("SkipGroupNorm", domain=MICROSOFT)
def skip_group_norm(
    x: Array,
    gamma: Array,
    beta: Array,
    skip: Array,
    bias: Array | None = None,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> tuple[Array, Array]:
    channels = x.shape[-1 if channels_last else 1]
    spatial = (1,) * (x.ndim - 2)
    one_per_channel = (*spatial, channels) if channels_last else (channels, *spatial)
    if skip.shape not in (x.shape, (x.shape[0], channels), (x.shape[0], *one_per_channel)):
        raise ShapeMismatch(f"SkipGroupNorm: skip {list(skip.shape)} does not fit X {list(x.shape)}")
    added = widened(skip).reshape(x.shape[0], *one_per_channel) if skip.shape != x.shape else widened(skip)
    total = widened(x) + added
    if bias is not None:
        total = total + widened(bias).reshape(one_per_channel)
    y = _group_norm("SkipGroupNorm", total, gamma, beta, groups, activation, epsilon, channels_last)
    return rounded(y, x.dtype), rounded(total, x.dtype)


# -- types ------------------------------------------------------------------------------------------------------------

_FLOAT32 = np.dtype(np.float32)

for _op in (gated_rms_norm, branchwise_rms_norm, group_norm):
    _op.infer(same_as(0))


def _reduced(shape: Shape | None, axis: int = -1) -> TensorType:
    """The type of a statistic kept per row."""
    if shape is None:
        return TensorType(DType.float32, None)
    start = axis % len(shape) if shape else 0
    return TensorType(DType.float32, (*shape[:start], *(1,) * (len(shape) - start)))


@skip_layer_normalization.infer
@skip_simplified_layer_normalization.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = tensor(call, 0)
    return [x, _reduced(x.shape), _reduced(x.shape), x]


@simplified_layer_normalization.infer
@contrib_simplified_layer_normalization.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, scale = tensor(call, 0), tensor(call, 1)
    statistic = _reduced(x.shape, call.attr("axis", -1))
    return [TensorType(scale.dtype, x.shape), TensorType(of(int(call.attr("stash_type", 1))), statistic.shape)]


@early_layer_normalization.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = tensor(call, 0)
    statistic = TensorType(of(int(call.attr("stash_type", 1))), _reduced(x.shape, call.attr("axis", -1)).shape)
    return [x, statistic, statistic]


@embed_layer_normalization.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    ids, words = tensor(call, 0).shape, tensor(call, 2)
    summed = TensorType(words.dtype, (at(ids, 0), at(ids, 1), at(words.shape, 1)))
    return [summed, TensorType(DType.int32, (at(ids, 0),)), summed]


@skip_group_norm.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [call.type(0), call.type(0)]
