"""Nobody needs it, so it goes; what has effects or defines an output stays."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.graph import Graph
from ranvier.ops import registry
from ranvier.passes import DeadCode
from tests.passes.pass_tools import Draft, apply, run


def test_chains_and_constants_nobody_needs() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        d.op("Exp", d.op("Mul", d.op("Neg", x), 2.0))
        d.constant(3.0)
        return d.done(d.op("Relu", x))

    applied = apply(DeadCode(), draw)
    assert applied.ops == ["Relu"] and not applied.graph.constants
    assert dict(applied.ctx.notes) == {"node": 3, "constant": 2}


def test_inputs_and_constants_that_are_outputs_stay() -> None:
    def draw() -> Graph:
        d = Draft()
        d.input("unused")
        return d.done(d.constant(3.0, "three"))

    applied = apply(DeadCode(), draw)
    assert len(applied.graph.inputs) == 1 and len(applied.graph.constants) == 1 and applied.ctx.changes == 0


def test_effects_are_kept() -> None:
    @registry.op("Announce", domain="test", traits=("impure",))
    def announce(x: np.ndarray) -> np.ndarray:
        return x

    try:
        d = Draft()
        x = d.input()
        d.op("Announce", d.op("Neg", x), domain="test")
        graph = d.done(d.op("Relu", x))
        ctx = run(DeadCode(), graph)
        assert [n.op for n in graph] == ["Neg", "Announce", "Relu"]
        assert "effects" in "; ".join(ctx.declined)
    finally:
        registry.forget("test", "Announce")


@pytest.mark.parametrize(
    ("op", "version", "left"), [("MaxPool", 22, 1), ("BatchNormalization", 9, 5), ("Dropout", 10, 1)]
)
def test_optional_results(op: str, version: int, left: int) -> None:
    """An older BatchNormalization trains when it lists more than one result, so the list must not change."""

    def draw() -> Graph:
        d = Draft()
        x = d.input(shape=(2, 3, 4, 4))
        operands = [np.ones(3, np.float32)] * 4 if op == "BatchNormalization" else []
        attrs = {"kernel_shape": (2, 2)} if op == "MaxPool" else {}
        node = d.node(op, x, *operands, version=version, outputs=5 if operands else 2, **attrs)
        return d.done(node.output)

    assert len(apply(DeadCode(), draw).only(op).outputs) == left


def test_results_of_an_if_that_nobody_reads() -> None:
    def draw() -> Graph:
        d = Draft()
        x, condition = d.input(), d.input("c", (), "bool")
        outside = d.op("Tanh", x)  # needed by the dropped result only
        bodies = []
        for op in ("Relu", "Neg"):
            body = Draft(d)
            bodies.append(body.done(body.op("Exp", outside), body.op(op, x), body.op("Sin", x)))
        results = d.op("If", condition, then_branch=bodies[0], else_branch=bodies[1], outputs=3)
        return d.done(results[1])

    applied = apply(DeadCode(), draw)
    assert [n.op for n in applied.graph.all_nodes()] == ["If", "Relu", "Neg"]
    assert applied.only("If").output.index == 0


def test_loops_lose_what_they_collect_and_carry_in_vain() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        body = Draft(d)
        names = ("step", "going", "useful", "idle", "overwritten", "read")
        _, going, useful, idle, _, read = (body.graph.add_input(n, None) for n in names)
        results = body.done(
            body.op("Identity", going),
            body.op("Add", useful, body.op("Neg", read)),
            body.op("Identity", idle),
            body.op("Sin", x),
            body.op("Relu", read),
            body.op("Exp", useful),
        )
        found = d.op("Loop", 2, np.array(True), x, d.op("Cos", x), x, x, body=results, outputs=5)
        return d.done(found[0])

    applied = apply(DeadCode(), draw)
    loop = applied.only("Loop")
    assert len(loop.inputs) == 4 and len(loop.outputs) == 2  # useful, and read: the next step needs it
    assert {n.op for n in applied.graph.all_nodes()} == {"Loop", "Identity", "Add", "Neg", "Relu"}
    assert [v.name for v in loop.attrs["body"].inputs] == ["step", "going", "useful", "read"]


def test_a_node_with_a_subgraph_nobody_needs_frees_what_it_captured() -> None:
    def draw() -> Graph:
        d = Draft()
        x, condition = d.input(), d.input("c", (), "bool")
        captured = d.op("Exp", x)
        bodies = []
        for _ in range(2):
            body = Draft(d)
            bodies.append(body.done(body.op("Neg", captured)))
        d.op("If", condition, then_branch=bodies[0], else_branch=bodies[1])
        return d.done(d.op("Relu", x))

    assert apply(DeadCode(), draw).ops == ["Relu"]
