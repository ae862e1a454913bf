"""Many models under one limit: loading, unloading the idle, waiting for a slot, counting."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import (
    Cancelled,
    DeadlineExceeded,
    DTypeMismatch,
    InvalidConfig,
    InvalidInput,
    InvalidModel,
    ResourceLimit,
    SessionClosed,
)
from ranvier.formats import onnx as onnx_format
from ranvier.runtime.metrics import Counters, percentile
from tests.runtime.small_models import endless, linear, written

ROWS = 256
WEIGHTS = ROWS * ROWS * 4 + ROWS * 4  # bytes of one square model
X = np.ones((1, ROWS), np.float32)
WAIT = 30  # seconds no test should ever need


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Three models of the same size with different weights."""
    return [written(linear(ROWS, ROWS, seed=k), tmp_path, f"m{k}.onnx") for k in range(3)]


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return written(endless(), tmp_path, "slow.onnx")


def running(manager: rv.SessionManager, name: str, count: int = 1) -> None:
    """Wait until so many runs of a model are in progress."""
    deadline = time.monotonic() + WAIT
    while manager.metrics(name).active < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


FOREVER = {"limit": np.array(np.inf, np.float32)}


def test_models_by_name(paths: list[Path]) -> None:
    with rv.SessionManager() as manager:
        for k, path in enumerate(paths):
            session = manager.load(f"m{k}", path)
            assert session.report.model == f"m{k}"
            assert manager.get(f"m{k}") is session
        assert manager.names() == ["m0", "m1", "m2"]
        assert len(manager) == 3
        assert "m1" in manager
        for k, path in enumerate(paths):
            with rv.load(path) as alone:
                np.testing.assert_array_equal(manager.run(f"m{k}", {"x": X})["y"], alone.run({"x": X})["y"])
        assert list(manager.run("m0", [X], ["y"])) == ["y"]
        manager.unload("m1")
        assert "m1" not in manager
        assert repr(manager).startswith("<SessionManager of 2 models, ")
        with pytest.raises(InvalidInput, match=r"no model is loaded as 'm1' \(known: m0, m2\)"):
            manager.run("m1", {"x": X})
    with pytest.raises(SessionClosed, match="the session manager is closed"):
        manager.run("m0", {"x": X})
    with pytest.raises(SessionClosed):
        manager.load("m0", paths[0])


def test_a_name_is_taken_once(paths: list[Path]) -> None:
    with rv.SessionManager() as manager:
        first = manager.load("m", paths[0])
        with pytest.raises(InvalidConfig, match="'m' is already loaded"):
            manager.load("m", paths[1])
        assert manager.get("m") is first
        second = manager.load("m", paths[1], replace=True)
        assert manager.get("m") is second
        with pytest.raises(SessionClosed):
            first.run({"x": X})
        with pytest.raises(InvalidModel):
            manager.load("m", "absent.onnx", replace=True)
        assert manager.get("m") is second  # the one that works stays


def test_a_model_that_fails_to_load_leaves_nothing(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=10 * WEIGHTS) as manager:
        with pytest.raises(InvalidModel):
            manager.load("m", b"garbage")
        assert len(manager) == 0
        assert manager.memory_bytes == 0
        manager.load("m", paths[0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"memory_limit": 0}, "memory_limit must be a whole number of 1 or more"),
        ({"max_sessions": 1.5}, "max_sessions must be"),
        ({"max_concurrent_runs": True}, "max_concurrent_runs must be"),
        ({"config": {}}, "config must be a SessionConfig"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        rv.SessionManager(**options)


def test_options_of_the_manager_and_of_a_model(paths: list[Path]) -> None:
    config = rv.SessionConfig(optimization="none", threads=1)
    with rv.SessionManager(config=config) as manager:
        session = manager.load("m", paths[0], threads=2, limits=rv.Limits(run_seconds=5.0))
        assert (session.config.optimization, session.config.threads) == ("none", 2)
        assert session.config.limits.run_seconds == 5.0
        with pytest.raises(InvalidConfig, match=r"unknown option 'thread'"):
            manager.load("n", paths[0], thread=2)


# -- room -------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_and_comes_back(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=int(2.5 * WEIGHTS)) as manager:
        manager.load("a", paths[0])
        expected = manager.run("a", {"x": X})["y"]
        manager.load("b", paths[1])
        manager.run("a", {"x": X})  # b is now the oldest
        manager.load("c", paths[2])
        found = manager.metrics()
        assert {name: m.loaded for name, m in found.items()} == {"a": True, "b": False, "c": True}
        assert (found["b"].evictions, found["b"].weight_bytes, found["b"].arena_bytes) == (1, 0, 0)
        assert manager.memory_bytes <= 2.5 * WEIGHTS
        assert manager.names() == ["a", "b", "c"]  # an unloaded model is still known
        manager.run("b", {"x": X})  # comes back, and a goes
        assert not manager.metrics("a").loaded
        np.testing.assert_array_equal(manager.run("a", {"x": X})["y"], expected)
        assert manager.metrics("b").loads == 2
        assert manager.metrics("a").loads == 2


def test_a_path_means_the_same_wherever_the_process_goes(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(paths[0].parent)
    with rv.SessionManager(max_sessions=1) as manager:
        manager.load("a", paths[0].name)
        manager.load("b", paths[1])
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
        manager.run("a", {"x": X})
        assert manager.metrics("a").loads == 2


def test_the_number_of_models_in_memory(paths: list[Path]) -> None:
    with rv.SessionManager(max_sessions=2) as manager:
        for k, path in enumerate(paths):
            manager.load(f"m{k}", path)
        assert [m.loaded for m in manager.metrics().values()] == [False, True, True]
    with rv.SessionManager(max_sessions=1) as manager:
        manager.load("bytes", paths[0].read_bytes())
        with pytest.raises(
            ResourceLimit, match=r"'max_sessions' reached \(loading 'm'; .* 'bytes'\): allowed 1"
        ) as full:
            manager.load("m", paths[1])
        assert (full.value.limit, full.value.allowed, full.value.actual) == ("max_sessions", 1, 2)
        assert manager.names() == ["bytes"]


def test_what_cannot_be_read_again_stays(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=int(1.5 * WEIGHTS)) as manager:
        manager.load("bytes", paths[0].read_bytes())
        with pytest.raises(ResourceLimit, match=r"'memory_limit' reached \(loading 'm'; .* 'bytes'\)"):
            manager.load("m", paths[1])
        assert manager.metrics("bytes").loaded
        manager.run("bytes", {"x": X})
        manager.unload("bytes")
        manager.load("m", paths[1])


def test_a_graph_counts_too(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=int(1.5 * WEIGHTS)) as manager:
        session = manager.load("graph", onnx_format.read(paths[0]))
        assert manager.metrics("graph").weight_bytes == WEIGHTS
        assert session.config.limits.memory_bytes == int(1.5 * WEIGHTS)
        with pytest.raises(ResourceLimit):
            manager.load("other", onnx_format.read(paths[1]))


def test_a_model_that_never_fits(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=WEIGHTS // 2) as manager:
        with pytest.raises(ResourceLimit, match="no other is loaded") as caught:
            manager.load("m", paths[0])
        assert caught.value.actual >= WEIGHTS
        assert manager.memory_bytes == 0


def test_nothing_is_unloaded_in_vain(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=int(2.5 * WEIGHTS)) as manager:
        manager.load("idle", paths[0])
        manager.load("bytes", paths[1].read_bytes())
        with pytest.raises(ResourceLimit):
            manager.load("large", written(linear(2 * ROWS, 2 * ROWS), paths[0].parent, "large.onnx"))
        assert manager.metrics("idle").loaded  # it would not have been enough


def test_a_model_in_use_is_not_unloaded(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=int(1.5 * WEIGHTS)) as manager:
        manager.load("a", paths[0])
        with manager.using("a") as session:
            with pytest.raises(ResourceLimit, match="in use or not reloadable: 'a'"):
                manager.load("b", paths[1])
            session.run({"x": X})
        manager.load("b", paths[1])
        assert not manager.metrics("a").loaded
        with pytest.raises(SessionClosed):
            session.run({"x": X})


def test_one_run_must_fit_beside_the_weights(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=WEIGHTS + 100_000) as manager:
        manager.load("m", paths[0])
        manager.run("m", {"x": X})
        with pytest.raises(ResourceLimit, match="memory_bytes"):
            manager.run("m", {"x": np.ones((1000, ROWS), np.float32)})
        manager.run("m", {"x": X})


def test_arenas_count_and_are_given_back_first(paths: list[Path]) -> None:
    with rv.SessionManager(memory_limit=3 * WEIGHTS, config=rv.SessionConfig(optimization="none")) as manager:
        manager.load("a", paths[0])
        manager.load("b", paths[1])
        rows = WEIGHTS // (ROWS * 4) // 3  # a third of a model's weights for each buffer
        for k in range(4):
            manager.run("a", {"x": np.ones((rows + k, ROWS), np.float32)})
            manager.run("b", {"x": np.ones((rows + k, ROWS), np.float32)})
            assert manager.memory_bytes <= 3 * WEIGHTS
        assert [m.evictions for m in manager.metrics().values()] == [0, 0]


def test_a_file_that_is_gone_is_an_error_of_the_run(paths: list[Path]) -> None:
    with rv.SessionManager(max_sessions=1) as manager:
        manager.load("a", paths[0])
        manager.load("b", paths[1])
        paths[0].unlink()
        with pytest.raises(InvalidModel, match="cannot open model"):
            manager.run("a", {"x": X})
        assert manager.metrics("a").errors == 1
        assert manager.metrics("a").last_error.startswith("InvalidModel: cannot open model")
        manager.run("b", {"x": X})


# -- runs at the same time ------------------------------------------------------------------------------------------


def test_runs_wait_for_a_slot(slow: Path, paths: list[Path]) -> None:
    stop = rv.RunOptions()
    with rv.SessionManager(max_concurrent_runs=1) as manager, ThreadPoolExecutor(2) as pool:
        manager.load("slow", slow)
        manager.load("m", paths[0])
        try:
            busy = pool.submit(manager.run, "slow", FOREVER, None, stop)
            running(manager, "slow")
            with pytest.raises(DeadlineExceeded, match=r"the run of 'm' waited 0\.1 s for a slot"):
                manager.run("m", {"x": X}, options=rv.RunOptions(timeout=0.1))
            cancelled = rv.RunOptions()
            cancelled.terminate = True
            with pytest.raises(Cancelled, match="cancelled while it waited"):
                manager.run("m", {"x": X}, options=cancelled)
            waiting = pool.submit(manager.run, "m", {"x": X})
            time.sleep(0.05)
            assert not waiting.done()
        finally:
            stop.terminate = True
        assert waiting.result(WAIT)["y"].shape == (1, ROWS)
        with pytest.raises(Cancelled):
            busy.result(WAIT)
        assert manager.metrics("m").errors == 2


def test_slots_of_one_model_leave_the_others_alone(slow: Path, paths: list[Path]) -> None:
    stop = rv.RunOptions()
    with rv.SessionManager(max_concurrent_runs=2) as manager, ThreadPoolExecutor(3) as pool:
        manager.load("slow", slow, max_concurrent_runs=1)
        manager.load("m", paths[0])
        try:
            first = pool.submit(manager.run, "slow", FOREVER, None, stop)
            running(manager, "slow")
            second = pool.submit(manager.run, "slow", FOREVER, None, stop)  # waits, without taking a slot of all
            time.sleep(0.05)
            assert manager.metrics("slow").active == 1
            manager.run("m", {"x": X}, options=rv.RunOptions(timeout=WAIT))
        finally:
            stop.terminate = True
        for each in (first, second):
            with pytest.raises(Cancelled):
                each.result(WAIT)


def test_many_threads_under_pressure(paths: list[Path]) -> None:
    expected = []
    for path in paths:
        with rv.load(path) as session:
            expected.append(session.run({"x": X})["y"])
    limit = int(2.2 * WEIGHTS)
    wrong: list[Any] = []
    with rv.SessionManager(memory_limit=limit, max_concurrent_runs=2) as manager:
        for k, path in enumerate(paths):
            manager.load(f"m{k}", path)

        def work(seed: int) -> None:
            order = np.random.default_rng(seed).integers(0, 3, 20)
            for k in order:
                try:
                    if not np.array_equal(manager.run(f"m{k}", {"x": X})["y"], expected[k]):
                        wrong.append(k)
                except ResourceLimit:
                    pass  # both models that fit were running
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert not wrong
        found = manager.metrics().values()
        assert sum(m.runs + m.errors for m in found) == 80
        assert all(m.active == 0 for m in found)
        assert manager.memory_bytes <= limit


def test_two_threads_load_an_unloaded_model_once(paths: list[Path]) -> None:
    with rv.SessionManager(max_sessions=1) as manager, ThreadPoolExecutor(4) as pool:
        manager.load("a", paths[0])
        manager.load("b", paths[1])
        results = list(pool.map(lambda _: manager.run("a", {"x": X})["y"], range(8)))
        assert manager.metrics("a").loads == 2
        assert all(np.array_equal(r, results[0]) for r in results)


def test_closing_lets_runs_finish(slow: Path) -> None:
    manager = rv.SessionManager()
    manager.load("slow", slow)
    with ThreadPoolExecutor(1) as pool:
        steps = 50_000  # a second or so: long enough to be seen while it runs
        run = pool.submit(manager.run, "slow", {"limit": np.array(steps, np.float32)})
        running(manager, "slow")
        manager.close()
        assert run.result(WAIT)["end"] == steps


# -- counting -------------------------------------------------------------------------------------------------------


def test_metrics(paths: list[Path]) -> None:
    with rv.SessionManager(config=rv.SessionConfig(optimization="none")) as manager:
        manager.load("m", paths[0])
        assert manager.metrics("m").seconds_mean == 0.0
        for _ in range(10):
            manager.run("m", {"x": X})
        with pytest.raises(DTypeMismatch):
            manager.run("m", {"x": X.astype(int)})
        found = manager.metrics("m")
        assert (found.name, found.runs, found.errors, found.loads, found.evictions) == ("m", 10, 1, 1, 0)
        assert found.last_error.startswith("DTypeMismatch: input 'x': expected float32[n, 256]")
        assert found.weight_bytes == WEIGHTS
        assert found.arena_bytes == 0  # one fused kernel: nothing lies between its nodes
        assert 0 < found.seconds_p50 <= found.seconds_p95 <= found.seconds_p99 <= found.seconds_total
        assert found.seconds_mean == pytest.approx(found.seconds_total / 10)
        assert manager.metrics() == {"m": found}
        with pytest.raises(InvalidInput, match="no model is loaded as 'n'"):
            manager.metrics("n")


def test_percentiles() -> None:
    hundred = [float(k) for k in range(1, 101)]
    assert [percentile(hundred, p) for p in (0, 50, 95, 99, 100)] == [1, 50, 95, 99, 100]
    assert percentile([], 50) == 0.0
    assert percentile([3.0], 99) == 3.0


def test_percentiles_are_of_recent_runs() -> None:
    counters = Counters()
    for _ in range(5000):
        counters.ran(1.0)
    for _ in range(4096):
        counters.ran(2.0)
    found = counters.snapshot("m", loaded=True, active=0, weights=0, arenas=0)
    assert (found.runs, found.seconds_p50, found.seconds_total) == (9096, 2.0, 5000 + 2 * 4096)
