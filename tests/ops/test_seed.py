"""Random numbers drawn for many runs at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ranvier.ops import seed


@pytest.fixture(autouse=True)
def unseeded() -> Iterator[None]:
    yield
    seed.set_seed(None)


def test_no_number_comes_twice() -> None:
    draw = seed.Ahead((2, 3))
    with ThreadPoolExecutor(4) as pool:
        found = np.stack([future.result() for future in [pool.submit(draw) for _ in range(1000)]])
    assert found.shape == (1000, 2, 3) and found.dtype == np.float64
    assert len(np.unique(found)) == found.size and found.min() >= 0 and found.max() < 1
    assert abs(found.mean() - 0.5) < 0.05
    last = draw()
    assert last.flags.c_contiguous and last.flags.aligned


def test_a_seed_makes_them_repeatable_at_once() -> None:
    draw = seed.Ahead((4,))
    first = draw()
    series = []
    for _ in range(2):
        seed.set_seed(11)
        series.append([draw() for _ in range(100)])
        draw()
    np.testing.assert_array_equal(*series)
    assert len(np.unique(series[0])) == 400
    seed.set_seed(None)
    assert not np.array_equal(draw(), first)


def test_a_child_goes_on_with_other_numbers() -> None:
    draw = seed.Ahead((4,))
    draw()
    parents = draw._rows
    seed._forget()  # as in a new child
    draw()
    assert draw._rows is not parents
