"""Parts in time: what overlaps, what waits, and that branches move only where it helps."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.runtime.partition.balance import balance, branches
from ranvier.runtime.partition.optimise import optimise
from ranvier.runtime.partition.problem import CANNOT, OUTSIDE, Choice, Flow, Link, Problem
from ranvier.runtime.partition.regions import Region
from ranvier.runtime.partition.schedule import Schedule, schedule
from tests.runtime.partition.oracle import random_problem

FORK = [
    Flow(OUTSIDE, (0,), 0.0),
    Flow(0, (1, 2), 100.0),
    Flow(1, (3,), 100.0),
    Flow(2, (3,), 100.0),
    Flow(3, (), 0, True),
]


def diamond(latency: float, choices: list[Choice] | None = None) -> Problem:
    """One node, two branches of four seconds, one node that joins them."""
    given = choices or [Choice("a"), Choice("b", space=1)]
    seconds = [[1.0] * len(given), [4.0] * len(given), [4.0] * len(given), [1.0] * len(given)]
    return Problem(given, seconds, FORK, {(0, 1): Link(latency, 1e9), (1, 0): Link(latency, 1e9)})


def check(problem: Problem, owner: tuple[int, ...], found: Schedule) -> None:
    """Every node once, after what it needs and its transfer; no lane with two parts at a time."""
    assert sorted(node for step in found.steps for node in step.nodes) == list(range(problem.size))
    at = {node: k for k, step in enumerate(found.steps) for node in step.nodes}
    for flow in problem.flows:
        if flow.producer == OUTSIDE:
            continue
        made = found.steps[at[flow.producer]]
        for consumer in flow.consumers:
            a, b = problem.space[owner[flow.producer]], problem.space[owner[consumer]]
            read = found.steps[at[consumer]]
            if read is not made:
                assert read.start >= made.end + problem.moving(a, b, flow.nbytes) * (a != b) - 1e-9
                assert at[flow.producer] < at[consumer]
        if flow.output:
            home = problem.moving(problem.space[owner[flow.producer]], 0, flow.nbytes)
            assert found.seconds >= made.end + home - 1e-9
    for first, second in problem.order:
        assert at[first] <= at[second]
    for a, step in enumerate(found.steps):
        for other in found.steps[:a]:
            if (step.engine, step.lane) == (other.engine, other.lane):
                assert step.start >= other.end - 1e-9


def test_two_equal_branches_run_on_two_devices() -> None:
    problem = diamond(0.1)
    alone = optimise(problem).owner
    assert alone == (0, 0, 0, 0)
    owner, found = balance(problem, alone)
    assert {owner[1], owner[2]} == {0, 1}
    assert found.seconds == pytest.approx(1 + 0.1 + 4 + 0.1 + 1, rel=1e-3)
    both = {step.nodes: k for k, step in enumerate(found.steps)}
    assert tuple(sorted((both[1,], both[2,]))) in found.overlaps
    check(problem, owner, found)


def test_a_dear_transfer_keeps_branches_together() -> None:
    problem = diamond(2.5)
    owner, found = balance(problem, (0, 0, 0, 0))
    assert owner == (0, 0, 0, 0)
    assert found.seconds == pytest.approx(10.0)
    assert not found.overlaps


def test_providers_on_one_engine_do_not_overlap() -> None:
    problem = diamond(0.0, [Choice("a", engine=0), Choice("b", engine=0)])
    owner, found = balance(problem, (0, 0, 0, 0))
    assert owner == (0, 0, 0, 0)
    assert found.seconds == pytest.approx(10.0)
    assert schedule(problem, (0, 0, 1, 0)).seconds == pytest.approx(10.0)


def test_lanes_run_branches_of_one_provider_at_once() -> None:
    problem = diamond(0.0, [Choice("threads", lanes=2, launch=0.01)])
    found = schedule(problem, (0, 0, 0, 0))
    assert found.seconds == pytest.approx(6.03)
    assert found.overlaps == [(1, 2)]
    check(problem, (0, 0, 0, 0), found)
    dear = diamond(0.0, [Choice("threads", lanes=2, launch=3.0)])
    assert len(schedule(dear, (0, 0, 0, 0)).steps) == 1  # three more launches would cost more than they win
    apart = Problem([Choice("threads", lanes=2)], [[4.0], [4.0]], [Flow(0, (), 0, True), Flow(1, (), 0, True)])
    found = schedule(apart, (0, 0))
    assert found.seconds == pytest.approx(4.0)
    assert found.overlaps == [(0, 1)]
    assert {step.lane for step in found.steps} == {0, 1}


def test_a_provider_that_cannot_is_never_chosen() -> None:
    given = diamond(0.0)
    rows = [list(row) for row in given.seconds]
    rows[1][1] = rows[2][1] = CANNOT
    problem = Problem(given.choices, rows, given.flows, given.links)
    owner, _ = balance(problem, (0, 0, 0, 0))
    assert owner[1] == owner[2] == 0


def test_branches_end_where_they_meet() -> None:
    assert branches(diamond(0.0)) == [(1,), (2,)]
    flows = [Flow(0, (1, 3), 0), Flow(1, (2,), 0), Flow(2, (4,), 0), Flow(3, (4,), 0), Flow(5, (), 0, True)]
    flows += [Flow(4, (), 0, True)]
    problem = Problem([Choice("a")], [[1.0]] * 6, flows)
    assert branches(problem) == [(0, 1, 2, 3, 4), (5,), (1, 2), (3,)]


@pytest.mark.parametrize("seed", range(60))
def test_never_worse_than_one_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(2, 25)))
    start = optimise(problem)
    owner, found = balance(problem, start.owner)
    assert found.seconds <= start.cost.total * (1 + 1e-9)
    assert found.seconds <= found.serial * (1 + 1e-9)
    longest = max(min(row) for row in problem.seconds)
    assert found.seconds >= longest  # no node is faster than its fastest provider
    check(problem, owner, found)


def diamonds(count: int) -> Problem:
    """Diamonds in a row, on two engines that are equally fast: two ways of one second each, little else."""
    seconds: list[list[float]] = []
    flows = [Flow(OUTSIDE, (0,), 0.0)]
    for k in range(count):
        fork, left, right, join = range(4 * k, 4 * k + 4)
        seconds += [[0.01, 0.5], [1.0, 1.0], [1.0, 1.0], [0.01, 0.5]]
        flows += [Flow(fork, (left, right), 1.0), Flow(left, (join,), 1.0), Flow(right, (join,), 1.0)]
        last = k == count - 1
        flows.append(Flow(join, () if last else (join + 1,), 1.0, output=last))
    link = Link(0.01)
    choices = [Choice("here"), Choice("there", space=1)]
    return Problem(choices, seconds, flows, {(0, 1): link, (1, 0): link})


def test_all_branches_of_a_large_graph_are_looked_at() -> None:
    problem = diamonds(200)
    owner, found = balance(problem, [0] * problem.size)
    assert found.serial > 1.0 * 200
    assert found.seconds < 1.1 * 200
    for k in range(200):
        assert owner[4 * k + 1] != owner[4 * k + 2]


def test_a_region_counts_as_the_whole_does() -> None:
    """What lies around stays where it is and takes no time: the difference a move makes is that of the whole."""
    problem = diamonds(3)
    region = Region(problem, [0] * problem.size, [5, 6])
    assert region.nodes == [4, 5, 6, 7]
    before, after = (schedule(region.problem, owner).seconds for owner in (region.owner, region.moved([5], 1)))
    moved = [int(node == 5) for node in range(problem.size)]
    whole = schedule(problem, [0] * problem.size).seconds - schedule(problem, moved).seconds
    assert before - after == pytest.approx(whole)
    assert min(region.problem.seconds[0]) == 0.0 and region.problem.seconds[0][1] == CANNOT
