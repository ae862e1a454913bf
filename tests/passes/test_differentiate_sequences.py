"""Gradients through sequences and optionals against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.dtypes import of
from ranvier.errors import NotSupported
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import SequenceType, TensorType
from ranvier.ops import complete
from ranvier.passes.differentiate import differentiate
from tests.passes.gradient_tools import Case, check, r

I64 = np.int64
DOUBLE = of(np.float64(0))


def at(op: GraphOps, sequence: Value, place: int) -> Value:
    return op.SequenceAt(sequence, np.array(place, I64))


def built(op: GraphOps, x: Value, y: Value) -> Value:
    """Inserted, taken out, read from both ends."""
    items = op.SequenceConstruct(x, y, op.Mul(x, y))
    items = op.SequenceInsert(items, op.Exp(x), np.array(1, I64))
    items = op.SequenceErase(items, np.array(-2, I64))  # y leaves
    items = op.SequenceInsert(items, op.Tanh(y))
    return op.Add(op.Mul(at(op, items, 1), at(op, items, -1)), at(op, items, 2))


def split(attrs: dict[str, Any], *lengths: Any) -> Any:
    def build(op: GraphOps, x: Value) -> Value:
        parts = op.node("SplitToSequence", [x, *lengths], attrs).output
        return op.Mul(at(op, parts, 0), op.Exp(at(op, parts, 1)))

    return build


def joined(new_axis: int) -> Any:
    def build(op: GraphOps, x: Value, y: Value) -> Value:
        items = op.SequenceConstruct(op.Sin(x), y, x)
        return op.ConcatFromSequence(items, axis=-1, new_axis=new_axis)

    return build


def optional(op: GraphOps, x: Value) -> Value:
    return op.Exp(op.OptionalGetElement(op.Optional(op.Sin(x))))


def optional_list(op: GraphOps, x: Value) -> Value:
    items = op.OptionalGetElement(op.Optional(op.SequenceConstruct(x, op.Sin(x))))
    return op.Mul(at(op, items, 0), at(op, items, 1))


def mapped(op: GraphOps, x: Value, y: Value) -> Value:
    """A body over two lists and a tensor that all share."""
    body = Graph("body", opsets={"": 26})
    a, b, c = (body.add_input(name, TensorType(DOUBLE, (3,))) for name in "abc")
    inner = GraphOps(body, None, "", complete)
    body.outputs = [inner.Mul(inner.Sin(a), c), inner.Add(a, inner.Mul(b, c))]
    lists = [op.SequenceConstruct(x, y), op.SequenceConstruct(op.Exp(x), x)]
    made = op.graph.add(
        "SequenceMap", [*lists, y], {"body": body},
        [Value("", SequenceType(TensorType(DOUBLE, (3,)))) for _ in range(2)], version=17,
    )  # fmt: skip
    return op.Add(op.ConcatFromSequence(made.outputs[0], axis=0, new_axis=1), at(op, made.outputs[1], 1))


CASES = {
    "built": Case(built, [r(3), r(3, seed=1)], shape=(3,)),
    "split": Case(split({"axis": 1}, np.array([2, 2], I64)), [r(2, 4)], shape=(2, 2)),
    "split evenly": Case(split({"axis": 1}, np.array(2, I64)), [r(2, 5)], shape=(2, 2)),
    "split to rows": Case(split({"keepdims": 0}), [r(2, 3)], shape=(3,)),
    "joined": Case(joined(0), [r(2, 3), r(2, 3, seed=1)], shape=(2, 9)),
    "stacked": Case(joined(1), [r(2, 3), r(2, 3, seed=1)], shape=(2, 3, 3)),
    "optional": Case(optional, [r(4)], shape=(4,)),
    "optional list": Case(optional_list, [r(4)], shape=(4,)),
    "mapped": Case(mapped, [r(3), r(3, seed=1)], shape=(2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


def test_a_list_from_outside_is_refused() -> None:
    """What it holds is not known, and that it has no gradient would be wrong."""
    graph = Graph("g", opsets={"": 26})
    items = graph.add_input("items", SequenceType(TensorType(DOUBLE, (3,))))
    x = graph.add_input("x", TensorType(DOUBLE, (3,)))
    op = GraphOps(graph, None, "", complete)
    grown = op.SequenceInsert(items, op.Sin(x), np.array(0, I64))
    with pytest.raises(NotSupported, match="depends on what runs"):
        differentiate(graph, [(at(op, grown, 0), None)], [x])
