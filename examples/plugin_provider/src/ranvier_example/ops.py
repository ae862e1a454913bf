"""The operator ``example.signal::LeakyIntegrator``: ``y[t] = decay * y[t - 1] + x[t]`` along the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

import ranvier as rv
from ranvier.errors import InvalidValue
from ranvier.graph.types import Type
from ranvier.ops.registry import TypeCall

DOMAIN = "example.signal"
Array = np.ndarray[Any, Any]


def leaky_integrator(x: Array, *, decay: float = 0.9) -> Array:
    """The reference: it defines what the operator means, and runs it where no provider does better."""
    check(decay)
    y = np.array(x)
    for t in range(1, x.shape[-1] if x.ndim else 0):
        y[..., t] += x.dtype.type(decay) * y[..., t - 1]
    return y


def check(decay: float) -> None:
    if not -1 < decay < 1:
        raise InvalidValue(f"LeakyIntegrator: decay must be between -1 and 1, got {decay}", op="LeakyIntegrator")


def types(call: TypeCall) -> list[Type | None]:
    """The result has the type of the operand, so memory for it can be planned before the run."""
    return [call.type(0)]


def register() -> None:
    rv.register_op(DOMAIN, "LeakyIntegrator", leaky_integrator, infer=types)
