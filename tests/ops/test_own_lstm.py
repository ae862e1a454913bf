"""LSTMTraining against LSTM, which it must agree with, and what it keeps against what LSTM says of every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Symbol, TensorType
from ranvier.ops import get
from ranvier.ops.nn.recurrent import lstm
from ranvier.ops.own.lstm import DOMAIN, lstm_slopes, lstm_training
from ranvier.ops.registry import TypeCall

STEPS, BATCH, WIDTH, SIZE = 4, 3, 5, 2


def operands(ways: int, dtype: Any = np.float64) -> list[Any]:
    draw = np.random.default_rng(3)
    shapes = [(STEPS, BATCH, WIDTH), (ways, 4 * SIZE, WIDTH), (ways, 4 * SIZE, SIZE), (ways, 8 * SIZE)]
    shapes += [(ways, BATCH, SIZE), (ways, BATCH, SIZE), (ways, 3 * SIZE)]
    x, w, r, bias, h, c, holes = (draw.standard_normal(shape).astype(dtype) for shape in shapes)
    return [x, w, r, bias, None, h, c, holes]


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("present", [4, 6, 7, 8])
def test_it_is_the_layer(direction: str, present: int) -> None:
    given = operands(2 if direction == "bidirectional" else 1)[:present]
    attrs = {"hidden_size": SIZE, "direction": direction}
    y, last, last_cell, cells, gates = lstm_training.body(*given, **attrs)
    for have, want in zip((y, last, last_cell), lstm.body(*given, **attrs), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12)
    out = gates[..., SIZE : 2 * SIZE]
    np.testing.assert_allclose(out * np.tanh(cells), y, rtol=1e-12)


def test_halves_are_computed_wide_and_stay_halves() -> None:
    given = operands(1, np.float16)
    found = lstm_training.body(*given, hidden_size=SIZE)
    wide = lstm_training.body(*(None if a is None else a.astype(np.float32) for a in given), hidden_size=SIZE)
    for have, want in zip(found, wide, strict=True):
        assert have.dtype == np.float16
        np.testing.assert_allclose(have, want, rtol=2e-3, atol=1e-3)


def test_mistakes_are_named() -> None:
    given = operands(1)
    with pytest.raises(InvalidValue, match="direction must be"):
        lstm_training.body(*given, hidden_size=SIZE, direction="up")
    with pytest.raises(ShapeMismatch, match="LSTMTraining: X, W and R"):
        lstm_training.body(*given, hidden_size=SIZE + 1)
    with pytest.raises(InvalidValue, match="sequences are whole"):
        lstm_training.body(*given[:4], np.array([1, 2, 3], np.int32), hidden_size=SIZE)
    with pytest.raises(ShapeMismatch, match="gates and cells"):
        lstm_slopes.body(given[2], np.zeros((4, 1, 3, 6)), np.zeros((4, 1, 3, 2)))


def test_types() -> None:
    batch = Symbol("batch")
    x, w, r = (TensorType(DType.float32, shape) for shape in ((7, batch, 5), (2, 8, 5), (2, 8, 2)))
    rule = get(DOMAIN, "LSTMTraining").infer_rule
    assert rule is not None
    found = rule(TypeCall([x, w, r], [None] * 3, {"hidden_size": 2}, 5, 1))
    shapes = [(7, 2, batch, 2), (2, batch, 2), (2, batch, 2), (7, 2, batch, 2), (7, 2, batch, 8)]
    assert list(found) == [TensorType(DType.float32, shape) for shape in shapes]
