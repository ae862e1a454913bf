"""Faults of a device in another process: every request gets the right answer or a typed error, and nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import errors
from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.runtime.fallback import DEMOTED_AFTER
from ranvier.runtime.session import Session

SIZE = 32
WEIGHTS = np.random.default_rng(7).standard_normal((SIZE, SIZE)).astype(np.float32)


def chain() -> Graph:
    """Relu, MatMul, Tanh, MatMul, Abs: the products are what the accelerator takes."""
    graph = Graph("chain", opsets={"": 21})
    kind = TensorType(DType.float32, (4, SIZE))
    value = graph.add_input("x", kind)
    weights = graph.add_constant(ConstTensor.of(WEIGHTS), "w")
    for op, version in (("Relu", 14), ("MatMul", 13), ("Tanh", 13), ("MatMul", 13), ("Abs", 13)):
        node = graph.add(op, [value, weights] if op == "MatMul" else [value], version=version, name=op.lower())
        value = node.output
        value.type = kind
    value.name = "y"
    graph.outputs = [value]
    return graph


def expected(x: np.ndarray) -> np.ndarray:
    return np.abs(np.tanh(np.maximum(x, 0) @ WEIGHTS) @ WEIGHTS)


def session(faults: str = "", *, fallback: str = "on", **options: Any) -> Session:
    given = {"latency": 0.0, "gflops": 1e6, "bandwidth": 1e12, "ops": "MatMul", "faults": faults, "timeout": 2.0}
    return Session(
        chain(),
        SessionConfig(
            providers=("sim", "reference"),
            provider_options={"sim": {**given, **options}},
            fallback=fallback,
            optimization="none",
        ),
    )


def some_input(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((4, SIZE)).astype(np.float32)


def check(found: dict[str, np.ndarray], x: np.ndarray) -> None:
    np.testing.assert_allclose(found["y"], expected(x), rtol=1e-5, atol=1e-5)


def worker_pid(made: Session) -> int:
    return made.providers[0]._link._channel.pid  # type: ignore[attr-defined]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def closing() -> Any:
    opened: list[Session] = []
    yield opened.append
    for each in opened:
        each.close()


def test_parts_run_there_and_here(closing: Any) -> None:
    made = session()
    closing(made)
    assert [n.provider for n in made.report.nodes] == ["reference", "sim", "reference", "sim", "reference"]
    for seed in range(3):
        x = some_input(seed)
        check(made.run({"x": x}), x)
    assert len(made.report.transfers) == 4
    held = made.providers[0].statistics()  # type: ignore[attr-defined]
    assert held["runs"] == 6 and held["tensors"] == 0


def test_a_chain_on_the_device_stays_there(closing: Any) -> None:
    made = session(ops="")
    closing(made)
    x = some_input()
    check(made.run({"x": x}), x)
    assert [(t.source, t.target) for t in made.report.transfers] == [("cpu", "sim:0"), ("sim:0", "cpu")]


@pytest.mark.parametrize("fault", ["fail@1", "oom@1", "hang@2", "crash@1", "corrupt@2", "flaky@1", "fail/2", "flaky/2"])
def test_a_fault_does_not_reach_the_caller(fault: str, closing: Any) -> None:
    made = session(fault, timeout=0.5)
    closing(made)
    for seed in range(3):
        x = some_input(seed)
        check(made.run({"x": x}), x)
    condition = made.health["sim"]
    assert condition.failed >= 1
    assert condition.fallbacks + condition.retries >= 1
    if condition.fallbacks:
        assert any("sim failed while running" in text for text in made.report.fallbacks)


@pytest.mark.parametrize(("fault", "retries", "fallbacks"), [("fail@2", 0, 1), ("flaky@2", 1, 0)])
def test_a_fault_of_a_repeated_request_counts(fault: str, retries: int, fallbacks: int, closing: Any) -> None:
    """The second request of the same types takes a shorter way through the session."""
    made = session(fault, ops="")
    closing(made)
    for seed in range(3):
        check(made.run({"x": some_input(seed)}), some_input(seed))
    condition = made.health["sim"]
    assert (condition.failed, condition.retries, condition.fallbacks) == (1, retries, fallbacks)


@pytest.mark.parametrize("fault", ["fail@2", "flaky@2"])
def test_without_fallback_a_repeated_request_fails_too(fault: str, closing: Any) -> None:
    made = session(fault, fallback="off", ops="")
    closing(made)
    check(made.run({"x": some_input(0)}), some_input(0))
    with pytest.raises(errors.ProviderFailed, match="at run 2"):
        made.run({"x": some_input(1)})
    check(made.run({"x": some_input(2)}), some_input(2))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("fail@1", errors.ProviderFailed),
        ("oom@1", errors.OutOfMemory),
        ("hang@1", errors.ProviderTimeout),
        ("crash@1", errors.WorkerLost),
        ("corrupt@1", errors.ProviderFailed),
    ],
)
def test_without_fallback_the_error_is_typed(fault: str, kind: type[Exception], closing: Any) -> None:
    made = session(fault, fallback="off", timeout=0.5, ops="")
    closing(made)
    with pytest.raises(kind):
        made.run({"x": some_input()})


def test_a_passing_fault_is_tried_again_on_the_same_device(closing: Any) -> None:
    made = session("flaky@1")
    closing(made)
    x = some_input()
    check(made.run({"x": x}), x)
    condition = made.health["sim"]
    assert (condition.retries, condition.fallbacks, condition.failures) == (1, 0, 0)
    assert not made.report.fallbacks


def test_a_killed_worker_is_replaced(closing: Any) -> None:
    made = session()
    closing(made)
    x = some_input()
    check(made.run({"x": x}), x)
    first = worker_pid(made)
    os.kill(first, signal.SIGKILL)
    check(made.run({"x": x}), x)
    assert worker_pid(made) != first
    assert made.health["sim"].fallbacks == 0


def test_a_device_that_keeps_failing_is_left_out_and_tried_again_later(closing: Any) -> None:
    made = session("fail/1")
    closing(made)
    now = [0.0]
    made._recovery._clock = lambda: now[0]
    for seed in range(DEMOTED_AFTER + 4):
        x = some_input(seed)
        check(made.run({"x": x}), x)
    assert made.health["sim"].failed == DEMOTED_AFTER
    now[0] += 1.5  # past the first rest: one request tries it
    check(made.run({"x": x}), x)
    check(made.run({"x": x}), x)
    assert made.health["sim"].failed == DEMOTED_AFTER + 1
    now[0] += 1.5  # the rest has doubled
    check(made.run({"x": x}), x)
    assert made.health["sim"].failed == DEMOTED_AFTER + 1


def test_too_small_a_device_is_no_place_for_the_weights(closing: Any) -> None:
    made = session(memory=1000)
    closing(made)
    x = some_input()
    check(made.run({"x": x}), x)
    assert {n.provider for n in made.report.nodes} == {"reference"}
    assert any("failed to compile" in text and "no memory" in text for text in made.report.fallbacks)
    with pytest.raises(errors.OutOfMemory):
        session(memory=1000, fallback="off", ops="")


def test_the_deadline_of_a_run_counts_while_waiting(closing: Any) -> None:
    made = session("hang@1", timeout=30.0)
    closing(made)
    options = rv.RunOptions(timeout=0.3)
    started = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        made.run({"x": some_input()}, options=options)
    assert time.monotonic() - started < 5.0


def test_many_threads_while_faults_fire(closing: Any) -> None:
    made = session("flaky/7, fail/11, oom/13, crash/41, corrupt/57", timeout=5.0)
    closing(made)
    wrong: list[BaseException] = []
    done = []
    before = threading.active_count()

    def work(seed: int) -> None:
        for k in range(125):
            x = some_input(seed * 1000 + k)
            try:
                check(made.run({"x": x}), x)
                done.append(1)
            except errors.RanvierError:
                done.append(0)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(done) == 1000
    assert sum(done) == 1000  # others could always finish
    pid = worker_pid(made) if made.providers[0]._link is not None else None  # type: ignore[attr-defined]
    made.close()
    assert pid is None or not alive(pid)
    assert threading.active_count() <= before


def test_no_process_is_left_behind() -> None:
    made = session()
    made.run({"x": some_input()})
    pid, provider = worker_pid(made), made.providers[0]
    made.close()
    assert not alive(pid)
    with pytest.raises(errors.WorkerLost, match="shut down"):
        provider.link()  # type: ignore[attr-defined]


def test_a_session_that_nobody_closes_ends_its_process_too() -> None:
    made = session()
    made.run({"x": some_input()})
    pid = worker_pid(made)
    del made
    gc.collect()
    assert not alive(pid)


def test_options_are_checked() -> None:
    with pytest.raises(errors.InvalidConfig, match="gflop"):
        session(gflop=1)
    with pytest.raises(errors.InvalidConfig, match="memory must be"):
        session(memory=0)
    with pytest.raises(errors.InvalidConfig, match="flaky"):
        session("flakey@1")
    with pytest.raises(errors.InvalidConfig, match=r"unknown operator 'MatMull' \(did you mean 'MatMul'\?\)"):
        session(ops="Relu, MatMull")
