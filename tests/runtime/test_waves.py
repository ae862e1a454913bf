"""Parts of the host at the same time: the same results as one after the other, memory of their own, and an orderly end
when something fails. Waves are forced upon graphs here, whatever they cost."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ranvier.config import Limits, SessionConfig
from ranvier.dtypes import DType
from ranvier.errors import Cancelled, DeadlineExceeded, KernelError, MemoryLimit
from ranvier.graph.ir import Graph, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.providers.cpu.provider import CpuProvider
from ranvier.providers.reference import ReferenceKernel
from ranvier.runtime import compiled
from ranvier.runtime.control import RunOptions
from ranvier.runtime.lanes import Halt, Helpers
from ranvier.runtime.partition import Beside, Part, Partitioning, Placement, subgraph_of
from ranvier.runtime.partition.partitioner import needs
from ranvier.runtime.plan import Plan
from ranvier.runtime.session import Session

SHAPE = (24, 24)
KIND = TensorType(DType.float32, SHAPE)
Lanes = list[list[list[int]]]  # of waves and of what stands alone: nodes by lane


def random_graph(rng: np.random.Generator, size: int) -> Graph:
    graph = Graph("random", opsets={"": 21})
    values = [graph.add_input(name, KIND) for name in ("x", "y")]
    weights = rng.standard_normal(SHAPE).astype(np.float32) / 5
    values.append(graph.add_constant(ConstTensor.of(weights), "w"))
    for k in range(size):
        op, count, version = [("Add", 2, 14), ("Mul", 2, 14), ("MatMul", 2, 13), ("Tanh", 1, 13), ("Softmax", 1, 13)][
            int(rng.integers(5))
        ]
        chosen = [values[int(rng.integers(len(values)))] for _ in range(count)]
        value = graph.add(op, chosen, version=version, name=f"n{k}").output
        value.type = KIND
        values.append(value)
    ends = [value for value in values if value.producer is not None and not value.uses]
    graph.outputs = [*ends, values[3 + int(rng.integers(size))]]
    graph.outputs = list(dict.fromkeys(graph.outputs))
    return graph


def random_lanes(rng: np.random.Generator, graph: Graph) -> Lanes:
    """Any division into waves in which no lane waits for another."""
    before = needs(list(graph))
    done: set[int] = set()
    found: Lanes = []
    while len(done) < len(before):
        lanes: list[list[int]] = [[] for _ in range(int(rng.integers(1, 4)))]
        lane_of: dict[int, int] = {}
        for _ in range(int(rng.integers(1, 9))):
            options = []
            for k in range(len(before)):
                inside = {lane_of[other] for other in before[k] if other in lane_of}
                if k not in done and k not in lane_of and before[k] <= done | set(lane_of) and len(inside) < 2:
                    options.append((k, inside))
            if not options:
                break
            k, inside = options[int(rng.integers(len(options)))]
            lane_of[k] = inside.pop() if inside else int(rng.integers(len(lanes)))
            lanes[lane_of[k]].append(k)
        done |= set(lane_of)
        found.append([lane for lane in lanes if lane])
    return found


def force(
    patch: pytest.MonkeyPatch, lanes: Lanes, owner: Callable[[int], str], names: list[str], serial: bool = False
) -> None:
    """Sessions that are made from now on have these waves of the nodes with these names; ``serial``: the same parts,
    one after the other."""

    def partitioned(graph: Graph, providers: Any, config: Any, blocked: Any = None) -> Partitioning:
        """Bodies are placed elsewhere, as ever."""
        # by name: a session reorders its graph
        nodes = sorted(graph, key=lambda node: names.index(node.name))
        by_name = {provider.name: provider for provider in providers}

        def who(k: int) -> Any:
            return by_name.get(owner(k)) or providers[0]

        parts: list[Part] = []
        for wave, group in enumerate(lanes):
            for number, lane in enumerate(group):
                rows: list[list[int]] = []
                for k in lane:
                    if rows and who(rows[-1][-1]) is who(k) and who(k).capability().whole_parts:
                        rows[-1].append(k)
                    else:
                        rows.append([k])
                beside = None if serial or len(group) < 2 else Beside(wave, number, 1)
                parts += [Part(who(row[0]), subgraph_of(graph, [nodes[k] for k in row]), beside) for row in rows]
        return Partitioning(parts, [Placement(node, who(k).name) for k, node in enumerate(nodes)])

    patch.setattr(compiled, "partitioned", partitioned)


def config_of(**options: Any) -> SessionConfig:
    given = {"providers": ("cpu", "reference"), "optimization": "none", "threads": 4, **options}
    return SessionConfig(**given)


def feeds(rng: np.random.Generator) -> dict[str, Any]:
    return {name: rng.standard_normal(SHAPE).astype(np.float32) for name in ("x", "y")}


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ranvier-lane")]


def touched(plan: Plan, k: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What a step writes and what it reads of the arena, as (start, end)."""
    where = {p.slot: (p.offset, p.offset + p.nbytes) for p in plan.layout.placed}
    step, bound = plan.program.steps[k], plan._bound[k]
    writes = [where[slot] for slot in step.outputs if slot in where]
    if bound is not None and bound.workspace:
        start = plan.layout.workspaces[k]
        writes.append((start, start + bound.workspace))
    return writes, [where[slot] for slot in step.inputs if slot in where]


def check_memory(plan: Plan) -> None:
    for wave in plan.program.waves:
        for lane in wave.lanes:
            for other in wave.lanes:
                if other is lane:
                    continue
                for k in lane:
                    for start, end in touched(plan, k)[0]:
                        assert end <= plan.memory.arena
                        for j in other:
                            for a, b in (each for spans in touched(plan, j) for each in spans):
                                assert b <= start or end <= a, f"steps {k} and {j} share memory"


@pytest.mark.parametrize("seed", range(25))
def test_the_same_results_as_one_after_the_other(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(4, 25)))
    names = [node.name for node in graph]
    lanes = random_lanes(rng, graph)
    owners = ["cpu" if rng.random() < 0.5 else "reference" for _ in graph]
    force(monkeypatch, lanes, owners.__getitem__, names, serial=True)
    given = [feeds(rng) for _ in range(3)]
    with Session(graph, config_of()) as session:
        expected = [session.run(each) for each in given]
        assert not session._compiled.program(session.output_names).waves
    force(monkeypatch, lanes, owners.__getitem__, names)
    with Session(graph, config_of()) as session:
        plan = session.bind()
        assert len(plan.program.waves) == sum(len(group) > 1 for group in lanes)
        check_memory(plan)
        for wanted, each in zip(expected * 3, given * 3):
            for name, array in session.run(each).items():
                np.testing.assert_array_equal(array, wanted[name])
        last = session.output_names[-1]  # only what it needs is run: lanes become shorter, or go
        np.testing.assert_allclose(session.run(given[0], outputs=[last])[last], expected[0][last], rtol=1e-5)
        limited = session.run(given[0], options=RunOptions(timeout=60.0))
        np.testing.assert_array_equal(limited[last], expected[0][last])


def test_many_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    graph = random_graph(rng, 20)
    names = [node.name for node in graph]
    force(monkeypatch, random_lanes(rng, graph), lambda k: ("cpu", "reference")[k % 2], names)
    given = [feeds(rng) for _ in range(4)]
    wrong: list[Any] = []
    with Session(graph, config_of(threads=2)) as session:
        expected = [session.run(each) for each in given]

        def call(k: int) -> None:
            for _ in range(20):
                found = session.run(given[k])
                wrong.extend(name for name, array in found.items() if not np.array_equal(array, expected[k][name]))

        callers = [threading.Thread(target=call, args=(k,)) for k in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong


def two_branches(length: int = 3) -> Graph:
    """Two rows of nodes over one input, and their sum; each row would do with two buffers."""
    graph = Graph("branches", opsets={"": 21})
    x = graph.add_input("x", KIND)
    ends: list[Value] = []
    for name in ("a", "b"):
        value = x
        for k in range(length):
            value = graph.add("Softmax", [value], version=13, name=f"{name}{k}").output
            value.type = KIND
        ends.append(value)
    total = graph.add("Add", ends, version=14, name="sum").output
    total.type = KIND
    graph.outputs = [total]
    return graph


def force_branches(patch: pytest.MonkeyPatch, owner: Callable[[int], str], length: int = 3) -> None:
    lanes = [[list(range(length)), list(range(length, 2 * length))], [[2 * length]]]
    force(patch, lanes, owner, [node.name for node in two_branches(length)])


X = {"x": np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)}


def test_a_lane_uses_its_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    force_branches(monkeypatch, lambda k: "reference", 12)
    with Session(two_branches(12), config_of()) as session:
        plan = session.bind()
        check_memory(plan)
        nbytes = -(-24 * 24 * 4 // 64) * 64
        assert plan.memory.total == 24 * nbytes
        assert plan.memory.arena <= 6 * nbytes  # two for each lane, and what they give


def failing(patch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Kernels of the reference call ``act`` with the names of their nodes first."""
    whole = ReferenceKernel.__call__

    def call(self: ReferenceKernel, *given: Any) -> None:
        act(self.node.name)
        whole(self, *given)

    patch.setattr(ReferenceKernel, "__call__", call)


def raising(*names: str) -> Callable[[str], None]:
    def act(name: str) -> None:
        if name in names:
            raise RuntimeError(f"{name} is broken")

    return act


@pytest.mark.parametrize(("broken", "told"), [(("a1",), "a1"), (("b1",), "b1"), (("a2", "b0"), "a2")])
def test_the_first_failure_is_raised(monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...], told: str) -> None:
    force_branches(monkeypatch, lambda k: "reference")
    failing(monkeypatch, raising(*broken))
    with Session(two_branches(), config_of(fallback="off", providers=("reference",))) as session:
        for _ in range(3):
            with pytest.raises(KernelError, match=f"{told} is broken") as raised:
                session.run(X)
            assert raised.value.provider == "reference" and raised.value.node == told


@pytest.mark.parametrize("broken", ["a1", "b1"])
def test_others_finish_a_request_that_failed_in_a_lane(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    force_branches(monkeypatch, lambda k: "reference" if k < 3 else "cpu")
    with Session(two_branches(), config_of()) as session:
        expected = session.run(X)
    force_branches(monkeypatch, lambda k: "cpu" if broken[0] == "b" and k < 3 else "reference")
    failing(monkeypatch, raising(broken))
    with Session(two_branches(), config_of()) as session:
        found = session.run(X)
        assert session.health["reference"].fallbacks == 1
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-5)


def test_a_failure_ends_what_comes_after_it() -> None:
    begun = threading.Event()
    seen: list[int] = []

    def first(halt: Halt) -> None:
        assert begun.wait(5)
        raise ValueError("first")

    def second(halt: Halt) -> None:
        begun.set()
        for item in halt.until(range(3)):
            seen.append(item)
            while not halt._failed[0]:
                time.sleep(0.001)
        raise ValueError("second")

    helpers = Helpers(2)
    with pytest.raises(ValueError, match="first"):
        helpers.run([first, second])
    assert seen == [0]
    with pytest.raises(ValueError, match="second"):  # those before it go on: without helpers they would have ended
        helpers.run([lambda halt: seen.extend(halt.until(range(3))), second_alone, lambda halt: None])
    assert seen == [0, 0, 1, 2]
    helpers.close()
    helpers.run([lambda halt: seen.clear(), lambda halt: seen.append(9)])  # without threads, in order
    assert seen == [9]


def second_alone(halt: Halt) -> None:
    raise ValueError("second")


@pytest.mark.parametrize("late", ["a1", "b1"])
def test_a_deadline_passes_in_a_lane(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    force_branches(monkeypatch, lambda k: "reference")
    failing(monkeypatch, lambda name: time.sleep(0.2 if name == late else 0.0))
    with Session(two_branches(), config_of()) as session:
        with pytest.raises(DeadlineExceeded, match=r"limit of 0\.1 s"):
            session.run(X, options=RunOptions(timeout=0.1))
        assert session.run(X)


@pytest.mark.parametrize("where", ["a1", "b1"])
def test_a_run_is_cancelled_in_a_lane(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    force_branches(monkeypatch, lambda k: "reference")
    options = RunOptions()

    def act(name: str) -> None:
        if name == where:
            options.terminate = True

    failing(monkeypatch, act)
    with Session(two_branches(), config_of()) as session, pytest.raises(Cancelled):
        session.run(X, options=options)


def test_the_limit_on_memory_counts_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    force_branches(monkeypatch, lambda k: "reference")
    with Session(two_branches(), config_of(limits=Limits(memory_bytes=1 << 20))) as session:
        assert session.run(X)
        assert session.run(X)
    small = config_of(limits=Limits(memory_bytes=6000))
    with pytest.raises(MemoryLimit), Session(two_branches(), small) as session:
        session.run(X)


def test_lanes_are_told_apart_in_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    force_branches(monkeypatch, lambda k: "cpu" if k < 3 else "reference")
    both = threading.Barrier(2)
    failing(monkeypatch, lambda name: both.wait(5) if name == "b0" else None)
    with Session(two_branches(), config_of()) as session:
        whole = session._compiled.program(session.output_names)
        kernel = whole.steps[0].kernel
        bound = session.bind()._bound[0]
        assert bound is not None and whole.steps[0].kernel is kernel
        monkeypatch.setattr(type(bound), "profile", _meeting(type(bound).profile, both))
        with session.profile() as profile:
            session.run(X)
    steps = {event.name: event for event in profile.events if event.op != "run"}
    assert set(steps) == {"a0 +2", "b0", "b1", "b2", "sum"}
    assert steps["a0 +2"].thread != steps["b0"].thread == steps["b2"].thread
    assert steps["b0"].start < steps["a0 +2"].end and steps["a0 +2"].start < steps["b0"].end
    # kernels of one lane do not stand for the steps of another
    assert {"b0", "b1", "b2"} <= {record.label for record in profile.records()}
    rows = [e["args"]["name"] for e in profile.trace()["traceEvents"] if e["name"] == "thread_name"]
    assert len({row for row in rows if "thread" in row}) >= 2


def _meeting(profile: Callable[..., Any], barrier: threading.Barrier) -> Callable[..., Any]:
    met: list[bool] = []

    def call(*given: Any) -> Any:
        if not met:
            met.append(True)
            barrier.wait(5)
        return profile(*given)

    return call


def test_lanes_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    force_branches(monkeypatch, lambda k: "reference")
    both = threading.Barrier(2)  # which breaks where one waits for the other to end
    failing(monkeypatch, lambda name: both.wait(5) if name in ("a1", "b1") else None)
    with Session(two_branches(), config_of(threads=2, fallback="off", providers=("reference",))) as session:
        session.run(X)


def test_one_thread_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    force_branches(monkeypatch, lambda k: "reference")
    seen: set[int] = set()
    failing(monkeypatch, lambda name: seen.add(threading.get_ident()))
    with Session(two_branches(), config_of(threads=1)) as session:
        session.run(X)
    assert seen == {threading.get_ident()}


def test_closing_and_forgetting_a_session_ends_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    force_branches(monkeypatch, lambda k: "reference")
    session = Session(two_branches(), config_of())
    session.run(X)
    assert any(thread.name.startswith("ranvier-lane") for thread in threading.enumerate())
    session.close()
    assert not any(thread.name.startswith("ranvier-lane") for thread in threading.enumerate())
    forgotten = Session(two_branches(), config_of())
    forgotten.run(X)
    del forgotten
    gc.collect()


def test_a_run_outlives_the_end_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    force_branches(monkeypatch, lambda k: "reference")
    begun, go_on = threading.Event(), threading.Event()

    def act(name: str) -> None:
        if name == "b0":
            begun.set()
            assert go_on.wait(5)

    failing(monkeypatch, act)
    session = Session(two_branches(), config_of())
    results: list[Any] = []
    caller = threading.Thread(target=lambda: results.append(session.run(X)))
    caller.start()
    assert begun.wait(5)
    session.close()
    go_on.set()
    caller.join()
    assert len(results) == 1


def tanh_of(value: Value) -> Graph:
    """A body that reads a value from around it."""
    body = Graph("body", opsets={"": 21})
    made = body.add("Tanh", [value], version=13, name="inner").output
    made.type = KIND
    body.outputs = [made]
    return body


def test_a_body_keeps_to_the_threads_of_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch of an If in a lane runs on the CPU provider, with as many threads as the lane has."""
    graph = two_branches(2)
    condition = graph.add_constant(ConstTensor.of(np.array(True)), "yes")
    total = graph.outputs[0]
    attrs = {name: tanh_of(graph.inputs[0]) for name in ("then_branch", "else_branch")}
    chosen = graph.add("If", [condition], attrs, version=19, name="choice").output
    chosen.type = KIND
    graph.outputs = [total, chosen]
    names = ["a0", "a1", "b0", "b1", "sum", "choice"]
    force(monkeypatch, [[[0, 1], [2, 3, 5]], [[4]]], lambda k: "reference" if k == 5 else "cpu", names)
    seen: list[int | None] = []
    compile_ = CpuProvider.compile

    def noted(self: CpuProvider, part: Any, ctx: Any) -> Any:
        seen.extend(ctx.config.threads for node in part.nodes if node.name == "inner")
        return compile_(self, part, ctx)

    monkeypatch.setattr(CpuProvider, "compile", noted)
    with Session(graph, config_of()) as session:
        np.testing.assert_allclose(session.run(X)[chosen.name], np.tanh(X["x"]), rtol=1e-6)
    assert seen == [1, 1]
