"""Old forms of operators become the newest ones, and compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ranvier.graph import Graph
from ranvier.ops import NEWEST
from ranvier.ops.proto import schema_of
from ranvier.passes import Modernise
from ranvier.passes.base import PassContext
from ranvier.passes.modernise import _route
from tests.passes.pass_tools import Draft, apply

RNG = np.random.default_rng(1)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X = numbers(2, 3, 4, 5)
ARITHMETIC = ("Add", "Sub", "Mul", "Div")

# (operator, version, operands: an array is an input of the graph, a list or scalar a constant; attributes; outputs)
CASES: list[tuple[str, int, tuple[Any, ...], dict[str, Any], int]] = [
    *[(op, 6, (X, numbers(2, 3, 4, 5)), {}, 1) for op in ARITHMETIC],
    *[(op, 6, (X, numbers(5)), {"broadcast": 1}, 1) for op in ARITHMETIC],
    *[(op, 1, (X, numbers(3)), {"broadcast": 1, "axis": 1, "consumed_inputs": (0, 0)}, 1) for op in ARITHMETIC],
    ("Add", 6, (X, numbers(3, 4)), {"broadcast": 1, "axis": -3}, 1),
    ("Mul", 6, (X, numbers(1)), {"broadcast": 1, "axis": 1}, 1),
    ("Add", 6, (numbers(3), numbers(1, 1)), {"broadcast": 1}, 1),
    ("Pow", 1, (np.abs(X), numbers(3)), {"broadcast": 1, "axis": 1}, 1),
    ("Greater", 1, (X, numbers(3)), {"broadcast": 1, "axis": 1}, 1),
    ("And", 1, (X > 0, numbers(3) > 0), {"broadcast": 1, "axis": 1}, 1),
    ("Relu", 1, (X,), {"consumed_inputs": (0,)}, 1),
    ("Sigmoid", 6, (X,), {}, 1),
    ("BatchNormalization", 1, (X, *(np.abs(numbers(3)) for _ in range(4))), {"is_test": 1, "consumed_inputs": ()}, 1),
    ("BatchNormalization", 6, (X, *(np.abs(numbers(3)) for _ in range(4))), {"is_test": 1, "spatial": 1}, 1),
    ("BatchNormalization", 7, (X, *(np.abs(numbers(3)) for _ in range(4))), {"spatial": 1, "epsilon": 0.1}, 1),
    ("BatchNormalization", 9, (X, *(np.abs(numbers(3)) for _ in range(4))), {}, 1),
    ("Cast", 1, (X,), {"to": "INT32"}, 1),
    ("Cast", 9, (X,), {"to": 7}, 1),
    ("Clip", 1, (X,), {"min": -0.5}, 1),
    ("Clip", 6, (X,), {"min": -0.5, "max": 0.5}, 1),
    ("Clip", 6, (np.array([np.inf, -np.inf, 1], np.float32),), {}, 1),
    ("Clip", 6, (X.astype(np.float16),), {"max": 0.5}, 1),
    ("Concat", 1, (X, X), {}, 1),
    ("Concat", 4, (X, X), {"axis": 0}, 1),
    ("DFT", 17, (numbers(1, 6, 1),), {}, 1),
    ("DFT", 17, (numbers(1, 6, 4, 1),), {"axis": 2, "onesided": 1}, 1),
    ("Dropout", 6, (X,), {"is_test": 1, "ratio": 0.3}, 1),
    ("Dropout", 7, (X,), {"ratio": 1.0}, 1),
    ("Dropout", 10, (X,), {}, 2),
    ("Gemm", 6, (numbers(2, 3), numbers(3, 4), numbers(4)), {"broadcast": 1, "alpha": 0.5, "beta": 2.0}, 1),
    ("Gemm", 9, (numbers(2, 3), numbers(4, 3), numbers(4)), {"transB": 1}, 1),
    ("GridSample", 16, (X, numbers(2, 3, 3, 2)), {}, 1),
    ("GridSample", 16, (X, numbers(2, 3, 3, 2)), {"mode": "bicubic"}, 1),
    ("GroupNormalization", 18, (numbers(2, 6, 4), numbers(3), numbers(3)), {"num_groups": 3}, 1),
    ("LayerNormalization", 12, (numbers(2, 6), numbers(6), numbers(6)), {"epsilon": 0.01}, 1),
    ("GlobalLpPool", 1, (X,), {"p": 3.0}, 1),
    ("LpPool", 1, (X,), {"p": 2.0, "kernel_shape": (2, 2)}, 1),
    ("PRelu", 1, (X, numbers(3)), {}, 1),
    ("PRelu", 6, (X, numbers(1)), {}, 1),
    ("PRelu", 6, (numbers(4, 3), numbers(3)), {}, 1),
    ("PRelu", 7, (X, numbers(4, 1)), {}, 1),
    ("Pad", 1, (X,), {"paddings": (0, 0, 1, 0, 0, 0, 0, 2), "value": 0.5}, 1),
    ("Pad", 2, (X,), {"pads": (0, 0, 1, 0, 0, 0, 0, 2), "mode": "edge"}, 1),
    ("Pad", 11, (X, [0, 0, 1, 0, 0, 0, 0, 2]), {"mode": "reflect"}, 1),
    *[
        (f"Reduce{kind}", 11, (np.abs(X) + 1,), attrs, 1)
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
        for attrs in ({}, {"axes": (1, -1)}, {"axes": (2,), "keepdims": 0}, {"axes": ()})
    ],
    ("Reshape", 1, (X,), {"shape": (0, -1)}, 1),
    ("Reshape", 5, (X, [6, 20]), {}, 1),
    ("Resize", 10, (X, np.array([1, 1, 2, 1.5], np.float32)), {"mode": "nearest"}, 1),
    ("Resize", 10, (X, np.array([1, 1, 0.5, 2], np.float32)), {"mode": "linear"}, 1),
    ("RoiAlign", 10, (X, np.array([[0.3, 0.2, 3.1, 2.7]], np.float32), np.array([1])), {"output_height": 2}, 1),
    ("Scatter", 9, (numbers(3, 3), np.array([[1, 0, 2]]), numbers(1, 3)), {"axis": 0}, 1),
    ("Scatter", 11, (numbers(3, 3), np.array([[1, 0, 2]]), numbers(1, 3)), {"axis": 1}, 1),
    ("Selu", 1, (X,), {}, 1),
    ("Selu", 6, (X,), {"gamma": 2.0}, 1),
    ("Shape", 1, (X,), {}, 1),
    ("Slice", 1, (X,), {"starts": (1, 0), "ends": (3, -1), "axes": (1, 3)}, 1),
    ("Slice", 1, (X,), {"starts": (0, 1), "ends": (1, 1000)}, 1),
    *[
        (op, 11, (X,), attrs, 1)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for attrs in ({}, {"axis": 3}, {"axis": -2})
    ],
    ("Softmax", 1, (numbers(2, 3),), {"axis": 0}, 1),
    ("Softmax", 11, (numbers(2, 3),), {"axis": 2}, 1),
    ("Split", 1, (X, np.array([1, 2], np.float32)), {"axis": 1}, 2),
    ("Split", 2, (X,), {"axis": 2}, 2),
    ("Split", 11, (X,), {"axis": -1, "split": (1, 4)}, 2),
    ("Split", 13, (X, [1, 3]), {"axis": 2}, 2),
    ("Split", 13, (X,), {"axis": 0}, 2),
    ("Squeeze", 1, (numbers(1, 3, 1),), {"axes": (0,)}, 1),
    ("Squeeze", 11, (numbers(1, 3, 1),), {}, 1),
    ("Tile", 1, (X, np.float32(2), np.float32(1)), {}, 1),
    ("TopK", 1, (X,), {"k": 2, "axis": 1}, 2),
    ("TopK", 10, (X, [3]), {}, 2),
    ("Unsqueeze", 1, (X,), {"axes": (0, 2)}, 1),
    ("Unsqueeze", 11, (X,), {"axes": (-1,)}, 1),
    ("Upsample", 1, (X,), {"height_scale": 2.0, "width_scale": 1.5}, 1),
    ("Upsample", 1, (X,), {"height_scale": 2.0, "width_scale": 3.0, "mode": "bilinear"}, 1),
    ("Upsample", 7, (X,), {"scales": (1.0, 1.0, 2.0, 2.0), "mode": "linear"}, 1),
    ("Upsample", 9, (X, np.array([1, 1, 3, 2], np.float32)), {"mode": "nearest"}, 1),
    ("Upsample", 10, (X, np.array([1, 1, 3, 2], np.float32)), {}, 1),
]  # fmt: skip


def draw(op: str, version: int, operands: tuple[Any, ...], attrs: dict[str, Any], outputs: int) -> tuple[Graph, list]:
    d = Draft()
    values, feeds = [], []
    for k, operand in enumerate(operands):
        if (
            isinstance(operand, np.ndarray)
            and operand.ndim
            and (k == 0 or operand.ndim > 1 or operand.dtype != np.float32)
        ):
            values.append(d.input(f"x{k}", operand.shape, operand.dtype))
            feeds.append(operand)
        else:
            values.append(d.constant(operand))
    results = d.node(op, *values, version=version, outputs=outputs, **attrs).outputs
    return d.done(*results), feeds


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_old_form_becomes_the_newest_and_computes_the_same(case: tuple[Any, ...]) -> None:
    _, feeds = draw(*case)
    applied = apply(Modernise(), lambda: draw(*case)[0], feeds=feeds, rtol=1e-6)
    for node in applied.graph.all_nodes():
        assert node.version == schema_of("", node.op, NEWEST).since_version
    assert not applied.reasons
    again = PassContext()
    assert not Modernise().run(applied.graph, again), dict(again.notes)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (("BatchNormalization", 6, (X, *(numbers(3) for _ in range(4))), {}, 1), "it trains"),
        (("BatchNormalization", 7, (X, *(np.abs(numbers(3)) for _ in range(4))), {}, 5), "it trains"),
        (("BatchNormalization", 7, (X, *[np.abs(numbers(3, 4, 5))] * 4), {"spatial": 0}, 1), "per element"),
        (("Dropout", 7, (X,), {}, 2), "its mask is used, and had another type"),
        (("OneHot", 9, (np.array([1, -1]), [3], [0, 1]), {}, 1), "means something else"),
        (("LayerNormalization", 9, (X.astype(np.float16), numbers(5, 1)[:, 0]), {}, 1), "of several types"),
        (("LpPool", 1, (X,), {"p": 2.5, "kernel_shape": (2, 2)}, 1), "not a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_upgraded_stays_and_says_why(case: tuple[Any, ...], reason: str) -> None:
    _, feeds = draw(*case)
    applied = apply(Modernise(), lambda: draw(*case)[0], feeds=feeds, rtol=1e-6)
    assert reason in applied.reasons


def test_unknown_rank_leaves_what_needs_it() -> None:
    def drawn() -> Graph:
        d = Draft()
        x = d.input("x", None)
        return d.done(d.op("Softmax", x, version=11), d.op("Add", x, x, version=6, broadcast=1, axis=0))

    applied = apply(Modernise(), drawn, feeds=[numbers(2, 3)], rtol=1e-6)
    assert [n.version for n in applied.graph] == [11, 6]
    assert applied.reasons.count("rank of the operand is unknown") == 2


def test_what_new_forms_tell_is_known_to_those_that_wait_for_it() -> None:
    """The first Reshape tells no shape, nor what reads it."""

    def drawn() -> Graph:
        d = Draft()
        turned = d.op("Neg", d.op("Reshape", d.input("x", (6, 4)), version=1, shape=(2, 3, 4)))
        return d.done(d.op("Add", turned, d.input("b", (3,)), version=6, broadcast=1, axis=1))

    applied = apply(Modernise(), drawn, feeds=[numbers(6, 4), numbers(3)], rtol=1e-6)
    assert not applied.reasons and "axis" not in next(n for n in applied.graph if n.op == "Add").attrs


def test_every_version_of_every_operator_has_a_way_to_the_newest() -> None:
    stuck = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        route = _route(schema.name, schema.since_version) if not schema.domain else None
        if route is not None and route.reason:
            stuck.add(f"{schema.name}-{schema.since_version}")
    assert stuck == {"OneHot-9", "Scan-8"}  # negative indices; batches of sequences with lengths of their own


def test_nested_graphs_are_modernised_too() -> None:
    def drawn() -> Graph:
        d = Draft()
        x = d.input("x", (3, 4))
        condition = d.input("c", (), "bool")
        branches = []
        for axes in ((0,), (-1,)):
            body = Draft(d)
            branches.append(body.done(body.op("ReduceSum", x, version=11, axes=axes, keepdims=0)))
        return d.done(d.op("If", condition, version=11, then_branch=branches[0], else_branch=branches[1]))

    applied = apply(Modernise(), drawn, feeds=[numbers(3, 4), np.array(True)])
    assert {(n.op, n.version) for n in applied.graph.all_nodes()} == {("If", 25), ("ReduceSum", 13)}


def test_unchanged_nodes_stay_as_they_are() -> None:
    d = Draft()
    value = d.input()
    for _ in range(50):
        value = d.graph.add("Relu", [value], version=14).output
    d.graph.outputs = [value]
    ctx = PassContext()
    assert not Modernise().run(d.graph, ctx) and ctx.changes == 0
