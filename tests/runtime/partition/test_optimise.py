"""The optimiser against all placements there are, and its behaviour on large and on easy problems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.bench_partition import limited, network
from ranvier.errors import InvalidConfig, OutOfMemory
from ranvier.runtime.partition import search
from ranvier.runtime.partition.optimise import by_priority, optimise
from ranvier.runtime.partition.problem import CANNOT, OUTSIDE, Choice, Flow, Link, Problem
from tests.runtime.partition.oracle import brute_force, random_problem

HERE, THERE = Choice("here"), Choice("there", space=1)
LINKS = {(0, 1): Link(1.0, 100.0), (1, 0): Link(1.0, 100.0)}


def chain(*seconds: tuple[float, float], nbytes: float = 0.0) -> Problem:
    last = len(seconds) - 1
    flows = [Flow(OUTSIDE, (0,), nbytes)]
    flows += [Flow(k, (k + 1,) if k < last else (), nbytes, output=k == last) for k in range(last + 1)]
    return Problem([HERE, THERE], [list(row) for row in seconds], flows, LINKS)


@pytest.mark.parametrize("block", range(20))
def test_within_five_per_cent_of_the_optimum(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, int(rng.integers(2, 13)))
        found = optimise(problem)
        assert all(problem.seconds[node][who] < CANNOT for node, who in enumerate(found.owner))
        least, owner = brute_force(problem, found.cost.total)
        assert problem.cost(owner.tolist()).total == pytest.approx(least)  # both count the same
        assert found.cost.total <= least * 1.05, f"seed {seed}"


@pytest.mark.parametrize("block", range(4))
def test_within_memory_limits(block: int) -> None:
    for seed in range(15 * block, 15 * block + 15):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, int(rng.integers(2, 11)), capacities=True)
        found = optimise(problem)
        assert not problem.overfull(found.owner)
        assert found.cost.total <= brute_force(problem, found.cost.total)[0] * 1.05, f"seed {seed}"


@pytest.mark.parametrize("table", [8, 64])
def test_small_tables_still_give_good_placements(table: int) -> None:
    held = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, int(rng.integers(6, 11)))
        found = optimise(problem, table=table)
        held += found.method == "parts held"
        assert found.cost.total <= brute_force(problem, found.cost.total)[0] * 1.05, f"seed {seed}"
    assert held > 5


def test_a_shared_transfer_is_paid_once() -> None:
    """Four readers gain one second each by going over; the way there costs three, so only together it pays."""
    seconds = [[0.0, CANNOT], *[[1.0, 0.0]] * 4]
    flows = [Flow(OUTSIDE, (0,), 0), Flow(0, (1, 2, 3, 4), 200.0)]
    problem = Problem([HERE, THERE], seconds, flows, LINKS)
    found = optimise(problem)
    assert found.owner == (0, 1, 1, 1, 1)
    assert found.cost.transfer == pytest.approx(3.0)
    dearer = Problem([HERE, THERE], seconds, [flows[0], Flow(0, (1, 2, 3, 4), 310.0)], LINKS)
    assert optimise(dearer).owner == (0, 0, 0, 0, 0)


def test_transfers_decide() -> None:
    assert optimise(chain((1, 0.5), (1, 0.5))).owner == (0, 0)  # saves 1, costs 2 to go there and back
    assert optimise(chain((1, 0.5), (9, 0.5), (1, 0.5))).owner == (1, 1, 1)  # once there, it stays
    assert optimise(chain((1, CANNOT), (9, 0.5), (1, CANNOT))).owner == (0, 1, 0)


def test_ties_go_to_the_first() -> None:
    problem = Problem([Choice("a"), Choice("b")], [[1.0, 1.0]] * 3, [Flow(0, (1, 2), 1.0)])
    assert optimise(problem).owner == (0, 0, 0)


def test_the_same_problem_gives_the_same_placement() -> None:
    for seed in (3, 7):
        problems = [random_problem(np.random.default_rng(seed), 12) for _ in range(2)]
        assert optimise(problems[0]) == optimise(problems[1])


def test_one_provider_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(search, "Search", never)
    n = 1000
    flows = [Flow(k, (k + 1,) if k + 1 < n else (), 8.0, output=k + 1 == n) for k in range(n)]
    alone = Problem([HERE], [[1.0]] * n, flows)
    assert optimise(alone).owner == (0,) * n
    assert optimise(alone).method == "only choice"
    both = Problem([HERE, THERE], [[1.0, 1.5]] * n, flows, LINKS)
    assert optimise(both).method == "dominant"
    assert optimise(both).owner == (0,) * n


def test_large_networks() -> None:
    """Ten thousand nodes: far better than priority, and no worse than any one provider with help where it must."""
    problem = network(10_000)
    assert problem.size >= 10_000
    found = optimise(problem)
    assert found.cost.total < by_priority(problem).cost.total / 2
    for home in search.homes(problem):
        assert found.cost.total < problem.cost(home).total


def test_a_long_chain_is_cut_where_the_room_ends() -> None:
    """Nodes are alike, so no price of memory divides them: the best is one stretch as long as there is room."""
    n, room = 600, 150
    flows = [Flow(OUTSIDE, (0,), 10.0)]
    flows += [Flow(k, (k + 1,) if k < n - 1 else (), 10.0, output=k == n - 1) for k in range(n)]
    choices = [HERE, Choice("there", space=1, capacity=room)]
    problem = Problem(choices, [[3.0, 1.0]] * n, flows, LINKS, [1.0] * n)
    found = optimise(problem)
    assert not problem.overfull(found.owner)
    least = 3.0 * (n - room) + 1.0 * room + 2 * (1.0 + 10.0 / 100.0)
    assert least <= found.cost.total <= 1.01 * least


@pytest.mark.parametrize("shares", [(0.5, 0.3), (0.1, 0.1), (0.05, None), (0.0, 0.4)])
def test_large_networks_within_limits(shares: tuple[float | None, ...]) -> None:
    """Better than to give the providers the first nodes they want, as far as there is room, or none at all."""
    problem = limited(2_000, shares)
    found = optimise(problem)
    assert not problem.overfull(found.owner)
    room = [np.inf if choice.capacity is None else choice.capacity for choice in problem.choices]
    simple: list[int] = []
    for node, own in enumerate(search.homes(problem)[0]):
        fits = [p for p in problem.allowed[node] if room[p] >= problem.weights[node]]
        who = own if own in fits else min(fits, key=lambda p: problem.seconds[node][p])
        room[who] -= problem.weights[node]
        simple.append(who)
    assert found.cost.total < problem.cost(simple).total
    nowhere = [2 if problem.weights[node] else who for node, who in enumerate(optimise(network(2_000)).owner)]
    assert found.cost.total < problem.cost(nowhere).total


def test_what_cannot_be_placed_raises() -> None:
    with pytest.raises(InvalidConfig, match="no provider can run node 1"):
        optimise(chain((1, 1), (CANNOT, CANNOT)))
    full = Problem([Choice("a", capacity=10), Choice("b", capacity=5)], [[1.0, 1.0]] * 2, [], weights=[10, 10])
    with pytest.raises(OutOfMemory, match="the weights fit"):
        optimise(full)


def test_weights_go_where_there_is_room() -> None:
    choices = [Choice("small", capacity=10), Choice("large")]
    problem = Problem(choices, [[1.0, 3.0], [1.0, 9.0], [1.0, 5.0]], [], weights=[5, 5, 5])
    assert optimise(problem).owner == (1, 0, 0)


def test_a_missing_link_goes_through_the_host() -> None:
    choices = [Choice("a", space=1), Choice("b", space=2)]
    links = {(a, b): Link(1.0) for a, b in ((0, 1), (1, 0), (0, 2), (2, 0))}
    problem = Problem(choices, [[0.0, CANNOT], [CANNOT, 0.0]], [Flow(0, (1,), 0.0)], links)
    assert problem.cost([0, 1]).transfer == 2.0
    with pytest.raises(InvalidConfig, match="no link from memory space 0 to 2"):
        Problem(choices, problem.seconds, problem.flows, {(0, 1): Link(1.0), (1, 0): Link(1.0)}).cost([0, 1])


def test_priority_takes_the_first_that_can() -> None:
    assert by_priority(chain((9, 1), (CANNOT, 1), (9, 1))).owner == (0, 1, 0)
