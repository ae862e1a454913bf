"""Lazy tensors and what is built on them: functions, random numbers, gradients."""

from __future__ import annotations

from ranvier.tensor import (
    autodiff,
    composed,
    core,  # first: the others need the class
    creation,
    elementwise,
    fft,
    host,
    indexing,
    info,
    linalg,
    manipulate,
    random,
    reductions,
    searching,
    state,
    types,
)
from ranvier.tensor.autodiff import grad, jvp, stop_gradient, value_and_grad, vjp
from ranvier.tensor.core import Tensor
from ranvier.tensor.custom import checkpoint, custom_gradient
from ranvier.tensor.jitted import jit, realise
from ranvier.tensor.state import Parameter, State
from ranvier.tensor.tracing import no_grad

__all__ = [
    "Parameter",
    "State",
    "Tensor",
    "autodiff",
    "checkpoint",
    "composed",
    "core",
    "creation",
    "custom_gradient",
    "elementwise",
    "fft",
    "grad",
    "host",
    "indexing",
    "info",
    "jit",
    "jvp",
    "linalg",
    "manipulate",
    "no_grad",
    "random",
    "realise",
    "reductions",
    "searching",
    "state",
    "stop_gradient",
    "types",
    "value_and_grad",
    "vjp",
]
_OF_TENSORS = True
