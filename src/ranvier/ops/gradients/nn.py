"""Gradients of pooling, and layers as the plain operators they are made of, whose gradients are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, first, gradient, operand
from ranvier.ops.gradients.contraction import window_of
from ranvier.ops.gradients.parts import made_of

_PLACES_COMPARED = 16


# -- pooling --------------------------------------------------------------------------------------------------------


@gradient("GlobalAveragePool")
def _global_average(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    x, grad = first(node), grads[0]
    assert grad is not None
    count = float(np.prod(b.sizes(x)[2:]))
    return [b.Expand(b.Div(grad, b.number(count, grad)), b.shape(x))]


@gradient("GlobalMaxPool")
def _global_max(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    x, grad = first(node), grads[0]
    assert grad is not None
    chosen = b.Cast(b.Equal(x, node.output), to=b.dtype(grad).onnx)
    share = b.ReduceSum(chosen, b.whole(*range(2, b.rank(x))), keepdims=1)
    return [b.Mul(chosen, b.Div(grad, share))]


@gradient("MaxPool")
def _max_pool(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """Each result's to the place it came from; the pool is asked for the places again where nobody kept them."""
    x, grad = first(node), grads[0]
    if grad is None:
        return [None]
    if _windows_apart(b, node, x):
        return [_max_pool_apart(b, node, x, grad)]
    if len(node.outputs) > 1:
        places = node.outputs[1]
    else:
        places = b.node("MaxPool", [x], dict(node.attrs), outputs=2).outputs[1]
    flat = b.Reshape(grad, b.whole(-1))
    at = b.Reshape(places, b.whole(-1))
    size = int(np.prod(b.sizes(x)))
    zeros = b.constant(np.zeros(size, b.dtype(grad).numpy))
    return [b.like(b.ScatterElements(zeros, at, flat, axis=0, reduction="add"), x)]


def _windows_apart(b: Backward, node: Node, x: Value) -> bool:
    """Whether windows lie side by side, none over a border, and have few enough places to be compared one by one."""
    kernel = [int(k) for k in node.attrs["kernel_shape"]]
    strides, dilations, pads, _ = window_of(b, node, x, x)
    plain = strides == kernel and not any(pads) and all(d == 1 or k == 1 for d, k in zip(dilations, kernel))
    auto = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", b"NOTSET", "VALID", b"VALID")
    inside = all(r * k <= s for r, k, s in zip(b.sizes(node.output)[2:], kernel, b.sizes(x)[2:]))
    return plain and auto and inside and int(np.prod(kernel)) <= _PLACES_COMPARED


def _max_pool_apart(b: Backward, node: Node, x: Value, grad: Value) -> Value:
    """Each place of a window gets the gradient if it is the first that is not less than the result."""
    kernel = [int(k) for k in node.attrs["kernel_shape"]]
    rank, sizes, results = len(kernel), b.sizes(x), b.sizes(node.output)
    axes = b.whole(*range(2, rank + 2))
    taken: Value | None = None  # whether an earlier place was
    parts: list[Value] = []
    for place in np.ndindex(*kernel):
        ends = [p + (r - 1) * k + 1 for p, r, k in zip(place, results[2:], kernel)]
        here = b.Slice(x, b.whole(*place), b.whole(*ends), axes, b.whole(*kernel))
        found = b.Not(b.Less(here, node.output))
        chosen = found if taken is None else b.And(found, b.Not(taken))
        taken = found if taken is None else b.Or(taken, found)
        parts.append(b.Unsqueeze(b.where(chosen, grad), b.whole(*range(3, 2 * rank + 2, 2))))
    for axis in range(rank - 1, -1, -1):  # [n, c, results, 1, results, 1 ...]: the innermost places first
        count = kernel[axis]
        joined = [parts[k : k + count] for k in range(0, len(parts), count)]
        parts = [b.node("Concat", each, {"axis": 3 + 2 * axis}).output if count > 1 else each[0] for each in joined]
    covered = [r * k for r, k in zip(results[2:], kernel)]
    whole = b.Reshape(parts[0], b.whole(*sizes[:2], *covered))
    rest = [s - c for s, c in zip(sizes[2:], covered)]
    return b.Pad(whole, b.whole(*[0] * (rank + 4), *rest)) if any(rest) else whole


@gradient("AveragePool")
def _average_pool(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """A transposed convolution with a window of ones, of the gradient over how many each window held."""
    x, grad = first(node), grads[0]
    assert grad is not None
    n, c, *sizes = b.sizes(x)
    kernel = [int(k) for k in node.attrs["kernel_shape"]]
    rank = len(kernel)
    ones = b.constant(np.ones((1, 1, *kernel), b.dtype(x).numpy))
    strides, dilations, pads, _ = window_of(b, node, x, ones)
    results = b.sizes(node.output)[2:]
    beyond = [  # what windows of ceil_mode reach over, which never counts
        max(0, (results[k] - 1) * strides[k] + (kernel[k] - 1) * dilations[k] + 1 - sizes[k] - pads[k] - pads[rank + k])
        for k in range(rank)
    ]
    held, around = sizes, [*pads[:rank], *(pad + more for pad, more in zip(pads[rank:], beyond))]
    pads = around
    window = {"strides": strides, "dilations": dilations, "pads": pads}
    if attribute(node, "count_include_pad", 0):
        held = [sizes[k] + pads[k] + pads[rank + k] - beyond[k] for k in range(rank)]
        around = [*[0] * rank, *beyond]
    count: Value
    if attribute(node, "count_include_pad", 0) and not any(beyond):
        count = b.number(float(np.prod(kernel)), grad)
    else:
        ones_held = b.constant(np.ones((1, 1, *held), b.dtype(x).numpy))
        count = b.Conv(ones_held, ones, **{**window, "pads": around})
    rest = [
        sizes[k] + pads[k] + pads[rank + k] - ((results[k] - 1) * strides[k] + (kernel[k] - 1) * dilations[k] + 1)
        for k in range(rank)
    ]
    each = b.Reshape(b.Div(grad, count), b.whole(n * c, 1, *results))
    return [b.like(b.ConvTranspose(each, ones, output_padding=rest, **window), x)]


# -- normalization, by plain operators ------------------------------------------------------------------------------


def standard_score(b: Backward, x: Value, axes: Value, epsilon: float) -> tuple[Value, Value, Value]:
    """(x - mean) / deviation over some axes, the mean, and one over the deviation."""
    mean = b.ReduceMean(x, axes, keepdims=1)
    centred = b.Sub(x, mean)
    variance = b.ReduceMean(b.Mul(centred, centred), axes, keepdims=1)
    inverse = b.Reciprocal(b.Sqrt(b.Add(variance, b.number(epsilon, x))))
    return b.Mul(centred, inverse), mean, inverse


def rms_scaled(b: Backward, x: Value, axes: Value, epsilon: float) -> tuple[Value, Value]:
    """x over the root of its mean square over some axes, and one over that root."""
    square = b.ReduceMean(b.Mul(x, x), axes, keepdims=1)
    inverse = b.Reciprocal(b.Sqrt(b.Add(square, b.number(epsilon, x))))
    return b.Mul(x, inverse), inverse


@made_of("LayerNormalization")
def _layer_normalization(b: Backward, node: Node) -> Sequence[Value]:
    x, scale, bias = first(node), operand(node, 1), operand(node, 2)
    axis = b.axis(node, -1, x)
    axes = b.whole(*range(axis, b.rank(x)))
    y, mean, inverse = standard_score(b, x, axes, attribute(node, "epsilon", 1e-5))
    y = y if scale is None else b.Mul(y, scale)
    return [y if bias is None else b.Add(y, bias), mean, inverse]


@made_of("RMSNormalization", "SimplifiedLayerNormalization")
def _rms(b: Backward, node: Node) -> Sequence[Value]:
    x, scale = first(node), operand(node, 1)
    assert scale is not None
    axis = b.axis(node, -1, x)
    y, inverse = rms_scaled(b, x, b.whole(*range(axis, b.rank(x))), attribute(node, "epsilon", 1e-5))
    return [b.Mul(y, scale), inverse]


def _per_channel(b: Backward, value: Value, x: Value) -> Value:
    rank = b.rank(x)
    return b.Unsqueeze(value, b.whole(*range(1, rank - 1))) if rank > 2 else value


@made_of("InstanceNormalization")
def _instance(b: Backward, node: Node) -> Sequence[Value]:
    x, scale, bias = node.inputs
    assert x is not None and scale is not None and bias is not None
    axes = b.whole(*range(2, b.rank(x)))
    y, _, _ = standard_score(b, x, axes, attribute(node, "epsilon", 1e-5))
    return [b.Add(b.Mul(y, _per_channel(b, scale, x)), _per_channel(b, bias, x))]


@made_of("GroupNormalization")
def _group(b: Backward, node: Node) -> Sequence[Value]:
    x, scale, bias = node.inputs
    assert x is not None and scale is not None and bias is not None
    apart = b.Reshape(x, b.whole(0, int(node.attrs["num_groups"]), -1))
    y, _, _ = standard_score(b, apart, b.whole(2), attribute(node, "epsilon", 1e-5))
    if node.version < 21:  # which had one factor for each group
        return [b.like(b.Add(b.Mul(y, b.Unsqueeze(scale, b.whole(1))), b.Unsqueeze(bias, b.whole(1))), x)]
    return [b.Add(b.Mul(b.like(y, x), _per_channel(b, scale, x)), _per_channel(b, bias, x))]


@made_of("BatchNormalization")
def _batch(b: Backward, node: Node) -> Sequence[Value]:
    x, scale, bias, mean, variance = node.inputs
    assert x is not None and scale is not None and bias is not None and mean is not None and variance is not None
    epsilon = attribute(node, "epsilon", 1e-5)
    gain, shift = _per_channel(b, scale, x), _per_channel(b, bias, x)
    if not attribute(node, "training_mode", 0):
        inverse = b.Reciprocal(b.Sqrt(b.Add(variance, b.number(epsilon, x))))
        y = b.Mul(b.Sub(x, _per_channel(b, mean, x)), _per_channel(b, inverse, x))
        return [b.Add(b.Mul(y, gain), shift)]
    axes = b.whole(0, *range(2, b.rank(x)))
    y, own_mean, _ = standard_score(b, x, axes, epsilon)
    centred = b.Sub(x, own_mean)
    own_variance = b.ReduceMean(b.Mul(centred, centred), axes, keepdims=0)
    momentum = float(attribute(node, "momentum", 0.9))

    def running(old: Value, new: Value) -> Value:
        return b.Add(b.Mul(old, b.number(momentum, old)), b.Mul(new, b.number(1.0 - momentum, old)))

    flat = b.Reshape(own_mean, b.whole(-1))
    return [b.Add(b.Mul(y, gain), shift), running(mean, flat), running(variance, own_variance)]


@made_of("LpNormalization")
def _lp(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    axis = b.whole(b.axis(node, -1, x))
    op = "ReduceL1" if attribute(node, "p", 2) == 1 else "ReduceL2"
    return [b.Div(x, b.node(op, [x, axis], {"keepdims": 1}).output)]


@made_of("MeanVarianceNormalization")
def _mean_variance(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    axes = [int(a) for a in attribute(node, "axes", [0, 2, 3])]
    return [standard_score(b, x, b.whole(*axes), 1e-9)[0]]


# -- losses ---------------------------------------------------------------------------------------------------------


@made_of("SoftmaxCrossEntropyLoss")
def _cross_entropy(b: Backward, node: Node) -> Sequence[Value]:
    logarithms = b.LogSoftmax(first(node), axis=1)
    return [_likelihood(b, node, logarithms), logarithms]


@made_of("NegativeLogLikelihoodLoss")
def _negative_likelihood(b: Backward, node: Node) -> Sequence[Value]:
    return [_likelihood(b, node, first(node))]


def _likelihood(b: Backward, node: Node, logarithms: Value) -> Value:
    labels, weight = node.inputs[1], operand(node, 2)
    assert labels is not None
    kind = b.dtype(logarithms)
    ignored = attribute(node, "ignore_index", None)
    counts: Value | None = None
    safe = labels
    if ignored is not None:
        number = b.constant(np.asarray(ignored).astype(b.dtype(labels).numpy))
        skipped = b.Equal(labels, number)
        zero = b.constant(np.zeros((), b.dtype(labels).numpy))
        safe = b.Where(skipped, zero, labels)
        counts = b.Cast(b.Not(skipped), to=kind.onnx)
    picked = b.Squeeze(b.GatherElements(logarithms, b.Unsqueeze(safe, b.whole(1)), axis=1), b.whole(1))
    loss = b.Neg(picked)
    if weight is not None:
        own = b.Gather(weight, safe, axis=0)
        counts = own if counts is None else b.Mul(own, counts)
    if counts is not None:
        loss = b.Mul(loss, counts)
    reduction = attribute(node, "reduction", "mean")
    reduction = reduction.decode() if isinstance(reduction, bytes) else reduction
    if reduction == "none":
        return loss
    total = b.ReduceSum(loss, keepdims=0)
    if reduction == "sum":
        return total
    if counts is None:
        return b.ReduceMean(loss, keepdims=0)
    return b.Div(total, b.ReduceSum(counts, keepdims=0))
