"""Operators that work element by element."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.table import (
    ALL,
    ANY,
    BOOL,
    COMPLEX,
    CONTRIB,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Call,
    lowers,
)

# by the name torch has for it, with the types it is for
_UNARY = {
    "Abs": ("abs", NUMBERS | {DType.uint64}),
    "Neg": ("neg", NUMBERS),
    "Floor": ("floor", FLOATS),
    "Ceil": ("ceil", FLOATS),
    "Round": ("round", FLOATS),  # ties to even, as the standard wants
    "Sqrt": ("sqrt", FLOATS),
    "Sign": ("sign", NUMBERS),
    "Not": ("logical_not", BOOL),
    "IsNaN": ("isnan", FLOATS | BOOL),
    "Exp": ("exp", FLOATS),
    "Log": ("log", FLOATS),
    "Sin": ("sin", FLOATS),
    "Cos": ("cos", FLOATS),
    "Tan": ("tan", FLOATS),
    "Asin": ("asin", FLOATS),
    "Acos": ("acos", FLOATS),
    "Atan": ("atan", FLOATS),
    "Sinh": ("sinh", FLOATS),
    "Cosh": ("cosh", FLOATS),
    "Tanh": ("tanh", FLOATS),
    "Asinh": ("asinh", FLOATS),
    "Acosh": ("acosh", FLOATS),
    "Atanh": ("atanh", FLOATS),
    "Erf": ("erf", FLOATS),
    "Sigmoid": ("sigmoid", FLOATS),
    "Reciprocal": ("reciprocal", FLOATS),
    "BitwiseNot": ("bitwise_not", INTEGERS | {DType.uint64}),
}
_SIGN = -(1 << 63)
_WITH_64 = NUMBERS | {DType.uint64}
_BINARY = {
    "Add": ("add", _WITH_64, 7),
    "Sub": ("sub", _WITH_64, 7),
    "Mul": ("mul", _WITH_64, 7),
    "And": ("logical_and", BOOL, 7),
    "Or": ("logical_or", BOOL, 7),
    "Xor": ("logical_xor", BOOL, 7),
    "Equal": ("eq", ALL, 7),
    "BitwiseAnd": ("bitwise_and", _WITH_64, 18),
    "BitwiseOr": ("bitwise_or", _WITH_64, 18),
    "BitwiseXor": ("bitwise_xor", _WITH_64, 18),
    "Atan2": ("atan2", FLOATS, 1),
}
_COMPARISONS = {"Less": ("lt", 7), "LessOrEqual": ("le", 12), "Greater": ("gt", 7), "GreaterOrEqual": ("ge", 12)}


def _plain(name: str) -> Any:
    return lambda call, *operands: getattr(torch, name)(*operands)


def _compared(name: str) -> Any:
    def function(call: Call, a: Any, b: Any) -> Any:
        if call.operand_dtype(0) is DType.uint64:  # they come as bits of signed numbers
            a, b = a ^ _SIGN, b ^ _SIGN
        return getattr(torch, name)(a, b)

    return function


for _op, (_name, _since) in _COMPARISONS.items():
    lowers(_op, since=_since, types=ALL)(_compared(_name))
for _op, (_name, _types) in _UNARY.items():
    lowers(_op, types=_types)(_plain(_name))
for _op, (_name, _types, _since) in _BINARY.items():
    lowers(_op, since=_since, types=_types)(_plain(_name))


def _aligned(call: Call, a: Any, b: Any) -> Any:
    """The second operand as operators before version 7 broadcast it: along axes from ``axis`` on."""
    if not call.attr("broadcast", 0):
        return b
    axis = call.attr("axis")
    if axis is None or b.ndim == 0:
        return b
    return b.reshape(*b.shape, *[1] * (a.ndim - axis - b.ndim))


def _old(name: str) -> Any:
    return lambda call, a, b: getattr(torch, name)(a, _aligned(call, a, b))


for _op, _name in {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "Pow": "pow",
    "And": "logical_and",
    "Or": "logical_or",
    "Xor": "logical_xor",
    "Equal": "eq",
    "Less": "lt",
    "Greater": "gt",
}.items():
    lowers(_op, since=1, types=FLOATS | BOOL)(_old(_name))


@lowers("Identity", types=ANY | COMPLEX)
def identity(call: Call, x: Any) -> Any:
    return x


@lowers("After", domain="ranvier", types=ANY | COMPLEX)
def after(call: Call, x: Any, event: Any) -> Any:
    """Steps run in order, so what comes after another does so by itself."""
    return x


def _draws(node: Node) -> str | None:
    training = node.input(2)
    if training is not None and not (training.const is not None and not training.const.numpy().any()):
        return "training draws random numbers"
    if node.version < 7 and not node.attrs.get("is_test", 0):
        return "training draws random numbers"
    return None


@lowers("Dropout", types=FLOATS | BOOL, refuses=_draws)
def dropout(call: Call, x: Any, ratio: Any = None, training: Any = None) -> Any:
    if not call.wants(1):
        return x
    return x, torch.ones_like(x, dtype=torch.bool)


@lowers("Div", since=7, types=NUMBERS)
def divide(call: Call, a: Any, b: Any) -> Any:
    if a.dtype.is_floating_point:
        return torch.div(a, b)
    return torch.div(a, _nonzero(call, b), rounding_mode="trunc")


def _nonzero(call: Call, divisor: Any) -> Any:
    zero = divisor == 0
    call.require(~zero.any(), "a whole number is divided by zero")
    return divisor.masked_fill(zero, 1)


@lowers("Mod", since=10, types=NUMBERS)
def mod(call: Call, a: Any, b: Any) -> Any:
    if not a.dtype.is_floating_point:
        b = _nonzero(call, b)
    return torch.fmod(a, b) if call.flag("fmod") else torch.remainder(a, b)


@lowers("Pow", since=7, types=NUMBERS)
def power(call: Call, x: Any, y: Any) -> Any:
    if not x.dtype.is_floating_point and y.dtype.is_floating_point:
        return torch.pow(x.to(torch.float64), y.to(torch.float64)).trunc()
    if x.dtype.is_floating_point:
        return torch.pow(x, y.to(x.dtype))
    # torch has no whole power with a negative exponent, which leaves only the fractions of 1 and -1
    whole = torch.pow(x.to(torch.int64), y.to(torch.int64).clamp(min=0))
    odd = torch.where(y % 2 == 0, torch.ones_like(x), x)
    return torch.where(y < 0, torch.where(x.abs() == 1, odd, torch.zeros_like(x)).to(torch.int64), whole)


def _folded(function: Any, operands: tuple[Any, ...]) -> Any:
    result = operands[0]
    for operand in operands[1:]:
        result = function(result, operand)
    return result


@lowers("Max", types=NUMBERS)
def maximum(call: Call, *operands: Any) -> Any:
    return _folded(torch.maximum, operands)


@lowers("Min", types=NUMBERS)
def minimum(call: Call, *operands: Any) -> Any:
    return _folded(torch.minimum, operands)


@lowers("Sum", wide=True)
def total(call: Call, *operands: Any) -> Any:
    return _folded(torch.add, operands)


@lowers("Mean", wide=True)
def mean(call: Call, *operands: Any) -> Any:
    return _folded(torch.add, operands) / len(operands)


@lowers("Where", since=9, types=ANY | COMPLEX, moves=True)
def where(call: Call, condition: Any, x: Any, y: Any) -> Any:
    return torch.where(condition, x, y)


@lowers("Clip", since=11, types=NUMBERS)
def clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    if low is not None:
        x = torch.maximum(x, low.reshape(()).to(x.dtype))
    return x if high is None else torch.minimum(x, high.reshape(()).to(x.dtype))


@lowers("Clip", since=1)
def clip_by_attributes(call: Call, x: Any) -> Any:
    low, high = call.attr("min"), call.attr("max")
    return x if low is None and high is None else torch.clamp(x, low, high)


@lowers("IsInf", since=10, types=FLOATS | BOOL)
def is_inf(call: Call, x: Any) -> Any:
    if not call.flag("detect_negative", 1):
        return torch.isposinf(x) if call.flag("detect_positive", 1) else torch.zeros_like(x, dtype=torch.bool)
    return torch.isinf(x) if call.flag("detect_positive", 1) else torch.isneginf(x)


@lowers("BitShift", since=11, types=INTEGERS | {DType.uint64})
def bit_shift(call: Call, x: Any, by: Any) -> Any:
    bits = call.dtype().bits
    left = call.attr("direction") == "LEFT"
    if call.dtype() is DType.uint64:  # as bits of signed numbers, where a negative count is one far too large
        far, by = (by < 0) | (by >= bits), by.clamp(0, bits - 1)
        if left:
            return torch.where(far, torch.zeros_like(x), torch.bitwise_left_shift(x, by))
        rest = torch.bitwise_right_shift(x, 1) & ((1 << 63) - 1)  # the sign goes with the first place
        return torch.where(far, 0, torch.where(by == 0, x, torch.bitwise_right_shift(rest, (by - 1).clamp(min=0))))
    shift = torch.bitwise_left_shift if left else torch.bitwise_right_shift
    y = shift(x, by.clamp(max=bits - 1))  # of a signed number, the sign stays however far the others are shifted out
    return torch.where(by >= bits, torch.zeros_like(x), y) if left or not x.dtype.is_signed else y


@lowers("BitCast", types=ANY, moves=True)
def bit_cast(call: Call, x: Any) -> Any:
    return x.contiguous().view(call.result_type())


# -- activations ------------------------------------------------------------------------------------------------------


@lowers("Relu", types=NUMBERS)
def relu(call: Call, x: Any) -> Any:
    return torch.relu(x)


@lowers("LeakyRelu")
def leaky_relu(call: Call, x: Any) -> Any:
    return functional.leaky_relu(x, call.attr("alpha", 0.01))


@lowers("PRelu", types=NUMBERS)
def prelu(call: Call, x: Any, slope: Any) -> Any:
    if call.version < 7 and slope.ndim == 1 and x.ndim > 1 and slope.shape[0] > 1:
        slope = slope.reshape(-1, *[1] * (x.ndim - 2))
    return torch.where(x < 0, x * slope, x)


@lowers("ThresholdedRelu")
def thresholded_relu(call: Call, x: Any) -> Any:
    return torch.where(x > call.attr("alpha", 1.0), x, torch.zeros_like(x))


@lowers("Elu", wide=True)
def elu(call: Call, x: Any) -> Any:
    return functional.elu(x, call.attr("alpha", 1.0))


@lowers("Selu", wide=True)
def selu(call: Call, x: Any) -> Any:
    new = call.version >= 6
    alpha = call.attr("alpha", 1.67326319217681884765625 if new else 1.6732)
    gamma = call.attr("gamma", 1.05070102214813232421875 if new else 1.0507)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


@lowers("Celu", since=12, wide=True)
def celu(call: Call, x: Any) -> Any:
    return functional.celu(x, call.attr("alpha", 1.0))


@lowers("HardSigmoid", wide=True)
def hard_sigmoid(call: Call, x: Any) -> Any:
    return torch.clamp(call.attr("alpha", 0.2) * x + call.attr("beta", 0.5), 0, 1)


@lowers("HardSwish", since=14, wide=True)
def hard_swish(call: Call, x: Any) -> Any:
    return x * torch.clamp(x / 6 + 0.5, 0, 1)


@lowers("Softplus", wide=True)
def softplus(call: Call, x: Any) -> Any:
    return torch.logaddexp(x, torch.zeros_like(x))


@lowers("Softsign", wide=True)
def softsign(call: Call, x: Any) -> Any:
    return x / (1 + x.abs())


@lowers("Mish", since=18, wide=True)
def mish(call: Call, x: Any) -> Any:
    return x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x)))


@lowers("Swish", since=24, wide=True)
def swish(call: Call, x: Any) -> Any:
    return x * torch.sigmoid(call.attr("alpha", 1.0) * x)


@lowers("QuickGelu", domain=CONTRIB, wide=True)
def quick_gelu(call: Call, x: Any) -> Any:
    return x * torch.sigmoid(call.attr("alpha", 1.702) * x)


@lowers("SwiGLU", wide=True)
def swiglu(call: Call, gate: Any, linear: Any) -> Any:
    return gate * torch.sigmoid(call.attr("alpha", 1.0) * gate) * linear


@lowers("Gelu", since=20, wide=True)
def gelu(call: Call, x: Any) -> Any:
    return functional.gelu(x, approximate=call.attr("approximate", "none"))


@lowers("Gelu", domain=CONTRIB, wide=True)
def contrib_gelu(call: Call, x: Any) -> Any:
    return functional.gelu(x)


@lowers("BiasGelu", domain=CONTRIB, wide=True)
def bias_gelu(call: Call, x: Any, bias: Any) -> Any:
    return functional.gelu(x + bias)


@lowers("FastGelu", domain=CONTRIB, wide=True)
def fast_gelu(call: Call, x: Any, bias: Any = None) -> Any:
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


@lowers("ScaledSiLU", domain=CONTRIB, wide=True)
def scaled_silu(call: Call, x: Any, factor: Any = None) -> Any:
    scaled = x * (call.attr("alpha", 1.0) if factor is None else factor.reshape(()))
    return scaled * torch.sigmoid(scaled)


@lowers("Shrink", since=9, types=NUMBERS, wide=True)
def shrink(call: Call, x: Any) -> Any:
    limit, bias = call.attr("lambd", 0.5), call.attr("bias", 0.0)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, torch.zeros_like(x)))


@lowers("Affine", wide=True)
def affine(call: Call, x: Any) -> Any:
    return x * call.attr("alpha", 1.0) + call.attr("beta", 0.0)


@lowers("Scale", wide=True)
def scale(call: Call, x: Any) -> Any:
    return x * call.attr("scale", 1.0)


@lowers("ScaledTanh", wide=True)
def scaled_tanh(call: Call, x: Any) -> Any:
    return call.attr("alpha", 1.0) * torch.tanh(call.attr("beta", 1.0) * x)


@lowers("ParametricSoftplus", wide=True)
def parametric_softplus(call: Call, x: Any) -> Any:
    scaled = call.attr("beta", 1.0) * x
    return call.attr("alpha", 1.0) * torch.logaddexp(scaled, torch.zeros_like(scaled))


@lowers("ImageScaler", wide=True)
def image_scaler(call: Call, x: Any) -> Any:
    y = x * call.attr("scale", 1.0)
    bias = call.attr("bias")
    return y + call.constant(lambda: np.asarray(bias, np.float32).reshape(-1, 1, 1)).to(y.dtype) if bias else y
