"""Dropout and the stream of random numbers behind it: the same in compiled functions, and new ones at each call."""

from __future__ import annotations

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn
from ranvier.errors import InvalidInput
from ranvier.tensor.random import philox


def test_words_are_those_of_the_generator() -> None:
    source = nn.Generator((7 << 32) | 9)
    source.words((3,))
    found = source.words((2, 5)).numpy()
    words = philox((np.arange(3), 0, 3, 1), (7, 9))  # block, its upper half, what it is for, which draw
    np.testing.assert_array_equal(found.reshape(-1), words.T.reshape(-1)[:10])


def test_a_share_is_dropped_and_the_mean_stays() -> None:
    layer = nn.Dropout(0.25, generator=nn.Generator(1))
    found = layer(rv.Tensor(np.ones((100, 100), np.float32))).numpy()
    assert set(np.unique(found)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((found == 0).mean() - 0.25) < 0.015
    whole = nn.Dropout2d(0.5, generator=nn.Generator(1))(rv.Tensor(np.ones((4, 8, 3, 3), np.float32))).numpy()
    channels = whole.reshape(4, 8, 9)
    assert (channels == channels[..., :1]).all() and 0 < (channels[..., 0] == 0).sum() < 32


def test_bounds() -> None:
    x = rv.Tensor(np.ones(10, np.float32))
    assert nn.functional.dropout(x, 0.0) is x and nn.functional.dropout(x, 0.5, training=False) is x
    assert not nn.functional.dropout(x, 1.0).numpy().any()
    with pytest.raises(InvalidInput):
        nn.Dropout(1.5)


def test_compiled_calls_draw_what_plain_ones_do() -> None:
    x = rv.Tensor(np.ones((8, 33), np.float32))
    plain, compiled = (nn.Dropout(0.5, generator=nn.Generator(4)) for _ in range(2))
    run = rv.jit(lambda x: compiled(x))
    wanted = [plain(x).numpy() for _ in range(3)]
    found = [run(x).numpy() for _ in range(3)]
    np.testing.assert_array_equal(found, wanted)
    assert not np.array_equal(found[0], found[1])
    assert run.traces == 1
    np.testing.assert_array_equal(compiled.generator.state.numpy(), plain.generator.state.numpy())


def test_compiled_functions_notice_the_mode() -> None:
    layer = nn.Dropout(0.5, generator=nn.Generator(4))
    run = rv.jit(lambda x: layer(x))
    x = rv.Tensor(np.ones(64, np.float32))
    assert (run(x).numpy() == 0).any()
    layer.eval()
    np.testing.assert_array_equal(run(x).numpy(), np.ones(64))
    layer.train()
    assert (run(x).numpy() == 0).any() and run.traces == 2


def test_gradients_go_where_numbers_went() -> None:
    layer, weight = nn.Dropout(0.5, generator=nn.Generator(2)), nn.Parameter(np.ones(50, np.float32))
    kept = layer(weight)
    kept.sum().backward()
    assert weight.grad is not None
    np.testing.assert_array_equal(weight.grad.numpy(), kept.numpy())


def test_a_stream_goes_on_where_it_was() -> None:
    one = nn.Generator(5)
    one.words((4,)).numpy()
    saved = one.state.numpy().copy()
    first = one.words((4,)).numpy()
    one.state.assign(rv.Tensor(saved))
    np.testing.assert_array_equal(one.words((4,)).numpy(), first)
    assert not np.array_equal(one.manual_seed(5).words((4,)).numpy(), first)
