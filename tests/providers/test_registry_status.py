"""How providers stand, what they did, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.errors import InvalidConfig, KernelError, ProviderUnavailable, SessionClosed
from ranvier.providers.base import ProviderCapability
from ranvier.providers.ledger import Ledger, ProviderStatus
from ranvier.providers.reference import ReferenceProvider
from ranvier.providers.registry import REGISTRY


def model(*ops: str) -> bytes:
    """A chain of operators on one vector."""
    names = [f"v{k}" for k in range(len(ops) + 1)]
    nodes = [helper.make_node(op, [names[k]], [names[k + 1]]) for k, op in enumerate(ops)]
    x = helper.make_tensor_value_info(names[0], onnx.TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info(names[-1], onnx.TensorProto.FLOAT, ["n"])
    made = helper.make_model(helper.make_graph(nodes, "chain", [x], [y]), opset_imports=[helper.make_opsetid("", 17)])
    data: bytes = made.SerializeToString()
    return data


class Counted(ReferenceProvider):
    """The reference under another name, which can be told to fail and notices its end."""

    name = "counted"
    aliases = ("CountedExecutionProvider",)
    closed = 0
    broken = False

    def capability(self) -> ProviderCapability:
        return ProviderCapability(whole_parts=False)

    def compile(self, part: Any, ctx: Any) -> Any:
        kernel = super().compile(part, ctx)
        if Counted.broken:
            raise ProviderUnavailable("counted", "broken while compiling")
        return _Watched(kernel)

    def close(self) -> None:
        Counted.closed += 1
        super().close()


class _Watched:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(self, *args: Any) -> None:
        if Counted.broken:
            raise KernelError("it broke", provider="counted")
        self._kernel(*args)


@pytest.fixture
def counted() -> Iterator[None]:
    Counted.closed, Counted.broken = 0, False
    REGISTRY.register("counted", Counted, Counted.aliases, first=True, auto=False)
    yield
    REGISTRY.unregister("counted")


def status(name: str = "counted") -> ProviderStatus:
    (found,) = REGISTRY.status(name)
    return found


X = {"v0": np.float32([1, 2, 3])}


def test_a_provider_nobody_used(counted: None) -> None:
    found = status()
    assert not found.initialised and not found.ready
    assert found.reason == "nobody used it yet"
    assert (found.devices, found.memory, found.sessions) == ((), None, 0)


def test_operations_memory_and_sessions(counted: None) -> None:
    before = status().operations
    with rv.load(model("Relu", "Neg", "Abs"), providers=["counted"], optimization="none") as session:
        for _ in range(5):
            session.run(X)
        session.run({"v0": np.float32([1])})  # another plan
        found = status("CountedExecutionProvider")
        assert found.initialised and found.ready and found.reason == ""
        assert found.devices == ("cpu",)
        assert found.operations - before == 6 * 3
        assert found.sessions == 1
        assert found.memory is not None and found.memory.active >= 0
        assert {s.name for s in REGISTRY.status()} >= {"counted", "cpu", "reference"}
    assert status().sessions == 0
    del session
    assert status().operations - before == 18  # they stay counted when the session is gone


def test_the_short_way_of_a_session_counts_too() -> None:
    with rv.load(model("Relu", "Neg"), providers=["cpu"], optimization="none") as session:
        session.run(X)
        before = status("cpu").operations
        for _ in range(7):
            session.run(X)
        assert status("cpu").operations - before == 14


def test_the_last_error_is_kept(counted: None) -> None:
    before = status("reference").last_error  # of other tests in this process
    with rv.load(model("Relu"), providers=["counted", "reference"]) as session:
        Counted.broken = True
        np.testing.assert_array_equal(session.run(X)["v1"], X["v0"])
        assert status().last_error == "KernelError: it broke"
        assert status("reference").last_error == before
    Counted.broken = False
    with rv.load(model("Neg"), providers=["counted"], fallback="off") as session:
        Counted.broken = True
        with pytest.raises(KernelError):
            session.run(X)


def test_an_unknown_name(counted: None) -> None:
    with pytest.raises(InvalidConfig, match="'counted'"):
        REGISTRY.status("countd")
    assert REGISTRY.status("ROCMExecutionProvider")[0].reason == "this installation has no such provider"


def test_counting_from_many_threads_loses_nothing() -> None:
    ledger = Ledger()

    class Owner:
        pass

    def work() -> None:
        owner = Owner()
        tally = ledger.tally(owner, {"a": 2, "b": 1})
        for _ in range(1000):
            tally.runs += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.operations() == {"a": 16_000, "b": 8_000}


# -- the end --------------------------------------------------------------------------------------------------------


def test_shutdown_ends_sessions_and_providers(counted: None) -> None:
    session = rv.load(model("Relu"), providers=["counted"])
    session.run(X)
    REGISTRY.shutdown()
    assert Counted.closed == 1
    with pytest.raises(SessionClosed):
        session.run(X)
    assert not status().initialised
    REGISTRY.shutdown()
    assert Counted.closed == 1  # nothing is closed twice
    with rv.load(model("Relu"), providers=["counted"]) as again:  # and all can be had anew
        np.testing.assert_array_equal(again.run(X)["v1"], X["v0"])


def test_one_that_fails_to_close_does_not_keep_the_others(counted: None, caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(ReferenceProvider):
        name = "stubborn"

        def close(self) -> None:
            raise RuntimeError("no")

    REGISTRY.register("stubborn", Stubborn, first=True, auto=False)
    REGISTRY.get("stubborn")
    REGISTRY.get("counted")
    try:
        REGISTRY.shutdown()
    finally:
        REGISTRY.unregister("stubborn")
    assert Counted.closed == 1
    assert "RuntimeError: no" in caplog.text


def test_requests_under_way_end_well_or_with_a_typed_error(counted: None) -> None:
    session = rv.load(model("Relu", "Neg"), providers=["cpu"])
    expected = session.run(X)["v2"]
    ready = threading.Barrier(5)
    wrong: list[Any] = []

    def work() -> None:
        ready.wait()
        while True:
            try:
                if not np.array_equal(session.run(X)["v2"], expected):
                    wrong.append("a result")
            except SessionClosed:
                return
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    ready.wait()
    REGISTRY.shutdown()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)


_PROGRAM = """
import os, sys
from ranvier.providers.reference import ReferenceProvider
from ranvier.providers.registry import REGISTRY

class Told(ReferenceProvider):
    name = "told"
    def close(self):
        print("closed", os.getpid() == main, flush=True)

main = os.getpid()
REGISTRY.register("told", Told)
REGISTRY.get("told")
child = os.fork()
if not child:
    sys.exit(0)  # a copy of the process leaves alone what it did not make
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process are a thing of POSIX")
def test_providers_are_closed_when_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:-1] == ["closed True"]
