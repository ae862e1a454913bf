"""Waves of host parts in time: who overlaps, with how many threads, and where it is not worth it."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.runtime.partition.issuing import order_of_issue
from ranvier.runtime.partition.optimise import optimise
from ranvier.runtime.partition.problem import CANNOT, OUTSIDE, Choice, Flow, Link, Problem
from ranvier.runtime.partition.schedule import Schedule
from ranvier.runtime.partition.waves import DEVICE, UNKNOWN, Threads, in_waves, timed
from tests.runtime.partition.oracle import random_problem

FAST, SLOW = 0, 1  # native code that can use all threads; one node at a time on one thread
CHOICES = [Choice("fast", engine=0), Choice("slow", engine=0, whole_parts=False)]


def threads(count: int, *used: int, locked: dict[tuple[int, int], float] | None = None, **more: object) -> Threads:
    return Threads(count, used or (count, 1), locked or {}, **more)  # type: ignore[arg-type]


def fork(fast: list[float], slow: list[float]) -> tuple[Problem, tuple[int, ...]]:
    """A node, then two rows of nodes, one for each provider, and a node that joins them."""
    rows = [[1.0, CANNOT], *([s, CANNOT] for s in fast), *([CANNOT, s] for s in slow), [1.0, CANNOT]]
    a, b = len(fast), len(fast) + len(slow)
    flows = [Flow(OUTSIDE, (0,), 0.0), Flow(0, (1, a + 1), 0.0)]
    flows += [Flow(k, (k + 1,), 0.0) for k in range(1, b + 1) if k not in (a, b)]
    flows += [Flow(a, (b + 1,), 0.0), Flow(b, (b + 1,), 0.0), Flow(b + 1, (), 0.0, True)]
    return Problem(CHOICES, rows, flows), (FAST, *[FAST] * a, *[SLOW] * (b - a), FAST)


def check(problem: Problem, found: Schedule, count: int) -> None:
    """Every node once and after what it reads; lanes of a wave independent; never more threads than there are."""
    assert sorted(node for step in found.steps for node in step.nodes) == list(range(problem.size))
    at = {node: k for k, step in enumerate(found.steps) for node in step.nodes}
    for node, before in enumerate(problem.before):
        for other in before:
            a, b = found.steps[at[other]], found.steps[at[node]]
            assert a is b or a.end <= b.start + 1e-9
            assert a.wave < 0 or a.wave != b.wave or a.lane == b.lane
    waves = {step.wave for step in found.steps} - {-1}
    for wave in waves:
        lanes = {step.lane: step.threads for step in found.steps if step.wave == wave}
        assert len(lanes) >= 2 and sum(lanes.values()) <= count and min(lanes.values()) >= 1
    issue = order_of_issue(problem, found)
    assert sorted(issue) == list(range(len(found.steps)))
    place = {k: j for j, k in enumerate(issue)}
    for k, step in enumerate(found.steps):
        assert all(place[other] < place[k] for other in step.after)
    for wave in waves:
        positions = sorted(place[k] for k, step in enumerate(found.steps) if step.wave == wave)
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        lanes_in_order = [found.steps[issue[j]].lane for j in positions]
        assert lanes_in_order == sorted(lanes_in_order)


def test_native_code_beside_the_interpreter() -> None:
    problem, owner = fork([2.0], [4.0])
    found = in_waves(problem, owner, threads(2))
    assert found is not None
    check(problem, found, 2)
    assert found.serial == pytest.approx(8.0)
    assert found.seconds == pytest.approx(1 + 4 + 1, rel=1e-3)  # on one thread the native code takes four as well
    both = {step.nodes: step for step in found.steps}
    assert both[1,].threads == 1 and both[1,].wave == both[2,].wave >= 0
    assert both[0,].wave == both[3,].wave == -1


def test_more_threads_go_to_the_native_code() -> None:
    problem, owner = fork([6.0], [7.0])
    found = in_waves(problem, owner, threads(4))
    assert found is not None
    check(problem, found, 4)
    both = {step.nodes: step for step in found.steps}
    assert (both[1,].threads, both[2,].threads) == (3, 1)
    assert found.seconds == pytest.approx(1 + 6 * 4 / 3 + 1, rel=1e-3)


def test_a_long_part_is_cut_where_the_short_one_ends() -> None:
    problem, owner = fork([1.0] * 8, [4.0])
    found = in_waves(problem, owner, threads(2))
    assert found is not None
    check(problem, found, 2)
    assert found.seconds == pytest.approx(1 + 4 + 6 + 1, rel=1e-3)  # two of the eight in four seconds, the rest alone
    assert [step.nodes for step in found.steps if step.wave >= 0] == [(1, 2), (9,)]


def test_two_native_branches_gain_nothing() -> None:
    problem, _ = fork([4.0], [4.0])
    rows = [[row[0] if row[0] < CANNOT else row[1], CANNOT] for row in problem.seconds]
    alike = Problem(CHOICES, rows, problem.flows)
    assert in_waves(alike, (0, 0, 0, 0), threads(2)) is None


def test_two_branches_of_the_interpreter() -> None:
    problem, _ = fork([4.0], [4.0])
    rows = [[CANNOT, 1.0], [CANNOT, 4.0], [CANNOT, 4.0], [CANNOT, 1.0]]
    slow = Problem(CHOICES, rows, problem.flows)
    owner = (SLOW,) * 4
    found = in_waves(slow, owner, threads(2))
    assert found is not None and found.seconds == pytest.approx(6.0, rel=1e-3)
    held = {(k, SLOW): rows[k][SLOW] for k in range(4)}
    assert in_waves(slow, owner, threads(2, locked=held)) is None  # one thread at a time has the lock
    assert in_waves(slow, owner, threads(2, alone=frozenset({(1, SLOW)}))) is None
    assert in_waves(slow, owner, threads(1)) is None


def test_the_lock_keeps_others_waiting_a_little() -> None:
    problem, owner = fork([2.0], [4.0])
    found = in_waves(problem, owner, threads(2, locked={(2, SLOW): 4.0}))
    assert found is not None and found.seconds == pytest.approx(1 + 4.01 + 1, rel=1e-3)


def test_nothing_runs_beside_what_nobody_knows() -> None:
    problem, owner = fork([2.0], [4.0])
    assert in_waves(problem, owner, threads(2, 2, UNKNOWN)) is None


def test_a_device_works_on_during_a_wave() -> None:
    problem, owner = fork([2.0], [4.0])
    choices = [*CHOICES, Choice("device", space=1)]
    rows = [[*row, CANNOT] for row in problem.seconds] + [[CANNOT, CANNOT, 3.0]]
    flows = [*problem.flows, Flow(0, (4,), 0.0), Flow(4, (), 0.0, True)]
    more = Problem(choices, rows, [f for f in flows if f.producer != 0] + [Flow(0, (1, 2, 4), 0.0)])
    more = Problem(choices, rows, more.flows, {(0, 1): Link(0.5), (1, 0): Link(0.5)})
    found = in_waves(more, (*owner, 2), threads(2, 2, 1, DEVICE))
    assert found is not None
    check(more, found, 2)
    assert found.seconds == pytest.approx(6.0, rel=1e-3)
    device = next(step for step in found.steps if step.owner == 2)
    assert (device.start, device.end) == (pytest.approx(1.5), pytest.approx(4.5))


@pytest.mark.parametrize("seed", range(60))
def test_random_problems(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = random_problem(rng, int(rng.integers(3, 25)))
    count = int(rng.integers(2, 6))
    kinds = [int(rng.choice([DEVICE, UNKNOWN, 1, count])) if p else count for p in range(len(given.choices))]
    owner = optimise(given).owner
    found = in_waves(given, owner, Threads(count, kinds, {}))
    if found is None:
        return
    check(given, found, count)
    groups: list[list[list[tuple[int, ...]]]] = []
    last: tuple[int, int] | None = None
    for step in (found.steps[k] for k in order_of_issue(given, found)):
        here = None if step.wave < 0 else (step.wave, step.lane)
        if here is None or last is None or here[0] != last[0]:
            groups.append([[step.nodes]])
        elif here[1] != last[1]:
            groups[-1].append([step.nodes])
        else:
            groups[-1][-1].append(step.nodes)
        last = here
    again = timed(given, owner, Threads(count, kinds, {}), groups)
    assert {step.nodes: step.wave >= 0 for step in again.steps} == {step.nodes: step.wave >= 0 for step in found.steps}
    if DEVICE not in kinds:  # whose parts may be started in another order
        assert again.seconds == pytest.approx(found.seconds)
