"""Gradients of reductions, running sums and softmax."""

from __future__ import annotations

import math

from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, constant_ints, first, gradient, operand

_AXES_AS_INPUT = {"ReduceSum": 13}  # the others since 18


def _axes(b: Backward, node: Node) -> tuple[int, ...] | None:
    """The reduced axes; None where nothing is reduced at all."""
    x = first(node)
    if node.version >= _AXES_AS_INPUT.get(node.op, 18):
        axes = constant_ints(operand(node, 1), f"axes of {node.op}")
    else:
        axes = tuple(node.attrs.get("axes", ()))
    rank = b.rank(x)
    if not axes:
        return None if attribute(node, "noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(a + rank if a < 0 else a for a in axes))


def _kept(b: Backward, node: Node, value: Value, axes: tuple[int, ...]) -> Value:
    """A result as it would be with its reduced axes kept."""
    if attribute(node, "keepdims", 1) or not axes:
        return value
    return b.Unsqueeze(value, b.whole(*axes))


def _count(b: Backward, x: Value, axes: tuple[int, ...], like: Value) -> Value:
    dims = b.dims(x)
    known = [d for d in (dims[a] for a in axes) if isinstance(d, int)]
    if len(known) == len(axes):
        return b.number(float(math.prod(known)), like)
    sizes = b.Gather(b.Shape(x), b.whole(*axes))
    return b.Cast(b.ReduceProd(sizes, keepdims=0), to=b.dtype(like).onnx)


@gradient(
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
def _reduce(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x = grads[0], first(node)
    assert grad is not None
    axes = _axes(b, node)
    y = node.output
    if axes is not None:
        grad, y = _kept(b, node, grad, axes), _kept(b, node, y, axes)
    axes = axes or ()
    spread = _spread(b, node, grad, x, y, axes)
    return [spread, None][: len(node.inputs)]


def _spread(b: Backward, node: Node, grad: Value, x: Value, y: Value, axes: tuple[int, ...]) -> Value:
    op = node.op
    if op == "ReduceSum":
        return b.Expand(grad, b.shape(x))
    if op == "ReduceMean":
        return b.Expand(b.Div(grad, _count(b, x, axes, grad)), b.shape(x))
    if op in ("ReduceMax", "ReduceMin"):
        chosen = b.Cast(b.Equal(x, y), to=b.dtype(grad).onnx)
        share = b.ReduceSum(chosen, b.whole(*axes), keepdims=1) if axes else chosen
        return b.Mul(chosen, b.Div(grad, share))  # equals share it
    if op == "ReduceL1":
        return b.Mul(grad, b.Sign(x))
    if op == "ReduceL2":
        length = b.Where(b.Equal(y, b.number(0.0, y)), b.number(1.0, y), y)
        return b.Mul(b.Div(grad, length), x)
    if op == "ReduceSumSquare":
        return b.Mul(grad, b.Mul(b.number(2.0, x), x))
    if op == "ReduceLogSum":
        return b.Expand(b.Div(grad, b.Exp(y)), b.shape(x))
    if op == "ReduceLogSumExp":
        return b.Mul(grad, b.Exp(b.Sub(x, y)))
    return _products_of_others(b, grad, x, axes)


def _products_of_others(b: Backward, grad: Value, x: Value, axes: tuple[int, ...]) -> Value:
    """For a product each factor's slope is the product of the others: running products from both ends, because dividing
    by the factor fails where it is zero."""
    if len(axes) != 1:
        raise NotSupported("the gradient of ReduceProd is known for one axis at a time")
    size = b.dims(x)[axes[0]]
    if not isinstance(size, int) or size > 64:
        raise NotSupported("the gradient of ReduceProd is known for up to 64 factors")
    axis = axes[0]
    parts = [b.Slice(x, b.whole(k), b.whole(k + 1), b.whole(axis)) for k in range(size)]
    left, right = [b.number(1.0, x)], [b.number(1.0, x)]
    for part in parts[:-1]:
        left.append(b.Mul(left[-1], part))
    for part in parts[:0:-1]:
        right.append(b.Mul(right[-1], part))
    others = [b.Mul(a, z) for a, z in zip(left, reversed(right))]
    wide = [b.Mul(grad, each) for each in others]
    return b.node("Concat", wide, {"axis": axis}).output


@gradient("CumSum")
def _cumsum(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    reverse = 1 - int(attribute(node, "reverse", 0))
    return [b.CumSum(grads[0], node.inputs[1], exclusive=attribute(node, "exclusive", 0), reverse=reverse), None]


def _softmax_axis(b: Backward, node: Node) -> int:
    if node.version < 13:
        raise NotSupported(f"the gradient of {node.op} is known from opset 13 on")
    return b.axis(node, -1, first(node))


@gradient("Softmax")
def _softmax(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, y = grads[0], node.output
    assert grad is not None
    axis = b.whole(_softmax_axis(b, node))
    return [b.Mul(y, b.Sub(grad, b.ReduceSum(b.Mul(grad, y), axis, keepdims=1)))]


@gradient("LogSoftmax")
def _log_softmax(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, y = grads[0], node.output
    assert grad is not None
    axis = b.whole(_softmax_axis(b, node))
    return [b.Sub(grad, b.Mul(b.Exp(y), b.ReduceSum(grad, axis, keepdims=1)))]


@gradient("TopK")
def _top_k(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x = grads[0], first(node)
    if grad is None:
        return [None, None]
    axis = b.axis(node, -1, x)
    return [b.ScatterElements(b.zeros(x), node.outputs[1], grad, axis=axis), None]
