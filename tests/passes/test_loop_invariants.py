"""Values that a loop hands on unchanged are read from around it."""

from __future__ import annotations

import numpy as np

from ranvier.graph import Graph
from ranvier.passes import DeadCode, LoopInvariants
from tests.passes.pass_tools import Draft, apply, run


def loop(through_identity: bool, result_is_output: bool) -> Graph:
    d = Draft()
    x, w = d.input("x", (2, 3)), d.constant(np.ones((3, 3), np.float32), "w")
    inner = Draft(d)
    inner.input("i", (), "int64")
    going = inner.input("c", (), "bool")
    h, v = inner.input("h", (2, 3)), inner.input("v", (3, 3))
    kept = inner.op("Identity", v) if through_identity else v
    body = inner.done(inner.op("Identity", going), inner.op("MatMul", h, v), kept)
    yes = d.constant(np.array(True))
    last, same = d.op("Loop", 4, yes, x, w, outputs=2, body=body)
    return d.done(last, same) if result_is_output else d.done(d.op("MatMul", last, same))


def test_a_weight_that_is_carried_becomes_a_constant_of_the_body() -> None:
    for through_identity in (False, True):
        applied = apply(LoopInvariants(), lambda how=through_identity: loop(how, False))
        node = applied.only("Loop")
        (product,) = [n for n in node.attrs["body"] if n.op == "MatMul"]
        assert product.inputs[1] is applied.graph.constants["w"]
        run(DeadCode(), applied.graph)
        assert len(node.inputs) == 3 and len(node.outputs) == 1 and len(node.attrs["body"].inputs) == 3


def test_a_result_that_is_an_output_stays_a_result() -> None:
    applied = apply(LoopInvariants(), lambda: loop(False, True))
    node = applied.only("Loop")
    assert applied.graph.outputs[1] is node.outputs[1]
    (product,) = [n for n in node.attrs["body"] if n.op == "MatMul"]
    assert product.inputs[1] is applied.graph.constants["w"]


def test_states_that_change_stay_carried() -> None:
    applied = apply(LoopInvariants(), lambda: loop(False, False))
    (product,) = [n for n in applied.only("Loop").attrs["body"] if n.op == "MatMul"]
    assert product.inputs[0] is applied.only("Loop").attrs["body"].inputs[2]


def test_the_state_of_a_scan() -> None:
    def draw() -> Graph:
        d = Draft()
        xs, w = d.input("xs", (5, 3)), d.input("w", (3,))
        inner = Draft(d)
        v, x = inner.input("v", (3,)), inner.input("x", (3,))
        body = inner.done(v, inner.op("Mul", v, x))
        _, ys = d.op("Scan", w, xs, outputs=2, body=body, num_scan_inputs=1)
        return d.done(ys)

    applied = apply(LoopInvariants(), draw)
    (product,) = [n for n in applied.only("Scan").attrs["body"] if n.op == "Mul"]
    assert product.inputs[0] is applied.graph.inputs[1]
