"""The cheapest labels, against trying all of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ranvier.providers.cpu.narrow.mincut import Cut


def cheapest(costs: list[tuple[float, float]], pairs: list[tuple[int, int, float]]) -> float:
    """The least total over all labellings."""
    return min(total(labels, costs, pairs) for labels in itertools.product((0, 1), repeat=len(costs)))


def total(labels: tuple[int, ...], costs: list[tuple[float, float]], pairs: list[tuple[int, int, float]]) -> float:
    own = sum(cost[label] for cost, label in zip(costs, labels))
    return own + sum(cost for one, zero, cost in pairs if labels[one] == 1 and labels[zero] == 0)


@pytest.mark.parametrize("seed", range(60))
def test_no_labelling_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    costs = [(rng.choice([0.0, rng.random()]), rng.choice([0.0, rng.random(), math.inf])) for _ in range(count)]
    pairs = [
        (*rng.sample(range(count), 2), rng.choice([rng.random(), math.inf]))
        for _ in range(rng.randint(0, 2 * count) if count > 1 else 0)
    ]
    cut = Cut()
    items = [cut.item(*cost) for cost in costs]
    for one, zero, cost in pairs:
        cut.pair(items[one], items[zero], cost)
    ones = cut.solve()
    found = tuple(int(item in ones) for item in items)
    assert total(found, costs, pairs) == pytest.approx(cheapest(costs, pairs))


def test_ties_go_to_label_zero() -> None:
    cut = Cut()
    even, cheap = cut.item(1.0, 1.0), cut.item(1.0, 0.5)
    assert cut.solve() == {cheap} and even not in cut.solve()


def test_an_item_must_have_a_label() -> None:
    with pytest.raises(ValueError, match="one label"):
        Cut().item(math.inf, math.inf)
