"""Operators that work element by element."""

from __future__ import annotations

import math
from typing import Any

from ranvier.graph.ir import Node
from ranvier.providers.mlx.library import mx
from ranvier.providers.mlx.table import ALL, BOOL, FLOATS, INTEGERS, NUMBERS, Call, lowers

# by the name mlx has for it; those mlx computes in the operand's own type well enough
_UNARY = {
    "Abs": ("abs", NUMBERS),
    "Neg": ("negative", NUMBERS),
    "Floor": ("floor", FLOATS),
    "Ceil": ("ceil", FLOATS),
    "Round": ("round", FLOATS),  # ties to even, as the standard wants
    "Sqrt": ("sqrt", FLOATS),
    "Sign": ("sign", NUMBERS),
    "Not": ("logical_not", BOOL),
    "BitwiseNot": ("bitwise_invert", INTEGERS),
    "IsNaN": ("isnan", FLOATS | BOOL),
}
_UNARY_WIDE = {
    "Exp": "exp",
    "Log": "log",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "arcsin",
    "Acos": "arccos",
    "Atan": "arctan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Tanh": "tanh",
    "Asinh": "arcsinh",
    "Acosh": "arccosh",
    "Atanh": "arctanh",
    "Erf": "erf",
    "Sigmoid": "sigmoid",
    "Reciprocal": "reciprocal",
}
_BINARY = {
    "Add": ("add", NUMBERS, 7),
    "Sub": ("subtract", NUMBERS, 7),
    "Mul": ("multiply", NUMBERS, 7),
    "And": ("logical_and", BOOL, 7),
    "Or": ("logical_or", BOOL, 7),
    "Xor": ("not_equal", BOOL, 7),
    "Equal": ("equal", ALL, 7),
    "Less": ("less", NUMBERS | BOOL, 7),
    "LessOrEqual": ("less_equal", NUMBERS | BOOL, 12),
    "Greater": ("greater", NUMBERS | BOOL, 7),
    "GreaterOrEqual": ("greater_equal", NUMBERS | BOOL, 12),
    "BitwiseAnd": ("bitwise_and", INTEGERS, 18),
    "BitwiseOr": ("bitwise_or", INTEGERS, 18),
    "BitwiseXor": ("bitwise_xor", INTEGERS, 18),
}


def _plain(name: str) -> Any:
    return lambda call, *operands: getattr(mx, name)(*operands)


for _op, (_name, _types) in _UNARY.items():
    lowers(_op, types=_types)(_plain(_name))
for _op, _name in _UNARY_WIDE.items():
    lowers(_op, wide=True)(_plain(_name))
for _op, (_name, _types, _since) in _BINARY.items():
    lowers(_op, since=_since, types=_types)(_plain(_name))


@lowers("Identity", types=ALL)
def identity(call: Call, x: Any) -> Any:
    return x


def _is_training(node: Node) -> str | None:
    if node.input(2) is not None:
        return "training draws random numbers"
    return None if len(node.outputs) == 1 else "its mask is not lowered to mlx"


@lowers("Dropout", since=7, refuses=_is_training)
def dropout(call: Call, x: Any, ratio: Any = None) -> Any:
    return x


@lowers("Div", since=7)
def divide(call: Call, a: Any, b: Any) -> Any:
    return mx.divide(a, b)


@lowers("Div", since=14, types=NUMBERS)
def divide_any(call: Call, a: Any, b: Any) -> Any:
    if mx.issubdtype(a.dtype, mx.floating):
        return mx.divide(a, b)
    divisor = _nonzero(call, b)
    if mx.issubdtype(a.dtype, mx.unsignedinteger):
        return mx.floor_divide(a, divisor)
    # the standard cuts towards zero; a floored quotient is one too low where there is a rest and the signs differ
    quotient = mx.floor_divide(a, divisor)
    short = mx.logical_and(a - quotient * divisor != 0, (a < 0) != (divisor < 0))
    return quotient + short.astype(a.dtype)


def _nonzero(call: Call, divisor: Any) -> Any:
    """A processor traps where a whole number is divided by zero."""
    zero = divisor == 0
    call.require(mx.logical_not(mx.any(zero)), "a whole number is divided by zero")
    return mx.where(zero, mx.ones_like(divisor), divisor)


def _fmod_of_floats(node: Node) -> str | None:
    return None if node.attrs.get("fmod", 0) == 0 else "fmod is not lowered to mlx"


@lowers("Mod", since=10, types=INTEGERS, refuses=_fmod_of_floats)
def mod(call: Call, a: Any, b: Any) -> Any:
    divisor = _nonzero(call, b)
    if mx.issubdtype(a.dtype, mx.unsignedinteger):
        return mx.remainder(a, divisor)
    rest = a - mx.floor_divide(a, divisor) * divisor
    return rest


def _same_types(node: Node) -> str | None:
    a, b = node.inputs[:2]
    same = a is not None and b is not None and getattr(a.type, "dtype", 0) == getattr(b.type, "dtype", 1)
    return None if same else "its operands have different types"


@lowers("Pow", since=7, refuses=_same_types, wide=True)
def power(call: Call, x: Any, y: Any) -> Any:
    return mx.power(x, y)


@lowers("Max", since=8, types=NUMBERS)
def maximum(call: Call, *operands: Any) -> Any:
    return _folded(mx.maximum, operands)


@lowers("Min", since=8, types=NUMBERS)
def minimum(call: Call, *operands: Any) -> Any:
    return _folded(mx.minimum, operands)


@lowers("Sum", since=8, wide=True)
def total(call: Call, *operands: Any) -> Any:
    return _folded(mx.add, operands)


@lowers("Mean", since=8, wide=True)
def mean(call: Call, *operands: Any) -> Any:
    return _folded(mx.add, operands) / len(operands)


def _folded(function: Any, operands: tuple[Any, ...]) -> Any:
    result = operands[0]
    for operand in operands[1:]:
        result = function(result, operand)
    return result


@lowers("Where", since=9, types=ALL)
def where(call: Call, condition: Any, x: Any, y: Any) -> Any:
    return mx.where(condition, x, y)


@lowers("Clip", since=11, types=NUMBERS)
def clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    if low is not None:
        x = mx.maximum(x, low)
    return x if high is None else mx.minimum(x, high)


@lowers("Clip", since=6)
def clip_by_attributes(call: Call, x: Any) -> Any:
    low, high = call.attr("min"), call.attr("max")
    return clip(call, x, low, high)


@lowers("IsInf", since=10, types=FLOATS | BOOL)
def is_inf(call: Call, x: Any) -> Any:
    found = mx.isinf(x)
    if not call.attr("detect_negative", 1):
        found = mx.logical_and(found, x > 0)
    return found if call.attr("detect_positive", 1) else mx.logical_and(found, x < 0)


@lowers("Relu", types=NUMBERS)
def relu(call: Call, x: Any) -> Any:
    return mx.maximum(x, mx.zeros_like(x))


@lowers("LeakyRelu", since=6, wide=True)
def leaky_relu(call: Call, x: Any) -> Any:
    return mx.where(x < 0, x * call.attr("alpha", 0.01), x)


@lowers("PRelu", since=7, wide=True)
def prelu(call: Call, x: Any, slope: Any) -> Any:
    return mx.where(x < 0, x * slope, x)


@lowers("ThresholdedRelu", since=10)
def thresholded_relu(call: Call, x: Any) -> Any:
    return mx.where(x > call.attr("alpha", 1.0), x, mx.zeros_like(x))


@lowers("Elu", since=6, wide=True)
def elu(call: Call, x: Any) -> Any:
    return mx.where(x < 0, call.attr("alpha", 1.0) * mx.expm1(mx.minimum(x, 0)), x)


@lowers("Selu", since=6, wide=True)
def selu(call: Call, x: Any) -> Any:
    alpha, gamma = call.attr("alpha", 1.67326319217681884765625), call.attr("gamma", 1.05070102214813232421875)
    return gamma * mx.where(x > 0, x, alpha * mx.expm1(mx.minimum(x, 0)))


@lowers("Celu", since=12, wide=True)
def celu(call: Call, x: Any) -> Any:
    alpha = call.attr("alpha", 1.0)
    return mx.maximum(x, 0) + mx.minimum(alpha * mx.expm1(mx.minimum(x, 0) / alpha), 0)


@lowers("HardSigmoid", since=6, wide=True)
def hard_sigmoid(call: Call, x: Any) -> Any:
    return mx.clip(call.attr("alpha", 0.2) * x + call.attr("beta", 0.5), 0, 1)


@lowers("HardSwish", since=14, wide=True)
def hard_swish(call: Call, x: Any) -> Any:
    return x * mx.clip(x / 6 + 0.5, 0, 1)


@lowers("Softplus", since=1, wide=True)
def softplus(call: Call, x: Any) -> Any:
    return mx.logaddexp(x, mx.zeros_like(x))


@lowers("Softsign", since=1, wide=True)
def softsign(call: Call, x: Any) -> Any:
    return x / (1 + mx.abs(x))


@lowers("Mish", since=18, wide=True)
def mish(call: Call, x: Any) -> Any:
    return x * mx.tanh(mx.logaddexp(x, mx.zeros_like(x)))


@lowers("Swish", since=24, wide=True)
def swish(call: Call, x: Any) -> Any:
    return x * mx.sigmoid(call.attr("alpha", 1.0) * x)


@lowers("Gelu", since=20, wide=True)
def gelu(call: Call, x: Any) -> Any:
    if call.attr("approximate", "none") == "tanh":
        return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))


@lowers("Shrink", since=9, wide=True)
def shrink(call: Call, x: Any) -> Any:
    limit, bias = call.attr("lambd", 0.5), call.attr("bias", 0.0)
    return mx.where(x < -limit, x + bias, mx.where(x > limit, x - bias, mx.zeros_like(x)))
