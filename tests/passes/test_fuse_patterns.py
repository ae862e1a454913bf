"""What the fusion rules rely on in the pattern language."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.dtypes import DType
from ranvier.graph import ConstTensor, Graph, GraphOps, Match, Rule, RuleSet, TensorType, Value, verify
from ranvier.graph.patterns import ANY, CONSTANT, PatternOps, heads

MATRIX = TensorType(DType.float32, (2, 3))


class Small:
    """A graph with one input ``x``; ``call`` adds a node, numbers become constants."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.add_input("x", MATRIX)

    def constant(self, array: Any) -> Value:
        return self.graph.add_constant(ConstTensor.of(np.asarray(array)))

    def call(self, op: str, *operands: Any, **attrs: Any) -> Value:
        values = [v if isinstance(v, Value) else self.constant(np.float32(v)) for v in operands]
        output = self.graph.add(op, values, attrs).output
        output.type = MATRIX
        return output

    def apply(self, rule: Rule, *outputs: Value) -> Any:
        self.graph.outputs = list(outputs)
        stats = RuleSet([rule]).apply(self.graph)
        verify(self.graph)
        return stats


class Halved(Rule):
    def pattern(self, op: PatternOps, x: Any) -> Any:
        return op.Mul(op.Relu(x), 1 / 3)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.Abs(match["x"])


@pytest.mark.parametrize("dtype", [DType.float32, DType.float16, DType.bfloat16, DType.float64])
def test_a_number_matches_as_exactly_as_its_type_can_say(dtype: DType) -> None:
    third = np.asarray(1 / 3).astype(dtype.numpy)
    small = Small()
    assert small.apply(Halved(), small.call("Mul", small.call("Relu", small.x), small.constant(third))).changes == 1
    if dtype.bits < 32:
        small = Small()
        above = np.nextafter(third, np.asarray(1).astype(dtype.numpy))
        assert small.apply(Halved(), small.call("Mul", small.call("Relu", small.x), small.constant(above))).changes == 0


def test_attributes_of_old_broadcasting_do_not_match() -> None:
    small = Small()
    y = small.call("Mul", small.call("Relu", small.x), 1 / 3, axis=1, broadcast=1)
    assert small.apply(Halved(), y).changes == 0


class Sliced(Rule):
    def pattern(self, op: PatternOps, x: Any) -> Any:
        return op.Neg(op.Slice(x, ..., _label="slice"))

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        assert match.node("slice").op == "Slice"
        return op.Abs(match["x"])


@pytest.mark.parametrize("count", [0, 2, 4])
def test_an_ellipsis_stands_for_any_further_operands(count: int) -> None:
    small = Small()
    y = small.call("Neg", small.call("Slice", small.x, *[1.0] * count))
    assert small.apply(Sliced(), y).changes == 1
    assert [node.op for node in small.graph] == ["Abs"]


class SecondChoice(Rule):
    """Only one of the two orders of a product passes the check."""

    def pattern(self, op: PatternOps, x: Any, y: Any) -> Any:
        return op.Mul(op.Relu(x), op.Relu(y))

    def check(self, match: Match) -> str | None:
        return None if match["x"].name == "x" else f"{match['x'].name} is not x"

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.Sub(match["x"], match["y"])


def test_every_way_to_match_is_tried_before_a_rule_declines() -> None:
    small = Small()
    other = small.graph.add_input("other", MATRIX)
    y = small.call("Mul", small.call("Relu", other), small.call("Relu", small.x))
    stats = small.apply(SecondChoice(), y)
    assert stats.changes == 1 and not stats.declined


def test_the_first_reason_is_reported_where_none_passes() -> None:
    small = Small()
    a, b = small.graph.add_input("a", MATRIX), small.graph.add_input("b", MATRIX)
    stats = small.apply(SecondChoice(), small.call("Mul", small.call("Relu", a), small.call("Relu", b)))
    assert stats.declined == {"SecondChoice": {"a is not x": 1}}


class Diamond(Rule):
    def pattern(self, op: PatternOps, x: Any) -> Any:
        top = op.Relu(x)
        return op.Div(top, op.Sqrt(op.Exp(top)))

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.Abs(match["x"])


def test_nodes_of_a_match_go_in_whatever_order_they_were_found() -> None:
    small = Small()
    top = small.call("Relu", small.x)
    assert small.apply(Diamond(), small.call("Div", top, small.call("Sqrt", small.call("Exp", top)))).changes == 1
    assert [node.op for node in small.graph] == ["Abs"]


def test_what_was_known_of_the_old_value_is_known_of_the_new() -> None:
    small = Small()
    y = small.call("Mul", small.call("Relu", small.x), 1 / 3)
    small.apply(Halved(), y)
    assert small.graph.outputs[0].type == MATRIX


def test_heads_are_the_most_telling_operand() -> None:
    op = PatternOps()
    x = op.one_of(op.Erf(1.0), op.Tanh(1.0))
    assert heads(op.Mul(op.Relu(1.0), x)) == {"Relu"}
    assert heads(op.Mul(x, 0.5)) == {"Erf", "Tanh"}
    assert heads(op.Abs(0.5)) == {CONSTANT}
    assert heads(op.Abs(op.one_of(None, op.Erf(1.0)))) == {ANY}
