"""How nodes are put together into parts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import ranvier as rv
from ranvier.dtypes import DType
from ranvier.graph import Graph, TensorType
from ranvier.providers.base import Claim, Decline, ProviderCapability
from ranvier.runtime.partition import Partitioner


class Takes:
    """A provider of some operators that compiles whole parts."""

    def __init__(self, name: str, ops: set[str], whole: bool = True) -> None:
        self.name, self.ops, self.whole, self.device = name, ops, whole, "host"

    def capability(self) -> ProviderCapability:
        return ProviderCapability(whole_parts=self.whole)

    def claim(self, view: Any) -> Any:
        for node in view:
            yield Claim((node,)) if node.op in self.ops else Decline(node, "not mine")


def parts(graph: Graph, *providers: Takes) -> list[tuple[str, list[str]]]:
    found = Partitioner(providers).partition(graph).parts  # type: ignore[arg-type]
    return [(p.provider.name, [n.op for n in p.subgraph.nodes]) for p in found]


def chain(graph: Graph, value: Any, *ops: str) -> Any:
    for op in ops:
        value = graph.add(op, [value], {}, 1, version=13).output
    return value


def test_an_unrelated_node_does_not_cut_a_part() -> None:
    graph = Graph("g")
    x, y = (graph.add_input(n, TensorType(DType.float32, (3,))) for n in "xy")
    first = chain(graph, x, "Exp")
    other = chain(graph, y, "Neg")
    last = chain(graph, first, "Abs")
    graph.outputs = [other, last]
    a, b = Takes("a", {"Exp", "Abs"}), Takes("b", {"Neg"})
    assert sorted(parts(graph, a, b)) == [("a", ["Exp", "Abs"]), ("b", ["Neg"])]


def test_nodes_one_by_one_gather_before_a_part() -> None:
    graph = Graph("g")
    x, y = (graph.add_input(n, TensorType(DType.float32, (3,))) for n in "xy")
    p = chain(graph, x, "Exp", "Neg")
    q = chain(graph, y, "Neg", "Abs")
    total = graph.add("Add", [p, q], {}, 1, version=14).output
    graph.outputs = [total]
    a, b = Takes("a", {"Exp", "Abs", "Add"}), Takes("b", {"Neg"}, whole=False)
    found = parts(graph, a, b)
    assert found == [("a", ["Exp"]), ("b", ["Neg"]), ("b", ["Neg"]), ("a", ["Abs", "Add"])]


def test_the_given_order_stays_where_nothing_is_gained() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.float32, (3,)))
    left, right = chain(graph, x, "Exp"), chain(graph, x, "Abs")
    graph.outputs = [chain(graph, left, "Exp"), chain(graph, right, "Abs")]
    assert parts(graph, Takes("a", {"Exp", "Abs"})) == [("a", ["Exp", "Abs", "Exp", "Abs"])]


@pytest.mark.parametrize("seed", range(20))
def test_every_order_runs_and_none_has_more_parts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = Graph("g")
    values: list[Any] = [graph.add_input("x", TensorType(DType.float32, (3,)))]
    ops = ["Exp", "Neg", "Abs"]
    for _ in range(30):
        operand = values[int(rng.integers(max(0, len(values) - 6), len(values)))]
        values.append(chain(graph, operand, ops[int(rng.integers(3))]))
    graph.outputs = [v for v in values[1:] if not v.uses]
    providers = [Takes("a", {"Exp"}), Takes("b", {"Neg"}), Takes("c", {"Abs"}, whole=False)]
    found = Partitioner(providers).partition(graph).parts  # type: ignore[arg-type]
    done = set(graph.inputs)
    for part in found:
        for node in part.subgraph.nodes:
            assert all(v in done for v in node.inputs)
            done.update(node.outputs)
    assert len(done) == 31
    owners = [next(p for p in providers if n.op in p.ops) for n in graph]
    cuts = 1 + sum(a is not b or not b.whole for a, b in itertools.pairwise(owners))
    assert len(found) <= cuts


def test_random_draws_keep_their_order() -> None:
    text = """
    draws (float[N] x) => (float[N] a, float[4] p, float[4] q)
    {
        e = Exp (x)
        p = RandomNormal <shape = [4], seed = 1.0> ()
        a = Neg (e)
        q = RandomNormal <shape = [4], seed = 2.0> ()
    }
    """
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>{text}')
    x = np.ones(3, np.float32)
    with rv.load(model, providers=["cpu", "reference"]) as session, rv.load(model, providers=["reference"]) as other:
        found, expected = session.run({"x": x}), other.run({"x": x})
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)
