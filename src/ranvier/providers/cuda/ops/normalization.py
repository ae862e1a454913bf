"""Normalizations; statistics of halves are taken as float32."""

from __future__ import annotations

import math
from typing import Any

from ranvier.dtypes import DType
from ranvier.graph.ir import Node
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.ops.quantization import real
from ranvier.providers.cuda.table import CONTRIB, FLOATS, Call, lowers

_WITH_IDS = FLOATS | {DType.int32, DType.int64}


def per_channel(v: Any, x: Any) -> Any:
    return v.reshape(-1, *[1] * max(x.ndim - 2, 0))


def _trains(call: Call) -> bool:
    if call.version >= 14:
        return call.flag("training_mode")
    return len(call.node.outputs) > 1 if call.version >= 7 else not call.flag("is_test")


@lowers("BatchNormalization", wide=True)
def batch_normalization(call: Call, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    spatial = bool(call.attr("spatial", 1))

    def shaped(v: Any) -> Any:
        return per_channel(v, x) if spatial else v

    def normal(m: Any, v: Any) -> Any:
        gain = shaped(scale) / torch.sqrt(shaped(v) + call.attr("epsilon", 1e-5))
        return x * gain + (shaped(bias) - shaped(m) * gain)

    if not _trains(call):
        return normal(mean, variance)
    axes = (0, *range(2, x.ndim)) if spatial else (0,)
    now_mean = x.mean(dim=axes).reshape(mean.shape)
    now_variance = x.var(dim=axes, correction=0).reshape(mean.shape)
    momentum = call.attr("momentum", 0.9)
    found = (
        normal(now_mean, now_variance),
        mean * momentum + now_mean * (1 - momentum),
        variance * momentum + now_variance * (1 - momentum),
        now_mean,
        now_variance,
    )
    return found[: len(call.node.outputs)]


@lowers("InstanceNormalization", wide=True)
def instance_normalization(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    rows = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    y = functional.layer_norm(rows, rows.shape[-1:], eps=call.attr("epsilon", 1e-5)).reshape(x.shape)
    return y * per_channel(scale, x) + per_channel(bias, x)


@lowers("GroupNormalization", since=18, wide=True)
def group_normalization(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    groups = call.attr("num_groups")
    if call.version < 21:  # one for each group
        scale, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, bias))
    rows = x.reshape(x.shape[0], groups, -1)
    y = functional.layer_norm(rows, rows.shape[-1:], eps=call.attr("epsilon", 1e-5)).reshape(x.shape)
    return y * per_channel(scale, x) + per_channel(bias, x)


@lowers("LayerNormalization", wide=True)
def layer_normalization(call: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    axis, epsilon = call.attr("axis", -1) % x.ndim, call.attr("epsilon", 1e-5)
    if call.attr("stash_type", 1) == 11:
        x = x.to(torch.float64)
        scale, bias = scale.to(x.dtype), None if bias is None else bias.to(x.dtype)
    shape = tuple(x.shape[axis:])
    plain = tuple(scale.shape) == shape and (bias is None or tuple(bias.shape) == shape)
    if plain and not call.wants(1) and not call.wants(2):
        return functional.layer_norm(x, shape, scale.to(x.dtype), None if bias is None else bias.to(x.dtype), epsilon)
    axes = tuple(range(axis, x.ndim))
    mean = x.mean(dim=axes, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt((centred * centred).mean(dim=axes, keepdim=True) + epsilon)
    y = centred * inverse * scale
    return (y if bias is None else y + bias), mean, inverse


def rms(x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    return torch.rsqrt((x * x).mean(dim=axes, keepdim=True) + epsilon)


@lowers("RMSNormalization", since=23, wide=True)
def rms_normalization(call: Call, x: Any, scale: Any) -> Any:
    if call.attr("stash_type", 1) == 11:
        x = x.to(torch.float64)
    return x * rms(x, tuple(range(call.attr("axis", -1) % x.ndim, x.ndim)), call.attr("epsilon", 1e-5)) * scale


def _simplified(call: Call, x: Any, scale: Any) -> Any:
    inverse = rms(x, tuple(range(call.attr("axis", -1) % x.ndim, x.ndim)), call.attr("epsilon", 1e-5))
    return x * inverse * scale, inverse


lowers("SimplifiedLayerNormalization", wide=True)(_simplified)
lowers("SimplifiedLayerNormalization", domain=CONTRIB, wide=True)(_simplified)


@lowers("SkipLayerNormalization", domain=CONTRIB, wide=True)
def skip_layer_normalization(call: Call, x: Any, skip: Any, gamma: Any, beta: Any = None, bias: Any = None) -> Any:
    total = x + skip
    if bias is not None:
        total = total + bias
    mean = total.mean(dim=-1, keepdim=True)
    centred = total - mean
    inverse = torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + call.attr("epsilon", 1e-12))
    y = centred * inverse * gamma
    return (y if beta is None else y + beta), mean, inverse, total


def _without_mean(node: Node) -> str | None:
    used = len(node.outputs) > 1 and node.outputs[1].uses
    return "it has no mean to show" if used else None


@lowers("SkipSimplifiedLayerNormalization", domain=CONTRIB, refuses=_without_mean, wide=True)
def skip_simplified(call: Call, x: Any, skip: Any, gamma: Any, bias: Any = None) -> Any:
    total = x + skip
    if bias is not None:
        total = total + bias
    inverse = rms(total, (total.ndim - 1,), call.attr("epsilon", 1e-12))
    return total * inverse * gamma, None, inverse, total


@lowers("LpNormalization", wide=True)
def lp_normalization(call: Call, x: Any) -> Any:
    axis = call.attr("axis", -1)
    if call.attr("p", 2) == 1:
        length = x.abs().sum(dim=axis, keepdim=True)
    else:
        length = (x * x).sum(dim=axis, keepdim=True).sqrt()
    return torch.where(length == 0, torch.zeros_like(x), x / torch.where(length == 0, torch.ones_like(length), length))


@lowers("MeanVarianceNormalization", since=9, wide=True)
def mean_variance_normalization(call: Call, x: Any) -> Any:
    axes = tuple(call.attr("axes") or (0, 2, 3))
    return (x - x.mean(dim=axes, keepdim=True)) / (x.std(dim=axes, correction=0, keepdim=True) + 1e-9)


@lowers("LRN", wide=True)
def local_response_normalization(call: Call, x: Any) -> Any:
    size, channels = call.attr("size"), x.shape[1]
    before, after = min((size - 1) // 2, channels), min(math.ceil((size - 1) / 2), channels)
    squares = functional.pad(x * x, [0, 0] * (x.ndim - 2) + [before, after])
    total = squares[:, :channels]
    for shift in range(1, before + after + 1):
        total = total + squares[:, shift : shift + channels]
    return x * (call.attr("bias", 1.0) + call.attr("alpha", 1e-4) / size * total) ** -call.attr("beta", 0.75)


@lowers("EmbedLayerNormalization", domain=CONTRIB, types=_WITH_IDS, wide=True)
def embed_layer_normalization(
    call: Call,
    ids: Any,
    segments: Any,
    words: Any,
    positions: Any,
    segment_table: Any,
    gamma: Any,
    beta: Any,
    mask: Any = None,
    position_ids: Any = None,
) -> Any:
    where = _places(ids) if position_ids is None else position_ids
    total = embedded(call, words, ids) + embedded(call, positions, where)
    if segments is not None and segment_table is not None:
        total = total + embedded(call, segment_table, segments)
    y = functional.layer_norm(total, total.shape[-1:], gamma, beta, call.attr("epsilon", 1e-12))
    return (y, _lengths(ids, mask), total)[: len(call.node.outputs)]


def embedded(call: Call, table: Any, at: Any) -> Any:
    """The rows of a table that are asked for."""
    at = at.to(torch.int64)
    call.require(((at >= 0) & (at < table.shape[0])).all(), f"an index is outside [0, {table.shape[0]})")
    return functional.embedding(at.clamp(0, table.shape[0] - 1), table)


def _places(ids: Any) -> Any:
    return torch.arange(ids.shape[1], device=ids.device)[None]


def _lengths(ids: Any, mask: Any) -> Any:
    """How many tokens of each sequence are not padding."""
    return ids.new_zeros(ids.shape[0]) if mask is None else (mask == 1).sum(dim=1)


@lowers("QEmbedLayerNormalization", domain=CONTRIB, types=_WITH_IDS | {DType.int8, DType.uint8})
def quantized_embed_layer_normalization(
    call: Call,
    ids: Any,
    segments: Any,
    words: Any,
    positions: Any,
    segment_table: Any,
    gamma: Any,
    beta: Any,
    mask: Any,
    *parameters: Any,
) -> Any:
    """``parameters``: the scales of both tables, the segments', gamma and beta, then their zero points."""
    scales, zeros = parameters[:5], parameters[5:]
    total = real(embedded(call, words, ids), scales[0], zeros[0])
    total = total + real(embedded(call, positions, _places(ids)), scales[1], zeros[1])
    if segments is not None and segment_table is not None and scales[2] is not None:
        total = total + real(embedded(call, segment_table, segments), scales[2], zeros[2])
    scale, shift = real(gamma, scales[3], zeros[3]), real(beta, scales[4], zeros[4])
    y = functional.layer_norm(total, total.shape[-1:], scale, shift, call.attr("epsilon", 1e-12))
    return (y, _lengths(ids, mask))[: len(call.node.outputs)]
