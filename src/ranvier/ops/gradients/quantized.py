"""Gradients through rounding to codes, as if nothing had been rounded: so that a model learns to be quantized."""

from __future__ import annotations

import ml_dtypes

from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, first, gradient, operand


@gradient("QuantizeLinear")
def _quantize(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """Straight through where a number has a code of its own, nothing where it lies outside of all codes. With the
    product that makes numbers of codes again, scales learn from what rounding and clipping lose."""
    grad, x, scale, zero = grads[0], first(node), node.inputs[1], operand(node, 2)
    assert grad is not None and scale is not None
    codes = b.dtype(node.output)
    if attribute(node, "block_size", 0) or not codes.is_integer:
        raise NotSupported("the gradient of QuantizeLinear by blocks, or to floating-point codes, is not known")
    kind = b.dtype(x)
    wide = [1] * b.rank(x)
    if b.rank(scale) == 1 and b.rank(x) > 0:
        wide[b.axis(node, 1, x)] = b.sizes(scale)[0]
    step = b.Reshape(b.cast(scale, kind), b.whole(*wide))
    ratio = b.Div(x, step)
    place = b.Round(ratio)
    if zero is not None:
        place = b.Add(place, b.Reshape(b.cast(zero, kind), b.whole(*wide)))
    limits = ml_dtypes.iinfo(codes.numpy)
    low, high = b.number(float(limits.min), x), b.number(float(limits.max), x)
    inside = b.And(b.GreaterOrEqual(place, low), b.LessOrEqual(place, high))
    through = b.Div(b.where(inside, b.cast(grad, kind)), step)
    of_scale = b.sum_to(b.Neg(b.Mul(through, ratio)), step)
    return [through, b.cast(b.like(of_scale, scale), b.dtype(scale)), None][: len(node.inputs)]
