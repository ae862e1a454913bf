"""Timing with a clock of the test's own: minima of rounds in turns, bounded, and honest about a machine at work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ranvier.codegen.llvm import cache
from ranvier.config import SessionConfig
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.calibration import lazy, store
from ranvier.runtime.calibration.measure import measure
from ranvier.runtime.calibration.rounds import AT_WORK, Timed, disturbance, take_turns
from ranvier.runtime.calibration.table import Figures, least_of


class Clock:
    """Time that passes only when something runs."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: Iterable[float]) -> Callable[[], None]:
        """Something that takes these seconds, run after run; the last of them for ever."""
        left = list(seconds)

        def call() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_the_shortest_run_counts() -> None:
    clock = Clock()
    timed = Timed(clock.work([3.0, 1.0, 2.0]), clock)
    timed.run(0.0)
    assert timed.rounds == [pytest.approx(1.0)]


def test_a_round_ends_with_its_time_or_with_all_time() -> None:
    clock = Clock()
    long, late = Timed(clock.work([1.0]), clock), Timed(clock.work([1.0]), clock)
    long.run(10.0)
    assert clock.now == pytest.approx(110.0)
    late.run(10.0, end=clock.now)
    assert clock.now == pytest.approx(111.0)  # one run, whatever the round might have taken


def test_a_busy_moment_hits_one_round_of_all_and_the_best_of_none() -> None:
    clock = Clock()
    quiet, busy = [1.0] * 3, [5.0] * 3
    timed = [Timed(clock.work(quiet + busy + quiet + quiet + quiet), clock) for _ in range(4)]
    take_turns(timed, 4, 0.0, math.inf, clock)
    assert all(each.rounds == pytest.approx([1.0, 5.0, 1.0, 1.0]) for each in timed)
    assert disturbance(timed) < AT_WORK


def test_rounds_far_apart_mean_a_machine_at_work() -> None:
    clock = Clock()
    timed = [Timed(clock.work([1.0] * 3 + [2.0] * 3 + [1.7] * 3 + [3.0] * 3), clock) for _ in range(3)]
    take_turns(timed, 4, 0.0, math.inf, clock)
    assert disturbance(timed) > AT_WORK


def test_nothing_is_begun_after_the_end_and_too_few_rounds_are_not_believed() -> None:
    clock = Clock()
    timed = [Timed(clock.work([1.0]), clock) for _ in range(10)]
    take_turns(timed, 4, 0.0, 104.5, clock)
    assert clock.now == pytest.approx(105.0)  # three runs of the first, two of the second
    assert [len(each.rounds) for each in timed] == [1, 1] + [0] * 8
    assert disturbance(timed) == math.inf


class Ticking:
    """A clock that every look moves on: on it everything takes equally long, and time runs out."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_calibration_that_has_no_time_is_short_and_provisional() -> None:
    clock = Ticking(0.05)
    figures = measure(REGISTRY.get("reference"), SessionConfig(threads=1), quick=True, budget=1.0, clock=clock)
    assert figures.provisional == 1
    assert figures.seconds < 3.0
    assert len(figures.points) >= 2 and figures.launch > 0


def test_a_calibration_with_time_for_rounds_is_not() -> None:
    figures = measure(REGISTRY.get("reference"), SessionConfig(threads=1), quick=True, budget=1.0, clock=Ticking(1e-4))
    assert figures.provisional == 0
    assert figures.iteration is not None


def figures(launch: float, provisional: int, **points: float) -> Figures:
    return Figures(
        "reference",
        launch=launch,
        points={f"{name} float32": ((1e6, seconds),) for name, seconds in points.items()},
        quick=True,
        iteration=launch,
        provisional=provisional,
    )


def test_of_two_provisional_measurements_the_shorter_times_count() -> None:
    found = least_of(figures(2e-6, 1, product=1e-3, gather=1e-4), figures(1e-6, 2, product=2e-3, movement=3e-4))
    assert found == figures(1e-6, 3, product=1e-3, gather=1e-4, movement=3e-4)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Figures]:
    """What measurements will find, one after the other."""
    given: list[Figures] = []
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    monkeypatch.delenv(lazy.VARIABLE, raising=False)
    monkeypatch.setattr(store, "_read", {})
    monkeypatch.setattr(lazy, "_measured_at", {})
    monkeypatch.setattr(lazy, "measure", lambda *_, **how: given.pop(0))
    return given


def asked() -> Figures:
    return lazy.figures_for([REGISTRY.get("reference")], SessionConfig(threads=1))["reference"]


def test_provisional_figures_are_measured_again_after_a_while(
    answers: list[Figures], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(lazy, "_now", lambda: now)
    answers += [figures(3e-6, 1, product=1e-3), figures(2e-6, 1, product=2e-3), figures(9e-6, 0, product=9e-3)]
    assert asked() == figures(3e-6, 1, product=1e-3)
    now += lazy.AGAIN / 2
    assert asked() == figures(3e-6, 1, product=1e-3)
    now += lazy.AGAIN
    assert asked() == figures(2e-6, 2, product=1e-3)
    monkeypatch.setattr(store, "_read", {})  # another process, which need not wait
    monkeypatch.setattr(lazy, "_measured_at", {})
    assert asked() == figures(9e-6, 0, product=9e-3)  # of a machine at rest: nothing older counts
    now += 10 * lazy.AGAIN
    assert asked() == figures(9e-6, 0, product=9e-3)
    assert not answers


def test_a_machine_that_is_always_at_work_is_measured_so_often_and_no_more(
    answers: list[Figures], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(lazy, "_now", lambda: now)
    answers += [figures(1e-6, 1, product=1e-3) for _ in range(20)]
    for _ in range(20):
        asked()
        now += lazy.AGAIN
    assert 20 - len(answers) == lazy.TIMES


def test_off_leaves_provisional_figures_as_they_are(answers: list[Figures], monkeypatch: pytest.MonkeyPatch) -> None:
    answers += [figures(3e-6, 1, product=1e-3)]
    first: Any = asked()
    monkeypatch.setattr(lazy, "_measured_at", {})
    monkeypatch.setenv(lazy.VARIABLE, "off")
    assert asked() == first
