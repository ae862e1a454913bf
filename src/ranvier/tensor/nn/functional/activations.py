"""Activation functions, by PyTorch's names. Each is one operator where there is one, so that kernels take it along."""

from __future__ import annotations

from typing import Any

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor import elementwise, reductions
from ranvier.tensor.composed import clip
from ranvier.tensor.core import Tensor, as_tensor, call
from ranvier.tensor.expr import spec
from ranvier.tensor.manipulate import reshape
from ranvier.tensor.nn.functional.shape import parts
from ranvier.tensor.nn.precision import raised


def _one(op: str, input: Any, **attrs: Any) -> Tensor:
    own = as_tensor(input)
    return call(spec(op, tuple(sorted(attrs.items()))), (own,), own.dtype, own.shape)


def relu(input: Any) -> Tensor:
    return elementwise.relu(input)


def relu6(input: Any) -> Tensor:
    return clip(input, 0.0, 6.0)


def leaky_relu(input: Any, negative_slope: float = 0.01) -> Tensor:
    return _one("LeakyRelu", input, alpha=float(negative_slope))


def prelu(input: Any, weight: Any) -> Tensor:
    """One slope for all, or one for each channel (axis 1)."""
    own, slopes = as_tensor(input), as_tensor(weight)
    if slopes.size > 1 and own.ndim > 1:
        slopes = reshape(slopes, (slopes.size, *(1,) * (own.ndim - 2)))
    return call(spec("PRelu"), (own, slopes), own.dtype, own.shape)


def elu(input: Any, alpha: float = 1.0) -> Tensor:
    return _one("Elu", input, alpha=float(alpha))


def selu(input: Any) -> Tensor:
    return _one("Selu", input)


def celu(input: Any, alpha: float = 1.0) -> Tensor:
    return _one("Celu", input, alpha=float(alpha))


def gelu(input: Any, approximate: str = "none") -> Tensor:
    if approximate not in ("none", "tanh"):
        raise InvalidInput(f"gelu is 'none' (exact) or 'tanh', not {approximate!r}")
    return elementwise.gelu(input) if approximate == "none" else _one("Gelu", input, approximate="tanh")


def silu(input: Any) -> Tensor:
    own = as_tensor(input)
    return elementwise.multiply(own, elementwise.sigmoid(own))


def mish(input: Any) -> Tensor:
    return _one("Mish", input)


def sigmoid(input: Any) -> Tensor:
    return elementwise.sigmoid(input)


def tanh(input: Any) -> Tensor:
    return elementwise.tanh(input)


def tanhshrink(input: Any) -> Tensor:
    own = as_tensor(input)
    return elementwise.subtract(own, elementwise.tanh(own))


def softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, and x itself beyond the threshold."""
    own = as_tensor(input)
    scaled = own if beta == 1.0 else own * beta
    curved = elementwise.softplus(scaled)
    curved = curved if beta == 1.0 else curved / beta
    return elementwise.where(scaled > threshold, own, curved)


def logsigmoid(input: Any) -> Tensor:
    return elementwise.negative(elementwise.softplus(elementwise.negative(input)))


def softsign(input: Any) -> Tensor:
    return _one("Softsign", input)


def hardsigmoid(input: Any) -> Tensor:
    return _one("HardSigmoid", input, alpha=1.0 / 6.0, beta=0.5)


def hardswish(input: Any) -> Tensor:
    return _one("HardSwish", input)


def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return clip(input, float(min_val), float(max_val))


def threshold(input: Any, threshold: float, value: float) -> Tensor:
    own = as_tensor(input)
    return elementwise.where(own > threshold, own, value)


def softmax(input: Any, dim: int = -1) -> Tensor:
    return reductions.softmax(raised(as_tensor(input)), axis=dim)


def log_softmax(input: Any, dim: int = -1) -> Tensor:
    return reductions.log_softmax(raised(as_tensor(input)), axis=dim)


def softmin(input: Any, dim: int = -1) -> Tensor:
    return softmax(elementwise.negative(input), dim)


def glu(input: Any, dim: int = -1) -> Tensor:
    """The first half along an axis, times the sigmoid of the second."""
    own = as_tensor(input)
    if own.shape[dim] % 2:
        raise ShapeMismatch(f"glu halves axis {dim}, which has {own.shape[dim]} elements")
    first, second = parts(own, 2, dim)
    return first * elementwise.sigmoid(second)


_OF_TENSORS = True
