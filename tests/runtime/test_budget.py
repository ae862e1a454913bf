"""Memory over runs that overlap: of one session against its limit, of several against what the machine has."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.errors import Cancelled, MemoryLimit, OutOfMemory, RanvierError
from ranvier.memory import Budget, promises, room
from ranvier.runtime.outputs import blocks

ROWS = 3_000_000  # 12 MB of float32


def model(text: str, name: str = "g") -> onnx.ModelProto:
    made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "mine" : 1]>\n{text}')
    made.graph.name = name
    return made


class Gate:
    """An operator that copies its input once somebody lets it."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Semaphore(0), threading.Event()
        self.failing = False

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.entered.release()
        assert self.opened.wait(30)
        if self.failing:
            raise RuntimeError("it breaks here")
        return x + 1


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    rv.register_op("mine", "Gate", made, infer=lambda call: [call.type(0)])
    yield made
    made.opened.set()
    rv.unregister_op("mine", "Gate")


@contextmanager
def in_the_middle_of(gate: Gate, run: Callable[[], Any], count: int = 1) -> Iterator[list[Any]]:
    """Inside, ``count`` runs stand at the gate; afterwards the list has what they returned or raised."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(run())
        except RanvierError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            assert gate.entered.acquire(timeout=30)
        yield results
    finally:
        gate.opened.set()
        for thread in threads:
            thread.join()


def gated(name: str = "g") -> onnx.ModelProto:
    return model("g (float[n] x) => (float[n] z) { y = mine.Gate(x) a = CumSum(y, t) z = Add(a, y) }", name)


def loaded(made: onnx.ModelProto, **options: Any) -> rv.Session:
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.int64), "t"))
    return rv.load(made, providers=["reference"], **options)


# -- runs of one session ----------------------------------------------------------------------------------------------


def needed(count: int) -> int:
    """What one run of the gated model takes, as the limit counts it."""
    with loaded(gated()) as free:
        plan = free.bind(n=count)
        return plan.weight_bytes() + plan.memory.arena + plan.output_bytes()


def test_runs_at_the_same_time_share_the_limit(gate: Gate) -> None:
    one = needed(1000)
    x = np.ones(1000, np.float32)
    with loaded(gated(), limits=rv.Limits(memory_bytes=2 * one)) as session:
        with in_the_middle_of(gate, lambda: session.run({"x": x}), count=2) as results:
            with pytest.raises(MemoryLimit, match=r"arena of 'g' asked for .* in use: .* by arena of 'g'") as caught:
                session.run({"x": x})
            error = caught.value
            assert (error.limit, error.allowed, error.part) == ("memory_bytes", 2 * one, "arena of 'g'")
            assert error.in_use == error.actual - error.requested > one
            assert "by outputs of 'g'" in str(error)
        assert [list(result["z"][:2]) for result in results] == [[4, 6], [4, 6]]
        assert session.run({"x": x})["z"][0] == 4  # and when they are over there is room again
        assert session.health["reference"].failed == 0
        held = session.memory().budget
        assert held is not None and "outputs of 'g'" not in held.by("tag") and one < held.peak <= 2 * one


def test_weights_count_once_for_all_runs() -> None:
    budget = Budget(1000)
    for nbytes in (300, 200, 300, 400):
        budget.weigh(nbytes)
    assert budget.snapshot().by("tag") == {"weights": 400}
    with pytest.raises(MemoryLimit, match=r"weights asked for 601 bytes; in use: 400 by weights"):
        budget.weigh(1001)
    assert budget.current == 400


@pytest.mark.parametrize("ending", ["error", "cancelled", "unknown sizes"])
def test_nothing_stays_counted(gate: Gate, ending: str) -> None:
    made = gated()
    if ending == "unknown sizes":
        made = model("g (float[n] x) => (float[m] z) { y = mine.Gate(x) i = NonZero(y) c = Cast <to = 1> (i) "
                     "s = Shape(x) z = Reshape(c, s) }")  # fmt: skip
    options = rv.RunOptions()
    with loaded(made, limits=rv.Limits(memory_bytes=1 << 20)) as session:
        if ending != "error":
            gate.opened.set()
            result = session.run({"x": np.ones(100, np.float32)})
            assert result["z"].shape == (100,)  # which the caller still holds, and does not count any more
            gate.opened.clear()
            gate.entered.acquire()
        gate.failing = ending == "error"
        run = lambda: session.run({"x": np.ones(100, np.float32)}, options=options)  # noqa: E731
        with in_the_middle_of(gate, run) as results:
            options.terminate = ending == "cancelled"
        if ending == "cancelled":
            assert isinstance(results[0], Cancelled)
        elif ending == "error":
            assert isinstance(results[0], RanvierError)
        session.trim()
        held = session.memory().budget
        assert held is not None and set(held.by("tag")) <= {"weights"}


def test_arenas_that_wait_go_before_a_run_is_refused(gate: Gate) -> None:
    gate.opened.set()
    with loaded(gated(), limits=rv.Limits(memory_bytes=needed(2000) + 100)) as session:
        for count in (1000, 1500, 500, 2000, 1999):
            assert session.run({"x": np.ones(count, np.float32)})["z"].shape == (count,)


# -- sessions of one process ------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what the machine has left, beside what is promised already."""
    gc.collect()  # results of others may wait to be freed
    blocks.clear()

    def has(nbytes: int) -> None:
        monkeypatch.setattr(room, "LARGE", 8 << 20)
        monkeypatch.setattr(room, "_HEADROOM", 0)
        monkeypatch.setattr(room, "memory_left", lambda around: nbytes)

    return has


@pytest.mark.parametrize("ending", ["well", "error"])
def test_two_sessions_cannot_be_promised_more_than_there_is(
    gate: Gate, ending: str, machine: Callable[[int], None]
) -> None:
    x = np.ones(ROWS, np.float32)
    before = promises.total
    other = model("h (float[n] x) => (float[n] z) { z = CumSum(x, t) }", "h")
    own = rv.MemoryConfig(alignment=128)  # a pool of its own: in the shared one there may be room that others left
    with loaded(gated("first"), memory=own) as session, loaded(other, memory=own) as second:
        arena = session.bind(n=ROWS).memory.arena
        machine(arena + 4 * ROWS + 3 * ROWS)
        with in_the_middle_of(gate, lambda: session.run({"x": x})) as results:
            assert promises.total - before >= arena + 4 * ROWS
            refused = r"outputs of 'h': 12,\d+,\d+ bytes asked for.*promised.*'first'"  # in whole blocks
            with pytest.raises(OutOfMemory, match=refused) as caught:
                second.run({"x": x})
            assert caught.value.part == "outputs of 'h'" and (caught.value.requested or 0) >= 4 * ROWS
            gate.failing = ending == "error"
        assert isinstance(results[0], RanvierError if ending == "error" else dict)
        assert promises.total == before
        assert second.run({"x": x})["z"][1] == 2
        assert promises.total == before


def test_what_is_kept_for_later_goes_before_a_request_fails(machine: Callable[[int], None]) -> None:
    blocks.several([((ROWS,), np.dtype(np.float32))], "a result that nobody keeps")[1].done()
    gc.collect()
    assert blocks.nbytes >= 4 * ROWS
    machine(4 * ROWS)
    with promises.ask(4 * ROWS, "somebody"), pytest.raises(OutOfMemory, match="12,000,000 to somebody"):
        promises.ask(4 * ROWS, "another")
    assert blocks.nbytes == 0


def test_a_promise_ends_with_whoever_holds_it(machine: Callable[[int], None]) -> None:
    machine(100 << 20)
    before = promises.total
    promise = promises.ask(20 << 20, "one")
    promise.lower(10 << 20)
    assert promises.total - before == 10 << 20
    promise.lower(15 << 20)  # what is written stays written
    assert promises.holders()["one"] == 10 << 20
    promise.lower(1 << 20)  # of which nobody takes note
    assert promises.total == before
    promise.done()
    dropped = promises.ask(20 << 20, "another")
    assert promises.total - before == 20 << 20
    del dropped
    assert promises.total == before


def test_a_pool_remembers_what_nobody_has_written(machine: Callable[[int], None]) -> None:
    from ranvier.providers.memory import PoolAllocator

    machine(100 << 20)
    before = promises.total
    pool = PoolAllocator(rv.MemoryConfig(growth="static", pool_size=40 << 20))
    assert promises.total - before == 40 << 20
    first = pool.alloc(10 << 20)
    pool.touched(first)
    assert promises.total - before == 30 << 20
    second = pool.alloc(10 << 20)
    pool.free(second)
    assert promises.total - before == 20 << 20
    pool.free(first)
    assert promises.total - before == 20 << 20
    pool.close()
    assert promises.total == before


# -- and for real -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are counted there")
@pytest.mark.parametrize("known", [True, False], ids=["planned", "by data"])
def test_a_process_survives_two_threads_that_want_too_much(known: bool) -> None:
    """900 MB to go, and two threads that make results of 600 MB each at the same time."""
    script = f"""
        import resource, threading
        import numpy as np, onnx, ranvier as rv
        from ranvier.devices import resident_memory
        from ranvier.memory import promises

        if {known}:
            text = "g (float[n] x) => (float[n] y) {{ y = Neg(x) }}"
        else:
            text = "g (float[1] x, int64[1] s) => (float[m] y) {{ y = Expand(x, s) }}"
        model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]>' + text)
        sessions = [rv.load(model, providers=[name], threads=1, fallback="off") for name in ("reference", "cpu")]
        count = 150_000_000
        few, many = ({{"x": np.ones(n, np.float32)}} for n in (10, count if {known} else 1))
        if not {known}:
            few["x"], few["s"], many["s"] = few["x"][:1], np.array([10]), np.array([count])
        for session in sessions:
            session.run(few)
        taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 900_000_000, resource.RLIM_INFINITY))
        start, end, seen = threading.Barrier(2), threading.Barrier(2), []

        def work(session):
            start.wait()
            result = None
            try:
                result = session.run(many)["y"]
                seen.append("well" if result.size == count else "wrong")
            except rv.errors.OutOfMemory as error:
                assert error.part and error.requested >= 600_000_000 and error.capacity, error
                seen.append("refused")
            end.wait()  # a result is held until the other one has tried

        threads = [threading.Thread(target=work, args=(s,)) for s in sessions]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert promises.total == 0, promises.holders()
        print(sorted(seen))
        for session in sessions:
            session.run(few)
        sessions[0].run(many)  # there is room again
        print("alive")
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[:2] == ["['refused', 'well']", "alive"]
