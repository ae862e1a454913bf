"""Batches: what is in them, their order, and going on in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ranvier.errors import InvalidInput
from ranvier.tensor.training.data import Batches, Stream, as_data


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_an_epoch_has_every_sample_once() -> None:
    data = Batches(np.arange(10), 3, seed=4)
    found = numbers(data.epoch(0))
    assert [len(batch) for batch in found] == [3, 3, 3, 1]
    assert sorted(k for batch in found for k in batch) == list(range(10))
    assert len(data) == 4


def test_epochs_and_seeds_differ_and_repeat() -> None:
    data = Batches(np.arange(50), 50, seed=1)
    first, second = numbers(data.epoch(0)), numbers(data.epoch(1))
    assert first != second
    assert first == numbers(Batches(np.arange(50), 50, seed=1).epoch(0))
    assert first != numbers(Batches(np.arange(50), 50, seed=2).epoch(0))


def test_without_shuffling_the_order_stays() -> None:
    assert numbers(Batches(np.arange(5), 2, shuffle=False).epoch(3)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_it_goes_on_where_it_was(start: int) -> None:
    data = Batches(np.arange(11), 3, seed=9)
    assert numbers(data.epoch(2, start)) == numbers(data.epoch(2))[start:]


def test_the_last_part_is_dropped() -> None:
    data = Batches(np.arange(11), 3, drop_last=True)
    assert len(data) == 3
    assert all(len(batch) == 3 for batch in data.epoch(0))


def test_trees_of_arrays_stay_together() -> None:
    data = Batches({"x": np.arange(8), "y": (np.arange(8) * 2, np.arange(8) * 3)}, 4)
    for batch in data.epoch(0):
        assert (batch["y"][0] == batch["x"] * 2).all()
        assert (batch["y"][1] == batch["x"] * 3).all()


def test_samples_of_an_object_are_stacked() -> None:
    class Squares:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, k: int) -> tuple[float, int]:
            return float(k), k * k

    batch = next(Batches(Squares(), 6, shuffle=False).epoch(0))
    assert batch[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch[1].tolist() == [0, 1, 4, 9, 16, 25]


def test_a_transform_draws_the_same_for_the_same_batch() -> None:
    def noisy(batch: Any, random: np.random.Generator) -> Any:
        return batch + random.normal(size=batch.shape)

    data = Batches(np.zeros(12), 3, transform=noisy)
    whole = list(data.epoch(1))
    assert not np.array_equal(whole[0], whole[1])
    assert np.array_equal(whole[2], next(data.epoch(1, 2)))
    assert not np.array_equal(whole[0], next(data.epoch(2)))


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidInput, match="one length"):
        Batches((np.arange(3), np.arange(4)), 2)


def test_a_batch_that_cannot_be_filled_is_refused() -> None:
    with pytest.raises(InvalidInput, match="make no batch"):
        Batches(np.arange(3), 4, drop_last=True)


def test_a_stream_passes_over_what_was_seen() -> None:
    def read(epoch: int) -> Iterator[int]:
        return iter([epoch * 10 + k for k in range(4)])

    assert list(Stream(read).epoch(2, 1)) == [21, 22, 23]


def test_a_stream_that_seeks_is_told_where() -> None:
    def read(epoch: int, start: int) -> list[int]:
        return [epoch, start]

    assert list(Stream(read, seeks=True).epoch(2, 7)) == [2, 7]


def test_what_counts_as_data() -> None:
    assert len(list(as_data((np.arange(6), np.arange(6)), 2).epoch(0))) == 3
    assert list(as_data([1, 2, 3]).epoch(5)) == [1, 2, 3]
    with pytest.raises(InvalidInput, match="not int"):
        as_data(3)
