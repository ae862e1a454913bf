"""Parts of weights that are worked on side by side: each once, all of them, and what goes wrong is told."""

from __future__ import annotations

import threading
import time

import pytest

from ranvier import parts


@pytest.mark.parametrize("nbytes", [1, 1 << 30])
@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_every_part_once(count: int, nbytes: int) -> None:
    done: list[int] = []
    lock = threading.Lock()

    def work(first: int, last: int) -> None:
        with lock:
            done.extend(range(first, last))

    parts.in_parts(work, count, 3, nbytes)
    assert sorted(done) == list(range(count))


@pytest.mark.parametrize("nbytes", [1, 1 << 30])
def test_results_are_in_the_order_of_what_they_are_of(nbytes: int) -> None:
    def work(item: int) -> int:
        time.sleep((7 - item) * 1e-3)
        return item * item

    assert list(parts.side_by_side(work, range(7), nbytes)) == [k * k for k in range(7)]


@pytest.mark.parametrize("nbytes", [1, 1 << 30])
def test_what_goes_wrong_is_told(nbytes: int) -> None:
    def work(first: int, last: int) -> None:
        if first:
            raise ValueError("a part")

    with pytest.raises(ValueError, match="a part"):
        parts.in_parts(work, 4, 2, nbytes)
