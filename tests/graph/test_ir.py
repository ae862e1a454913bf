"""The IR: use lists, order, removal, nested graphs, verification."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.dtypes import DType
from ranvier.errors import InvalidGraph
from ranvier.graph import ConstTensor, Graph, Node, Symbol, TensorType, Value, topological_order, verify


def chain(length: int = 3) -> Graph:
    graph = Graph("chain")
    value = graph.add_input("x", TensorType(DType.float32, (2,)))
    for _ in range(length):
        value = graph.add("Relu", [value], version=14).output
    graph.outputs = [value]
    return graph


def test_use_lists_follow_every_change() -> None:
    graph = Graph()
    x, y = graph.add_input("x"), graph.add_input("y")
    node = graph.add("Add", [x, x])
    assert [position for _, position in x.uses] == [0, 1]
    node.set_input(1, y)
    assert [(n.op, p) for n, p in x.uses] == [("Add", 0)]
    assert [(n.op, p) for n, p in y.uses] == [("Add", 1)]
    x.replace_by(y)
    assert node.inputs == (y, y) and not x.uses
    node.set_inputs([])
    assert not y.uses


def test_replacing_a_value_changes_outputs_too() -> None:
    graph = chain(2)
    first, second = graph.nodes
    graph.outputs[0].replace_by(first.output)
    assert graph.outputs == [first.output]
    graph.remove(second)
    verify(graph)
    assert len(graph) == 1


def test_a_used_node_cannot_be_removed() -> None:
    graph = chain(2)
    with pytest.raises(InvalidGraph, match="still used"):
        graph.remove(graph.nodes[0])
    with pytest.raises(InvalidGraph, match="still used"):
        graph.remove(graph.nodes[1])


def test_iteration_survives_removal_and_insertion() -> None:
    graph = chain(5)
    seen = []
    for node in graph:
        seen.append(node)
        if len(seen) == 2:
            node.output.replace_by(node.inputs[0])
            graph.remove(node)
        if len(seen) == 4:
            graph.add("Neg", [graph.inputs[0]], before=node)
    assert len(seen) == 5 and len(graph) == 5
    assert [n.op for n in reversed(graph)] == [n.op for n in graph][::-1]


def test_sort_orders_and_finds_cycles() -> None:
    graph = Graph()
    x = graph.add_input("x")
    later = Value("later")
    user = graph.add("Relu", [later], name="user")
    graph.add("Neg", [x], None, [later], name="maker")
    graph.outputs = [user.output]
    assert [n.name for n in topological_order(graph)] == ["maker", "user"]
    graph.sort()
    verify(graph)
    later.producer.set_input(0, user.output)
    with pytest.raises(InvalidGraph, match="cycle"):
        graph.sort()


def nested() -> tuple[Graph, Node, Graph]:
    graph = Graph("outer")
    cond, x = graph.add_input("cond"), graph.add_input("x")
    branches = []
    for op in ("Relu", "Neg"):
        body = Graph(op)
        body.outputs = [body.add(op, [x]).output]
        branches.append(body)
    node = graph.add("If", [cond], {"then_branch": branches[0], "else_branch": branches[1]})
    graph.outputs = [node.output]
    return graph, node, branches[0]


def test_captures_are_dependencies() -> None:
    graph, node, body = nested()
    cond, x = graph.inputs
    assert node.captures() == [x]
    assert node.dependencies() == [cond, x]
    assert body.parent is node and body.root() is graph
    assert len(list(graph.all_nodes())) == 3
    verify(graph)
    node.output.replace_by(x)
    graph.outputs = [graph.add("Identity", [x]).output]
    graph.remove(node)
    assert [n.op for n, _ in x.uses] == ["Identity"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda g: g.inputs[0].uses.clear(), "does not know this use"),
        (lambda g: g.outputs.append(Value("stray")), "is not defined in it"),
        (lambda g: setattr(g.nodes[0].output, "index", 3), "does not know its producer"),
        (lambda g: g.add_input("x"), "two inputs are named"),
        (lambda g: g.nodes[0].set_input(0, Value("ghost")), "not defined before"),
        (lambda g: setattr(g, "_length", 9), "node list of length 9"),
        (lambda g: g.inputs[0].uses.update({(g.nodes[1], 0): None}), "that is not there"),
    ],
)
def test_verify_names_the_breach(damage, message: str) -> None:
    graph = chain()
    verify(graph)
    damage(graph)
    with pytest.raises(InvalidGraph, match=message):
        verify(graph)


def test_text_is_readable() -> None:
    graph, _, _ = nested()
    graph.add_constant(ConstTensor.of(np.float32([1, 2])), "w")
    text = str(graph)
    assert "graph outer(%cond: None, %x: None)" in text
    assert "%w = constant float32[2] = [1., 2.]" in text
    assert "then_branch:" in text and "Relu(%x)" in text


def test_types_merge_and_bind() -> None:
    n = Symbol("n", lo=1, hi=8)
    a = TensorType(DType.float32, (n, None, 3))
    assert a.merge(TensorType(None, (4, 5, None))) == TensorType(DType.float32, (4, 5, 3))
    assert a.bind({"n": 2}).shape == (2, None, 3)
    assert n.admits(8) and not n.admits(9) and not n.admits(0)
    assert str(a) == "float32[n, ?, 3]" and a.size is None
    assert TensorType(DType.bfloat16, (2, 3)).nbytes == 12
    with pytest.raises(ValueError, match="bounds"):
        Symbol("m", lo=3, hi=2)


def test_constants_load_once_and_are_read_only() -> None:
    calls = []
    tensor = ConstTensor(DType.float32, (2,), lambda: calls.append(1) or np.zeros(2, np.float32))
    assert not tensor.is_loaded and tensor.nbytes == 8
    assert tensor.numpy() is tensor.numpy() and calls == [1]
    with pytest.raises(ValueError, match="read-only"):
        tensor.numpy()[0] = 1
