"""Predictions for control flow: a body counts as often as it runs, at the rates of whoever runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from ranvier.formats.onnx import read
from ranvier.graph.ir import Graph, Node
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.calibration.bodies import TRIPS
from ranvier.runtime.calibration.model import MachineCosts, guessed
from ranvier.runtime.calibration.table import Figures
from tests.runtime.small_models import model_of, tensor

SIDE = 8
PRODUCT, PER_ROUND, LAUNCH = 1e-3, 1e-4, 1e-5
DEAR = 1.0  # seconds of a product on the reference: a body that is priced there shows


def product(source: str, result: str) -> Any:
    return helper.make_node("MatMul", [source, source], [result])


def loop(
    trips: list[Any], count: str = "n", weights: dict[str, Any] | None = None, nodes: tuple[Any, ...] = ()
) -> Graph:
    body = helper.make_graph(
        [product("s", "s2")],
        "body",
        [tensor("i", TensorProto.INT64, []), tensor("c", TensorProto.BOOL, []), tensor("s", TensorProto.FLOAT, None)],
        [tensor("c", TensorProto.BOOL, []), tensor("s2", TensorProto.FLOAT, None)],
    )
    return read(
        model_of(
            [*nodes, helper.make_node("Loop", [count, "", "x"], ["y"], body=body)],
            [tensor("x", TensorProto.FLOAT, [SIDE, SIDE]), *trips],
            [tensor("y", TensorProto.FLOAT, None)],
            weights,
        )
    )


def seconds(graph: Graph) -> float:
    """What the control flow in a graph is predicted to take on the reference, which leaves bodies to the runtime."""
    providers = [REGISTRY.get("cpu"), REGISTRY.get("reference")]
    operations = 2.0 * SIDE**3
    figures = {
        "cpu": Figures("cpu", launch=LAUNCH, points={"product float32": ((operations, PRODUCT),)}),
        "reference": Figures("reference", points={"product float32": ((operations, DEAR),)}, iteration=PER_ROUND),
    }
    known = guessed(graph)
    node: Node = next(node for node in graph if node.has_subgraphs)
    found = MachineCosts(providers, figures, known.types, known.values).node_seconds(node, providers[1])
    assert found is not None
    return found


ROUND = PRODUCT + LAUNCH + PER_ROUND


@pytest.mark.parametrize(("count", "times"), [(5, 5), (0, 0), (-3, 0), (2**63 - 1, TRIPS)])
def test_a_loop_with_a_constant_trip_count(count: int, times: float) -> None:
    graph = loop([], weights={"n": np.array(count, np.int64)})
    assert seconds(graph) == pytest.approx(times * ROUND)


def test_a_trip_count_that_follows_from_a_shape() -> None:
    nodes = (
        helper.make_node("Shape", ["z"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"], axis=0),
    )
    graph = loop([tensor("z", TensorProto.FLOAT, [12, 3])], weights={"zero": np.array(0, np.int64)}, nodes=nodes)
    assert seconds(graph) == pytest.approx(12 * ROUND)


def test_a_loop_of_which_nobody_knows_how_often_it_runs() -> None:
    assert seconds(loop([tensor("n", TensorProto.INT64, [])])) == pytest.approx(TRIPS * ROUND)


@pytest.mark.parametrize(("axis", "times"), [(0, 5), (1, 8), (-1, 8)])
def test_a_scan_runs_along_its_sequence(axis: int, times: int) -> None:
    shape = [5, SIDE, SIDE]
    rest = [size for k, size in enumerate(shape) if k != axis % 3]
    body = helper.make_graph(
        [product("s", "s2"), helper.make_node("Identity", ["e"], ["o"])],
        "body",
        [tensor("s", TensorProto.FLOAT, [SIDE, SIDE]), tensor("e", TensorProto.FLOAT, rest)],
        [tensor("s2", TensorProto.FLOAT, [SIDE, SIDE]), tensor("o", TensorProto.FLOAT, rest)],
    )
    node = helper.make_node(
        "Scan", ["x", "z"], ["y", "w"], body=body, num_scan_inputs=1, scan_input_axes=[axis], scan_output_axes=[axis]
    )
    graph = read(
        model_of(
            [node],
            [tensor("x", TensorProto.FLOAT, [SIDE, SIDE]), tensor("z", TensorProto.FLOAT, shape)],
            [tensor("y", TensorProto.FLOAT, None), tensor("w", TensorProto.FLOAT, None)],
        )
    )
    assert seconds(graph) == pytest.approx(times * ROUND)


def branch(*results: str) -> Any:
    nodes = [product(a, b) for a, b in zip(("x", *results), results)]
    return helper.make_graph(nodes, f"to {results[-1]}", [], [tensor(results[-1], TensorProto.FLOAT, None)])


@pytest.mark.parametrize(("rows", "products"), [(4, 1), (7, 3)])
def test_a_branch_that_shapes_decide(rows: int, products: int) -> None:
    nodes = [
        helper.make_node("Shape", ["z"], ["shape"]),
        helper.make_node("Equal", ["shape", "four"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("d", "e", "f")),
    ]
    inputs = [tensor("x", TensorProto.FLOAT, [SIDE, SIDE]), tensor("z", TensorProto.FLOAT, [rows])]
    four = {"four": np.array([4], np.int64)}
    graph = read(model_of(nodes, inputs, [tensor("y", TensorProto.FLOAT, None)], four))
    assert seconds(graph) == pytest.approx(products * PRODUCT + LAUNCH + PER_ROUND)


def test_of_branches_that_only_a_run_decides_the_longest_counts() -> None:
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("d", "e", "f"))
    inputs = [tensor("x", TensorProto.FLOAT, [SIDE, SIDE]), tensor("c", TensorProto.BOOL, [])]
    graph = read(model_of([node], inputs, [tensor("y", TensorProto.FLOAT, None)]))
    assert seconds(graph) == pytest.approx(3 * PRODUCT + LAUNCH + PER_ROUND)
