"""Activation functions, and the experimental image and scaling operators of opset 1 that old models still hold.

Compound formulas run in float32 for half-precision operands and round once (``@in_float32``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, TensorType, Type
from ranvier.ops.operands import in_float32, same_dtype
from ranvier.ops.registry import Array, OpDef, TypeCall, op
from ranvier.ops.tensor.special import erf

Ints = Sequence[int]
ELEMENTWISE = ("elementwise",)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x); an overflow of the exponential ends in the right limit, 0."""
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    """log(1 + e^x), with the exponential of a value that is never positive."""
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def exponential_tail(x: Array) -> Array:
    """e^x - 1 for negative ``x`` and 0 for positive ``x``: the part that ELU and SELU share."""
    return np.expm1(np.minimum(x, 0))


# -- piecewise linear -----------------------------------------------------------------------------------------------


@op("Relu", since=1, traits=ELEMENTWISE)
def relu(x: Array, *, consumed_inputs: Ints | None = None, out: Array | None = None) -> Array:
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        out = None
    return np.maximum(x, np.zeros((), x.dtype), out=out)


@op("LeakyRelu", since=1, traits=ELEMENTWISE)
@in_float32
def leaky_relu(x: Array, *, alpha: float = 0.01, consumed_inputs: Ints | None = None) -> Array:
    return np.where(x < 0, x * alpha, x)


@op("ThresholdedRelu", since=1, traits=ELEMENTWISE)
@in_float32
def thresholded_relu(x: Array, *, alpha: float = 1.0) -> Array:
    return np.where(x > alpha, x, np.zeros((), x.dtype))


@op("HardSigmoid", since=1, traits=ELEMENTWISE)
@in_float32
def hard_sigmoid(x: Array, *, alpha: float = 0.2, beta: float = 0.5, consumed_inputs: Ints | None = None) -> Array:
    return np.minimum(np.maximum(x * alpha + beta, 0), 1)


@op("HardSwish", since=14, traits=ELEMENTWISE)
@in_float32
def hard_swish(x: Array) -> Array:
    return x * np.minimum(np.maximum(x / 6 + 0.5, 0), 1)


@op("Shrink", since=9, traits=ELEMENTWISE)
@in_float32
def shrink(x: Array, *, bias: float = 0.0, lambd: float = 0.5) -> Array:
    wide = x.astype(np.float64) if x.dtype.kind in "iu" else x  # the attributes are fractions, whatever x is
    zero = np.zeros((), wide.dtype)
    shrunk = np.where(wide < -lambd, wide + bias, np.where(wide > lambd, wide - bias, zero))
    return shrunk.astype(x.dtype, copy=False)


# -- exponential ----------------------------------------------------------------------------------------------------


@op("Sigmoid", since=1, traits=ELEMENTWISE)
@in_float32
def sigmoid_(x: Array, *, consumed_inputs: Ints | None = None) -> Array:
    return sigmoid(x)


@op("Elu", since=1, traits=ELEMENTWISE)
@in_float32
def elu(x: Array, *, alpha: float = 1.0, consumed_inputs: Ints | None = None) -> Array:
    return np.where(x < 0, alpha * exponential_tail(x), x)


@op("Celu", since=12, traits=ELEMENTWISE)
@in_float32
def celu(x: Array, *, alpha: float = 1.0) -> Array:
    if alpha == 0:
        raise InvalidValue("Celu: alpha must not be 0", op="Celu")
    return np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha))


@op("Selu", since=6, traits=ELEMENTWISE)
@in_float32
def selu(x: Array, *, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323) -> Array:
    return _selu(x, alpha, gamma)


@op("Selu", since=1, traits=ELEMENTWISE)
@in_float32
def selu_1(x: Array, *, alpha: float = 1.6732, gamma: float = 1.0507, consumed_inputs: Ints | None = None) -> Array:
    """The first version had the constants rounded to five digits."""
    return _selu(x, alpha, gamma)


def _selu(x: Array, alpha: float, gamma: float) -> Array:
    return np.where(x < 0, alpha * gamma * exponential_tail(x), gamma * x)


@op("Softplus", since=1, traits=ELEMENTWISE)
@in_float32
def softplus_(x: Array) -> Array:
    return softplus(x)


@op("Softsign", since=1, traits=ELEMENTWISE)
@in_float32
def softsign(x: Array) -> Array:
    return np.asarray(x / (1 + np.abs(x)))


@op("Mish", since=18, traits=ELEMENTWISE)
@in_float32
def mish(x: Array) -> Array:
    return x * np.tanh(softplus(x))


@op("Swish", since=24, traits=ELEMENTWISE)
@in_float32
def swish(x: Array, *, alpha: float = 1.0) -> Array:
    return x * sigmoid(alpha * x)


@op("SwiGLU", since=28, traits=ELEMENTWISE)
@in_float32
def swiglu(gate: Array, linear: Array, *, alpha: float = 1.0) -> Array:
    same_dtype("SwiGLU", gate, linear)
    if gate.shape != linear.shape:
        raise ShapeMismatch(f"SwiGLU: shapes must be equal, got {list(gate.shape)} and {list(linear.shape)}")
    return gate * sigmoid(alpha * gate) * linear


@op("Gelu", since=20, traits=ELEMENTWISE)
@in_float32
def gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "none":
        gate = erf(x * math.sqrt(0.5))
    elif approximate == "tanh":
        gate = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    else:
        raise InvalidValue(f"Gelu: approximate must be 'none' or 'tanh', got {approximate!r}", op="Gelu")
    return np.asarray(0.5 * x * (1 + gate))


# -- experimental operators of opset 1, which the standard's package no longer describes ------------------------------


@op("ParametricSoftplus", since=1, traits=ELEMENTWISE)
@in_float32
def parametric_softplus(x: Array, *, alpha: float, beta: float) -> Array:
    return alpha * softplus(beta * x)


@op("ScaledTanh", since=1, traits=ELEMENTWISE)
@in_float32
def scaled_tanh(x: Array, *, alpha: float, beta: float) -> Array:
    return alpha * np.tanh(beta * x)


@op("Affine", since=1, traits=ELEMENTWISE)
@in_float32
def affine(x: Array, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
    return alpha * x + beta


@op("Scale", since=1, traits=ELEMENTWISE)
@in_float32
def scale_(x: Array, *, scale: float = 1.0) -> Array:
    return x * scale


@op("ImageScaler", since=1)
@in_float32
def image_scaler(x: Array, *, scale: float = 1.0, bias: Sequence[float] = ()) -> Array:
    """One factor for all pixels of an [N, C, H, W] batch, and one offset per channel."""
    if x.ndim != 4:
        raise ShapeMismatch(f"ImageScaler: expected [N, C, H, W], got shape {list(x.shape)}")
    if not bias:
        return x * scale
    if len(bias) != x.shape[1]:
        raise ShapeMismatch(f"ImageScaler: {len(bias)} bias values for {x.shape[1]} channels")
    return np.asarray(x * scale + np.asarray(bias, x.dtype)[:, None, None])


def _crop_window(height: int, width: int, border: Ints, scale: Ints | None) -> tuple[int, int, int, int]:
    """Top, left, bottom and right of the window that Crop keeps. ``border`` is (left, top, right, bottom)."""
    if len(border) != 4:
        raise InvalidValue(f"Crop: border needs 4 values, got {list(border)}", op="Crop")
    left, top, right, bottom = border
    if scale is None:
        window = top, left, height - bottom, width - right
    elif len(scale) == 2:
        window = top, left, top + scale[0], left + scale[1]
    else:
        raise InvalidValue(f"Crop: scale needs 2 values, got {list(scale)}", op="Crop")
    if not (0 <= window[0] <= window[2] <= height and 0 <= window[1] <= window[3] <= width):
        raise InvalidValue(f"Crop: window {list(window)} does not lie in an image of {height} by {width}", op="Crop")
    return window


@op("Crop", since=1)
def crop(x: Array, *, border: Ints = (0, 0, 0, 0), scale: Ints | None = None) -> Array:
    """A window of each image: what ``border`` leaves, or ``scale`` (height, width) pixels from its top left."""
    if x.ndim != 4:
        raise ShapeMismatch(f"Crop: expected [N, C, H, W], got shape {list(x.shape)}")
    top, left, bottom, right = _crop_window(x.shape[2], x.shape[3], border, scale)
    return x[:, :, top:bottom, left:right].copy()


def _like_operand(call: TypeCall) -> list[Type | None]:
    return [call.type(0)]


_LIKE_OPERAND: tuple[OpDef, ...] = (parametric_softplus, scaled_tanh, affine, scale_, image_scaler)
for _definition in _LIKE_OPERAND:
    _definition.infer(_like_operand)


@crop.infer
def _crop_type(call: TypeCall) -> list[Type | None]:
    kind = call.type(0)
    if not isinstance(kind, TensorType) or kind.shape is None or len(kind.shape) != 4:
        return [TensorType(kind.dtype) if isinstance(kind, TensorType) else None]
    batch, channels, height, width = kind.shape
    size: tuple[Dim, Dim] = (None, None)
    if isinstance(height, int) and isinstance(width, int):
        top, left, bottom, right = _crop_window(height, width, call.attr("border", (0, 0, 0, 0)), call.attr("scale"))
        size = (bottom - top, right - left)
    elif call.attr("scale") is not None:
        size = tuple(call.attr("scale"))
    return [TensorType(kind.dtype, (batch, channels, *size))]
