"""What is done to a model's parameters and their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ranvier.errors import ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor
from ranvier.tensor.manipulate import concat, reshape
from ranvier.tensor.optim.clipping import clip_grad_norm_, clip_grad_value_, get_total_norm
from ranvier.tensor.state import Parameter

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
    "parameters_to_vector",
    "vector_to_parameters",
]


def parameters_to_vector(parameters: Iterable[Parameter]) -> Tensor:
    """All numbers of all parameters, one after the other."""
    return concat([reshape(param.value, (-1,)) for param in parameters], axis=0)


def vector_to_parameters(vec: Any, parameters: Iterable[Parameter]) -> None:
    """The other way round."""
    own, params = as_tensor(vec), list(parameters)
    if own.shape != (sum(param.size for param in params),):
        raise ShapeMismatch(f"a vector of shape {list(own.shape)} does not fill these parameters")
    start = 0
    for param in params:
        param.assign(reshape(own[start : start + param.size], param.shape))
        start += param.size


_OF_TENSORS = True
