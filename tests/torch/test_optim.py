"""Optimizers and schedules beside PyTorch's: ten steps from the same weights end at the same place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier import nn, optim  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.standard_normal((10, 5, 6)).astype(np.float32)
T = RNG.integers(0, 3, (10, 5))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "Nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "dampened": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.01}),
    "Adafactor": ("Adafactor", {"lr": 0.1, "weight_decay": 0.1}),
}


def network(n: Any) -> Any:
    return n.Sequential(n.Linear(6, 8), n.Tanh(), n.Linear(8, 3))


def _step(model: Any, opt: Any, F: Any, x: Any, t: Any) -> Any:
    opt.zero_grad()
    loss = F.cross_entropy(model(x), t)
    loss.backward()
    opt.step()
    return loss


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_end_where_those_of_pytorch_do(name: str, compiled: bool) -> None:
    kind, options = CASES[name]
    torch.manual_seed(0)
    theirs, ours = network(torch.nn), network(nn)
    ours.load_state_dict(theirs.state_dict())
    other = getattr(torch.optim, kind)(theirs.parameters(), **options)
    own = getattr(optim, kind)(ours.parameters(), **options)

    def step(x: rv.Tensor, t: rv.Tensor) -> rv.Tensor:
        return _step(ours, own, nn.functional, x, t)

    run = rv.jit(step) if compiled else step
    for x, t in zip(X, T):
        loss = run(rv.Tensor(x), rv.Tensor(t))
        wanted = _step(theirs, other, torch.nn.functional, torch.tensor(x), torch.tensor(t))
        np.testing.assert_allclose(float(loss), wanted.item(), rtol=2e-5)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=2e-4, atol=2e-6)


def test_a_run_of_pytorch_goes_on_here() -> None:
    torch.manual_seed(0)
    theirs, ours = network(torch.nn), network(nn)
    other = torch.optim.AdamW(theirs.parameters(), lr=0.02)
    for k in range(5):
        _step(theirs, other, torch.nn.functional, torch.tensor(X[k]), torch.tensor(T[k]))
    own = optim.AdamW(ours.parameters())
    ours.load_state_dict(theirs.state_dict())
    own.load_state_dict(other.state_dict())
    for k in range(5, 10):
        _step(theirs, other, torch.nn.functional, torch.tensor(X[k]), torch.tensor(T[k]))
        _step(ours, own, nn.functional, rv.Tensor(X[k]), rv.Tensor(T[k]))
    for a, b in zip(ours.parameters(), theirs.parameters()):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=2e-4, atol=2e-6)


SCHEDULES: dict[str, Callable[[Any, Any], Any]] = {
    "StepLR": lambda s, o: s.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda s, o: s.MultiStepLR(o, [2, 5]),
    "ExponentialLR": lambda s, o: s.ExponentialLR(o, 0.9),
    "ConstantLR": lambda s, o: s.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda s, o: s.LinearLR(o, 0.1, 1.0, 5),
    "PolynomialLR": lambda s, o: s.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda s, o: s.CosineAnnealingLR(o, 9, 0.01),
    "CosineAnnealingWarmRestarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda s, o: s.OneCycleLR(o, 0.5, total_steps=12),
    "SequentialLR": lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 4), s.CosineAnnealingLR(o, 8)], [4]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_pytorch(name: str) -> None:
    found: list[list[tuple[float, float]]] = []
    for schedules, make, parameter in (
        (optim.lr_scheduler, optim.SGD, nn.Parameter(np.ones(1, np.float32))),
        (torch.optim.lr_scheduler, torch.optim.SGD, torch.nn.Parameter(torch.ones(1))),
    ):
        opt = make([parameter], lr=0.2, momentum=0.9)
        schedule = SCHEDULES[name](schedules, opt)
        found.append([])
        for k in range(12):
            found[-1].append((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
            if k < 11:
                opt.step()
                schedule.step()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_a_plateau_is_that_of_pytorch() -> None:
    values = [3.0, 2.0, 2.5, 2.4, 1.9, 1.9, 1.95, 1.8999, 1.0, 1.0, 1.0, 1.0]
    found = []
    for schedules, make, parameter in (
        (optim.lr_scheduler, optim.SGD, nn.Parameter(np.ones(1, np.float32))),
        (torch.optim.lr_scheduler, torch.optim.SGD, torch.nn.Parameter(torch.ones(1))),
    ):
        opt = make([parameter], lr=0.2)
        schedule = schedules.ReduceLROnPlateau(opt, patience=1, cooldown=1, factor=0.5)
        rates = []
        for value in values:
            schedule.step(value)
            rates.append(opt.param_groups[0]["lr"])
        found.append(rates)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


def test_clipping_is_that_of_pytorch() -> None:
    grads = [RNG.standard_normal((3, 4)).astype(np.float32), RNG.standard_normal(5).astype(np.float32)]
    ours = [nn.Parameter(np.zeros_like(g)) for g in grads]
    theirs = [torch.nn.Parameter(torch.zeros(g.shape)) for g in grads]
    for a, b, grad in zip(ours, theirs, grads):
        a.grad, b.grad = rv.Tensor(grad), torch.tensor(grad)
    total = nn.utils.clip_grad_norm_(ours, 1.0)
    np.testing.assert_allclose(float(total), torch.nn.utils.clip_grad_norm_(theirs, 1.0).item(), rtol=1e-6)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-6)
