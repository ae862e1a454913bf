"""Resize as gathers and products with small matrices, one for each axis: it is linear and treats axes one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, attribute, constant_array, first, operand
from ranvier.ops.gradients.parts import made_of
from ranvier.ops.nn.resample import AxisSampling, resize_steps, scaled_steps


@made_of("Resize", "Upsample")
def _resize(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    y = x
    steps = _steps(b, node)
    for step in steps:
        y = _resampled(b, y, step)
    for step in steps:
        if step.outside is not None and step.outside.any():
            wide = step.outside.reshape([-1 if k == step.axis else 1 for k in range(b.rank(x))])
            y = b.Where(b.constant(wide), b.number(float(attribute(node, "extrapolation_value", 0.0)), x), y)
    return [y]


def _steps(b: Backward, node: Node) -> list[AxisSampling]:
    """How the operator itself samples, axis by axis."""
    sizes = b.sizes(first(node))
    attrs: dict[str, Any] = {
        key: value.decode() if isinstance(value, bytes) else value for key, value in node.attrs.items()
    }
    if node.op == "Upsample" or node.version < 11:
        if "height_scale" in attrs:
            scales = [1.0, 1.0, attrs["height_scale"], attrs["width_scale"]]
        else:
            given = attrs["scales"] if "scales" in attrs else constant_array(operand(node, 1), f"scales of {node.op}")
            scales = np.asarray(given).reshape(-1).tolist()
        return scaled_steps(sizes, scales, attrs.get("mode", "nearest"), node.op)
    attrs.pop("extrapolation_value", None)
    operands = [
        None if (value := operand(node, k)) is None else constant_array(value, f"{what} of Resize")
        for k, what in ((1, "the roi"), (2, "scales"), (3, "sizes"))
    ]
    return resize_steps(sizes, *operands, **attrs)[1]


def _resampled(b: Backward, x: Value, step: AxisSampling) -> Value:
    if step.same:
        return x
    if step.weights is None:
        return b.Gather(x, b.constant(step.index.astype(np.int64)), axis=step.axis)
    old, rank, axis = b.sizes(x)[step.axis], b.rank(x), step.axis
    weights = np.zeros((old, len(step.index)))
    np.add.at(weights, (step.index.T, np.arange(len(step.index))), step.weights.T)
    order = [*(k for k in range(rank) if k != axis), axis]
    turned = x if axis == rank - 1 else b.Transpose(x, perm=order)
    y = b.MatMul(turned, b.constant(weights.astype(b.dtype(x).numpy)))
    return y if axis == rank - 1 else b.Transpose(y, perm=[int(k) for k in np.argsort(order)])
