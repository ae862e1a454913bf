"""Rarer layers as plain operators, and the gradient of determinants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, first, gradient, operand
from ranvier.ops.gradients.contraction import window_of
from ranvier.ops.gradients.parts import made_of
from ranvier.ops.gradients.quantized import spread

_LARGEST = 32  # matrices whose determinants are derived by those of their parts


@gradient("Det")
def _det(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """By the determinants of what is left without a row and a column, which holds for singular matrices too."""
    grad, x = grads[0], first(node)
    assert grad is not None
    sizes = b.sizes(x)
    n, rank = sizes[-1], len(sizes)
    wide = b.Unsqueeze(grad, b.whole(rank - 2, rank - 1))
    if n > _LARGEST:  # too many parts: by the inverse, which regular matrices have
        inverse = b.node("Inverse", [x], {}, domain="com.microsoft", version=1).output
        turned = b.Transpose(inverse, perm=[*range(rank - 2), rank - 1, rank - 2])
        return [b.Mul(b.Mul(wide, b.Unsqueeze(node.output, b.whole(rank - 2, rank - 1))), turned)]
    if n == 1:
        return [b.Expand(wide, b.shape(x))]
    others = np.array([[j for j in range(n) if j != k] for k in range(n)], np.int64)
    rows = b.Gather(x, b.constant(others), axis=rank - 2)  # [..., n, n - 1, n]
    minors = b.Gather(rows, b.constant(others), axis=rank)  # [..., n, n - 1, n, n - 1]
    order = [*range(rank - 2), rank - 2, rank, rank - 1, rank + 1]
    signs = (-1.0) ** np.add.outer(np.arange(n), np.arange(n))
    cofactors = b.Mul(b.Det(b.Transpose(minors, perm=order)), b.constant(signs.astype(b.dtype(x).numpy)))
    return [b.Mul(wide, cofactors)]


@made_of("LRN")
def _local_response(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    size = int(node.attrs["size"])
    alpha, beta, bias = (float(attribute(node, k, d)) for k, d in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    channels, rank = b.dims(x)[1], b.rank(x)
    if not isinstance(channels, int):
        raise NotSupported("the gradient of LRN needs the number of channels")
    pads = [0] * (2 * rank)
    pads[1], pads[rank + 1] = (size - 1) // 2, size // 2
    squares = b.Pad(b.Mul(x, x), b.whole(*pads), b.number(0.0, x))
    parts = [b.Slice(squares, b.whole(k), b.whole(k + channels), b.whole(1)) for k in range(size)]
    total = b.Add(b.Mul(b.add_all(parts), b.number(alpha / size, x)), b.number(bias, x))
    return [b.Div(x, b.Pow(total, b.number(beta, x)))]


@made_of("LpPool")
def _norm_pool(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    p = float(attribute(node, "p", 2))
    attrs = {key: value for key, value in node.attrs.items() if key not in ("p", "ceil_mode")}
    powers = b.Pow(b.Abs(x), b.number(p, x))
    if attribute(node, "ceil_mode", 0):  # the last windows reach over zeros that no mean would count
        powers, attrs = _reached(b, node, x, powers, attrs)
    mean = b.node("AveragePool", [powers], {**attrs, "count_include_pad": 1}).output
    total = b.Mul(mean, b.number(float(math.prod(node.attrs["kernel_shape"])), x))
    return [b.Pow(total, b.number(1.0 / p, x))]


def _reached(b: Backward, node: Node, x: Value, powers: Value, attrs: dict[str, Any]) -> tuple[Value, dict[str, Any]]:
    """The operand of a pool with zeros as far as its windows reach, and attributes without them."""
    kernel = [int(k) for k in node.attrs["kernel_shape"]]
    rank = len(kernel)
    strides, dilations, pads, _ = window_of(b, node, x, b.constant(np.ones((1, 1, *kernel), b.dtype(x).numpy)))
    sizes, results = b.sizes(x)[2:], b.sizes(node.output)[2:]
    ends = [
        max(pads[rank + k], (results[k] - 1) * strides[k] + (kernel[k] - 1) * dilations[k] + 1 - sizes[k] - pads[k])
        for k in range(rank)
    ]
    wide = b.Pad(powers, b.whole(0, 0, *pads[:rank], 0, 0, *ends), b.number(0.0, powers))
    return wide, {**{k: v for k, v in attrs.items() if k != "auto_pad"}, "pads": [0] * 2 * rank}


@made_of("GlobalLpPool")
def _global_norm_pool(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    p = float(attribute(node, "p", 2))
    axes = b.whole(*range(2, b.rank(x)))
    return [b.Pow(b.ReduceSum(b.Pow(b.Abs(x), b.number(p, x)), axes, keepdims=1), b.number(1.0 / p, x))]


@made_of("DequantizeLinear")
def _dequantize(b: Backward, node: Node) -> Sequence[Value]:
    """A product: scales can be learned."""
    x, scale, zero = first(node), node.inputs[1], operand(node, 2)
    assert scale is not None
    kind = b.dtype(scale)
    steps = b.cast(x, kind)
    if zero is not None:
        steps = b.Sub(steps, b.cast(spread(b, node, zero, x), kind))
    return [b.Mul(steps, spread(b, node, scale, x))]


def _drops_unseen(node: Node) -> bool:
    training = operand(node, 2)
    dropping = training is not None and (training.const is None or bool(training.const.numpy().any()))
    return dropping and len(node.outputs) < 2


@made_of("Dropout", when=_drops_unseen)
def _dropout(b: Backward, node: Node) -> Sequence[Value]:
    """With the mask, which tells what was dropped."""
    return b.node("Dropout", list(node.inputs), dict(node.attrs), outputs=2).outputs[:1]


@made_of("Compress")
def _compress(b: Backward, node: Node) -> Sequence[Value]:
    x, condition = first(node), node.inputs[1]
    assert condition is not None
    places = b.Squeeze(b.NonZero(b.cast(condition, DType.bool)), b.whole(0))
    if "axis" not in node.attrs:
        return [b.Gather(b.Reshape(x, b.whole(-1)), places, axis=0)]
    return [b.Gather(x, places, axis=b.axis(node, 0, x))]
