"""Gradients of elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import (
    Backward,
    Grads,
    attribute,
    first,
    gradient,
    needs,
    operand,
    stands_for_numbers,
)

Local = Callable[[Backward, Node, Value, Value], Value]


def _unary(*names: str, domain: str = "") -> Callable[[Local], Local]:
    """Declare an operator by its derivative at x, given x and the result y."""

    def register(local: Local) -> Local:
        @gradient(*names, domain=domain)
        def rule(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
            assert grads[0] is not None
            return [b.Mul(grads[0], local(b, node, first(node), node.output))]

        return local

    return register


def _one_plus(b: Backward, x: Value) -> Value:
    return b.Add(x, b.number(1.0, x))


def _one_minus(b: Backward, x: Value) -> Value:
    return b.Sub(b.number(1.0, x), x)


def _square(b: Backward, x: Value) -> Value:
    return b.Mul(x, x)


def _over(b: Backward, x: Value, number: float = 1.0) -> Value:
    return b.Div(b.number(number, x), x)


def _step(b: Backward, condition: Value, x: Value, yes: float = 1.0, no: float = 0.0) -> Value:
    return b.Where(condition, b.number(yes, x), b.number(no, x))


def _positive(b: Backward, x: Value) -> Value:
    return b.Greater(x, b.number(0.0, x))


@gradient("Identity", "Neg", "Cast", "CastLike", "Dropout")
def _linear(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad = grads[0]
    assert grad is not None
    if node.op == "Identity":
        return [grad]
    if node.op == "Neg":
        return [b.Neg(grad)]
    if node.op == "Dropout":
        return _dropout(b, node, grad)
    if stands_for_numbers(first(node)) or not b.dtype(first(node)).is_float:  # codes keep a gradient of numbers
        return [grad if needs(first(node)) else None]
    return [b.cast(grad, b.dtype(first(node)))]


def _dropout(b: Backward, node: Node, grad: Value) -> Grads:
    """What was dropped has no part in it; what was kept was scaled."""
    if len(node.outputs) < 2:  # it does not drop: where it does, it was given a mask first
        return [grad]
    ratio = operand(node, 1)
    keep = b.number(0.5, grad) if ratio is None else b.Sub(b.number(1.0, grad), b.cast(ratio, b.dtype(grad)))
    kept = b.where(node.outputs[1], grad)
    training = operand(node, 2)
    if training is None:
        return [kept]  # not in training: the mask is all true
    return [b.Where(training, b.Div(kept, keep), kept)]


@gradient("Floor", "Ceil", "Round", "Sign", "Bernoulli", "IsNaN", "IsInf", "Shape", "Size")
def _flat(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    return [None]


@_unary("Abs")
def _abs(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Sign(x)


@_unary("Exp")
def _exp(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return y


@_unary("Log")
def _log(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, x)


@_unary("Sqrt")
def _sqrt(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, y, 0.5)


@_unary("Reciprocal")
def _reciprocal(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Neg(_square(b, y))


@_unary("Sin")
def _sin(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Cos(x)


@_unary("Cos")
def _cos(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Neg(b.Sin(x))


@_unary("Tan")
def _tan(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _one_plus(b, _square(b, y))


@_unary("Asin")
def _asin(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, b.Sqrt(_one_minus(b, _square(b, x))))


@_unary("Acos")
def _acos(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, b.Sqrt(_one_minus(b, _square(b, x))), -1.0)


@_unary("Atan")
def _atan(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, _one_plus(b, _square(b, x)))


@_unary("Sinh")
def _sinh(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Cosh(x)


@_unary("Cosh")
def _cosh(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Sinh(x)


@_unary("Tanh")
def _tanh(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _one_minus(b, _square(b, y))


@_unary("Asinh")
def _asinh(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, b.Sqrt(_one_plus(b, _square(b, x))))


@_unary("Acosh")
def _acosh(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, b.Sqrt(b.Sub(_square(b, x), b.number(1.0, x))))


@_unary("Atanh")
def _atanh(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, _one_minus(b, _square(b, x)))


@_unary("Erf")
def _erf(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Mul(b.number(2.0 / math.sqrt(math.pi), x), b.Exp(b.Neg(_square(b, x))))


@_unary("Sigmoid")
def _sigmoid(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Mul(y, _one_minus(b, y))


@_unary("Relu")
def _relu(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _step(b, _positive(b, y), x)


@_unary("LeakyRelu")
def _leaky(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _step(b, _positive(b, x), x, 1.0, attribute(node, "alpha", 0.01))


@_unary("ThresholdedRelu")
def _thresholded(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _step(b, b.Greater(x, b.number(attribute(node, "alpha", 1.0), x)), x)


@_unary("Elu")
def _elu(b: Backward, node: Node, x: Value, y: Value) -> Value:
    alpha = b.number(attribute(node, "alpha", 1.0), x)
    return b.Where(_positive(b, x), b.number(1.0, x), b.Add(y, alpha))


@_unary("Celu")
def _celu(b: Backward, node: Node, x: Value, y: Value) -> Value:
    alpha = b.number(attribute(node, "alpha", 1.0), x)
    return b.Where(_positive(b, x), b.number(1.0, x), b.Exp(b.Div(x, alpha)))


@_unary("Selu")
def _selu(b: Backward, node: Node, x: Value, y: Value) -> Value:
    gamma = attribute(node, "gamma", 1.05070102214813232421875)
    alpha = attribute(node, "alpha", 1.67326319217681884765625)
    return b.Where(_positive(b, x), b.number(gamma, x), b.Add(y, b.number(gamma * alpha, x)))


@_unary("Softplus")
def _softplus(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return b.Sigmoid(x)


@_unary("Softsign")
def _softsign(b: Backward, node: Node, x: Value, y: Value) -> Value:
    return _over(b, _square(b, _one_plus(b, b.Abs(x))))


@_unary("HardSigmoid")
def _hard_sigmoid(b: Backward, node: Node, x: Value, y: Value) -> Value:
    inside = b.And(b.Greater(y, b.number(0.0, x)), b.Less(y, b.number(1.0, x)))
    return _step(b, inside, x, attribute(node, "alpha", 0.2))


@_unary("HardSwish")
def _hard_swish(b: Backward, node: Node, x: Value, y: Value) -> Value:
    slope = b.Add(b.Div(x, b.number(3.0, x)), b.number(0.5, x))
    inner = b.Where(b.Greater(x, b.number(-3.0, x)), slope, b.number(0.0, x))
    return b.Where(b.Less(x, b.number(3.0, x)), inner, b.number(1.0, x))


@_unary("Mish")
def _mish(b: Backward, node: Node, x: Value, y: Value) -> Value:
    bent = b.Tanh(b.Softplus(x))
    return b.Add(bent, b.Mul(x, b.Mul(_one_minus(b, _square(b, bent)), b.Sigmoid(x))))


@_unary("Swish")
def _swish(b: Backward, node: Node, x: Value, y: Value) -> Value:
    alpha = b.number(attribute(node, "alpha", 1.0), x)
    part = b.Sigmoid(b.Mul(alpha, x))
    return b.Add(part, b.Mul(b.Mul(alpha, x), b.Mul(part, _one_minus(b, part))))


@_unary("Gelu")
def _gelu(b: Backward, node: Node, x: Value, y: Value) -> Value:
    approximate = attribute(node, "approximate", "none")
    if approximate in ("tanh", b"tanh"):
        root, cubic = math.sqrt(2.0 / math.pi), 0.044715
        inner = b.Mul(b.number(root, x), b.Add(x, b.Mul(b.number(cubic, x), b.Mul(x, _square(b, x)))))
        bent = b.Tanh(inner)
        slope = b.Mul(b.number(root, x), _one_plus(b, b.Mul(b.number(3 * cubic, x), _square(b, x))))
        half = b.Mul(b.number(0.5, x), _one_plus(b, bent))
        return b.Add(half, b.Mul(b.Mul(b.number(0.5, x), x), b.Mul(_one_minus(b, _square(b, bent)), slope)))
    below = b.Mul(b.number(0.5, x), _one_plus(b, b.Erf(b.Mul(x, b.number(math.sqrt(0.5), x)))))
    bell = b.Mul(b.number(1.0 / math.sqrt(2 * math.pi), x), b.Exp(b.Mul(b.number(-0.5, x), _square(b, x))))
    return b.Add(below, b.Mul(x, bell))


@gradient("Clip")
def _clip(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """Inside the bounds the number passes; outside, the bound does."""
    grad, x = grads[0], first(node)
    assert grad is not None
    found: list[Value | None] = [None, None, None]
    passes = None
    low, high = operand(node, 1), operand(node, 2)
    if node.version < 11:
        low = b.number(node.attrs["min"], x) if "min" in node.attrs else None
        high = b.number(node.attrs["max"], x) if "max" in node.attrs else None
    for k, bound, compare in ((1, low, b.GreaterOrEqual), (2, high, b.LessOrEqual)):
        if bound is None:
            continue
        inside = compare(x, bound)
        passes = inside if passes is None else b.And(passes, inside)
        if k < len(node.inputs):
            found[k] = b.sum_to(b.Where(inside, b.number(0.0, grad), grad), bound)
    found[0] = grad if passes is None else b.where(passes, grad)
    return found[: len(node.inputs)]


# -- several operands -----------------------------------------------------------------------------------------------


@gradient("Add", "Sub", "Sum", "Mean")
def _sum(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad = grads[0]
    assert grad is not None
    if node.op == "Mean":
        grad = b.Mul(grad, b.number(1.0 / len(node.inputs), grad))
    found: list[Value | None] = []
    for k, value in enumerate(node.inputs):
        assert value is not None
        part = b.sum_to(grad, value)
        found.append(b.Neg(part) if node.op == "Sub" and k == 1 else part)
    return found


@gradient("Mul", "Div")
def _product(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, (x, y) = grads[0], node.inputs
    assert grad is not None and x is not None and y is not None
    if node.op == "Mul":
        return [b.sum_to(b.Mul(grad, y), x), b.sum_to(b.Mul(grad, x), y)]
    left = b.Div(grad, y)
    return [b.sum_to(left, x), b.sum_to(b.Neg(b.Mul(left, node.output)), y)]


@gradient("Pow")
def _pow(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, (x, p) = grads[0], node.inputs
    assert grad is not None and x is not None and p is not None
    power = b.cast(p, b.dtype(x))
    slope = b.Mul(power, b.Pow(x, b.Sub(power, b.number(1.0, x))))
    left = b.sum_to(b.Mul(grad, slope), x)
    if not needs(p):
        return [left, None]
    # the logarithm of what is not positive has no part in it
    logarithm = b.Where(_positive(b, x), b.Log(b.Where(_positive(b, x), x, b.number(1.0, x))), b.number(0.0, x))
    return [left, b.cast(b.sum_to(b.Mul(grad, b.Mul(node.output, logarithm)), p), b.dtype(p))]


@gradient("Max", "Min")
def _extreme(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """To the first of those that are the extreme."""
    grad = grads[0]
    assert grad is not None
    taken: Value | None = None
    found: list[Value | None] = []
    for value in node.inputs:
        assert value is not None
        mine = b.Equal(value, node.output)
        if taken is not None:
            mine = b.And(mine, b.Not(taken))
        found.append(b.sum_to(b.where(mine, grad), value))
        taken = mine if taken is None else b.Or(taken, mine)
    return found


@gradient("Mod")
def _mod(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, (x, y) = grads[0], node.inputs
    assert grad is not None and x is not None and y is not None
    times = b.Div(b.Sub(x, node.output), y)
    return [b.sum_to(grad, x), b.sum_to(b.Neg(b.Mul(grad, b.Round(times))), y)]


@gradient("PRelu")
def _prelu(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, (x, slope) = grads[0], node.inputs
    assert grad is not None and x is not None and slope is not None
    below = b.Less(x, b.number(0.0, x))
    return [b.Where(below, b.Mul(grad, slope), grad), b.sum_to(b.where(below, b.Mul(grad, x)), slope)]


@gradient("Where")
def _where(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, (condition, x, y) = grads[0], node.inputs
    assert grad is not None and condition is not None and x is not None and y is not None
    zero = b.number(0.0, grad)
    return [None, b.sum_to(b.Where(condition, grad, zero), x), b.sum_to(b.Where(condition, zero, grad), y)]
