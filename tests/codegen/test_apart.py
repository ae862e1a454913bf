"""Workers are woken on other cores than the caller's, unless somebody else says where they run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm import apart, driver
from ranvier.codegen.llvm import program as programs
from ranvier.codegen.llvm.apart import Places
from ranvier.codegen.llvm.pool import Pool
from ranvier.codegen.llvm.program import NativeProgram
from ranvier.codegen.storage import Storage
from tests.codegen.programs import ISA, counting, placed


def cores() -> list[int]:
    """Those that threads may be bound to; none where nobody may say so."""
    try:
        found = os.sched_getaffinity(0)
        os.sched_setaffinity(0, found)
    except (AttributeError, OSError):
        return []
    return sorted(found)


CORES = cores()
pytestmark = pytest.mark.skipif(len(CORES) < 2 or apart.calls() is None, reason="needs Linux and two cores")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool of one worker, which is woken for anything."""
    monkeypatch.setattr(programs, "usable_cores", lambda: 2)
    made = Pool(1)
    made._words[driver.WAKE_WORK // 8] = 0
    yield made
    made.close()


def on_core(core: int, work: Callable[[], Any]) -> Any:
    """What ``work`` gives in a thread that runs on one core."""
    found: list[Any] = []

    def run() -> None:
        os.sched_setaffinity(0, {core})
        found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def run(pool: Pool) -> None:
    """After its worker has gone to sleep."""
    tiles = 64
    out = Storage("output", 8 * tiles)
    program = NativeProgram([counting(out, tiles)] * 3, placed([out]), ISA, bases=3)
    made = np.zeros(tiles, np.int64)
    until = time.monotonic() + 5
    while not pool._words[driver.SLEEPERS // 8] and time.monotonic() < until:
        time.sleep(0.001)
    program.run([], [made], 0, threads=2, pool=pool)
    np.testing.assert_array_equal(made, np.full(tiles, 3))


def worker(pool: Pool) -> int:
    pool.ready(2)
    (thread,) = pool._threads
    assert thread.native_id is not None
    return thread.native_id


def test_the_callers_core_is_left_to_it(two: Pool) -> None:
    thread = worker(two)
    for core in (CORES[0], CORES[1], CORES[1], CORES[0]):
        on_core(core, lambda: run(two))
        assert os.sched_getaffinity(thread) == set(CORES) - {core}


def test_others_have_the_last_word(two: Pool) -> None:
    thread = worker(two)
    on_core(CORES[0], lambda: run(two))
    os.sched_setaffinity(thread, {CORES[0]})
    for core in CORES[1::-1]:
        on_core(core, lambda: run(two))
        assert os.sched_getaffinity(thread) == {CORES[0]}
    assert not two._words[driver.PLACES // 8]


def test_a_worker_of_a_thread_that_is_bound_stays_with_it(two: Pool) -> None:
    thread = on_core(CORES[1], lambda: worker(two))  # whose threads are
    on_core(CORES[0], lambda: run(two))
    assert os.sched_getaffinity(thread) == {CORES[1]}


def test_a_worker_that_comes_later_knows_it_too() -> None:
    places = Places.of(1)
    assert places is not None
    places.words[apart._LAST] = CORES[0]
    found: list[Any] = []

    def join() -> None:
        found.extend([places.joined(1), os.sched_getaffinity(0)])

    thread = threading.Thread(target=join)
    thread.start()
    thread.join()
    assert found == [True, set(CORES[1:])]


def test_without_a_core_for_each_or_without_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Places.of(len(CORES)) is None
    assert Places.of(0) is None
    places = Places.of(1)
    assert places is not None

    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert not places.joined(1)
    monkeypatch.setattr(os, "sched_getaffinity", refused)
    assert Places.of(1) is None
