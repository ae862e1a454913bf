"""Many threads: every tile once, steps in order, runs at the same time, forks, exits, and an idle pool that is idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm import driver, pool, system
from ranvier.codegen.llvm import program as programs
from ranvier.codegen.llvm.pool import Pool
from ranvier.codegen.llvm.program import NativeProgram
from ranvier.codegen.storage import Storage
from tests.codegen.programs import ISA, Mixer, climbed, climbing, counting, placed, run_mixer

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    """A pool for four threads, whatever the machine has."""
    made = Pool(3)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _cut_for_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "usable_cores", lambda: 4)


def waits_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system without futexes."""
    monkeypatch.setattr(system, "futex", lambda: (0, 0))
    monkeypatch.setattr(pool, "_worker", pool._worker.__wrapped__)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 9])
def test_every_tile_once(four: Pool, threads: int) -> None:
    for tiles in (1, 2, 3, 5, 17, 64, 1001, 20_011):
        for grain in (1, 4, 2000):
            out = Storage("output", 8 * tiles)
            program = NativeProgram([counting(out, tiles, grain=grain)] * 3, placed([out]), ISA, bases=3)
            made = np.zeros(tiles, np.int64)
            for _ in range(3):
                program.run([], [made], 0, threads=threads, pool=four)
            np.testing.assert_array_equal(made, np.full(tiles, 9))


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_steps_see_what_earlier_steps_wrote(four: Pool, threads: int) -> None:
    for seed in range(400):
        mixer = Mixer(seed)
        program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
        for repeat in range(3):
            run_mixer(mixer, program, seed=repeat, threads=threads, pool=four)


def test_many_steps_in_a_row(four: Pool) -> None:
    mixer = Mixer(2, steps=2000)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    for threads in (2, 4):
        run_mixer(mixer, program, threads=threads, pool=four)


def test_workers_that_sleep_between_runs(four: Pool) -> None:
    mixer = Mixer(7, steps=6)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    for k in range(40):
        run_mixer(mixer, program, threads=2 + k % 3, pool=four)
        time.sleep(0.0005 * (k % 3))


def test_callers_at_the_same_time(four: Pool) -> None:
    """One of them has the pool, the others go alone; programs and their memory do not mix."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            mixers = [Mixer(100 * seed + k) for k in range(10)]
            made = [NativeProgram(m.launches, m.places, ISA, bases=4) for m in mixers]
            for repeat in range(30):
                for mixer, program in zip(mixers, made):
                    run_mixer(mixer, program, seed=repeat, threads=1 + repeat % 4, pool=four)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not failures


def test_one_program_on_many_callers(four: Pool) -> None:
    mixer = Mixer(11, steps=8)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    callers = [
        threading.Thread(
            target=lambda: [run_mixer(mixer, program, seed=k, threads=4, pool=four) for k in range(100)]  # type: ignore[func-returns-value]
        )
        for _ in range(4)
    ]
    errors: list[Any] = []
    before, threading.excepthook = threading.excepthook, errors.append
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    threading.excepthook = before
    assert not errors


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_a_round_begins_when_the_one_before_is_done(four: Pool, threads: int) -> None:
    for width in (1, 2, 3, 31, 32, 100, 1000):
        for grain in (1, 7):
            rounds = 40
            out = Storage("output", 8 * width * (rounds + 1))
            program = NativeProgram([climbing(out, width, rounds, grain=grain)], placed([out]), ISA, bases=3)
            made = np.zeros((rounds + 1, width), np.int64)
            made[0] = np.arange(width)
            want = climbed(made[0], rounds)
            flag = np.zeros(1, np.int32)
            for abort in (0, int(flag.ctypes.data)):
                made[1:] = -1
                program.run([], [made], 0, threads=threads, pool=four, abort=abort)
                np.testing.assert_array_equal(made, want)


def test_rounds_of_many_callers_and_of_workers_that_come_late(four: Pool) -> None:
    """One caller has the pool, the others climb alone; workers fall asleep between the steps and join midway."""
    width, rounds = 24, 300
    out = Storage("output", 8 * width * (rounds + 1))
    steps = [climbing(out, width, rounds), climbing(out, width, rounds, step=7)]
    program = NativeProgram(steps, placed([out]), ISA, bases=3)
    failures: list[BaseException] = []

    def climb() -> None:
        try:
            for k in range(30):
                made = np.full((rounds + 1, width), -1)
                made[0] = np.arange(width) + k
                program.run([], [made], 0, threads=2 + k % 3, pool=four)
                np.testing.assert_array_equal(made, climbed(made[0], rounds, step=7))
                time.sleep(0.0005 * (k % 3))
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=climb) for _ in range(3)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not failures


@pytest.mark.parametrize("threads", [1, 3])
def test_an_abort_ends_a_step_between_its_rounds(four: Pool, threads: int) -> None:
    """The step's own first round sets the flag: its output is where the flag lies."""
    width, rounds = 4, 50
    out = Storage("output", 8 * width * (rounds + 1))
    program = NativeProgram([climbing(out, width, rounds)], placed([out]), ISA, bases=3)
    made = np.zeros((rounds + 1, width), np.int64)
    assert program.run([], [made], 0, threads=threads, pool=four, abort=int(made[3].ctypes.data)) == 1
    assert made[2].all() and made[3].any() and not made[4:].any()
    assert four._words[driver.LOCK // 8] == 0


def test_workers_take_part(four: Pool) -> None:
    out = Storage("output", 8 * 64)
    program = NativeProgram([counting(out, 64, effort=20_000)] * 3, placed([out]), ISA, bases=3)
    made, times, runs = np.zeros(64, np.int64), np.zeros((3, 3), np.int64), 0
    deadline = time.monotonic() + 10
    while times[:, 2].max() < 2 and time.monotonic() < deadline:
        runs += 1
        program.run([], [made], 0, threads=2, pool=four, times=times)
        assert times[:, 2].max() <= 2
        stamps = times[:, :2].ravel().tolist()
        assert stamps == sorted(stamps)
    assert times[:, 2].max() == 2
    np.testing.assert_array_equal(made, np.full(64, 3 * runs))


def test_a_worker_keeps_to_the_limit_and_to_its_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' side alone, on this thread: a step is opened by hand for the caller and two workers."""
    waits_in_python(monkeypatch)
    made = Pool(0)
    out = Storage("output", 8 * 10)
    program = NativeProgram([counting(out, 10, grain=3)], placed([out]), ISA, bases=3)
    counts, scratch = np.zeros(10, np.int64), np.full((4, 16), -1)
    pointers = np.array([counts.ctypes.data])
    step = program._numbers[: driver.STEP_WORDS].copy()
    step[driver.BUFFERS] = pointers.ctypes.data
    assert step[driver.CHUNKS] == 4
    words = made._words
    words[driver.STEP // 8 : driver.STEP // 8 + driver.STEP_WORDS] = step
    words[driver.STEP_SCRATCH // 8], words[driver.STEP_STRIDE // 8] = scratch.ctypes.data, scratch.strides[0]
    words[driver.STEP_LIMIT // 8] = 3
    words[driver.TICKET // 8] = ticket = (7 << 32) + 0b1111
    assert made._work(made.address, 3) == 1
    assert words[driver.TICKET // 8] == ticket and not counts.any()
    assert made._work(made.address, 2) == 1
    assert words[driver.TICKET // 8] == 7 << 32 and words[driver.DONE // 8] == (1 << 32) + 4
    np.testing.assert_array_equal(counts, np.ones(10))
    assert scratch[2, 0] == 5  # its own chunks were the last two; those before came after
    assert (np.delete(scratch, 2, 0) == -1).all()
    words[driver.STOP // 8] = 1
    assert made._work(made.address, 1) == 0


def test_a_pool_in_use_is_left_alone() -> None:
    busy = Pool(2)
    out = Storage("output", 8 * 16)
    program = NativeProgram([counting(out, 16)], placed([out]), ISA, bases=3)
    made, times = np.zeros(16, np.int64), np.zeros((1, 3), np.int64)
    busy._words[driver.LOCK // 8] = 1
    program.run([], [made], 0, threads=3, pool=busy, times=times)
    assert times[0, 2] == 1 and (made == 1).all()
    busy._words[driver.LOCK // 8] = 0
    busy.close()
    program.run([], [made], 0, threads=3, pool=busy, times=times)  # and one that is closed, too
    assert times[0, 2] == 1 and (made == 2).all()


def test_abort_frees_the_pool(four: Pool) -> None:
    flag = np.ones(1, np.int32)
    mixer = Mixer(3)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    row = np.zeros(mixer.size, np.int64)
    assert program.run([row], [row], 0, threads=4, pool=four, abort=int(flag.ctypes.data)) == 0
    assert four._words[driver.LOCK // 8] == 0
    run_mixer(mixer, program, threads=4, pool=four)


def test_close_during_runs() -> None:
    short = Pool(3)
    mixer = Mixer(4, steps=500)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    run_mixer(mixer, program, threads=4, pool=short)
    workers = list(short._threads)
    closer = threading.Timer(0.005, short.close)
    closer.start()
    for _ in range(5):
        run_mixer(mixer, program, threads=4, pool=short)
    closer.join()
    assert len(workers) == 3 and not any(w.is_alive() for w in workers)


def test_workers_that_wait_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_in_python(monkeypatch)
    made = Pool(3)
    assert made.portable
    for seed in range(100):
        mixer = Mixer(seed)
        run_mixer(mixer, NativeProgram(mixer.launches, mixer.places, ISA, bases=4), threads=4, pool=made)
    workers = list(made._threads)
    made.close()
    assert len(workers) == 3 and not any(w.is_alive() for w in workers)


@pytest.mark.parametrize("portable", [False, True])
def test_an_idle_pool_costs_nothing(portable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if portable:
        waits_in_python(monkeypatch)
    idle = Pool(3)
    mixer = Mixer(6, steps=20)
    run_mixer(mixer, NativeProgram(mixer.launches, mixer.places, ISA, bases=4), threads=4, pool=idle)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    idle.close()


def test_the_shared_pool_has_as_many_threads_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_shared", None)
    monkeypatch.setattr(pool, "usable_cores", lambda: 3)
    made = pool.shared()
    assert made is pool.shared() and made.size == 1  # nobody yet
    assert [made.ready(n) for n in (1, 2, 3, 64)] == [1, 2, 3, 3]
    made.close()
    assert made.ready(64) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_children_have_pools_of_their_own() -> None:
    mixer = Mixer(9, steps=30)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    run_mixer(mixer, program, threads=4)
    parents = pool.shared()
    stop = threading.Event()

    def keep_running() -> None:
        while not stop.is_set():
            run_mixer(mixer, program, threads=4)

    background = threading.Thread(target=keep_running)
    background.start()  # so that the lock of the pool is usually held when the fork happens
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                good = False
                try:
                    for _ in range(5):
                        run_mixer(mixer, program, threads=4)
                    good = pool.shared() is not parents and pool.shared().size == parents.size
                    pool.shared().close()
                finally:
                    os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        background.join()
    run_mixer(mixer, program, threads=4)


@pytest.mark.parametrize(
    "ending", ["", "threading.Thread(target=forever, daemon=True).start(); time.sleep(0.05)", "sys.exit(0)"]
)
def test_the_process_ends(ending: str) -> None:
    script = f"""
        import sys, threading, time
        from ranvier.codegen.llvm import pool, program
        program.usable_cores = pool.usable_cores = lambda: 3
        from ranvier.codegen.llvm.program import NativeProgram
        from tests.codegen.programs import ISA, Mixer, run_mixer
        mixer = Mixer(9, steps=30)
        made = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
        run_mixer(mixer, made, threads=3)
        assert pool.shared().size == 3
        def forever():
            while True:
                run_mixer(mixer, made, threads=3)
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
