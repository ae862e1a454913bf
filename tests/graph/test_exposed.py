"""What lies in bodies among the outputs: branches show what they computed, loops every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from ranvier.config import SessionConfig
from ranvier.formats import onnx as onnx_format
from ranvier.graph.exposed import can_be_shown, exposed
from ranvier.graph.ir import Graph, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.verify import verify
from ranvier.runtime.quantizing.distinct import make_values_distinct
from ranvier.runtime.session import Session
from tests.conformance.cases import Case, all_cases, check
from tests.runtime.small_models import model_of, tensor

Array = np.ndarray[Any, Any]
PLAIN = SessionConfig(providers=("reference",), optimization="none")
NESTED = [case for case in all_cases() if case.name.startswith(("test_loop", "test_scan", "test_if"))]
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def body(nodes: list[Any], outputs: list[Any], inputs: list[Any] | None = None) -> Any:
    return helper.make_graph(nodes, "body", inputs or [], outputs)


def branches() -> ModelProto:
    """y = (x + 1) * 2 where up, and |x| - 1 else, of a scalar there: -x where that is more than 9."""
    inner = [
        body([helper.make_node(op, ["s"], [name])], [tensor(name, FLOAT, [])])
        for op, name in (("Neg", "n"), ("Abs", "m"))
    ]
    then = body(
        [helper.make_node("Add", ["x", "one"], ["p"]), helper.make_node("Mul", ["p", "two"], ["a"])],
        [tensor("a", FLOAT, None)],
    )
    other = body(
        [
            helper.make_node("Abs", ["x"], ["q"]),
            helper.make_node("ReduceSum", ["q"], ["s"], keepdims=0),
            helper.make_node("Greater", ["s", "nine"], ["many"]),
            helper.make_node("If", ["many"], ["i"], then_branch=inner[0], else_branch=inner[1]),
            helper.make_node("Sub", ["q", "i"], ["b"]),
        ],
        [tensor("b", FLOAT, None)],
    )
    return model_of(
        [helper.make_node("If", ["up"], ["y"], then_branch=then, else_branch=other)],
        [tensor("up", BOOL, []), tensor("x", FLOAT, [3])],
        [tensor("y", FLOAT, None)],
        {"one": np.float32(1), "two": np.float32(2), "nine": np.float32(9)},
    )


def loop(results: list[str], scanned: int) -> ModelProto:
    """h doubles in every step; the first of two scan outputs is h + k. ``results``: of the node, as far as they are
    named."""
    steps = body(
        [
            helper.make_node("Add", ["h_in", "h_in"], ["h_out"], "twice"),
            helper.make_node("Cast", ["k"], ["step"], to=FLOAT),
            helper.make_node("Add", ["h_out", "step"], ["row"]),
            helper.make_node("Neg", ["row"], ["minus"]),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        [
            tensor("go_on", BOOL, []),
            tensor("h_out", FLOAT, [2]),
            *(tensor(n, FLOAT, [2]) for n in ("row", "minus")[:scanned]),
        ],
        [tensor("k", INT, []), tensor("go", BOOL, []), tensor("h_in", FLOAT, [2])],
    )
    outputs = [tensor(name, FLOAT, None) for name in results]
    return model_of(
        [helper.make_node("Loop", ["count", "", "x"], results, "loop", body=steps)],
        [tensor("x", FLOAT, [2]), tensor("count", INT, [])],
        outputs,
    )


def nested() -> ModelProto:
    """A loop in a branch in a loop: twice x is doubled k times where that is odd, and negated else."""
    inner = body(
        [helper.make_node("Add", ["d_in", "d_in"], ["d_out"]), helper.make_node("Identity", ["on"], ["on_out"])],
        [tensor("on_out", BOOL, []), tensor("d_out", FLOAT, None)],
        [tensor("j", INT, []), tensor("on", BOOL, []), tensor("d_in", FLOAT, None)],
    )
    then = body(
        [
            helper.make_node("Mul", ["grown", "two"], ["t"]),
            helper.make_node("Loop", ["k", "", "t"], ["a"], "inner", body=inner),
        ],
        [tensor("a", FLOAT, None)],
    )
    other = body([helper.make_node("Neg", ["grown"], ["b"])], [tensor("b", FLOAT, None)])
    steps = body(
        [
            helper.make_node("Concat", ["x_in", "x"], ["grown"], axis=0),
            helper.make_node("Mod", ["k", "even"], ["rest"]),
            helper.make_node("Cast", ["rest"], ["odd"], to=BOOL),
            helper.make_node("If", ["odd"], ["x_out"], "if", then_branch=then, else_branch=other),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        [tensor("go_on", BOOL, []), tensor("x_out", FLOAT, None)],
        [tensor("k", INT, []), tensor("go", BOOL, []), tensor("x_in", FLOAT, ["n"])],
    )
    return model_of(
        [helper.make_node("Loop", ["count", "", "x"], ["y"], "outer", body=steps)],
        [tensor("x", FLOAT, [1]), tensor("count", INT, [])],
        [tensor("y", FLOAT, None)],
        {"two": np.float32(2), "even": np.int64(2)},
    )


def shown(model: ModelProto, names: list[str], feed: dict[str, Any]) -> dict[str, list[list[float]]]:
    graph = onnx_format.read(model)
    before = str(graph)
    made = exposed(graph, names)
    verify(made)
    assert str(graph) == before, "the original stays as it was"
    assert [value.name for value in made.outputs] == [*(v.name for v in graph.outputs), *names]
    with Session(graph, PLAIN) as session:
        expected = session.run(feed)
    for config in (PLAIN, SessionConfig(threads=1)):
        with Session(exposed(graph, names), config) as session:
            found = session.run(feed)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    return {name: [np.asarray(each).tolist() for each in found[name]] for name in names}


@pytest.mark.parametrize("up", [True, False])
def test_branches_show_what_they_computed_and_others_nothing(up: bool) -> None:
    x = np.array([1, -2, 3], np.float32)
    found = shown(branches(), ["p", "q", "n", "m", "s"], {"up": np.array(up), "x": x})
    if up:
        assert found == {"p": [[2, -1, 4]], "q": [], "n": [], "m": [], "s": []}
    else:
        assert found == {"p": [], "q": [[1, 2, 3]], "n": [], "m": [6], "s": [6]}
        assert shown(branches(), ["n", "m"], {"up": np.array(up), "x": 9 * x}) == {"n": [-54], "m": []}


@pytest.mark.parametrize("results, scanned", [(["h"], 0), (["h", "rows"], 1), (["h"], 2), (["h", "rows", "others"], 2)])
def test_loops_show_every_step(results: list[str], scanned: int) -> None:
    """Also where the node's last results are left out."""
    x = np.array([1, -2], np.float32)
    names = ["h_in", "step", "minus"]
    found = shown(loop(results, scanned), names, {"x": x, "count": np.array(3)})
    assert found["h_in"] == [[1, -2], [2, -4], [4, -8]] and found["step"] == [0, 1, 2]
    assert found["minus"] == [[-2, 4], [-5, 7], [-10, 14]]
    assert shown(loop(results, scanned), names, {"x": x, "count": np.array(0)}) == {name: [] for name in names}


def test_shapes_may_change_from_step_to_step_and_bodies_lie_in_bodies() -> None:
    feed = {"x": np.ones(1, np.float32), "count": np.array(4)}
    found = shown(nested(), ["grown", "t", "d_in", "d_out", "b"], feed)
    assert found["grown"] == [[1, 1], [-1, -1, 1], [-4, -4, 4, 1], [4, 4, -4, -1, 1]]
    assert found["b"] == [[-1, -1], [4, 4, -4, -1]]
    first, second = np.array([-2, -2, 2]), np.array([8, 8, -8, -2, 2])
    assert found["t"] == [first.tolist(), second.tolist()]
    assert found["d_in"] == [each.tolist() for each in (first, second, 2 * second, 4 * second)]
    assert found["d_out"] == [each.tolist() for each in (2 * first, 2 * second, 4 * second, 8 * second)]


@pytest.mark.parametrize("attrs", [{}, {"scan_output_axes": [1], "scan_output_directions": [1]}])
def test_scans_show_every_step_in_order(attrs: dict[str, Any]) -> None:
    """Whatever the directions of other outputs are."""
    steps = body(
        [helper.make_node("Add", ["h_in", "x_in"], ["h_out"]), helper.make_node("Neg", ["h_out"], ["minus"])],
        [tensor("h_out", FLOAT, [2]), tensor("minus", FLOAT, [2])],
        [tensor("h_in", FLOAT, [2]), tensor("x_in", FLOAT, [2])],
    )
    model = model_of(
        [helper.make_node("Scan", ["h", "x"], ["last", "all"], "scan", body=steps, num_scan_inputs=1, **attrs)],
        [tensor("h", FLOAT, [2]), tensor("x", FLOAT, [3, 2])],
        [tensor("last", FLOAT, None), tensor("all", FLOAT, None)],
    )
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = shown(model, ["x_in", "h_out"], {"h": np.ones(2, np.float32), "x": x})
    assert found == {"x_in": x.tolist(), "h_out": (1 + np.cumsum(x, axis=0)).tolist()}


def inner(graph: Graph) -> dict[str, Value]:
    return {value.name: value for each in graph.all_graphs() if each is not graph for value in each.values()}


def test_what_can_be_shown() -> None:
    """No constants, and nothing in bodies of other operators."""
    graph = onnx_format.read(nested())
    values = inner(graph)
    assert {name for name, value in values.items() if not can_be_shown(value)} == set()
    values["k"].owner.parent.domain = "elsewhere"  # type: ignore[union-attr]
    assert not any(can_be_shown(value) for value in values.values())
    graph = onnx_format.read(nested())
    (outer,) = graph.nodes
    outer.attrs["body"].add_constant(ConstTensor.of(np.ones(3)), "ones")
    assert not can_be_shown(inner(graph)["ones"])


@pytest.mark.parametrize("case", NESTED, ids=lambda case: case.name)
def test_results_stay_what_they_are(case: Case) -> None:
    model = case.model()
    graph = onnx_format.read(model)
    make_values_distinct(graph)
    names = [name for name, value in inner(graph).items() if can_be_shown(value)]
    made = exposed(graph, names)
    verify(made)
    with Session(made, PLAIN) as session:
        for inputs, expected in case.data(model):
            found = list(session.run(inputs).values())
            assert len(found) == len(graph.outputs) + len(names)
            check(found[: len(graph.outputs)], expected, case)
