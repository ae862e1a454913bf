"""Gradients kept within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidInput
from ranvier.tensor import reductions
from ranvier.tensor.composed import clip
from ranvier.tensor.core import Tensor
from ranvier.tensor.elementwise import abs as size_of
from ranvier.tensor.elementwise import maximum, minimum, sqrt
from ranvier.tensor.manipulate import astype
from ranvier.tensor.state import Parameter


def _given(parameters: Iterable[Parameter] | Parameter) -> list[tuple[Parameter, Tensor]]:
    params = [parameters] if isinstance(parameters, Parameter) else list(parameters)
    return [(param, grad) for param in params if (grad := param.grad) is not None]


def get_total_norm(parameters: Iterable[Parameter] | Parameter, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, as one vector; in float32 at least."""
    grads = [grad for _, grad in _given(parameters)]
    wide = [grad if grad.dtype is DType.float64 else astype(grad, DType.float32) for grad in grads]
    if not wide:
        return Tensor(np.zeros((), np.float32))
    order = float(norm_type)
    if order == math.inf:
        parts = [reductions.max(size_of(grad)) for grad in wide]
    elif order == 2.0:
        parts = [reductions.sum(grad * grad) for grad in wide]
    elif order > 0.0:
        parts = [reductions.sum(size_of(grad) ** order) for grad in wide]
    else:
        raise InvalidInput(f"a norm's order is more than 0, not {norm_type}")
    total = parts[0]
    for part in parts[1:]:
        total = maximum(total, part) if order == math.inf else total + part
    if order == math.inf:
        return total
    return sqrt(total) if order == 2.0 else total ** (1.0 / order)


def clip_grad_norm_(parameters: Iterable[Parameter] | Parameter, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Make gradients smaller, all by the same factor, where their norm is above ``max_norm``; gives that norm."""
    params = [parameters] if isinstance(parameters, Parameter) else list(parameters)
    total = get_total_norm(params, norm_type)
    factor = minimum(max_norm / (total + 1e-6), 1.0)
    for param, grad in _given(params):
        param.grad = grad * astype(factor, grad.dtype)
    return total


def clip_grad_value_(parameters: Iterable[Parameter] | Parameter, clip_value: float) -> None:
    """Keep each element of gradients between ``-clip_value`` and ``clip_value``."""
    for param, grad in _given(parameters):
        param.grad = clip(grad, -float(clip_value), float(clip_value))


_OF_TENSORS = True
