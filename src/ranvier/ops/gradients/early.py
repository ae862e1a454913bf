"""Operators that the standard dropped or adopted later, and rarer ones that fill or choose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, constant_ints, first, gradient, operand
from ranvier.ops.gradients.parts import made_of

MICROSOFT = "com.microsoft"


# -- dropped ----------------------------------------------------------------------------------------------------------


def _times(b: Backward, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else b.Mul(x, b.number(factor, x))


def _number(node: Node, name: str, default: float = 1.0) -> float:
    return float(attribute(node, name, default))


@made_of("Affine")
def _affine(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    return [b.Add(_times(b, x, _number(node, "alpha")), b.number(_number(node, "beta", 0.0), x))]


@made_of("Scale")
def _scale(b: Backward, node: Node) -> Sequence[Value]:
    return [b.Mul(first(node), b.number(_number(node, "scale"), first(node)))]


@made_of("ParametricSoftplus", "ScaledTanh")
def _scaled_bend(b: Backward, node: Node) -> Sequence[Value]:
    bend = b.Tanh if node.op == "ScaledTanh" else b.Softplus
    inner = _times(b, first(node), _number(node, "beta"))
    return [b.Mul(bend(inner), b.number(_number(node, "alpha"), inner))]


@made_of("ImageScaler")
def _image_scaler(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    bias = np.asarray(attribute(node, "bias", None) or [0.0], b.dtype(x).numpy).reshape(-1, 1, 1)
    return [b.Add(_times(b, x, _number(node, "scale")), b.constant(bias))]


@made_of("Crop")
def _crop(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    left, top, right, bottom = (int(n) for n in attribute(node, "border", None) or (0, 0, 0, 0))
    scale = attribute(node, "scale", None)
    height, width = b.sizes(x)[2:]
    down, across = (height - bottom, width - right) if scale is None else (top + int(scale[0]), left + int(scale[1]))
    return [b.Slice(x, b.whole(top, left), b.whole(down, across), b.whole(2, 3))]


# -- adopted later ----------------------------------------------------------------------------------------------------


@made_of(
    "DequantizeLinear", "GridSample", "QuantizeLinear", "Range", "SimplifiedLayerNormalization", "Trilu",
    domain=MICROSOFT,
)  # fmt: skip
def _as_the_standard_has_it(b: Backward, node: Node) -> Sequence[Value]:
    return b.node(node.op, list(node.inputs), dict(node.attrs), outputs=len(node.outputs)).outputs


@made_of("GatherND", domain=MICROSOFT)
def _gather_nd(b: Backward, node: Node) -> Sequence[Value]:
    indices = node.inputs[1]
    assert indices is not None
    return [b.GatherND(first(node), b.cast(indices, DType.int64))]


@made_of("TorchEmbedding", domain=MICROSOFT)
def _embedding(b: Backward, node: Node) -> Sequence[Value]:
    return [b.Gather(first(node), node.inputs[1], axis=0)]


@made_of("Pad", domain=MICROSOFT)
def _pad(b: Backward, node: Node) -> Sequence[Value]:
    pads, fill = constant_ints(node.inputs[1], "pads"), operand(node, 2)
    value = None if fill is None else b.Reshape(fill, b.constant(np.zeros(0, np.int64)))
    return [b.node("Pad", [first(node), b.whole(*pads), value], dict(node.attrs)).output]


@made_of("ExpandDims", domain=MICROSOFT)
def _expand_dims(b: Backward, node: Node) -> Sequence[Value]:
    return [b.Unsqueeze(first(node), b.whole(*constant_ints(node.inputs[1], "the axis of ExpandDims")))]


# -- filling and choosing ---------------------------------------------------------------------------------------------


@gradient("Range")
def _range(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """A beginning and steps; where it ends changes none of its numbers."""
    grad = grads[0]
    assert grad is not None
    count = b.Squeeze(b.shape(node.output), b.whole(0))
    zero, one = (b.constant(np.asarray(n, np.int64)) for n in (0, 1))
    steps = b.cast(b.node("Range", [zero, count, one], {}).output, b.dtype(grad))
    return [b.ReduceSum(grad, keepdims=0), None, b.ReduceSum(b.Mul(grad, steps), keepdims=0)]


@gradient("OneHot")
def _one_hot(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """Of the two numbers it is filled with."""
    grad = grads[0]
    assert grad is not None
    marks = b.constant(np.array([0, 1], b.dtype(grad).numpy))
    chosen = b.node("OneHot", [*node.inputs[:2], marks], dict(node.attrs), version=node.version).output
    one = b.Reshape(b.ReduceSum(b.Mul(grad, chosen), keepdims=0), b.whole(1))
    rest = b.Sub(b.Reshape(b.ReduceSum(grad, keepdims=0), b.whole(1)), one)
    return [None, None, b.node("Concat", [rest, one], {"axis": 0}).output]


@gradient("TensorScatter")
def _tensor_scatter(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """What was written over has none, what was written has what lies there now."""
    grad, past, update, starts = grads[0], first(node), node.inputs[1], operand(node, 2)
    assert grad is not None and update is not None
    kept = b.node("TensorScatter", [grad, b.zeros(update), starts], dict(node.attrs)).output
    axis = b.axis(node, -2, past)
    rank, length, capacity = b.rank(past), b.sizes(update)[axis], b.sizes(past)[axis]
    batch = b.sizes(past)[0]
    steps = b.constant(np.broadcast_to(np.arange(length, dtype=np.int64), (batch, length)).copy())
    places = steps if starts is None else b.Add(steps, b.Unsqueeze(b.cast(starts, DType.int64), b.whole(1)))
    if attribute(node, "mode", "linear") in ("circular", b"circular"):
        places = b.Mod(places, b.constant(np.asarray(capacity, np.int64)))
    order = [0, axis, *(k for k in range(1, rank) if k != axis)]
    taken = b.GatherND(b.Transpose(grad, perm=order), b.Unsqueeze(places, b.whole(2)), batch_dims=1)
    return [kept, b.Transpose(taken, perm=[int(k) for k in np.argsort(order)]), None][: len(node.inputs)]
