"""A layer whose gates its gradient asks for is computed once, and gradients of that gradient are still right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.passes import KeptGates, PassContext
from ranvier.passes.differentiate import differentiate
from tests.passes.gradient_tools import Case, check, graph_of, r, run

OPERANDS = [r(3, 2, 3), r(1, 8, 3, seed=1), r(1, 8, 2, seed=2), r(1, 16, seed=3)]


def lstm(op: GraphOps, *given: Value, **attrs: Any) -> Value:
    return op.node("LSTM", list(given), {"hidden_size": 2, **attrs}, outputs=3).outputs[0]


def derived(case: Case) -> Graph:
    """The result and its gradients by the weights."""
    graph, values, y, seed = graph_of(case)
    grads = differentiate(graph, [(y, seed)], values[1:4])
    graph.outputs = [y, *(g for g in grads if g is not None)]
    return graph


def results(graph: Graph, case: Case) -> list[np.ndarray[Any, Any]]:
    feeds = {f"x{k}": a for k, a in enumerate(case.inputs)}
    return run(graph, {**feeds, "seed": r(3, 1, 2, 2, seed=9)})


def test_the_layer_is_computed_once() -> None:
    case = Case(lstm, OPERANDS)
    graph = derived(case)
    before = results(graph, case)
    assert KeptGates().run(graph, PassContext())
    ops = [n.op for n in graph]
    assert "LSTM" not in ops and ops.count("LSTMTraining") == 1
    for have, want in zip(results(graph, case), before, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12)


def test_layers_with_other_operands_stay() -> None:
    def build(op: GraphOps, x: Value, w: Value, r: Value, b: Value) -> Value:
        lstm(op, x, w, r, b, direction="reverse")
        lstm(op, x, w, r)
        return lstm(op, x, w, r, b)

    graph = derived(Case(build, OPERANDS))
    assert KeptGates().run(graph, PassContext())
    left = [n for n in graph if n.op == "LSTM"]
    assert [(n.attrs.get("direction"), len(n.inputs)) for n in left] == [("reverse", 4), (None, 3)]


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_gradients_of_the_gradient(direction: str) -> None:
    ways = 2 if direction == "bidirectional" else 1

    def first(op: GraphOps, x: Value, w: Value, again: Value, b: Value, h: Value, c: Value, holes: Value) -> Value:
        node = op.node(
            "LSTM", [x, w, again, b, None, h, c, holes], {"hidden_size": 2, "direction": direction}, outputs=3
        )
        targets: list[tuple[Value, Value | None]] = [(op.Mul(y, y), None) for y in node.outputs]
        grads = differentiate(op.graph, targets, [w, h])
        assert grads[0] is not None and grads[1] is not None
        return op.Concat(op.Reshape(grads[0], [-1]), op.Reshape(grads[1], [-1]), axis=0)

    shapes = [(2, 1, 2), (ways, 8, 2), (ways, 8, 2), (ways, 16), (ways, 1, 2), (ways, 1, 2), (ways, 6)]
    check(Case(first, [r(*shape, seed=seed, low=-1.0, high=1.0) for seed, shape in enumerate(shapes)]), 1e-4)
