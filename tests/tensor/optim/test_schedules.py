"""Schedules against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn, optim
from ranvier.errors import InvalidInput
from ranvier.optim import lr_scheduler as schedules


def optimizer(lr: float = 0.8) -> optim.Optimizer:
    return optim.SGD([nn.Parameter(np.ones(1, np.float32))], lr=lr, momentum=0.9)


def wave(k: float) -> float:
    return (1 + math.cos(math.pi * k)) / 2


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[int], float]]] = {
    "step": (lambda o: schedules.StepLR(o, 3, 0.5), lambda k: 0.5 ** (k // 3)),
    "milestones": (lambda o: schedules.MultiStepLR(o, [7, 2], 0.1), lambda k: 0.1 ** ((k >= 2) + (k >= 7))),
    "exponential": (lambda o: schedules.ExponentialLR(o, 0.9), lambda k: 0.9**k),
    "constant": (lambda o: schedules.ConstantLR(o, 0.25, 4), lambda k: 0.25 if k < 4 else 1.0),
    "linear": (lambda o: schedules.LinearLR(o, 0.1, 1.0, 4), lambda k: min(1.0, 0.1 + 0.9 * k / 4)),
    "polynomial": (lambda o: schedules.PolynomialLR(o, 8, 2.0), lambda k: (1 - min(k, 8) / 8) ** 2),
    "cosine": (lambda o: schedules.CosineAnnealingLR(o, 10, 0.08), lambda k: 0.1 + 0.9 * wave(k / 10)),
    "restarts": (
        lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, 2),
        lambda k: wave(k / 2) if k < 2 else wave((k - 2) / 4) if k < 6 else wave((k - 6) / 8),
    ),
    "warm-up": (
        lambda o: schedules.WarmupCosineLR(o, 3, 11),
        lambda k: (k + 1) / 3 if k < 3 else wave(min(k - 3, 8) / 8),
    ),
    "lambda": (lambda o: schedules.LambdaLR(o, lambda k: 1 / (k + 1)), lambda k: 1 / (k + 1)),
    "sequence": (
        lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, 0.1, 1.0, 3), schedules.ExponentialLR(o, 0.5)], [3]),
        lambda k: 0.1 + 0.3 * k if k < 3 else 0.5 ** (k - 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rates_are_those_of_the_closed_form(name: str) -> None:
    make, wanted = CASES[name]
    opt = optimizer()
    schedule = make(opt)
    found = []
    for _ in range(12):
        found.append(schedule.get_last_lr()[0])
        schedule.step()
    np.testing.assert_allclose(found, [0.8 * wanted(k) for k in range(12)], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_schedules_go_on_from_what_was_saved(name: str) -> None:
    make = CASES[name][0]
    one, other = make(optimizer()), make(optimizer(0.3))
    for _ in range(4):
        one.step()
    other.load_state_dict(one.state_dict())
    for each in (one, other):
        each.step()
    assert other.get_last_lr() == one.get_last_lr()


def test_one_cycle_moves_momentum_the_other_way() -> None:
    opt = optimizer()
    schedule = schedules.OneCycleLR(opt, 1.0, total_steps=11, pct_start=6 / 11, div_factor=10, final_div_factor=100)
    rates, momenta = [], []
    for _ in range(11):
        rates.append(opt.param_groups[0]["lr"])
        momenta.append(opt.param_groups[0]["momentum"])
        if len(rates) < 11:
            schedule.step()
    np.testing.assert_allclose(rates[0], 0.1)
    np.testing.assert_allclose(rates[5], 1.0)
    np.testing.assert_allclose(rates[10], 0.001)
    np.testing.assert_allclose([momenta[0], momenta[5], momenta[10]], [0.95, 0.85, 0.95])
    with pytest.raises(InvalidInput, match="11 steps"):
        schedule.step()


def test_a_plateau_makes_the_rate_smaller() -> None:
    opt = optimizer()
    schedule = schedules.ReduceLROnPlateau(opt, factor=0.5, patience=1, cooldown=1)
    rates = []
    for value in (3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0):
        schedule.step(value)
        rates.append(opt.param_groups[0]["lr"])
    np.testing.assert_allclose(rates, [0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2, 0.2])
    other = schedules.ReduceLROnPlateau(optimizer())
    other.load_state_dict(schedule.state_dict())
    assert other.best == 1.0 and other.get_last_lr() == [0.2]


def test_compiled_steps_follow_without_another_trace() -> None:
    param = nn.Parameter(np.zeros(1, np.float32))
    opt = optim.SGD([param], lr=1.0)
    schedule = schedules.ExponentialLR(opt, 0.5)

    @rv.jit
    def step() -> None:
        opt.zero_grad()
        param.sum().backward()
        opt.step()

    for _ in range(3):
        step()
        schedule.step()
    np.testing.assert_allclose(param.numpy(), -1.75)
    assert step.traces == 1
    with pytest.raises(InvalidInput, match="outside of jitted"):
        rv.jit(lambda x: (schedule.step(), x)[1])(rv.Tensor(1.0))
