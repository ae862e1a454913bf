"""The passes together: order, levels, what is left of typical models, and the time it takes."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.errors import InvalidConfig
from ranvier.graph import ConstTensor, Graph, Symbol, TensorType, Value, verify
from ranvier.ops import annotate
from ranvier.passes import PassContext, default_passes, passes_for
from ranvier.passes.evaluate import Evaluator
from tests.passes.pass_tools import Draft, assert_equal, feeds_for


def optimized(graph: Graph, level: str = "basic") -> Graph:
    passes_for(level, default_passes()).run(graph)  # type: ignore[arg-type]
    verify(graph)
    return graph


def test_each_pass_finds_what_it_requires_even_when_others_are_disabled() -> None:
    names = {p.name for p in default_passes()}
    assert {"modernise", "fold_constants", "fold_shapes", "cancel", "fold_affine"} <= names
    for name in names:
        passes_for("aggressive", default_passes(), [name])
    assert passes_for("none", default_passes()).passes == []
    with pytest.raises(InvalidConfig, match="fold_constants"):
        passes_for("basic", default_passes(), ["fold_constant"])


def heads(d: Draft, x: Value, count: int) -> Value:
    """Split the last axis into heads, the way a tracing exporter writes it."""
    shape = d.op("Shape", x)
    sizes = [d.op("Unsqueeze", d.op("Gather", shape, np.array(k)), [0]) for k in (0, 1)]
    width = d.op("Div", d.op("Gather", shape, np.array(2)), np.array(count))
    target = d.op("Concat", *sizes, [count], d.op("Unsqueeze", width, [0]), axis=0)
    return d.op("Transpose", d.op("Reshape", x, target), perm=(0, 2, 1, 3))


def test_a_traced_attention_keeps_no_shape_computation() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", ("batch", "length", 8))
        q, k = heads(d, x, 2), heads(d, x, 2)
        scores = d.op("MatMul", q, d.op("Transpose", k, perm=(0, 1, 3, 2)))
        scale = d.op("Sqrt", d.op("Cast", d.op("Gather", d.op("Shape", q), np.array(3)), to=1))
        return d.done(d.op("Sigmoid", d.op("Div", scores, scale)))

    plain, graph = draw(), optimized(draw())
    ops = [n.op for n in graph]
    assert "Shape" not in ops and "Gather" not in ops
    assert ops.count("Reshape") == 1 and len(ops) <= 6  # q and k are the same
    for sizes in ({"batch": 1, "length": 1}, {"batch": 3, "length": 5}):
        feeds = feeds_for(plain, sizes)
        assert_equal(Evaluator().graph(plain, feeds), Evaluator().graph(graph, feeds), 1e-6)


def test_an_old_convolutional_block_becomes_one_node_and_its_activation() -> None:
    def draw() -> Graph:
        d = Draft()
        rng = np.random.default_rng(0)
        x = d.input("x", ("n", 3, 8, 8))
        y = d.op("Conv", x, rng.standard_normal((4, 3, 3, 3)).astype(np.float32), version=1, pads=(1, 1, 1, 1))
        rest = [rng.random(4).astype(np.float32) for _ in range(4)]
        y = d.op("BatchNormalization", y, *rest, version=7)
        y = d.op("Dropout", y, version=7)
        return d.done(d.op("Clip", y, version=6, min=0.0, max=6.0))

    plain, graph = draw(), optimized(draw())
    assert [n.op for n in graph] == ["Conv", "Clip"]
    feeds = feeds_for(plain)
    assert_equal(Evaluator().graph(plain, feeds), Evaluator().graph(graph, feeds), 1e-5)


def large(count: int) -> Graph:
    """Nodes of five kinds, among which next to nothing can be optimized."""
    graph = Graph("large")
    value = graph.add_input("x", TensorType(ConstTensor.of(np.float32(0)).dtype, (Symbol("n"), 16, 8)))
    weights = graph.add_constant(ConstTensor.of(np.eye(8, dtype=np.float32)), "w")
    rng = np.random.default_rng(0)
    while len(graph) < count:
        bias = graph.add_constant(ConstTensor.of(rng.standard_normal(8).astype(np.float32)))
        value = graph.add("Add", [value, bias], version=14).output
        value = graph.add("Relu", [value], version=14).output
        value = graph.add("MatMul", [value, weights], version=13).output
        value = graph.add("Transpose", [value], {"perm": (0, 2, 1)}, version=13).output
        target = graph.add_constant(ConstTensor.of(np.array([0, 16, 8])))
        value = graph.add("Reshape", [value, target], version=14).output
    graph.outputs = [value]
    annotate(graph)
    return graph


def test_a_large_graph_in_which_nothing_fits_stays_as_it_is() -> None:
    graph = large(2_000)
    for step in default_passes():
        step.run(graph, PassContext())
    assert len(graph) == 2_000
