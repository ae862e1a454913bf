"""States whose new values are written over the old ones, and when they must not be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn, optim
from ranvier import numpy as rnp
from ranvier.errors import InvalidValue
from ranvier.memory import NOTED_FROM
from ranvier.ops.pulse import interruptible
from ranvier.tensor.compiled import Compiled
from ranvier.tensor.state import Parameter, State


def place(state: State) -> int:
    array = state._held.array
    assert array is not None
    return int(array.ctypes.data)


def compiled(function: Any) -> Compiled:
    (kept,) = function._kept.values()
    found: Compiled = kept[0]
    return found


def network(optimizer: str) -> tuple[Any, list[State], Any]:
    model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 10))
    nn.init.zeros_(model[0].bias)
    opt = getattr(optim, optimizer)(model.parameters(), lr=0.01)

    def step(x: Any, labels: Any) -> rv.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        return loss

    return step, list(model.parameters()), opt


def batch() -> tuple[Any, Any]:
    draw = np.random.default_rng(3)
    return draw.standard_normal((16, 20)).astype(np.float32), draw.integers(0, 10, 16)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Lion"])
def test_parameters_and_moments_have_one_place_and_the_values_of_two(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = batch()

    def trained() -> tuple[list[Any], list[int], list[int], list[State]]:
        nn.manual_seed(0)
        step, parameters, _ = network(optimizer)
        run = rv.jit(step)
        run(x, labels)
        run(x, labels)
        states = [state for state in compiled(run)._states if state.shape]
        before = [place(each) for each in states]
        for _ in range(4):
            run(x, labels)
        return [p.numpy().copy() for p in parameters], before, [place(each) for each in states], states

    values, before, after, states = trained()
    assert before == after and len(states) >= 6
    assert all(state._spare is None for state in states)
    monkeypatch.setattr("ranvier.runtime.plan.Plan.may_overwrite", lambda *_: False)
    apart, _, _, states = trained()
    assert all(state._spare is not None for state in states if state.name in ("", "exp_avg"))
    for found, expected in zip(values, apart):
        assert np.array_equal(found, expected)


def test_two_places_where_the_old_value_is_read_later() -> None:
    state = State(np.arange(64.0, dtype=np.float32).reshape(8, 8))

    @rv.jit
    def turned() -> None:
        state.assign(state.T + 1)

    expected = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    places = []
    for _ in range(4):
        turned()
        expected = expected.T + 1
        places.append(place(state))
    assert state.numpy().tolist() == expected.tolist()
    assert len(set(places)) == 2


def test_a_value_that_is_needed_after_the_new_one_is_made() -> None:
    w, v = State(np.full((6, 6), 2.0, np.float32)), State(np.full((6, 6), 3.0, np.float32))

    @rv.jit
    def crossed() -> rv.Tensor:
        a, b = w.value, v.value
        w.assign(a + b)
        v.assign(a - b)
        return a @ b

    values = np.full((6, 6), 2.0, np.float32), np.full((6, 6), 3.0, np.float32)
    for _ in range(3):
        found = crossed().numpy()
        assert np.allclose(found, values[0] @ values[1])
        values = values[0] + values[1], values[0] - values[1]
        assert np.array_equal(w.numpy(), values[0]) and np.array_equal(v.numpy(), values[1])


def test_an_update_waits_for_the_last_product() -> None:
    """In the order they are written down the weight is replaced before the second product reads it."""
    w = State(np.eye(16, dtype=np.float32))

    @rv.jit
    def step(x: Any) -> rv.Tensor:
        old = w.value
        w.assign(old * 0.5)
        return (x @ old) @ old.T

    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    places = []
    for k in range(4):
        np.testing.assert_allclose(step(x).numpy(), x * 0.25**k, rtol=1e-6)
        places.append(place(w))
    assert len(set(places)) == 1


def test_data_that_is_refused_leaves_states_as_they_were() -> None:
    nn.manual_seed(0)
    step, _, _ = network("AdamW")
    run = rv.jit(step)
    x, labels = batch()
    run(x, labels)
    run(x, labels)
    states = compiled(run)._states
    before = [(place(s), s.numpy().copy()) for s in states]
    with pytest.raises(InvalidValue, match=r"range|bounds"):
        run(x, np.full_like(labels, 10))
    for state, (where, value) in zip(states, before):
        assert place(state) == where and np.array_equal(state.numpy(), value)
    assert np.isfinite(float(run(x, labels)))


def test_runs_that_may_end_halfway_have_two_places() -> None:
    state = State(np.zeros(100, np.float32))

    @rv.jit
    def count() -> None:
        state.assign(state + 1)

    count()
    first = place(state)
    count()
    assert place(state) == first
    with interruptible(lambda where: None):
        count()
    assert place(state) != first and state.numpy().tolist() == [3.0] * 100


def test_results_that_are_derived_later_keep_what_they_need() -> None:
    w = Parameter([1.0, 2.0, 3.0])

    @rv.jit
    def step() -> rv.Tensor:
        loss = (w * w * w).sum()
        w.assign(w * 2)
        return loss

    first, second = step(), step()
    first.backward()
    assert w.grad is not None and w.grad.tolist() == [3.0, 12.0, 27.0]
    w.grad = None
    second.backward()
    assert w.grad is not None and w.grad.tolist() == [12.0, 48.0, 108.0]


def test_gathered_gradients_have_one_place() -> None:
    w = Parameter(np.ones((4, 4), np.float32))
    w.grad = rnp.zeros((4, 4))

    @rv.jit
    def gather(x: Any) -> None:
        (w * x).sum().backward()

    places = []
    for _ in range(4):
        gather(np.full((4, 4), 2.0, np.float32))
        assert w.grad is not None and w.grad._expr.array is not None
        places.append(w.grad._expr.array.ctypes.data)
    assert w.grad.numpy().tolist() == [[8.0] * 4] * 4
    assert len(set(places[1:])) == 1


def test_large_states_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    size = NOTED_FROM // 4
    state = State(np.zeros(size, np.float32))

    @rv.jit
    def count() -> None:
        state.assign(state + 1)

    count()
    monkeypatch.setattr("ranvier.runtime.session.Session.run", None)
    count()
    assert state[0] == 2 and state[size - 1] == 2


def test_memory_of_others_is_left_alone() -> None:
    theirs = np.zeros((512, 512), np.float32)
    state = State(rnp.from_dlpack(theirs))

    @rv.jit
    def count() -> None:
        state.assign(state + 1)

    count()
    count()
    assert not theirs.any() and state[0, 0] == 2


def test_memory_that_a_result_lies_in_is_used_too() -> None:
    """Large results lie in blocks that are used again once nobody holds them."""
    state = State(rnp.ones((512, 512)) * 2)
    view = State((rnp.ones((512, 512)) * 3).numpy()[:256])

    @rv.jit
    def count() -> None:
        state.assign(state + 1)
        view.assign(view + 1)

    rv.realise(state.value, view.value)
    before = place(state)
    count()
    assert place(state) == before
    assert state[0, 0] == 3 and view[0, 0] == 4
