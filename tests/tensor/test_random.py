"""Numbers from keys: the generator's published words, and that what is drawn has the distribution it is said to."""

from __future__ import annotations

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import DTypeMismatch, InvalidInput
from ranvier.tensor import random
from ranvier.tensor.state import State

FULL = 0xFFFFFFFF
# words that the authors of the generator publish for it: counter, key, result
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_words_are_those_of_the_generator(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(int(w) for w in random.philox(counter, key)) == words


def test_the_same_key_gives_the_same_numbers_and_another_one_others() -> None:
    first, again, other = (random.normal(random.key(seed), (64,)).numpy() for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.intersect1d(first, other).size


def test_a_longer_draw_begins_like_a_shorter_one() -> None:
    key = random.key(11)
    np.testing.assert_array_equal(random.uniform(key, (5,)).numpy(), random.uniform(key, (40,)).numpy()[:5])


def test_keys_that_were_split_or_folded_are_all_different() -> None:
    key = random.key(0)
    found = {tuple(row) for row in random.split(key, 100).tolist()}
    found |= {tuple(random.fold_in(key, k).tolist()) for k in range(100)}
    assert len(found) == 200
    assert tuple(key.tolist()) not in found


def test_numbers_do_not_depend_on_the_provider() -> None:
    key = random.key(9)
    with rv.backend("reference"):
        there = random.normal(key, (8,)).numpy()
    np.testing.assert_array_equal(there, random.normal(key, (8,)).numpy())


def test_uniform_numbers_fill_their_range_evenly() -> None:
    found = random.uniform(random.key(1), (20_000,), low=-2.0, high=3.0).numpy()
    assert found.dtype == np.float32 and found.min() >= -2.0 and found.max() < 3.0
    shares = np.histogram(found, 10, (-2.0, 3.0))[0] / found.size
    np.testing.assert_allclose(shares, 0.1, atol=0.01)


def test_normal_numbers_have_the_moments_of_their_distribution() -> None:
    found = random.normal(random.key(2), (40_000,), mean=1.0, std=2.0, dtype="float64").numpy()
    scaled = (found - 1.0) / 2.0
    np.testing.assert_allclose(
        [scaled.mean(), scaled.var(), (scaled**3).mean(), (scaled**4).mean()], [0, 1, 0, 3], atol=0.1
    )


def test_truncated_numbers_stay_inside() -> None:
    found = random.truncated_normal(random.key(3), (5_000,), low=-1.0, high=1.5).numpy()
    assert found.min() >= -1.0 and found.max() <= 1.5


def test_whole_numbers_come_equally_often() -> None:
    found = random.randint(random.key(4), (12_000,), -3, 3).numpy()
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [-3, -2, -1, 0, 1, 2]
    np.testing.assert_allclose(counts / found.size, 1 / 6, atol=0.02)


def test_bernoulli_and_categorical_follow_their_probabilities() -> None:
    assert abs(random.bernoulli(random.key(5), 0.3, (20_000,)).numpy().mean() - 0.3) < 0.02
    weights = np.array([0.1, 0.6, 0.3])
    drawn = random.categorical(random.key(6), np.log(weights), shape=(20_000,)).numpy()
    np.testing.assert_allclose(np.bincount(drawn) / drawn.size, weights, atol=0.02)


def test_a_permutation_has_every_element_once() -> None:
    assert sorted(random.permutation(random.key(7), 50).tolist()) == list(range(50))
    rows = rv.Tensor(np.arange(12.0).reshape(4, 3))
    mixed = random.permutation(random.key(7), rows).numpy()
    assert sorted(map(tuple, mixed)) == sorted(map(tuple, rows.numpy()))


def test_a_choice_without_replacement_repeats_nothing() -> None:
    found = random.choice(random.key(8), 10, (10,), replace=False).tolist()
    assert sorted(found) == list(range(10))
    with pytest.raises(InvalidInput):
        random.choice(random.key(8), 3, (4,), replace=False)


def test_what_is_no_key_or_no_float_is_refused() -> None:
    with pytest.raises(InvalidInput, match="key"):
        random.normal(rv.Tensor([1, 2]), (3,))
    with pytest.raises(DTypeMismatch):
        random.uniform(random.key(0), (3,), dtype="int32")


def test_compiled_functions_draw_the_same_numbers() -> None:
    def draw(key: rv.Tensor) -> list[rv.Tensor]:
        first, second = random.split(key)
        later = random.fold_in(second, 5_000_000_000)
        return [
            random.split(key, 3),
            later,
            random.bits(first, (3, 5)),
            random.uniform(first, (7,), low=-2.0, high=3.0),
            random.uniform(later, (2, 3), dtype="float64"),
            random.bernoulli(first, 0.3, (4, 9)),
        ]

    compiled = rv.jit(draw)
    gaussian = rv.jit(lambda key: random.normal(key, (5, 3), mean=1.0, std=2.0))
    for seed in (0, 1, 1 << 40):
        for found, expected in zip(compiled(random.key(seed)), draw(random.key(seed))):
            np.testing.assert_array_equal(found.numpy(), expected.numpy())
        expected = random.normal(random.key(seed), (5, 3), mean=1.0, std=2.0)
        np.testing.assert_allclose(gaussian(random.key(seed)).numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)
    assert compiled.traces == gaussian.traces == 1


def test_a_key_in_a_state_gives_other_numbers_at_each_call() -> None:
    state = State(random.key(3))

    @rv.jit
    def noise() -> rv.Tensor:
        keys = random.split(state)
        state.assign(keys[0])
        return random.uniform(keys[1], (4,))

    key, expected = random.key(3), []
    for _ in range(3):
        pair = random.split(key)
        key = pair[0]
        expected.append(random.uniform(pair[1], (4,)).tolist())
    assert [noise().tolist() for _ in range(3)] == expected
