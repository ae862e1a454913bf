"""Signatures that differ in a size share a graph where the function does the same for all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import numpy as rnp
from ranvier.tensor.state import Parameter

SIZES = (5, 3, 8, 1, 13)


def x(size: int) -> Any:
    return np.random.default_rng(size).standard_normal((size, 4)).astype(np.float32)


def test_one_graph_for_all_sizes_from_the_second_on() -> None:
    w = rv.Tensor(np.linspace(-1, 1, 12).reshape(4, 3).astype(np.float32))

    def function(x: rv.Tensor) -> dict[str, rv.Tensor]:
        h = rnp.tanh(x @ w)
        rows = h.reshape(-1, 1) + rnp.zeros((h.shape[0] * 3, 2))
        return {"rows": rows.reshape(h.shape[0], 6), "tail": rnp.concat([h, h * 2], axis=0)[1:], "mean": h.mean(axis=0)}

    compiled = rv.jit(function)
    for _ in range(2):
        for size in SIZES:
            found, expected = compiled(x(size)), function(rv.Tensor(x(size)))
            for name, each in expected.items():
                np.testing.assert_allclose(found[name].numpy(), each.numpy(), rtol=1e-5, atol=1e-6)
    assert compiled.traces == len(SIZES) and compiled.graphs == 2


def test_training_steps_share_a_graph_too() -> None:
    def trained(**options: Any) -> tuple[Any, Any]:
        w = Parameter(np.full((4, 3), 0.1, np.float32))

        def step(x: rv.Tensor, t: rv.Tensor) -> rv.Tensor:
            w.grad = None
            loss = ((rnp.tanh(x @ w) - t) ** 2).mean()
            loss.backward()
            assert w.grad is not None
            w.assign(w - 0.5 * w.grad)
            return loss

        run = rv.jit(**options)(step)
        for size in (8, 16, 32, 24, 8):
            run(x(size), np.ones((size, 3), np.float32))
        return run, w.numpy()

    shared, found = trained()
    apart, expected = trained(dynamic=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (shared.graphs, apart.graphs, shared.traces) == (2, 4, 4)


def test_a_function_that_does_something_else_for_some_sizes_is_noticed() -> None:
    @rv.jit
    def function(x: rv.Tensor) -> rv.Tensor:
        return x * 2 if x.shape[0] < 10 else x * 3

    for size, factor in ((2, 2), (3, 2), (12, 3), (4, 2), (20, 3)):
        np.testing.assert_allclose(function(x(size)).numpy(), factor * x(size), rtol=1e-6)


def test_a_number_that_comes_back_is_noticed() -> None:
    """It followed from the size in two calls, and is what it was in the first in a third."""
    five, six = rv.Tensor(np.float32(5)), rv.Tensor(np.float32(6))

    @rv.jit
    def function(x: rv.Tensor) -> rv.Tensor:
        return x * (six if x.shape[0] == 6 else five)

    for size in (5, 6, 7):
        np.testing.assert_array_equal(function(x(size)).numpy(), x(size) * np.float32(6 if size == 6 else 5))


@pytest.mark.parametrize("power", [2, 0])
def test_numbers_that_do_not_follow_from_a_size_are_no_symbols(power: int) -> None:
    @rv.jit
    def function(x: rv.Tensor) -> rv.Tensor:
        return x * float(x.shape[0] ** power) + rnp.arange(x.shape[0], dtype="float32")[:, None]

    for size in SIZES:
        expected = x(size) * size**power + np.arange(size, dtype=np.float32)[:, None]
        np.testing.assert_allclose(function(x(size)).numpy(), expected, rtol=1e-6)


def test_two_sizes_that_differ_are_compiled_by_themselves() -> None:
    product = rv.jit(lambda a, b: a @ b)
    for rows, inner in ((2, 3), (4, 5), (6, 5), (7, 5)):
        a, b = np.ones((rows, inner), np.float32), np.ones((inner, 2), np.float32)
        assert product(a, b).tolist() == [[inner] * 2] * rows
    assert product.graphs >= 2
