"""Gradients of reductions, running sums and softmax."""

from __future__ import annotations

import math

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
    if not axes:
        return grad
    sizes, rank = b.sizes(x), b.rank(x)
    kept = [k for k in range(rank) if k not in axes]
    order = [*kept, *axes]
    count = math.prod(sizes[a] for a in axes)
    rows = b.Reshape(b.Transpose(x, perm=order), b.whole(*(sizes[k] for k in kept), count))
    others = b.Mul(_products_before(b, rows, len(kept), 1), _products_before(b, rows, len(kept), -1))
    apart = b.Reshape(others, b.whole(*(sizes[k] for k in order)))
    return b.Mul(grad, b.Transpose(apart, perm=sorted(range(rank), key=order.__getitem__)))


def _shifted(b: Backward, x: Value, axis: int, by: int, direction: int, fill: float) -> Value:
    """Each element ``by`` places further along an axis (back, the other way), and a number where none comes from."""
    rank, by = b.rank(x), min(by, b.sizes(x)[axis])
    pads = [0] * (2 * rank)
    ahead, behind = (axis, rank + axis) if direction > 0 else (rank + axis, axis)
    pads[ahead], pads[behind] = by, -by
    return b.Pad(x, b.whole(*pads), b.number(fill, x))


def _products_before(b: Backward, x: Value, axis: int, direction: int) -> Value:
    """The product of all that comes before each element (after it, the other way): in each turn of twice as many."""
    found, reach = _shifted(b, x, axis, 1, direction, 1.0), 1
    while reach < b.sizes(x)[axis]:
        found = b.Mul(found, _shifted(b, found, axis, reach, direction, 1.0))
        reach *= 2
    return found


@gradient("CumProd")
def _cumprod(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """What comes back to an element is its own gradient, and what comes back to the next one times that one: a running
    sum whose steps are taken together in pairs, then in fours and so on. Nothing is divided by what may be zero."""
    grad, x = grads[0], first(node)
    assert grad is not None
    (axis,) = constant_ints(operand(node, 1), "the axis of CumProd")
    axis = axis % b.rank(x)
    forwards = -1 if attribute(node, "reverse", 0) else 1
    if attribute(node, "exclusive", 0):
        grad = _shifted(b, grad, axis, 1, -forwards, 0.0)
    factor, total, reach = _shifted(b, x, axis, 1, -forwards, 1.0), grad, 1
    while reach < b.sizes(x)[axis]:
        total = b.Add(total, b.Mul(factor, _shifted(b, total, axis, reach, -forwards, 0.0)))
        factor = b.Mul(factor, _shifted(b, factor, axis, reach, -forwards, 1.0))
        reach *= 2
    return [b.Mul(_products_before(b, x, axis, forwards), total), None]


@gradient("CumSum")
def _cumsum(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    reverse = 1 - int(attribute(node, "reverse", 0))
    return [b.CumSum(grads[0], node.inputs[1], exclusive=attribute(node, "exclusive", 0), reverse=reverse), None]


def _softmax_axes(b: Backward, node: Node) -> Value:
    """One axis; before version 13 all from one on, as if they were one."""
    if node.version < 13:
        return b.whole(*range(b.axis(node, 1, first(node)), b.rank(first(node))))
    return b.whole(b.axis(node, -1, first(node)))


@gradient("Softmax")
def _softmax(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, y = grads[0], node.output
    assert grad is not None
    axes = _softmax_axes(b, node)
    return [b.Mul(y, b.Sub(grad, b.ReduceSum(b.Mul(grad, y), axes, keepdims=1)))]


@gradient("LogSoftmax")
def _log_softmax(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, y = grads[0], node.output
    assert grad is not None
    axes = _softmax_axes(b, node)
    return [b.Sub(grad, b.Mul(b.Exp(y), b.ReduceSum(grad, axes, keepdims=1)))]


@gradient("TopK")
def _top_k(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x = grads[0], first(node)
    if grad is None:
        return [None, None]
    axis = b.axis(node, -1, x)
    return [b.ScatterElements(b.zeros(x), node.outputs[1], grad, axis=axis), None]
