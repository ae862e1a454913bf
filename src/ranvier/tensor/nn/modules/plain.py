"""Layers without weights of their own, or with one: activations, pooling, dropout, shapes, losses.

Most of them are a function of :mod:`ranvier.tensor.nn.functional` with its arguments kept; one class for each, so that
models print as what they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput
from ranvier.tensor.core import Tensor
from ranvier.tensor.manipulate import reshape
from ranvier.tensor.nn import functional as F
from ranvier.tensor.nn.generator import Generator
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.state import Parameter, State


class Applied(Module):
    """A function of the input with its other arguments kept."""

    _function: Callable[..., Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        kwargs.pop("inplace", None)  # values never change here
        names = list(inspect.signature(type(self)._function).parameters)[1:]
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} arguments; {len(args)} were given")
        self._given = dict(zip(names, args)) | kwargs
        unknown = [name for name in self._given if name not in names]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no argument {unknown[0]!r}; there are: {', '.join(names)}")

    def forward(self, input: Any) -> Tensor:
        return type(self)._function(input, **self._given)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._given.items())


def _layer(name: str, function: Callable[..., Tensor]) -> type[Applied]:
    body = {"_function": staticmethod(function), "__doc__": function.__doc__, "__module__": __name__}
    return type(name, (Applied,), body)


ReLU, ReLU6 = _layer("ReLU", F.relu), _layer("ReLU6", F.relu6)
LeakyReLU, ELU, SELU, CELU = (
    _layer(name, function)
    for name, function in (("LeakyReLU", F.leaky_relu), ("ELU", F.elu), ("SELU", F.selu), ("CELU", F.celu))
)
GELU, SiLU, Mish = _layer("GELU", F.gelu), _layer("SiLU", F.silu), _layer("Mish", F.mish)
Sigmoid, Tanh, Softplus = _layer("Sigmoid", F.sigmoid), _layer("Tanh", F.tanh), _layer("Softplus", F.softplus)
LogSigmoid, Softsign = _layer("LogSigmoid", F.logsigmoid), _layer("Softsign", F.softsign)
Tanhshrink, Threshold = _layer("Tanhshrink", F.tanhshrink), _layer("Threshold", F.threshold)
Hardsigmoid, Hardswish = _layer("Hardsigmoid", F.hardsigmoid), _layer("Hardswish", F.hardswish)
Hardtanh, GLU = _layer("Hardtanh", F.hardtanh), _layer("GLU", F.glu)
Softmax, LogSoftmax, Softmin = (
    _layer("Softmax", F.softmax),
    _layer("LogSoftmax", F.log_softmax),
    _layer("Softmin", F.softmin),
)
MaxPool1d, MaxPool2d, MaxPool3d = (
    _layer(f"MaxPool{k + 1}d", each) for k, each in enumerate((F.max_pool1d, F.max_pool2d, F.max_pool3d))
)
AvgPool1d, AvgPool2d, AvgPool3d = (
    _layer(f"AvgPool{k + 1}d", each) for k, each in enumerate((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d))
)
AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d = (
    _layer(f"AdaptiveAvgPool{k + 1}d", each)
    for k, each in enumerate((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d))
)
AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d = (
    _layer(f"AdaptiveMaxPool{k + 1}d", each)
    for k, each in enumerate((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d))
)
Upsample, PixelShuffle = _layer("Upsample", F.interpolate), _layer("PixelShuffle", F.pixel_shuffle)


class PReLU(Module):
    """Negative numbers by a slope that is learned."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        super().__init__()
        self.num_parameters = num_parameters
        self.weight = Parameter(np.full(num_parameters, init, np.float32))

    def forward(self, input: Any) -> Tensor:
        return F.prelu(input, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"


class Flatten(Module):
    """All axes from one on as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Any) -> Tensor:
        return F.flatten(input, self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """One axis as several."""

    def __init__(self, dim: int, unflattened_size: tuple[int, ...]) -> None:
        super().__init__()
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, input: Tensor) -> Tensor:
        at = self.dim % input.ndim
        return reshape(input, (*input.shape[:at], *self.unflattened_size, *input.shape[at + 1 :]))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


class _Dropout(Module):
    _function: Callable[..., Tensor] = staticmethod(F.dropout)

    def __init__(self, p: float = 0.5, inplace: bool = False, *, generator: Generator | None = None) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise InvalidInput(f"not a probability: {p}")
        self.p, self.generator = p, generator

    def forward(self, input: Any) -> Tensor:
        return type(self)._function(input, self.p, self.training, generator=self.generator)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout(_Dropout):
    """Elements set to 0 at random while training. Numbers come from ``generator``, or the default one."""


class Dropout1d(_Dropout):
    """Whole channels of [batch, channels, length] set to 0 at random while training."""

    _function = staticmethod(F.dropout1d)


class Dropout2d(_Dropout):
    """Whole channels of [batch, channels, height, width] set to 0 at random while training."""

    _function = staticmethod(F.dropout2d)


class Dropout3d(_Dropout):
    """Whole channels of [batch, channels, depth, height, width] set to 0 at random while training."""

    _function = staticmethod(F.dropout3d)


class Loss(Module):
    """A loss with its arguments kept; weights among them move with the module."""

    _function: Callable[..., Tensor]
    _inputs = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        names = list(inspect.signature(type(self)._function).parameters)[self._inputs :]
        given = dict(zip(names, args)) | kwargs
        unknown = [name for name in given if name not in names]
        if unknown or len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {', '.join(names)}")
        self._given = {}
        for name, value in given.items():
            if isinstance(value, Tensor | np.ndarray):
                self.register_buffer(name, value if isinstance(value, State) else State(value))
            else:
                self._given[name] = value

    def forward(self, *inputs: Any) -> Tensor:
        return type(self)._function(*inputs, **self._given, **self._buffers)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._given.items())


def _loss(name: str, function: Callable[..., Tensor], inputs: int = 2) -> type[Loss]:
    body = {"_function": staticmethod(function), "_inputs": inputs, "__doc__": function.__doc__, "__module__": __name__}
    return type(name, (Loss,), body)


CrossEntropyLoss, NLLLoss = _loss("CrossEntropyLoss", F.cross_entropy), _loss("NLLLoss", F.nll_loss)
MSELoss, L1Loss = _loss("MSELoss", F.mse_loss), _loss("L1Loss", F.l1_loss)
SmoothL1Loss, HuberLoss = _loss("SmoothL1Loss", F.smooth_l1_loss), _loss("HuberLoss", F.huber_loss)
BCELoss = _loss("BCELoss", F.binary_cross_entropy)
BCEWithLogitsLoss = _loss("BCEWithLogitsLoss", F.binary_cross_entropy_with_logits)
KLDivLoss = _loss("KLDivLoss", F.kl_div)
GaussianNLLLoss = _loss("GaussianNLLLoss", F.gaussian_nll_loss, 3)
PoissonNLLLoss = _loss("PoissonNLLLoss", F.poisson_nll_loss)
CosineEmbeddingLoss = _loss("CosineEmbeddingLoss", F.cosine_embedding_loss, 3)
TripletMarginLoss = _loss("TripletMarginLoss", F.triplet_margin_loss, 3)
HingeEmbeddingLoss = _loss("HingeEmbeddingLoss", F.hinge_embedding_loss)
MarginRankingLoss = _loss("MarginRankingLoss", F.margin_ranking_loss, 3)


class CosineSimilarity(Applied):
    """The cosine of the angle between vectors along an axis."""

    _function = staticmethod(F.cosine_similarity)

    def __init__(self, dim: int = 1, eps: float = 1e-8) -> None:
        super().__init__(dim=dim, eps=eps)

    def forward(self, x1: Any, x2: Any) -> Tensor:  # type: ignore[override]
        return F.cosine_similarity(x1, x2, **self._given)


_OF_TENSORS = True
