"""Clipping, loss scaling, averages and gathered gradients, as they are and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn, optim
from ranvier.errors import InvalidInput
from ranvier.nn import utils

RNG = np.random.default_rng(9)


def params(*grads: Any) -> list[nn.Parameter]:
    found = []
    for grad in grads:
        param = nn.Parameter(np.zeros_like(grad))
        param.grad = rv.Tensor(grad)
        found.append(param)
    return found


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, np.inf])
def test_norms_are_kept_below_a_bound(order: float) -> None:
    grads = [RNG.standard_normal((3, 4)).astype(np.float32), RNG.standard_normal(5).astype(np.float32)]
    flat = np.concatenate([g.reshape(-1) for g in grads])
    norm = np.linalg.norm(flat, order)
    for bound in (0.5 * norm, 2.0 * norm):
        given = params(*grads)
        np.testing.assert_allclose(float(utils.clip_grad_norm_(given, bound, order)), norm, rtol=1e-5)
        for param, grad in zip(given, grads):
            np.testing.assert_allclose(param.grad.numpy(), grad * min(1.0, bound / norm), rtol=1e-5)  # type: ignore[union-attr]
    assert float(utils.clip_grad_norm_([nn.Parameter(1.0)], 1.0)) == 0.0


def test_values_are_kept_between_bounds_and_parameters_as_vectors() -> None:
    grad = np.array([-3.0, 0.5, 2.0], np.float32)
    (param,) = params(grad)
    utils.clip_grad_value_(param, 1.0)
    np.testing.assert_array_equal(param.grad.numpy(), [-1, 0.5, 1])  # type: ignore[union-attr]
    model = nn.Linear(2, 3)
    vector = utils.parameters_to_vector(model.parameters())
    utils.vector_to_parameters(vector * 2, model.parameters())
    np.testing.assert_array_equal(utils.parameters_to_vector(model.parameters()).numpy(), vector.numpy() * 2)


def _either(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return rv.jit(function) if compiled else function


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_that_overflow_change_nothing_but_the_scale(compiled: bool) -> None:
    param = nn.Parameter(np.ones(2, np.float32))
    opt = optim.Adam([param], lr=0.1)
    scaler = optim.GradScaler(init_scale=1024.0, growth_interval=2)

    def step(factor: rv.Tensor) -> None:
        opt.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.unscale_(opt)
        utils.clip_grad_norm_([param], 1e6)
        scaler.step(opt)
        scaler.update()

    run = _either(step, compiled)
    history = []
    for factor in (2.0, np.inf, 2.0, 2.0, 2.0, 2.0):
        before = param.numpy().copy()
        run(rv.Tensor(np.float32(factor)))
        history.append((scaler.get_scale(), bool((param.numpy() == before).all())))
    assert history == [(1024, False), (512, True), (512, False), (1024, False), (1024, False), (2048, False)]
    assert float(opt.param_groups[0].steps) == 5
    np.testing.assert_allclose(param.numpy(), 1 - 5 * 0.1, rtol=1e-4)  # Adam's steps are of one size
    if compiled:
        assert run.traces == 1  # type: ignore[attr-defined]
    other = optim.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 2048


def test_half_precision_with_scaling_learns() -> None:
    nn.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    opt, scaler = optim.AdamW(model.parameters(), lr=0.02), optim.GradScaler()
    x = RNG.standard_normal((32, 4)).astype(np.float32)
    t = x[:, :1] * x[:, 1:2]

    @rv.jit
    def step(x: rv.Tensor, t: rv.Tensor) -> rv.Tensor:
        opt.zero_grad()
        with nn.autocast("fp16"):
            loss = nn.functional.mse_loss(model(x), t)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss

    losses = [float(step(rv.Tensor(x), rv.Tensor(t))) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]
    assert all(param.dtype.name == "float32" for param in model.parameters())


def test_scalers_are_used_in_order() -> None:
    (param,) = params(np.ones(1, np.float32))
    opt, scaler = optim.SGD([param]), optim.GradScaler()
    with pytest.raises(InvalidInput, match="after step"):
        scaler.update()
    scaler.unscale_(opt)
    with pytest.raises(InvalidInput, match="have been unscaled"):
        scaler.unscale_(opt)
    off = optim.GradScaler(enabled=False)
    off.step(opt)
    off.update()
    assert off.get_scale() == 1.0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
def test_averages_follow(compiled: bool, warmup: bool) -> None:
    param = nn.Parameter(np.zeros(2, np.float32))
    ema = optim.EMA([param], 0.8, warmup=warmup)

    def step(value: rv.Tensor) -> None:
        param.assign(value)
        ema.update()

    run, wanted = _either(step, compiled), np.zeros(2)
    for n in range(5):
        value = RNG.standard_normal(2).astype(np.float32)
        run(rv.Tensor(value))
        decay = min(0.8, (1 + n) / (10 + n)) if warmup else 0.8
        wanted = decay * wanted + (1 - decay) * value
    with ema.applied():
        np.testing.assert_allclose(param.numpy(), wanted, rtol=1e-5)
    np.testing.assert_array_equal(param.numpy(), value)
    other = optim.EMA([nn.Parameter(np.zeros(2, np.float32))])
    other.load_state_dict(ema.state_dict())
    np.testing.assert_allclose(other.averages[0].numpy(), wanted, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_small_batches_gathered_are_one_large_one(compiled: bool) -> None:
    nn.manual_seed(1)
    small, large = nn.Linear(3, 2), nn.Linear(3, 2)
    large.load_state_dict(small.state_dict())
    x, t = RNG.standard_normal((2, 12, 3)).astype(np.float32), RNG.standard_normal((2, 12, 2)).astype(np.float32)
    gathered = optim.GradientAccumulation(optim.AdamW(small.parameters(), lr=0.1), 3)
    whole = optim.AdamW(large.parameters(), lr=0.1)

    def step(x: rv.Tensor, t: rv.Tensor) -> None:
        gathered.zero_grad()
        nn.functional.mse_loss(small(x), t).backward()
        gathered.step()

    run = _either(step, compiled)
    for k in range(2):
        for part in range(3):
            run(rv.Tensor(x[k, part * 4 : part * 4 + 4]), rv.Tensor(t[k, part * 4 : part * 4 + 4]))
        whole.zero_grad()
        nn.functional.mse_loss(large(rv.Tensor(x[k])), rv.Tensor(t[k])).backward()
        whole.step()
        np.testing.assert_allclose(small.weight.numpy(), large.weight.numpy(), rtol=2e-4, atol=1e-5)
