"""Gradients written by hand, computed again, and taken forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import numpy as rnp
from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.compiled import Compiled
from ranvier.tensor.groups import groups
from ranvier.tensor.state import Parameter

X = np.linspace(0.2, 1.1, 12).reshape(3, 4)


@rv.custom_gradient
def clipped(x: rv.Tensor) -> Any:
    """Its values are the operand's; the gradient is held within a bound."""
    return x * 1.0, lambda g: rnp.clip(g, -1.0, 1.0)


@rv.custom_gradient
def log1pexp(x: rv.Tensor) -> Any:
    e = rnp.exp(x)
    return rnp.log(1 + e), lambda g: g * (1 - 1 / (1 + e))


@rv.custom_gradient
def scaled_pair(x: rv.Tensor, y: dict[str, rv.Tensor]) -> Any:
    out = {"a": x * y["k"], "b": x + 1}
    return out, lambda g: (g["a"] * 10 + g["b"] * 100, {"k": None})


def test_the_gradient_is_the_one_that_was_written() -> None:
    found = rv.grad(lambda x: (clipped(x * 3) ** 2).sum())(rv.Tensor([0.1, 5.0], "float64"))
    np.testing.assert_allclose(found.numpy(), [0.6 * 3, 3.0])
    at = rv.Tensor(100.0, "float64")
    assert rv.grad(log1pexp)(at).item() == 1.0
    np.testing.assert_allclose(rv.grad(rv.grad(log1pexp))(rv.Tensor(0.3, "float64")).item(), 0.2445, atol=1e-4)
    with pytest.raises(InvalidInput, match="two things"):
        rv.custom_gradient(lambda x: x)(rv.Tensor(1.0))  # type: ignore[arg-type, return-value]
    with pytest.raises(ShapeMismatch):
        rv.grad(lambda x: rv.custom_gradient(lambda y: (y * 1, lambda g: rv.Tensor([1.0, 2.0])))(x))(rv.Tensor(1.0))


def test_several_arguments_and_results_and_calls_behind_each_other() -> None:
    def function(x: rv.Tensor, k: rv.Tensor) -> rv.Tensor:
        first = scaled_pair(x, {"k": k})
        second = scaled_pair(first["a"] + first["b"], {"k": k})
        return (second["a"] * 2).sum() + x.sum()

    dx, dk = rv.grad(function, (0, 1))(rv.Tensor([1.0]), rv.Tensor([3.0]))
    assert dx.tolist() == [20.0 * 110 + 1] and dk.tolist() == [0.0]


def test_parameters_and_compiled_functions_with_written_gradients() -> None:
    w = Parameter([2.0, -3.0])

    def loss(x: rv.Tensor) -> rv.Tensor:
        return (clipped(w * x) * 5).sum()

    for function in (loss, rv.jit(loss)):
        for _ in range(2):
            w.grad = None
            function(rv.Tensor([1.0, 2.0])).backward()
            assert w.grad is not None and w.grad.tolist() == [1.0, 2.0]

    @rv.jit
    def step(x: rv.Tensor) -> None:
        w.grad = None
        loss(x).backward()

    step(rv.Tensor([3.0, 4.0]))
    assert w.grad.tolist() == [3.0, 4.0]


def test_equal_calls_are_compiled_once() -> None:
    def round_() -> None:
        value, slope = rv.value_and_grad(lambda x: (clipped(x * 3) ** 2).sum())(rv.Tensor(X[0]))
        rv.realise(value, slope)

    round_()
    made = groups.made
    round_()
    assert groups.made == made


def deep(x: rv.Tensor, w: rv.Tensor) -> rv.Tensor:
    for _ in range(3):
        x = rnp.tanh(x @ w) * rnp.exp(x) + x
    return x


def test_what_is_computed_again_gives_the_same_gradients() -> None:
    w = rv.Tensor(np.eye(4) * 0.3 + 0.1)
    again = rv.checkpoint(deep)
    nested = rv.checkpoint(lambda x, w: again(again(x, w), w))
    x = rv.Tensor(X)

    def slopes(function: Callable[..., rv.Tensor], compiled: bool = False) -> Any:
        derived = rv.grad(lambda x, w: (function(x, w) ** 2).mean(), (0, 1))
        return (rv.jit(derived) if compiled else derived)(x, w)

    for plain, other in ((deep, again), (lambda x, w: deep(deep(x, w), w), nested)):
        for compiled in (False, True):
            for a, b in zip(slopes(other, compiled), slopes(plain)):
                np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9)
    curve = rv.grad(lambda x: (rv.grad(lambda x: deep(x, w).sum())(x) ** 2).sum())(x)
    recomputed = rv.grad(lambda x: (rv.grad(lambda x: again(x, w).sum())(x) ** 2).sum())(x)
    np.testing.assert_allclose(recomputed.numpy(), curve.numpy(), rtol=1e-9)
    _, back = rv.vjp(again, x, w)
    _, plainly = rv.vjp(deep, x, w)
    for a, b in zip(back(x), plainly(x)):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9)


def test_captured_variables_and_parameters_have_their_gradients() -> None:
    w = rv.Tensor(np.eye(4) * 0.3)
    x = rv.Tensor(X)
    expected = rv.grad(lambda w: deep(x, w).sum())(w).numpy()
    found = rv.grad(lambda w: rv.checkpoint(lambda x: deep(x, w))(x).sum())(w)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
    p = Parameter(w)
    rv.checkpoint(lambda x: deep(x, p))(x).sum().backward()
    assert p.grad is not None
    np.testing.assert_allclose(p.grad.numpy(), expected, rtol=1e-9)
    p.grad = None

    @rv.jit
    def forward(x: rv.Tensor) -> rv.Tensor:
        return rv.checkpoint(lambda x: deep(x, p))(x)

    forward(x).sum().backward()
    assert p.grad is not None
    np.testing.assert_allclose(p.grad.numpy(), expected, rtol=1e-9)


def test_computing_again_takes_less_memory() -> None:
    w = Parameter(np.eye(64, dtype=np.float32) * 0.01)

    def block(x: rv.Tensor) -> rv.Tensor:
        for _ in range(4):
            x = rnp.tanh(x @ w)
        return x

    def arena(around: Any) -> int:
        wrapped = around(block)

        @rv.jit
        def step(x: rv.Tensor) -> rv.Tensor:
            w.grad = None
            for _ in range(6):
                x = wrapped(x)
            loss = (x * x).mean()
            loss.backward()
            return loss

        step(rv.Tensor(np.ones((512, 64), np.float32)))
        (((compiled,)),) = step._kept.values()
        assert isinstance(compiled, Compiled)
        return compiled.arena_bytes()

    whole, less = arena(lambda f: f), arena(rv.checkpoint)
    activation = 512 * 64 * 4
    assert whole > 20 * activation
    assert less < 0.6 * whole


def test_forwards() -> None:
    x, t = rv.Tensor(X), rv.Tensor(np.cos(7 * X))
    w = rv.Tensor(np.eye(4) * 0.3 + 0.1)
    value, slope = rv.jvp(deep, (x, w), (t, w * 0.5))
    np.testing.assert_allclose(value.numpy(), deep(x, w).numpy(), rtol=1e-12)
    step = 1e-6
    ends = [deep(x + s * step * t, w + s * step * 0.5 * w).numpy() for s in (1, -1)]
    np.testing.assert_allclose(slope.numpy(), (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    out, tangents = rv.jvp(lambda p: {"a": p["x"].max(), "b": [p["x"][:, 1] * 2]}, ({"x": x},), ({"x": t},))
    assert out["a"].item() == X.max() and tangents["a"].item() == pytest.approx(t.numpy()[2, 3])
    np.testing.assert_allclose(tangents["b"][0].numpy(), 2 * t.numpy()[:, 1])
    with pytest.raises(InvalidInput):
        rv.jvp(deep, (x, w), (t,))


def test_forwards_over_backwards_is_the_product_with_the_second_derivative() -> None:
    x, t = rv.Tensor(X), rv.Tensor(np.sin(3 * X))

    def loss(x: rv.Tensor) -> rv.Tensor:
        return (rnp.sin(x) * x**2).sum()

    _, product = rv.jvp(rv.grad(loss), (x,), (t,))
    second = -np.sin(X) * X**2 + 4 * X * np.cos(X) + 2 * np.sin(X)
    np.testing.assert_allclose(product.numpy(), second * t.numpy(), rtol=1e-10)
    compiled = rv.jit(lambda x, t: rv.jvp(rv.grad(loss), (x,), (t,))[1])
    np.testing.assert_allclose(compiled(x, t).numpy(), product.numpy(), rtol=1e-12)
