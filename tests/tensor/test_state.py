"""States hold values that are replaced, parameters gather gradients."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

import ranvier as rv
from ranvier import numpy as rnp
from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch
from ranvier.tensor.state import Parameter, State


def test_a_state_is_a_place_and_what_was_read_stays() -> None:
    state = State([1.0, 2.0], name="total")
    seen, doubled = state.value, state * 2
    state.assign(state + 1)
    state += 1
    assert state.tolist() == [3.0, 4.0] and seen.tolist() == [1.0, 2.0] and doubled.tolist() == [2.0, 4.0]
    assert (3 * state).dtype is state.dtype and isinstance(state, rv.Tensor)
    with pytest.raises(ShapeMismatch, match="'total' holds the shape"):
        state.assign([1.0])
    with pytest.raises(DTypeMismatch, match="'total' holds float32"):
        state.assign(rv.Tensor([1, 2]))
    assert {state: 1}[state] == 1
    state[0] = 9.0
    assert state.tolist() == [9.0, 4.0]


def test_states_are_copied_and_pickled_as_what_they_are() -> None:
    parameter = Parameter([1.0, 2.0], name="w", requires_grad=False)
    for made in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert type(made) is Parameter and made.name == "w" and not made.requires_grad
        made.assign([5.0, 5.0])
        assert parameter.tolist() == [1.0, 2.0]


def test_gradients_gather_until_they_are_cleared() -> None:
    w, b = Parameter(np.ones((2, 3))), Parameter(np.zeros(3))
    x = np.array([[1.0, 2.0]])
    for times in (1, 2):
        (rnp.tanh(rv.Tensor(x) @ w + b) * 2).sum().backward()
        slope = 2 * (1 - np.tanh(x @ np.ones((2, 3))) ** 2)
        assert w.grad is not None and b.grad is not None
        np.testing.assert_allclose(w.grad.numpy(), times * x.T @ slope, rtol=1e-12)
        np.testing.assert_allclose(b.grad.numpy(), times * slope[0], rtol=1e-12)
    w.grad = None
    assert w.grad is None
    with pytest.raises(ShapeMismatch):
        w.grad = rv.Tensor([1.0])


def test_what_was_looked_at_on_the_way_has_a_gradient_all_the_same() -> None:
    w = Parameter(3.0)
    y = w * w
    assert float(y) == 9.0
    z = y * w
    if float(z) > 5:
        z = z + y
    z.backward()
    assert w.grad is not None and float(w.grad) == 3 * 9 + 2 * 3


def test_backward_from_more_than_a_number_is_given_a_gradient() -> None:
    w = Parameter([1.0, 2.0])
    with pytest.raises(ShapeMismatch):
        (w * w).backward()
    (w * w).backward([1.0, 10.0])
    assert w.grad is not None and w.grad.tolist() == [2.0, 40.0]
    with pytest.raises(ShapeMismatch):
        (w * w).backward([1.0])


def test_what_was_remembered_is_forgotten_afterwards() -> None:
    w = Parameter([1.0, 2.0])
    hidden = rnp.exp(w)
    inner = weakref.ref(hidden._expr)
    loss = (hidden * hidden).sum()
    del hidden
    loss.backward()
    assert w.grad is not None
    np.testing.assert_allclose(w.grad.numpy(), 2 * np.exp([2.0, 4.0]), rtol=1e-6)
    loss.realise()
    gc.collect()
    assert inner() is None
    with pytest.raises(InvalidInput, match="retain_graph"):
        loss.backward()
    again = (w * 3).sum()
    w.grad = None
    again.backward(retain_graph=True)
    again.backward()
    assert w.grad.tolist() == [6.0, 6.0]


def test_nothing_is_remembered_where_it_is_not_wanted() -> None:
    w, frozen = Parameter([1.0]), Parameter([2.0], requires_grad=False)
    with rv.no_grad():
        free = (w * 2).sum()
    with pytest.raises(InvalidInput):
        free.backward()
    with pytest.raises(InvalidInput):
        (frozen * 2).sum().backward()
    (w * frozen).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [2.0] and frozen.grad is None
    frozen.requires_grad = True
    (w * frozen).sum().backward()
    assert frozen.grad is not None and frozen.grad.tolist() == [1.0]


def test_no_gradient_goes_through_an_assignment() -> None:
    w, mean = Parameter([1.0, 3.0]), State([0.0])
    mean.assign(mean * 0.5 + w.mean(axis=0, keepdims=True) * 0.5)
    (w * mean).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [1.0, 1.0]
    old = w._held
    w.assign(w - 0.5 * w.grad)
    inner = weakref.ref(old)
    del old
    assert w.tolist() == [0.5, 2.5]
    gc.collect()
    assert inner() is None  # a computed value does not hold on to those before it


def test_gradients_of_gradients() -> None:
    w = Parameter(2.0, "float64")
    (w**3).backward(create_graph=True)
    first = w.grad
    assert first is not None and float(first) == 12.0
    w.grad = None
    first.backward()
    assert w.grad is not None and float(w.grad) == 12.0


def test_functions_of_functions_see_parameters_as_what_they_hold() -> None:
    w = Parameter([2.0, 3.0])
    found = rv.grad(lambda x: (x * x * w).sum())(rv.Tensor([1.0, 1.0]))
    assert found.tolist() == [4.0, 6.0]
    by_parameter = rv.grad(lambda p: (p * p).sum())(w)
    assert by_parameter.tolist() == [4.0, 6.0] and w.grad is None


def test_a_loop_over_steps_compiles_in_its_first_rounds() -> None:
    from ranvier.tensor.groups import groups

    w = Parameter(np.full((4, 2), 0.5, np.float32))

    def step(k: int) -> float:
        x = rv.Tensor(np.full((3, 4), 0.1 * k, np.float32))
        w.grad = None
        loss = ((x @ w - 1.0) ** 2).mean()
        loss.backward()
        w.assign(w - 0.1 * w.grad)
        return float(loss)

    losses = [step(3) for _ in range(3)]
    made = groups.made
    losses += [step(3) for _ in range(4)]
    assert groups.made == made
    assert losses == sorted(losses, reverse=True)
