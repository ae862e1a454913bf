"""Equal computations are merged, across scopes and operand orders; what only looks equal is not."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.graph import Graph
from ranvier.passes import CommonSubexpressions
from tests.passes.pass_tools import Draft, apply, run


def test_equal_nodes_and_everything_built_on_them() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        first, second = (d.op("Exp", d.op("Add", x, 1.0)) for _ in range(2))
        return d.done(d.op("Mul", first, second))

    applied = apply(CommonSubexpressions(), draw)
    assert applied.ops == ["Add", "Exp", "Mul"]
    assert len(applied.graph.constants) == 1


def test_operands_of_commutative_operators_in_any_order() -> None:
    def draw() -> Graph:
        d = Draft()
        x, z = d.input(), d.input("z")
        return d.done(
            d.op("Sub", d.op("Add", x, z), d.op("Add", z, x)),
            d.op("Sub", d.op("Sub", x, z), d.op("Sub", z, x)),
            d.op("Mul", d.op("Max", x, z), d.op("Max", z, x)),
        )

    ops = apply(CommonSubexpressions(), draw).ops
    assert (ops.count("Add"), ops.count("Sub"), ops.count("Max")) == (1, 4, 2)


@pytest.mark.parametrize(
    ("op", "first", "second", "merged"),
    [
        ("LeakyRelu", {"alpha": 0.1}, {"alpha": 0.1}, True),
        ("LeakyRelu", {"alpha": 0.1}, {"alpha": 0.2}, False),
        ("LeakyRelu", {"alpha": 0.0}, {"alpha": -0.0}, False),
        ("Softmax", {"axis": -1}, {}, True),  # -1 is the default
        ("Softmax", {"axis": 1}, {"axis": -1}, False),
        ("Transpose", {"perm": (1, 0)}, {"perm": [1, 0]}, True),
    ],
)
def test_attributes(op: str, first: dict, second: dict, merged: bool) -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        return d.done(d.op("Add", d.op(op, x, **first), d.op(op, x, **second)))

    assert apply(CommonSubexpressions(), draw).ops.count(op) == (1 if merged else 2)


def test_constants_are_equal_by_content_and_type() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (4,))
        numbers = [np.float32(0), np.float32(-0.0), np.zeros(1, np.float32), np.float32(0)]
        return d.done(*(d.op("Add", x, n) for n in numbers))

    applied = apply(CommonSubexpressions(), draw)
    assert len(applied.graph.constants) == 3
    assert applied.ops == ["Add", "Add", "Add", "Identity"]  # an output of its own, of the same value


def test_outputs_keep_their_names() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        return d.done(d.op("Relu", x), d.op("Relu", x), d.op("Identity", x), d.op("Identity", x))

    applied = apply(CommonSubexpressions(), draw)
    assert applied.ops.count("Relu") == 1
    assert run(CommonSubexpressions(), applied.graph).changes == 0


def test_several_results_at_once() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (4, 2))
        a, b = (d.op("Split", x, [1, 3], axis=0, outputs=2) for _ in range(2))
        return d.done(d.op("Add", a[0], b[0]), d.op("Mul", a[1], b[1]))

    assert apply(CommonSubexpressions(), draw).ops == ["Split", "Add", "Mul"]


def test_random_and_quantized_nodes_stay_apart() -> None:
    d = Draft()
    x = d.input()
    noise = [d.op("RandomNormalLike", x) for _ in range(2)]
    weights = [d.op("DequantizeLinear", np.ones(3, np.int8), 0.5) for _ in range(2)]
    graph = d.done(d.op("Sum", *noise, *weights))
    run(CommonSubexpressions(), graph)
    ops = [n.op for n in graph]
    assert ops.count("RandomNormalLike") == 2 and ops.count("DequantizeLinear") == 2


def test_a_branch_reuses_what_was_computed_outside_but_not_the_other_way() -> None:
    def draw() -> Graph:
        d = Draft()
        x, condition = d.input(), d.input("c", (), "bool")
        outside = d.op("Exp", d.op("Add", x, 1.0))
        then, other = Draft(d), Draft(d)
        bodies = {
            "then_branch": then.done(then.op("Neg", then.op("Exp", then.op("Add", x, 1.0)))),
            "else_branch": other.done(other.op("Sqrt", other.op("Abs", x))),
        }
        chosen = d.op("If", condition, **bodies)
        return d.done(d.op("Sum", outside, chosen, d.op("Sqrt", d.op("Abs", x))))

    applied = apply(CommonSubexpressions(), draw)
    ops = [n.op for n in applied.graph.all_nodes()]
    assert (ops.count("Exp"), ops.count("Sqrt")) == (1, 2)


def test_a_constant_with_many_uses_is_merged_in_groups() -> None:
    d = Draft()
    value = d.input()
    for k in range(600):
        value = d.op("Add", value, d.constant(1.0, f"one{k}"))
    graph = d.done(value)
    run(CommonSubexpressions(), graph)
    assert 1 < len(graph.constants) < 6
