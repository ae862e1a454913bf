"""Operators of com.microsoft on plain tensors, images and rows, as plain operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, constant_ints, first, gradient, operand, text
from ranvier.ops.gradients.contrib import MICROSOFT, added, fused_conv, two
from ranvier.ops.gradients.nn import rms_scaled, standard_score
from ranvier.ops.gradients.parts import made_of

# -- linear algebra and Fourier transforms ------------------------------------------------------------------------


@gradient("Inverse", domain=MICROSOFT)
def _inverse(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad = grads[0]
    assert grad is not None
    rank = b.rank(grad)
    turned = b.Transpose(node.output, perm=[*range(rank - 2), rank - 1, rank - 2])
    return [b.Neg(b.MatMul(b.MatMul(turned, grad), turned))]


def _along(b: Backward, axis: int) -> Value:
    return b.constant(np.asarray(axis, np.int64))


@made_of("Rfft", domain=MICROSOFT)
def _rfft(b: Backward, node: Node) -> Sequence[Value]:
    """Half of the last axis's transform, then whole ones of the axes before it."""
    x = first(node)
    rank = b.rank(x)
    y = b.DFT(b.Unsqueeze(x, b.whole(rank)), None, _along(b, rank - 1), onesided=1)
    for axis in range(rank - int(attribute(node, "signal_ndim", 1)), rank - 1):
        y = b.DFT(y, None, _along(b, axis))
    return [y]


@made_of("Irfft", domain=MICROSOFT)
def _irfft(b: Backward, node: Node) -> Sequence[Value]:
    y = first(node)
    rank = b.rank(y) - 1
    for axis in range(rank - int(node.attrs["signal_ndim"]), rank - 1):
        y = b.DFT(y, None, _along(b, axis), inverse=1)
    length = b.constant(np.asarray(2 * (b.sizes(y)[rank - 1] - 1), np.int64))
    y = b.DFT(y, length, _along(b, rank - 1), inverse=1, onesided=1)
    return [b.Squeeze(y, b.whole(rank))]


@made_of("ComplexMul", "ComplexMulConj", domain=MICROSOFT)
def _complex_product(b: Backward, node: Node) -> Sequence[Value]:
    x, y = two(node)

    def part(value: Value, k: int) -> Value:
        return b.Slice(value, b.whole(k), b.whole(k + 1), b.whole(b.rank(value) - 1))

    real, imaginary = (b.Mul(part(x, k), part(y, 0)) for k in (0, 1))
    crossed, straight = (b.Mul(part(x, k), part(y, 1)) for k in (0, 1))
    if node.op == "ComplexMul":
        parts = [b.Sub(real, straight), b.Add(imaginary, crossed)]
    else:
        parts = [b.Add(real, straight), b.Sub(imaginary, crossed)]
    return [b.node("Concat", parts, {"axis": -1}).output]


@made_of("CDist", domain=MICROSOFT)
def _distances(b: Backward, node: Node) -> Sequence[Value]:
    x, y = two(node)
    left = b.ReduceSum(b.Mul(x, x), b.whole(1), keepdims=1)
    right = b.ReduceSum(b.Mul(y, y), b.whole(1), keepdims=0)
    products = b.Mul(b.MatMul(x, b.Transpose(y, perm=[1, 0])), b.number(-2.0, x))
    squares = b.Max(b.Add(b.Add(left, right), products), b.number(0.0, x))
    return [b.Sqrt(squares) if text(node, "metric") == "euclidean" else squares]


# -- indexing -----------------------------------------------------------------------------------------------------


@made_of("UnfoldTensor", domain=MICROSOFT)
def _unfold(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    rank, size, step = b.rank(x), int(node.attrs["size"]), int(attribute(node, "step", 1))
    axis = int(attribute(node, "dim", -1)) % rank
    count = (b.sizes(x)[axis] - size) // step + 1
    places = np.add.outer(np.arange(count) * step, np.arange(size)).astype(np.int64)
    windows = b.Gather(x, b.constant(places), axis=axis)
    return [b.Transpose(windows, perm=[k for k in range(rank + 1) if k != axis + 1] + [axis + 1])]


@gradient("NGramRepeatBlock", domain=MICROSOFT)
def _blocked(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    return [None, b.where(b.Not(b.IsInf(node.output)), grads[0])]


# -- sums and activations -----------------------------------------------------------------------------------------


@made_of("BiasDropout", domain=MICROSOFT)
def _bias_dropout(b: Backward, node: Node) -> Sequence[Value]:
    x, bias = two(node)
    attrs = {"seed": node.attrs["seed"]} if "seed" in node.attrs else {}
    made = b.node("Dropout", [b.Add(x, bias), operand(node, 3), operand(node, 4)], attrs, outputs=2)
    return [added(b, made.outputs[0], operand(node, 2)), made.outputs[1]]


@made_of("BiasSoftmax", domain=MICROSOFT)
def _bias_softmax(b: Backward, node: Node) -> Sequence[Value]:
    x, bias = two(node)
    sizes = b.sizes(x)
    split = int(attribute(node, "axis", 1)) % len(sizes)
    width = math.prod(sizes[split:])
    rows = math.prod(b.sizes(bias)) // width
    inner = bool(node.attrs["is_inner_broadcast"])
    scores = b.Reshape(x, b.whole(rows, -1, width) if inner else b.whole(-1, rows, width))
    shift = b.Reshape(bias, b.whole(rows, 1, width) if inner else b.whole(1, rows, width))
    return [b.like(b.Softmax(b.Add(scores, shift), axis=-1), x)]


def _silu(b: Backward, x: Value) -> Value:
    return b.Mul(x, b.Sigmoid(x))


@made_of("ScaledSiLU", domain=MICROSOFT)
def _scaled_silu(b: Backward, node: Node) -> Sequence[Value]:
    x, scale = first(node), operand(node, 1)
    if scale is None:
        return [_silu(b, b.Mul(x, b.number(float(attribute(node, "alpha", 1.0)), x)))]
    return [_silu(b, b.Mul(x, b.cast(b.Reshape(scale, b.whole(1)), b.dtype(x))))]


# -- normalization ------------------------------------------------------------------------------------------------


@made_of("GatedRMSNorm", domain=MICROSOFT)
def _gated_rms(b: Backward, node: Node) -> Sequence[Value]:
    x, scale, gate = node.inputs
    assert x is not None and scale is not None and gate is not None
    width = math.prod(b.sizes(scale))
    rows = b.Reshape(x, b.whole(*b.sizes(x)[:-1], -1, width))
    y, _ = rms_scaled(b, rows, b.whole(b.rank(rows) - 1), attribute(node, "epsilon", 1e-5))
    y = b.like(b.Mul(y, b.Reshape(scale, b.whole(width))), x)
    return [b.Mul(y, b.Sigmoid(gate) if text(node, "activation") == "sigmoid" else _silu(b, gate))]


@made_of("BranchwiseRMSNorm", domain=MICROSOFT)
def _branches(b: Backward, node: Node) -> Sequence[Value]:
    x, scale, branches = first(node), operand(node, 1), int(attribute(node, "num_branches", 0))
    apart = b.Reshape(x, b.whole(*b.sizes(x)[:-1], branches, -1)) if branches else x
    y, _ = rms_scaled(b, apart, b.whole(b.rank(apart) - 1), attribute(node, "epsilon", 1e-5))
    if scale is not None:
        y = b.Mul(y, b.Reshape(scale, b.whole(-1, b.sizes(apart)[-1])))
    return [b.like(y, x)]


def _group_norm(b: Backward, node: Node, x: Value) -> Value:
    gamma, beta = node.inputs[1:3]
    assert gamma is not None and beta is not None
    last, rank, groups = attribute(node, "channels_last", 1), b.rank(x), int(node.attrs["groups"])
    planar = _channels_first(b, x) if last else x
    rows = b.Reshape(planar, b.whole(b.sizes(x)[0], groups, -1))
    y, _, _ = standard_score(b, rows, b.whole(2), attribute(node, "epsilon", 1e-5))
    own = b.whole(-1, *[1] * (rank - 2))
    y = b.Add(b.Mul(b.like(y, planar), b.Reshape(gamma, own)), b.Reshape(beta, own))
    y = _silu(b, y) if attribute(node, "activation", 0) else y
    return _channels_last(b, y) if last else y


@made_of("GroupNorm", domain=MICROSOFT)
def _plain_group_norm(b: Backward, node: Node) -> Sequence[Value]:
    return [_group_norm(b, node, first(node))]


@made_of("SkipGroupNorm", domain=MICROSOFT)
def _skip_group_norm(b: Backward, node: Node) -> Sequence[Value]:
    x, skip, bias = first(node), node.inputs[3], operand(node, 4)
    assert skip is not None
    spatial = [1] * (b.rank(x) - 2)
    last = attribute(node, "channels_last", 1)
    if b.sizes(skip) != b.sizes(x):
        skip = b.Reshape(skip, b.whole(b.sizes(x)[0], *([*spatial, -1] if last else [-1, *spatial])))
    total = b.Add(x, skip)
    if bias is not None:
        total = b.Add(total, b.Reshape(bias, b.whole(*([*spatial, -1] if last else [-1, *spatial]))))
    return [_group_norm(b, node, total), total]


# -- images with their channels last --------------------------------------------------------------------------------


def _channels_first(b: Backward, x: Value) -> Value:
    rank = b.rank(x)
    return b.Transpose(x, perm=[0, rank - 1, *range(1, rank - 1)])


def _channels_last(b: Backward, x: Value) -> Value:
    return b.Transpose(x, perm=[0, *range(2, b.rank(x)), 1])


@made_of("NhwcConv", domain=MICROSOFT)
def _nhwc_conv(b: Backward, node: Node) -> Sequence[Value]:
    x, w = two(node)
    operands = [_channels_first(b, x), _channels_first(b, w), operand(node, 2)]
    return [_channels_last(b, b.node("Conv", operands, dict(node.attrs)).output)]


@made_of("NhwcFusedConv", domain=MICROSOFT)
def _nhwc_fused_conv(b: Backward, node: Node) -> Sequence[Value]:
    x, w = two(node)
    rest = operand(node, 3)
    operands = [_channels_first(b, x), w, operand(node, 2), None if rest is None else _channels_first(b, rest)]
    return [_channels_last(b, fused_conv(b, node, operands))]


@made_of("NhwcMaxPool", domain=MICROSOFT)
def _nhwc_max_pool(b: Backward, node: Node) -> Sequence[Value]:
    return [_channels_last(b, b.node("MaxPool", [_channels_first(b, first(node))], dict(node.attrs)).output)]


@made_of("ConvTransposeWithDynamicPads", domain=MICROSOFT)
def _conv_transpose(b: Backward, node: Node) -> Sequence[Value]:
    x, w = two(node)
    attrs, pads = dict(node.attrs), operand(node, 2)
    if pads is not None:
        attrs["pads"] = list(constant_ints(pads, "the pads of ConvTransposeWithDynamicPads"))
    return [b.node("ConvTranspose", [x, w, operand(node, 3)], attrs).output]
