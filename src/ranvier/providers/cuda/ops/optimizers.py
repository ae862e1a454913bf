"""One step of an optimizer as an operator: groups of values, gradients and states, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranvier.dtypes import DType
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.table import FLOATS, TRAINING, Call, lowers

_TYPES = FLOATS | {DType.int64}


def _grouped(inputs: tuple[Any, ...], kinds: int, step: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
    count = len(inputs) // kinds
    updated = [step(*inputs[k::count]) for k in range(count)]
    return tuple(result for group in zip(*updated) for result in group)


def _number(x: Any) -> Any:
    return x.reshape(()).to(torch.float64)


@lowers("Adagrad", domain=TRAINING, types=_TYPES)
def adagrad(call: Call, rate: Any, count: Any, *inputs: Any) -> Any:
    factor = _number(rate) / (1 + _number(count) * call.attr("decay_factor", 0.0))
    decay, epsilon = call.attr("norm_coefficient", 0.0), call.attr("epsilon", 1e-6)

    def step(x: Any, g: Any, h: Any) -> tuple[Any, ...]:
        gradient = decay * x + g
        squares = h + gradient * gradient
        return x - factor.to(x.dtype) * gradient / (torch.sqrt(squares) + epsilon), squares

    return _grouped(inputs, 3, step)


@lowers("Adam", domain=TRAINING, types=_TYPES)
def adam(call: Call, rate: Any, count: Any, *inputs: Any) -> Any:
    alpha, beta, epsilon = call.attr("alpha", 0.9), call.attr("beta", 0.999), call.attr("epsilon", 1e-6)
    decay, after = call.attr("norm_coefficient", 0.0), call.attr("norm_coefficient_post", 0.0)
    steps = _number(count)
    safe = steps.clamp(min=1)
    correction = torch.sqrt(1 - beta**safe) / (1 - alpha**safe)
    factor = _number(rate) * torch.where(steps > 0, correction, torch.ones_like(correction))

    def step(x: Any, g: Any, v: Any, h: Any) -> tuple[Any, ...]:
        gradient = decay * x + g
        first = alpha * v + (1 - alpha) * gradient
        second = beta * h + (1 - beta) * gradient * gradient
        moved = x - factor.to(x.dtype) * first / (torch.sqrt(second) + epsilon)
        return (1 - after) * moved, first, second

    return _grouped(inputs, 4, step)


@lowers("Momentum", domain=TRAINING, types=_TYPES)
def momentum(call: Call, rate: Any, count: Any, *inputs: Any) -> Any:
    alpha, decay = call.attr("alpha"), call.attr("norm_coefficient")
    steps = _number(count)
    share = torch.where(steps > 0, torch.full_like(steps, call.attr("beta")), torch.ones_like(steps))
    factor = _number(rate)

    def step(x: Any, g: Any, v: Any) -> tuple[Any, ...]:
        gradient = decay * x + g
        speed = alpha * v + share.to(x.dtype) * gradient
        direction = speed if call.attr("mode") == "standard" else gradient + alpha * speed
        return x - factor.to(x.dtype) * direction, speed

    return _grouped(inputs, 3, step)
