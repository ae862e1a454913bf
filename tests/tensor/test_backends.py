"""Who computes tensors, compiled functions and training steps when the user has a say in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn, optim
from ranvier import numpy as rnp
from ranvier.tensor.compiled import Compiled
from ranvier.tensor.state import State


@pytest.fixture(autouse=True)
def nobody_preferred() -> Iterator[None]:
    yield
    rv.set_backend(None)
    rv.set_backend_priority([])


def providers(function: Any) -> list[set[str]]:
    """Who runs each graph of a compiled function."""
    kept: list[Compiled] = [each for signature in function._kept.values() for each in signature]
    return [{part.part.provider.name for part in each._plan.program.parts} for each in kept if each._plan is not None]


def test_a_compiled_function_has_a_graph_for_each_preference() -> None:
    f = rv.jit(lambda x: rnp.tanh(x) * 2 + 1)
    x = np.linspace(-1, 1, 12, dtype=np.float32)
    usual = f(x).numpy()
    with rv.backend("reference"):
        np.testing.assert_allclose(f(x).numpy(), usual, rtol=1e-6)
    assert providers(f) == [{"cpu"}, {"reference"}]
    rv.set_backend("reference")
    f(x)
    rv.set_backend(None)
    f(x)
    assert f.traces == 2
    rv.set_backend_priority(["reference"])
    f(x)
    assert f.traces == 2  # the same preference in other words
    rv.set_backend_priority(["cpu", "reference"])
    f(x)
    assert providers(f)[-1] == {"cpu"}


def test_states_go_from_one_to_the_other() -> None:
    state = State(np.zeros(300, np.float32))

    @rv.jit
    def count() -> rv.Tensor:
        state.assign(state + 1)
        return state.sum()

    for k in range(6):
        with rv.backend("reference" if k % 2 else None):
            held = state.numpy()
            assert float(count()) == 300.0 * (k + 1)
            assert held.tolist() == [float(k)] * 300
    assert state.tolist() == [6.0] * 300


def trained(compiled: bool, device: str | None = None) -> tuple[list[float], list[Any]]:
    nn.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    if device is not None:
        model.to_device(device)
    opt = optim.AdamW(model.parameters(), lr=0.05)
    draw = np.random.default_rng(1)
    x, labels = draw.standard_normal((12, 6)).astype(np.float32), draw.integers(0, 4, 12)

    def step(x: rv.Tensor, t: rv.Tensor) -> rv.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        opt.step()
        return loss

    run = rv.jit(step) if compiled else step
    given = [rv.Tensor(a) if device is None else rv.Tensor(a).to_device(device) for a in (x, labels)]
    losses = [float(run(*given)) for _ in range(5)]
    if device is not None:
        assert all(str(p.device) == device for p in model.parameters())
        assert all(p.grad is not None and str(p.grad.device) == device for p in model.parameters())
    return losses, [p.numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("compiled", [True, False])
def test_training_by_the_reference(compiled: bool) -> None:
    usual = trained(compiled)
    with rv.backend("reference"):
        found = trained(compiled)
    rv.set_backend_priority(["reference"])
    again = trained(compiled)
    assert usual[0][-1] < 0.5 * usual[0][0]
    np.testing.assert_allclose(found[0], usual[0], rtol=1e-3)
    assert again[0] == found[0]  # the very same arithmetic
    for a, b in zip(found[1], usual[1]):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("compiled", [True, False])
def test_training_on_a_device(compiled: bool) -> None:
    usual, found = trained(compiled), trained(compiled, "sim:0")
    np.testing.assert_allclose(found[0], usual[0], rtol=1e-3)


def test_a_module_comes_back_from_a_device() -> None:
    nn.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = np.ones((2, 3), np.float32)
    model.eval()
    before = model(rv.Tensor(x)).numpy()
    model.to_device("sim:0")
    there = model(rv.Tensor(x).to_device("sim:0"))
    assert str(there.device) == "sim:0"
    np.testing.assert_allclose(there.numpy(), before, rtol=1e-5, atol=1e-6)
    model.to_device("cpu")
    np.testing.assert_array_equal(model(rv.Tensor(x)).numpy(), before)
