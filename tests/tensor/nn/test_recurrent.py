"""Recurrent layers, step by step in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn
from ranvier.errors import ShapeMismatch

RNG = np.random.default_rng(2)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def step(mode: str, w: list[np.ndarray], x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
    """One step with PyTorch's order of gates; the new states, the output first."""
    a, b = x @ w[0].T + w[2], state[0] @ w[1].T + w[3]
    if mode == "RNN":
        return [np.tanh(a + b)]
    if mode == "LSTM":
        i, f, g, o = np.split(a + b, 4, -1)
        memory = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(memory), memory]
    (r, z, n), (s, y, m) = np.split(a, 3, -1), np.split(b, 3, -1)
    kept = sigmoid(z + y)
    return [(1 - kept) * np.tanh(n + sigmoid(r + s) * m) + kept * state[0]]


def reference(layer: Any, mode: str, x: np.ndarray, firsts: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    lasts: list[list[np.ndarray]] = [[] for _ in firsts]
    for k in range(layer.num_layers):
        ways = []
        for way in range(2 if layer.bidirectional else 1):
            tail = f"l{k}" + ("_reverse" if way else "")
            w = [getattr(layer, f"{name}_{tail}").numpy() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            state = [first[k * (2 if layer.bidirectional else 1) + way] for first in firsts]
            outs = []
            for t in range(len(x))[:: -1 if way else 1]:
                state = step(mode, w, x[t], state)
                outs.append(state[0])
            ways.append(np.stack(outs[:: -1 if way else 1]))
            for kept, each in zip(lasts, state):
                kept.append(each)
        x = np.concatenate(ways, -1)
    return x, [np.stack(each) for each in lasts]


@pytest.mark.parametrize("mode", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_sequences(mode: str, bidirectional: bool) -> None:
    layer = getattr(nn, mode)(3, 4, 2, bidirectional=bidirectional)
    x = RNG.standard_normal((5, 2, 3)).astype(np.float32)
    ways, number = 2 if bidirectional else 1, 2 if mode == "LSTM" else 1
    firsts = [RNG.standard_normal((2 * ways, 2, 4)).astype(np.float32) for _ in range(number)]
    given = tuple(map(rv.Tensor, firsts)) if number == 2 else rv.Tensor(firsts[0])
    for begin, wanted in ((given, firsts), (None, [np.zeros_like(f) for f in firsts])):
        out, last = layer(rv.Tensor(x), begin)
        outs, lasts = reference(layer, mode, x, wanted)
        np.testing.assert_allclose(out.numpy(), outs, rtol=1e-4, atol=1e-5)
        for found, each in zip(last if number == 2 else (last,), lasts):
            np.testing.assert_allclose(found.numpy(), each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["RNN", "LSTM", "GRU"])
def test_cells_and_layouts(mode: str) -> None:
    layer, cell = getattr(nn, mode)(3, 4, batch_first=True), getattr(nn, f"{mode}Cell")(3, 4)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).assign(getattr(layer, f"{name}_l0").value)
    x = RNG.standard_normal((2, 5, 3)).astype(np.float32)
    out, _ = layer(rv.Tensor(x))
    state = None
    for t in range(5):
        state = cell(rv.Tensor(x[:, t]), state)
        output = state[0] if mode == "LSTM" else state
        np.testing.assert_allclose(output.numpy(), out.numpy()[:, t], rtol=1e-4, atol=1e-5)
    single, last = layer(rv.Tensor(x[0]))
    np.testing.assert_allclose(single.numpy(), out.numpy()[0], rtol=1e-4, atol=1e-5)
    assert (last[0] if mode == "LSTM" else last).shape == (1, 4)


def test_gradients_are_slopes() -> None:
    layer = nn.LSTM(2, 3).to("float64")
    x = rv.Tensor(RNG.standard_normal((4, 2, 2)))

    def loss() -> rv.Tensor:
        out, (_, memory) = layer(x)
        return (out * out).sum() + memory.sum()

    loss().backward()
    weight = layer.weight_hh_l0
    before, grad = weight.numpy().copy(), weight.grad
    assert grad is not None
    for place in ((0, 0), (5, 2), (11, 1)):
        ends = []
        for sign in (1, -1):
            moved = before.copy()
            moved[place] += sign * 1e-6
            weight.assign(rv.Tensor(moved))
            ends.append(float(loss()))
        np.testing.assert_allclose(grad.numpy()[place], (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


def test_mistakes_are_named() -> None:
    with pytest.raises(ShapeMismatch, match="for 3 inputs was given 2"):
        nn.GRU(3, 4)(rv.Tensor(np.zeros((5, 1, 2), np.float32)))
    with pytest.raises(ShapeMismatch, match="first state"):
        nn.GRU(3, 4)(rv.Tensor(np.zeros((5, 1, 3), np.float32)), rv.Tensor(np.zeros((1, 2, 4), np.float32)))
