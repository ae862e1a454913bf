"""Normalizations."""

from __future__ import annotations

import math
from typing import Any

from ranvier.graph.ir import Node
from ranvier.providers.mlx.library import mx
from ranvier.providers.mlx.table import Call, lowers, only_first_result


def _rows(call: Call, x: Any, *vectors: Any) -> tuple[Any, ...]:
    """``x`` as rows of what is normalized together, and the vectors as long as a row."""
    axis = call.attr("axis", -1) % x.ndim
    shape = x.shape[axis:]
    rows = mx.reshape(x, (-1, math.prod(shape)))
    return rows, *(None if v is None else mx.reshape(mx.broadcast_to(v, shape), (-1,)) for v in vectors)


@lowers("LayerNormalization", since=17, refuses=only_first_result, wide=True)
def layer_normalization(call: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    rows, weights, offsets = _rows(call, x, scale, bias)
    return mx.reshape(mx.fast.layer_norm(rows, weights, offsets, call.attr("epsilon", 1e-5)), x.shape)


@lowers("RMSNormalization", since=23, wide=True)
def rms_normalization(call: Call, x: Any, scale: Any) -> Any:
    rows, weights = _rows(call, x, scale)
    return mx.reshape(mx.fast.rms_norm(rows, weights, call.attr("epsilon", 1e-5)), x.shape)


def _per_channel(v: Any, x: Any) -> Any:
    return mx.reshape(v, (-1, *[1] * (x.ndim - 2)))


def _is_training(node: Node) -> str | None:
    return "training is not lowered to mlx" if node.attrs.get("training_mode", 0) else only_first_result(node)


@lowers("BatchNormalization", since=9, refuses=_is_training, wide=True)
def batch_normalization(call: Call, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    factor = scale * mx.rsqrt(variance + call.attr("epsilon", 1e-5))
    if x.ndim == 1:
        return (x - mean) * factor + bias
    return (x - _per_channel(mean, x)) * _per_channel(factor, x) + _per_channel(bias, x)


@lowers("InstanceNormalization", since=1, wide=True)
def instance_normalization(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    rows = mx.reshape(x, (*x.shape[:2], -1))
    y = mx.reshape(mx.fast.layer_norm(rows, None, None, call.attr("epsilon", 1e-5)), x.shape)
    return y * _per_channel(scale, x) + _per_channel(bias, x)


@lowers("GroupNormalization", since=21, wide=True)
def group_normalization(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    rows = mx.reshape(x, (x.shape[0], call.attr("num_groups"), -1))
    y = mx.reshape(mx.fast.layer_norm(rows, None, None, call.attr("epsilon", 1e-5)), x.shape)
    return y * _per_channel(scale, x) + _per_channel(bias, x)


@lowers("LpNormalization", since=1, wide=True)
def lp_normalization(call: Call, x: Any) -> Any:
    axis = call.attr("axis", -1)
    if call.attr("p", 2) == 1:
        length = mx.sum(mx.abs(x), axis=axis, keepdims=True)
    else:
        length = mx.sqrt(mx.sum(mx.square(x), axis=axis, keepdims=True))
    return mx.where(length == 0, mx.zeros_like(x), x / mx.where(length == 0, mx.ones_like(length), length))


@lowers("LRN", since=1, wide=True)
def local_response_normalization(call: Call, x: Any) -> Any:
    size = call.attr("size")
    before, channels = (size - 1) // 2, x.shape[1]
    widths = [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)]
    squares = mx.pad(mx.square(x), widths)
    total = squares[:, :channels]
    for shift in range(1, size):
        total = total + squares[:, shift : shift + channels]
    return x / mx.power(call.attr("bias", 1.0) + call.attr("alpha", 1e-4) / size * total, call.attr("beta", 0.75))
