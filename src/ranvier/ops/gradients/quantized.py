"""Gradients through rounding to codes, as if nothing had been rounded: so that a model learns to be quantized."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, first, gradient, operand


def spread(b: Backward, node: Node, parameter: Value, x: Value) -> Value:
    """A scale or zero point as it is broadcast to a tensor: one, one for each place of an axis, or one for a block."""
    block, axis = int(attribute(node, "block_size", 0)), b.axis(node, 1, x) if b.rank(x) else 0
    if block:
        return b.Gather(parameter, b.constant(_blocks(b, x, axis, block)), axis=axis)
    wide = [1] * b.rank(x)
    if b.rank(parameter) == 1 and b.rank(x) > 0:
        wide[axis] = b.sizes(parameter)[0]
    return b.Reshape(parameter, b.whole(*wide))


def _blocks(b: Backward, x: Value, axis: int, block: int) -> np.ndarray:
    """To which block each place of an axis belongs."""
    return np.arange(b.sizes(x)[axis], dtype=np.int64) // block


@gradient("QuantizeLinear")
def _quantize(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """Straight through where a number has a code of its own, nothing where it lies outside of all codes. With the
    product that makes numbers of codes again, scales learn from what rounding and clipping lose."""
    grad, x, scale, zero = grads[0], first(node), node.inputs[1], operand(node, 2)
    assert grad is not None and scale is not None
    codes = b.dtype(node.output)
    kind = b.dtype(x)
    step = spread(b, node, b.cast(scale, kind), x)
    ratio = b.Div(x, step)
    place = b.Round(ratio) if codes.is_integer else ratio
    if zero is not None:
        place = b.Add(place, b.cast(spread(b, node, zero, x), kind))
    limits = ml_dtypes.iinfo(codes.numpy) if codes.is_integer else ml_dtypes.finfo(codes.numpy)
    low, high = b.number(float(limits.min), x), b.number(float(limits.max), x)
    inside = b.And(b.GreaterOrEqual(place, low), b.LessOrEqual(place, high))
    through = b.Div(b.where(inside, b.cast(grad, kind)), step)
    of_step = b.Neg(b.Mul(through, ratio))
    block = int(attribute(node, "block_size", 0))
    if block:
        axis, rank = b.axis(node, 1, x), b.rank(x)
        places = _blocks(b, x, axis, block)
        owned = (places[:, None] == np.arange(b.sizes(scale)[axis])).astype(kind.numpy)
        order = [*(k for k in range(rank) if k != axis), axis]
        summed = b.MatMul(b.Transpose(of_step, perm=order), b.constant(owned))
        of_scale = b.Transpose(summed, perm=[int(k) for k in np.argsort(order)])
    else:
        of_scale = b.like(b.sum_to(of_step, step), scale)
    return [through, b.cast(of_scale, b.dtype(scale)), None][: len(node.inputs)]
