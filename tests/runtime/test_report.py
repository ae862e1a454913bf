"""``session.report`` as data, and transfers in it, in metrics and in traces."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.types import Symbol, TensorType
from ranvier.runtime.manager import SessionManager
from ranvier.runtime.report import report_for
from ranvier.runtime.session import Session
from ranvier.runtime.transfer import TransferCounts
from tests.faults.test_sim import SIZE, expected, some_input
from tests.faults.test_sim import session as split_session

STEP = 4 * SIZE * 4  # bytes of every value of the chain


def two_inputs(rows: Any = 3) -> Graph:
    """``|a + b| * a``: sum and product on the accelerator, the absolute value on the host."""
    graph = Graph("two", opsets={"": 21})
    kind = TensorType(DType.float32, (rows, 5))
    a, b = graph.add_input("a", kind), graph.add_input("b", kind)
    total = graph.add("Add", [a, b], version=14, name="total").output
    size = graph.add("Abs", [total], version=13, name="size").output
    result = graph.add("Mul", [size, a], version=14, name="product").output
    for value, name in ((total, "total"), (size, "size"), (result, "y")):
        value.type, value.name = kind, name
    graph.outputs = [result]
    if isinstance(rows, Symbol):
        graph.symbols[rows.name] = rows
    return graph


def placed(graph: Graph) -> Session:
    options = {"sim": {"ops": "Add,Mul", "latency": 0.0, "gflops": 1e6, "bandwidth": 1e12}}
    return Session(graph, SessionConfig(providers=("sim", "reference"), provider_options=options, optimization="none"))


def test_parts_and_transfers_are_those_that_run() -> None:
    with placed(two_inputs()) as session:
        report = session.report
        assert [(p.provider, p.memory, p.nodes) for p in report.parts] == [
            ("sim", "sim:0", (0,)),
            ("reference", "cpu", (1,)),
            ("sim", "sim:0", (2,)),
        ]
        assert [n.part for n in report.nodes] == [0, 1, 2]
        assert (report.parts[0].inputs, report.parts[0].outputs) == (("a", "b"), ("total",))
        # a and b travel together, and a is there already when the product needs it
        assert [(t.values, t.source, t.target, t.bytes) for t in report.transfers] == [
            (("a", "b"), "cpu", "sim:0", 120),
            (("total",), "sim:0", "cpu", 60),
            (("size",), "cpu", "sim:0", 60),
            (("y",), "sim:0", "cpu", 60),
        ]
        assert report.moved() == []
        a, b = (np.full((3, 5), x, np.float32) for x in (-3.0, 1.0))
        for _ in range(3):
            np.testing.assert_array_equal(session.run({"a": a, "b": b})["y"], np.abs(a + b) * a)
        moved = {(m.source, m.target): (m.transfers, m.values, m.bytes) for m in report.moved()}
        assert moved == {("cpu", "sim:0"): (6, 9, 540), ("sim:0", "cpu"): (6, 6, 360)}
        assert all(m.seconds > 0 for m in report.moved())
        assert "transfer a, b: cpu → sim:0 (120 bytes)" in str(report)


def test_bytes_of_open_sizes_are_unknown_until_they_are_given() -> None:
    with placed(two_inputs(Symbol("rows"))) as session:
        assert [t.bytes for t in session.report.transfers] == [None] * 4
        assert session.report.transfers[0].types == ("float32[rows, 5]", "float32[rows, 5]")
        known = report_for(session, {"rows": 7})
        assert [t.bytes for t in known.transfers] == [280, 140, 140, 140]
        assert known.nodes[1].types == ("float32[7, 5]",)
        assert [t.bytes for t in session.report.transfers] == [None] * 4


def test_the_report_is_data_for_json() -> None:
    with split_session() as session:
        session.run({"x": some_input()})
        found = json.loads(json.dumps(session.report.to_dict(), allow_nan=False))
    assert [n["provider"] for n in found["nodes"]] == ["reference", "sim", "reference", "sim", "reference"]
    assert found["parts"][1]["nodes"] == [1] and found["by_provider"] == {"reference": 3, "sim": 2}
    assert found["transfers"][0]["bytes"] == STEP
    assert found["nodes"][1]["weight_bytes"] == SIZE * SIZE * 4
    assert found["inputs"] == {"x": "float32[4, 32]"} and found["outputs"] == {"y": "float32[4, 32]"}
    assert [(m["source"], m["target"], m["bytes"]) for m in found["moved"]] == [
        ("cpu", "sim:0", 2 * STEP),
        ("sim:0", "cpu", 2 * STEP),
    ]
    (declined,) = found["declined"]
    assert (declined["provider"], declined["count"]) == ("sim", 3)
    assert (declined["operators"], declined["examples"]) == (["Relu", "Tanh", "Abs"], ["relu", "tanh", "abs"])


def test_counts_do_not_miss_a_transfer() -> None:
    counts = TransferCounts()

    def add() -> None:
        for _ in range(2000):
            counts.add("cpu", "sim:0", 2, 8, 0.5)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (found,) = counts.snapshot()
    assert (found.transfers, found.values, found.bytes, found.seconds) == (8000, 16000, 64000, 4000.0)


def test_metrics_of_a_manager_have_the_transfers() -> None:
    given = {"latency": 0.0, "gflops": 1e6, "bandwidth": 1e12, "ops": "Add,Mul"}
    options = {"providers": ("sim", "reference"), "provider_options": {"sim": given}, "optimization": "none"}
    with SessionManager() as manager:
        manager.load("two", two_inputs(), **options)
        manager.run("two", {"a": np.ones((3, 5), np.float32), "b": np.ones((3, 5), np.float32)})
        found = manager.metrics("two").transfers
    assert {(m.source, m.target): m.bytes for m in found} == {("cpu", "sim:0"): 180, ("sim:0", "cpu"): 120}


def test_a_trace_tells_transfers_apart_and_has_rows_by_provider() -> None:
    x = some_input()
    with split_session() as session:
        session.run({"x": x})
        with session.profile() as profiler:
            result = session.run({"x": x})["y"]
        np.testing.assert_allclose(result, expected(x), rtol=1e-5, atol=1e-5)
        trace = profiler.trace()["traceEvents"]
        ways = profiler.transfers()
        records = profiler.records()
    rows = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert list(rows.values()) == ["session", "reference", "sim", "transfers"]
    ranks = {e["tid"]: e["args"]["sort_index"] for e in trace if e["name"] == "thread_sort_index"}
    assert sorted(ranks, key=lambda tid: ranks[tid]) == list(rows)
    calls = [e for e in trace if e["ph"] == "X"]
    for event in calls:
        expected_row = "transfers" if event["cat"] == "transfer" else event["args"]["provider"]
        assert rows[event["tid"]] == expected_row
    moves = [e for e in calls if e["cat"] == "transfer"]
    assert [(e["args"]["from"], e["args"]["to"], e["args"]["bytes"]) for e in moves] == [
        ("cpu", "sim:0", STEP),
        ("sim:0", "cpu", STEP),
    ] * 2
    assert all(e["args"]["GB/s"] == pytest.approx(STEP / (e["dur"] * 1e3), rel=0.01) for e in moves)
    assert not any("bytes" in e["args"] for e in calls if e["cat"] != "transfer")
    assert [(w.source, w.target, w.transfers, w.bytes) for w in ways] == [
        ("cpu", "sim:0", 2, 2 * STEP),
        ("sim:0", "cpu", 2, 2 * STEP),
    ]
    assert [r.bytes for r in records if r.kernel == "transfer"] == [STEP] * 4


def test_rows_of_a_trace_by_thread() -> None:
    with split_session() as session:
        x = some_input()
        both = threading.Barrier(2)

        def work() -> None:
            both.wait(30)  # neither ends before the other begins: else both could have the same number
            session.run({"x": x})
            both.wait(30)

        with session.profile() as profiler:
            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        trace = profiler.trace()["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["name"] == "thread_name"]
    kinds = ("session", "reference", "sim", "transfers")
    assert sorted(names) == sorted(f"{kind}, thread {k}" for kind in kinds for k in (0, 1))


def test_the_work_of_a_part_in_another_memory_is_known_by_its_types() -> None:
    with split_session(ops="") as session:
        with session.profile() as profiler:
            session.run({"x": some_input()})
        records = {record.kernel: record for record in profiler.records()}
    # x, the weights and the result; what the five nodes hand to each other stays where it is
    assert records["5 nodes"].bytes == STEP + SIZE * SIZE * 4 + STEP
    assert records["5 nodes"].flops >= 2 * 2 * 4 * SIZE * SIZE
