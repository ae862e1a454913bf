"""Gradients of ScatterElements and ScatterND, whatever they do with what lies there already."""

from __future__ import annotations

from collections.abc import Callable

from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, gradient

Put = Callable[[Value, Value, str], Value]  # numbers put into a tensor at the node's places
Take = Callable[[Value], Value]  # what lies there


@gradient("ScatterElements", "Scatter")
def _scatter_elements(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    x, indices = node.inputs[:2]
    assert x is not None
    axis = b.axis(node, 0, x)
    return _gradients(
        b,
        node,
        grads[0],
        lambda into, numbers, how: b.ScatterElements(into, indices, numbers, axis=axis, reduction=how),
        lambda of: b.GatherElements(of, indices, axis=axis),
    )


@gradient("ScatterND")
def _scatter_nd(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    indices = node.inputs[1]
    return _gradients(
        b,
        node,
        grads[0],
        lambda into, numbers, how: b.ScatterND(into, indices, numbers, reduction=how),
        lambda of: b.GatherND(of, indices),
    )


def _gradients(b: Backward, node: Node, grad: Value | None, put: Put, take: Take) -> Grads:
    x, _, updates = node.inputs
    assert grad is not None and x is not None and updates is not None
    how = attribute(node, "reduction", "none")
    how = how.decode() if isinstance(how, bytes) else how
    if how == "none":
        return [put(grad, b.zeros(updates), "none"), None, take(grad)]
    if how == "add":
        return [grad, None, take(grad)]
    if how in ("max", "min"):
        return _of_the_chosen(b, node, grad, put, take)
    if how == "mul":
        return _of_products(b, x, updates, grad, put, take)
    raise NotSupported(f"the gradient of {node.op} with reduction {how!r} is not known")


def _of_the_chosen(b: Backward, node: Node, grad: Value, put: Put, take: Take) -> Grads:
    """To whatever is the result; equal ones share."""
    x, _, updates = node.inputs
    assert x is not None and updates is not None
    kind = b.dtype(grad)
    own = b.cast(b.Equal(x, node.output), kind)
    theirs = b.cast(b.Equal(updates, take(node.output)), kind)
    share = b.Div(grad, put(own, theirs, "add"))
    return [b.Mul(share, own), None, b.Mul(take(share), theirs)]


def _of_products(b: Backward, x: Value, updates: Value, grad: Value, put: Put, take: Take) -> Grads:
    """Times all other factors; a factor of zero is left out and counted, so that nothing is divided by it."""
    zero = b.Equal(updates, b.number(0.0, updates))
    safe = b.Where(zero, b.number(1.0, updates), updates)
    zeros = take(put(b.zeros(x), b.cast(zero, b.dtype(x)), "add"))
    alone = b.LessOrEqual(zeros, b.cast(zero, b.dtype(x)))  # no factor but perhaps this one is zero
    others = b.Div(take(b.Mul(grad, put(x, safe, "mul"))), safe)
    return [b.Mul(grad, put(b.filled(1.0, x), updates, "mul")), None, b.where(alone, others)]
