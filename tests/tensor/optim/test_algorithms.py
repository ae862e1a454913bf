"""Optimizers against their definitions in NumPy, as they are and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn, optim
from ranvier.errors import InvalidInput
from ranvier.tensor.groups import groups

RNG = np.random.default_rng(8)
START = RNG.standard_normal((3, 4))
GRADS = RNG.standard_normal((6, 3, 4))
Rule = Callable[[np.ndarray, int, np.ndarray, dict[str, Any]], np.ndarray]


def sgd(p: np.ndarray, t: int, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    g = g + 0.1 * p
    s["buffer"] = g if t == 1 else 0.9 * s["buffer"] + g
    return p - 0.05 * (g + 0.9 * s["buffer"])


def dampened(p: np.ndarray, t: int, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    s["buffer"] = g if t == 1 else 0.9 * s["buffer"] + 0.7 * g
    return p - 0.05 * s["buffer"]


def adam(p: np.ndarray, t: int, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    g = g + 0.1 * p
    m = s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    v = s["v"] = 0.99 * s.get("v", 0) + 0.01 * g * g
    return p - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-6)


def adamw(p: np.ndarray, t: int, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    m = s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    v = s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    s["top"] = np.maximum(s.get("top", 0), v)
    return p * (1 - 0.05 * 0.2) - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(s["top"] / (1 - 0.999**t)) + 1e-8)


def lion(p: np.ndarray, t: int, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    m = s.get("m", np.zeros_like(p))
    s["m"] = 0.99 * m + 0.01 * g
    return p * (1 - 0.05 * 0.2) - 0.05 * np.sign(0.9 * m + 0.1 * g)


def rmsprop(p: np.ndarray, t: int, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    v = s["v"] = 0.9 * s.get("v", 0) + 0.1 * g * g
    m = s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["b"] = 0.5 * s.get("b", 0) + g / (np.sqrt(v - m * m) + 1e-6)
    return p - 0.05 * s["b"]


def adagrad(p: np.ndarray, t: int, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    s["sum"] = s.get("sum", 0) + g * g
    return p - 0.05 / (1 + (t - 1) * 0.1) * g / (np.sqrt(s["sum"]) + 1e-10)


def adafactor(p: np.ndarray, t: int, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    share = t**-0.8
    rate = min(0.05, 1 / np.sqrt(t)) * max(1e-3, np.sqrt((p**2).mean()))
    r = s["r"] = (1 - share) * s.get("r", 0) + share * (g * g).mean(1, keepdims=True)
    c = s["c"] = (1 - share) * s.get("c", 0) + share * (g * g).mean(0, keepdims=True)
    u = g / np.sqrt(r @ c / r.mean())
    return p * (1 - 0.05 * 0.2) - rate / max(1, np.sqrt((u * u).mean())) * u


CASES: dict[str, tuple[type[optim.Optimizer], dict[str, Any], Rule]] = {
    "sgd": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, sgd),
    "sgd dampened": (optim.SGD, {"momentum": 0.9, "dampening": 0.3}, dampened),
    "adam": (optim.Adam, {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}, adam),
    "adamw": (optim.AdamW, {"weight_decay": 0.2, "amsgrad": True}, adamw),
    "lion": (optim.Lion, {"weight_decay": 0.2}, lion),
    "rmsprop": (optim.RMSprop, {"alpha": 0.9, "eps": 1e-6, "momentum": 0.5, "centered": True}, rmsprop),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1}, adagrad),
    "adafactor": (optim.Adafactor, {"weight_decay": 0.2}, adafactor),
}


def runs(name: str, compiled: bool, dtype: str = "float64") -> Iterator[tuple[nn.Parameter, optim.Optimizer]]:
    make, options, _ = CASES[name]
    param = nn.Parameter(START.astype(dtype))
    opt = make([param], lr=0.05, **options)

    def step(grad: rv.Tensor) -> None:
        opt.zero_grad()
        (param * grad).sum().backward()
        opt.step()

    run = rv.jit(step) if compiled else step
    for grad in GRADS:
        run(rv.Tensor(grad.astype(dtype)))
        yield param, opt
    if compiled:
        assert run.traces == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_definition(name: str, compiled: bool) -> None:
    wanted, memory = START, {}  # type: ignore[var-annotated]
    for t, (param, _) in enumerate(runs(name, compiled), 1):
        wanted = CASES[name][2](wanted, t, GRADS[t - 1], memory)
        np.testing.assert_allclose(param.numpy(), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_runs_go_on_bit_by_bit_from_what_was_saved(name: str) -> None:
    make, options, _ = CASES[name]
    saved: Any = None
    for t, (param, opt) in enumerate(runs(name, False, "float32"), 1):
        if t == 3:
            saved = param.numpy().copy(), opt.state_dict()
    again = nn.Parameter(saved[0])
    other = make([again], lr=0.5, **options)
    other.load_state_dict(saved[1])
    assert other.param_groups[0]["lr"] == 0.05
    for grad in GRADS[3:]:
        other.zero_grad()
        (again * rv.Tensor(grad.astype(np.float32))).sum().backward()
        other.step()
    np.testing.assert_array_equal(again.numpy(), param.numpy())


def test_all_updates_of_a_step_are_one_computation() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = optim.AdamW(model.parameters())
    x, t = rv.Tensor(RNG.standard_normal((5, 4)).astype(np.float32)), rv.Tensor(np.array([0, 1, 2, 0, 1]))

    def step() -> rv.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        opt.step()
        return loss

    first = step()
    before = groups.made
    step()
    assert groups.made - before <= 1 and first._expr.array is not None  # the loss came along
    for _ in range(5):
        made = groups.made
        last = step()
        assert groups.made == made
    assert float(last) < float(first)


def test_groups_have_options_of_their_own() -> None:
    one, two = (nn.Parameter(np.ones(2, np.float32)) for _ in range(2))
    opt = optim.SGD([{"params": [one]}, {"params": two, "lr": 1.0, "weight_decay": 0.5}], lr=0.1)
    for param in (one, two):
        param.grad = rv.Tensor(np.ones(2, np.float32))
    opt.step()
    np.testing.assert_allclose(one.numpy(), 0.9)
    np.testing.assert_allclose(two.numpy(), -0.5)
    opt.param_groups[0]["lr"] = 0.2
    assert opt.param_groups[0]["lr"] == 0.2 and "SGD(Group(1 parameters, lr=0.2" in repr(opt)
    with pytest.raises(InvalidInput, match="no option 'rate'"):
        opt.add_param_group({"params": [nn.Parameter(np.ones(1))], "rate": 3})
    with pytest.raises(InvalidInput, match="in one group"):
        opt.add_param_group({"params": [one]})


def test_options_that_change_reach_compiled_steps() -> None:
    param = nn.Parameter(np.ones(2, np.float32))
    opt = optim.SGD([param], lr=0.1)

    @rv.jit
    def step() -> None:
        opt.zero_grad()
        param.sum().backward()
        opt.step()

    step()
    opt.param_groups[0]["lr"] = 0.5  # a state: the same program
    step()
    np.testing.assert_allclose(param.numpy(), 0.4, rtol=1e-6)
    assert step.traces == 1
    opt.param_groups[0]["weight_decay"] = 1.0  # part of the program: another one
    step()
    np.testing.assert_allclose(param.numpy(), 0.4 - 0.5 * 1.4, rtol=1e-5)
    assert step.traces == 2


def test_parameters_without_gradient_and_skipped_steps_stay() -> None:
    one, two = (nn.Parameter(np.ones(2, np.float32)) for _ in range(2))
    opt = optim.Adam([one, two])
    one.grad = rv.Tensor(np.ones(2, np.float32))
    opt.step(skip=rv.Tensor(True))
    np.testing.assert_array_equal(one.numpy(), 1)
    assert float(opt.param_groups[0].steps) == 0 and not opt.state[one]["exp_avg"].numpy().any()
    opt.step(skip=rv.Tensor(False))
    assert (one.numpy() < 1).all() and (two.numpy() == 1).all()


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidInput, match="no parameters"):
        optim.SGD([])
    with pytest.raises(InvalidInput, match="not Tensor"):
        optim.SGD([rv.Tensor(1.0)])
    with pytest.raises(InvalidInput, match="not negative"):
        optim.SGD([nn.Parameter(1.0)], lr=-1)
    with pytest.raises(InvalidInput, match="Nesterov"):
        optim.SGD([nn.Parameter(1.0)], nesterov=True)
    with pytest.raises(InvalidInput, match="a beta"):
        optim.Adam([nn.Parameter(1.0)], betas=(0.9, 1.0))
