"""Patterns: what they match, what they refuse, and that rewriting keeps names and invariants."""

from __future__ import annotations

import numpy as np

from ranvier.graph import ConstTensor, Graph, GraphOps, Rule, RuleSet, substitute, verify


class DoubleNeg(Rule):
    def pattern(self, op, x):
        return op.Neg(op.Neg(x))

    def rewrite(self, op, match):
        return op.Identity(match["x"])


class ScaledSum(Rule):
    """Commutative operands, a number, a repeated variable, a label."""

    def pattern(self, op, x, y):
        return op.Add(op.Mul(x, 2.0, _label="mul"), op.Sub(x, y))

    def check(self, match):
        return "y is an input" if match["y"].producer is None and match["y"].const is None else None

    def rewrite(self, op, match):
        return op.Fused(match["x"], match["y"], _domain="test")


class OptionalBias(Rule):
    def pattern(self, op, x, w, b_):
        return op.Relu(op.Conv(x, w, b_))

    def rewrite(self, op, match):
        return op.ConvRelu(match["x"], match["w"], match.get("b_"), _domain="test")


def constant(graph: Graph, number: float):
    return graph.add_constant(ConstTensor.of(np.float32(number)))


def test_repeated_rewrites_and_the_name_of_an_output() -> None:
    graph = Graph()
    value = graph.add_input("x")
    for _ in range(6):
        value = graph.add("Neg", [value]).output
    value.name = "y"
    graph.outputs = [value]
    stats = RuleSet([DoubleNeg()]).apply(graph)
    assert stats.applied["DoubleNeg"] == 3
    assert [n.op for n in graph] == ["Identity"] * 3
    assert graph.outputs[0].name == "y" and graph.nodes[-1].origin == "DoubleNeg"
    verify(graph)


def test_inner_values_used_elsewhere_block_a_match() -> None:
    graph = Graph()
    x = graph.add_input("x")
    inner = graph.add("Neg", [x]).output
    graph.outputs = [graph.add("Neg", [inner]).output, graph.add("Abs", [inner]).output]
    assert RuleSet([DoubleNeg()]).apply(graph).changes == 0


def scaled(graph: Graph, *, swap: bool, number: float, same: bool):
    x, z = graph.add_input("x"), graph.add_input("z")
    y = graph.add("Abs", [z]).output
    two = constant(graph, number)
    left = graph.add("Mul", [two, x] if swap else [x, two]).output
    right = graph.add("Sub", [x if same else z, y]).output
    graph.outputs = [graph.add("Add", [right, left] if swap else [left, right]).output]


def test_commutative_operands_numbers_and_variables() -> None:
    for swap in (False, True):
        graph = Graph()
        scaled(graph, swap=swap, number=2.0, same=True)
        assert RuleSet([ScaledSum()]).apply(graph).changes == 1
        assert [n.op for n in graph] == ["Abs", "Fused"]
        verify(graph)
    for number, same in ((2.1, True), (2.0, False)):
        graph = Graph()
        scaled(graph, swap=False, number=number, same=same)
        assert RuleSet([ScaledSum()]).apply(graph).changes == 0


def test_a_check_gives_its_reason() -> None:
    graph = Graph()
    x, y = graph.add_input("x"), graph.add_input("y")
    mul = graph.add("Mul", [x, constant(graph, 2)]).output
    graph.outputs = [graph.add("Add", [mul, graph.add("Sub", [x, y]).output]).output]
    stats = RuleSet([ScaledSum()]).apply(graph)
    assert stats.changes == 0 and stats.declined["ScaledSum"]["y is an input"] == 1


def test_optional_operands() -> None:
    for with_bias in (False, True):
        graph = Graph()
        x, w, b = (graph.add_input(n) for n in "xwb")
        conv = graph.add("Conv", [x, w, b] if with_bias else [x, w]).output
        graph.outputs = [graph.add("Relu", [conv]).output]
        RuleSet([OptionalBias()]).apply(graph)
        (node,) = graph.nodes
        assert node.op == "ConvRelu" and node.inputs[2] is (b if with_bias else None)


def test_substituting_an_input_for_an_output_keeps_the_name() -> None:
    graph = Graph()
    x = graph.add_input("x")
    old = graph.add("Relu", [x]).output
    old.name = "y"
    graph.outputs = [old]
    substitute(old, x, GraphOps(graph, old.producer, "test"))
    assert graph.outputs[0].name == "y" and graph.outputs[0].producer.op == "Identity"


def test_rules_apply_inside_subgraphs() -> None:
    graph = Graph()
    cond, x = graph.add_input("c"), graph.add_input("x")
    body = Graph("then")
    body.outputs = [body.add("Neg", [body.add("Neg", [x]).output]).output]
    other = Graph("else")
    other.outputs = [other.add("Relu", [x]).output]
    node = graph.add("If", [cond], {"then_branch": body, "else_branch": other})
    graph.outputs = [node.output]
    assert RuleSet([DoubleNeg()]).apply(graph).changes == 1
    assert [n.op for n in body] == ["Identity"]
    verify(graph)
