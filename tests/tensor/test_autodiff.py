"""Gradients of functions of tensors, against differences in float64 and against what is known by heart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn
from ranvier import numpy as rnp
from ranvier.errors import DTypeMismatch, InvalidInput, NotSupported, ShapeMismatch
from ranvier.tensor import random
from ranvier.tensor.backward import recipes
from ranvier.tensor.groups import groups


def slopes(function: Callable[[rv.Tensor], rv.Tensor], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        ends = []
        for sign in (1, -1):
            moved = at.copy()
            moved[place] += sign * step
            ends.append(float(function(rv.Tensor(moved))))
        found[place] = (ends[0] - ends[1]) / (2 * step)
    return found


X = random.uniform(random.key(1), (3, 4), low=0.2, high=0.9, dtype="float64").numpy()
W = random.normal(random.key(2), (4, 2), dtype="float64")
FUNCTIONS: dict[str, Callable[[rv.Tensor], rv.Tensor]] = {
    "arithmetic": lambda x: (x * x / (x + 2) - 3 / x).sum(),
    "powers": lambda x: (x**3 + 2**x + x**0.5).sum(),
    "functions": lambda x: (rnp.sin(x) * rnp.exp(x) + rnp.log1p(x) * rnp.expm1(x) + rnp.atan2(x, x + 1)).sum(),
    "hyperbolic": lambda x: (rnp.tanh(x) + rnp.sigmoid(x) * rnp.erf(x) + rnp.gelu(x)).sum(),
    "matrices": lambda x: (rnp.tanh(x @ W) ** 2).sum(),
    "einsum": lambda x: rnp.einsum("ij,jk->ik", x, W).max(),
    "reductions": lambda x: x.mean(axis=0).max() + x.var() + x.std(axis=1).sum() + rnp.logsumexp(x),
    "softmax": lambda x: (x.log_softmax(1) * x.softmax(0)).sum(),
    "shapes": lambda x: (x.reshape(2, 6).T[1:, None] * rnp.concat([x, x], axis=1).flatten()[:2]).sum(),
    "parts": lambda x: (x[1] * x[:, ::2].sum() + x[rv.Tensor([0, 2]), 1:][:, rv.Tensor([0, 0])].sum()).sum(),
    "masks": lambda x: (x[x > 0.5] ** 2).sum() + rnp.where(x > 0.4, x, x * x).sum(),
    "bounds": lambda x: rnp.clip(x, 0.3, 0.7).sum() * rnp.maximum(x, 0.5).sum(),
    "sorting": lambda x: (rnp.sort(x, axis=0) * rv.Tensor(np.arange(12.0).reshape(3, 4))).sum(),
    "running": lambda x: (rnp.cumulative_sum(x, axis=1) ** 2).sum() + (rnp.diff(x, axis=1) ** 2).sum(),
    "padding": lambda x: (rnp.pad(x, 1) * rnp.pad(rnp.roll(x, 1, axis=1), 1)).sum() + rnp.tril(x).sum(),
    "distances": lambda x: rnp.hypot(x, 2 * x).sum() + rnp.linalg.vector_norm(x) + rnp.linalg.trace(x[:, :3]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_the_slopes_that_differences_show(name: str) -> None:
    function = FUNCTIONS[name]
    value, found = rv.value_and_grad(function)(rv.Tensor(X))
    np.testing.assert_allclose(found.numpy(), slopes(function, X), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(float(value), float(function(rv.Tensor(X))), rtol=1e-12)


def test_assignments_and_branches_and_loops_of_python() -> None:
    def function(x: rv.Tensor) -> rv.Tensor:
        y = x * 1.0
        y[0] = y[1] * 2
        y += x
        for k in range(3):
            if float(y[k, 0]) > 0.5:
                y = y * (k + 1)
        return (y * y).sum()

    np.testing.assert_allclose(rv.grad(function)(rv.Tensor(X)).numpy(), slopes(function, X), rtol=1e-5)


def test_higher_orders() -> None:
    def function(x: rv.Tensor) -> rv.Tensor:
        return rnp.sin(x) * x**3

    x = 0.7
    first, second, third = rv.grad(function), rv.grad(rv.grad(function)), rv.grad(rv.grad(rv.grad(function)))
    s, c = np.sin(x), np.cos(x)
    at = rv.Tensor(x, "float64")
    np.testing.assert_allclose(float(first(at)), 3 * x**2 * s + x**3 * c)
    np.testing.assert_allclose(float(second(at)), 6 * x * s + 6 * x**2 * c - x**3 * s)
    np.testing.assert_allclose(float(third(at)), 6 * s + 18 * x * c - 9 * x**2 * s - x**3 * c)


def test_a_gradient_inside_of_which_the_outer_variable_is_used() -> None:
    def outer(x: rv.Tensor) -> rv.Tensor:
        return x * rv.grad(lambda y: x * y * y)(rv.Tensor(3.0, "float64"))  # x * 2 x 3

    assert float(rv.grad(outer)(rv.Tensor(5.0, "float64"))) == 60.0


def test_gradients_come_in_the_form_of_the_arguments() -> None:
    params: dict[str, Any] = {"w": rv.Tensor([[1.0, 2.0]]), "layers": [rv.Tensor(3.0), (rv.Tensor([4.0]),)]}

    def loss(p: dict[str, Any], scale: float, *, shift: float) -> rv.Tensor:
        return (p["w"] * p["layers"][0]).sum() * scale + shift

    value, found = rv.value_and_grad(loss)(params, 2.0, shift=1.0)
    assert float(value) == 19.0
    assert found["w"].tolist() == [[6.0, 6.0]] and found["layers"][0].item() == 6.0
    assert found["layers"][1][0].tolist() == [0.0]  # nothing depends on it


def test_several_arguments_and_something_beside_the_value() -> None:
    def loss(x: rv.Tensor, y: rv.Tensor) -> tuple[rv.Tensor, dict[str, rv.Tensor]]:
        return (x * y).sum(), {"seen": x + y}

    (value, aux), (dx, dy) = rv.value_and_grad(loss, (0, 1), has_aux=True)(rv.Tensor([1.0, 2.0]), rv.Tensor([3.0, 4.0]))
    assert value.item() == 11.0 and dx.tolist() == [3.0, 4.0] and dy.tolist() == [1.0, 2.0]
    assert aux["seen"].tolist() == [4.0, 6.0]
    found, _ = rv.grad(loss, has_aux=True)(rv.Tensor([1.0]), rv.Tensor([3.0]))
    assert found.tolist() == [3.0]


def test_a_pullback_can_be_used_often() -> None:
    out, back = rv.vjp(lambda x, y: {"a": x @ y, "b": x.sum()}, rv.Tensor(X), W)
    out["a"].numpy()  # computed before it is asked for the way back
    ones = np.ones((3, 2))
    for scale in (1.0, 2.0):
        dx, dy = back({"a": rv.Tensor(scale * ones), "b": rv.Tensor(0.0, "float64")})
        np.testing.assert_allclose(dx.numpy(), scale * ones @ W.numpy().T)
        np.testing.assert_allclose(dy.numpy(), scale * X.T @ ones)
    with pytest.raises(ShapeMismatch):
        back({"a": rv.Tensor(np.ones((2, 2))), "b": rv.Tensor(0.0, "float64")})
    with pytest.raises(InvalidInput):
        back({"a": rv.Tensor(ones)})


def test_no_gradient_goes_through_what_is_stopped() -> None:
    found = rv.grad(lambda x: (x * rv.stop_gradient(x)).sum())(rv.Tensor([2.0, 3.0]))
    assert found.tolist() == [2.0, 3.0]
    kept = rv.stop_gradient({"a": [rv.Tensor([1.0])]})
    assert kept["a"][0].tolist() == [1.0]


def test_equal_structures_are_derived_and_compiled_once() -> None:
    step = rv.value_and_grad(lambda w, x: (rnp.tanh(x @ w) ** 2).mean())
    w = rv.Tensor(np.ones((5, 3), np.float32))

    def train(turns: int) -> None:
        nonlocal w
        for k in range(turns):
            loss, slope = step(w, rv.Tensor(np.full((4, 5), 0.1 * k, np.float32)))
            w = w - 0.1 * slope
            assert loss.item() >= 0

    train(3)
    before = recipes.made, groups.made
    train(10)
    assert (recipes.made, groups.made) == before


def test_a_value_and_its_gradient_are_computed_together() -> None:
    value, found = rv.value_and_grad(lambda x: (x**2).sum())(rv.Tensor([1.0, 2.0]))
    value.numpy()
    assert found._expr.array is not None


def test_training_keeps_nothing_of_earlier_steps() -> None:
    w = rv.Tensor(np.ones(3, np.float32))
    state = rv.Tensor(np.zeros(3, np.float32))
    for _ in range(5):

        def loss(p: rv.Tensor) -> tuple[rv.Tensor, rv.Tensor]:
            fresh = state * 0.9 + p * 0.1  # noqa: B023
            fresh.numpy()  # looked at while the gradient is being made
            return (p * fresh).sum(), fresh

        found, state = rv.grad(loss, has_aux=True)(w)
        w = w - 0.1 * found
        w.numpy()
    (w + state).numpy()
    depth, pending = 0, [state._expr]
    while pending:
        depth += 1
        pending = [x for e in pending for x in e.inputs]
    assert depth < 6


def test_errors_name_the_line() -> None:
    def function(x: rv.Tensor) -> rv.Tensor:
        return rnp.linalg.inv(x).sum()  # NumPy's, without a gradient

    line = function.__code__.co_firstlineno + 1
    with pytest.raises(NotSupported, match=rf"inv .*test_autodiff.py:{line}"):
        rv.grad(function)(rv.Tensor(np.eye(2)))


def test_what_has_no_gradient_is_refused() -> None:
    with pytest.raises(DTypeMismatch, match="int64"):
        rv.grad(lambda x: x.sum())(rv.Tensor([1, 2]))
    with pytest.raises(ShapeMismatch, match="single number"):
        rv.grad(lambda x: x * 2)(rv.Tensor([1.0, 2.0]))
    with pytest.raises(InvalidInput):
        rv.grad(lambda x: 3.0)(rv.Tensor(1.0))
    with pytest.raises(InvalidInput, match="argument 2"):
        rv.grad(lambda x: x, 2)(rv.Tensor(1.0))
    with pytest.raises(DTypeMismatch):
        rv.grad(lambda x: x.argmax())(rv.Tensor([1.0]))


def test_an_error_in_the_function_leaves_nothing_behind() -> None:
    def broken(x: rv.Tensor) -> rv.Tensor:
        raise KeyError("user")

    with pytest.raises(KeyError):
        rv.grad(broken)(rv.Tensor(1.0))
    assert float(rv.grad(lambda x: x * x)(rv.Tensor(3.0))) == 6.0


def test_a_gradient_with_a_loop_inside_is_refused_by_name() -> None:
    """A long recurrent layer's is a Scan, which tensors cannot hold."""
    layer = nn.GRU(2, 2)
    y, _ = layer(rv.Tensor(np.ones((600, 1, 2), np.float32)))
    with pytest.raises(NotSupported, match="shorter sequences"):
        y.sum().backward()
