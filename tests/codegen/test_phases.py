"""Seconds by phase: what is inside of another phase is not counted twice."""

from __future__ import annotations

import threading

import pytest

from ranvier.codegen import phases
from ranvier.codegen.phases import phase, taken


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(phases.time, "perf_counter", made)
    monkeypatch.setattr(phases, "_seconds", {})
    return made


def test_a_phase_inside_of_another_counts_for_itself(clock: _Clock) -> None:
    with phase("outer"):
        clock.now += 1
        with phase("inner"):
            clock.now += 10
            with phase("outer"):
                clock.now += 100
        clock.now += 1000
    with phase("inner"):
        clock.now += 10000
    assert taken() == {"outer": 1101, "inner": 10010}


def test_errors_end_phases(clock: _Clock) -> None:
    with pytest.raises(ZeroDivisionError), phase("outer"), phase("inner"):
        clock.now += 1
        raise ZeroDivisionError
    with phase("outer"):
        clock.now += 2
    assert taken() == {"inner": 1, "outer": 2}


def test_threads_have_phases_of_their_own(clock: _Clock) -> None:
    def other() -> None:
        with phase("other"):
            clock.now += 5

    with phase("mine"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert taken() == {"other": 5, "mine": 5}
