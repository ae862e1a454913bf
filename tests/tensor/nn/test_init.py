"""First values of parameters: their bounds and spread."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ranvier import nn
from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.nn import init
from ranvier.numpy import random

KEY = random.key(5)


def made(*shape: int) -> nn.Parameter:
    return nn.Parameter(np.zeros(shape, np.float32))


def test_uniform_ones_stay_in_their_bounds_and_fill_them() -> None:
    for found, bound in (
        (init.kaiming_uniform_(made(200, 50), a=math.sqrt(5), key=KEY), 1 / math.sqrt(50)),
        (init.kaiming_uniform_(made(20, 10, 3, 3), mode="fan_out", nonlinearity="relu", key=KEY), math.sqrt(6 / 180)),
        (init.xavier_uniform_(made(200, 50), gain=2.0, key=KEY), 2 * math.sqrt(6 / 250)),
        (nn.Linear(50, 200, key=KEY).weight, 1 / math.sqrt(50)),
        (nn.Conv2d(10, 20, 3, groups=2, key=KEY).weight, 1 / math.sqrt(5 * 9)),
        (nn.LSTM(10, 20, key=KEY).weight_ih_l0, 1 / math.sqrt(20)),
    ):
        size = np.abs(found.numpy())
        assert size.max() <= bound and size.max() > 0.97 * bound
        assert abs(size.mean() - bound / 2) < 0.08 * bound


def test_normal_ones_have_their_spread() -> None:
    for found, spread in (
        (init.normal_(made(200, 50), 1.0, 0.5, key=KEY), 0.5),
        (init.kaiming_normal_(made(200, 50), nonlinearity="relu", key=KEY), math.sqrt(2 / 50)),
        (init.xavier_normal_(made(200, 50), key=KEY), math.sqrt(2 / 250)),
        (nn.Embedding(200, 50, key=KEY).weight, 1.0),
    ):
        assert abs(found.numpy().std() / spread - 1) < 0.03
    cut = init.trunc_normal_(made(200, 50), mean=1.0, std=0.5, a=0.5, b=2.0, key=KEY).numpy()
    assert cut.min() >= 0.5 and cut.max() <= 2.0 and abs(cut.mean() - 1.12) < 0.03


def test_fixed_ones() -> None:
    np.testing.assert_array_equal(init.eye_(made(2, 3)).numpy(), np.eye(2, 3))
    np.testing.assert_array_equal(init.constant_(made(2), 4.0).numpy(), [4, 4])
    rows = init.orthogonal_(made(4, 3, 3), gain=2.0, key=KEY).numpy().reshape(4, 9)
    np.testing.assert_allclose(rows @ rows.T, 4 * np.eye(4), atol=1e-5)
    columns = init.orthogonal_(made(9, 4), key=KEY).numpy()
    np.testing.assert_allclose(columns.T @ columns, np.eye(4), atol=1e-6)
    assert ((init.sparse_(made(10, 6), 0.3, key=KEY).numpy() == 0).sum(0) == 3).all()
    x = np.arange(18, dtype=np.float32).reshape(1, 2, 3, 3)
    kept = nn.functional.conv2d(x, init.dirac_(made(2, 2, 3, 3)), padding=1)
    np.testing.assert_array_equal(kept.numpy(), x)


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidInput, match="fan_in"):
        init.kaiming_normal_(made(2, 2), mode="fan")
    with pytest.raises(InvalidInput, match="no gain"):
        init.calculate_gain("mystery")
    with pytest.raises(ShapeMismatch):
        init.xavier_normal_(made(2))
    assert not (nn.Embedding(5, 3, padding_idx=-1).weight.numpy()[4]).any()
