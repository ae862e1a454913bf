"""Products that need nothing of the step before are done once, ahead of the loop."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.graph import Graph
from ranvier.passes import LoopProducts
from tests.passes.pass_tools import Draft, apply


def loop(rank: int) -> Graph:
    d = Draft()
    xs = d.input("xs", (4, 2, 3) if rank == 3 else (4, 3))
    w = d.input("w", (3, 3))
    inner = Draft(d)
    i, going = inner.input("i", (), "int64"), inner.input("c", (), "bool")
    h = inner.input("h", (2, 3))
    row = inner.op("Gather", xs, i, axis=0)
    body = inner.done(inner.op("Identity", going), inner.op("Add", inner.op("MatMul", row, w), h))
    yes, start = d.constant(np.array(True)), d.constant(np.ones((2, 3), np.float32))
    return d.done(d.op("Loop", 3, yes, start, body=body))


@pytest.mark.parametrize("rank", [2, 3])
def test_the_projection_of_all_steps_is_one_product(rank: int) -> None:
    applied = apply(LoopProducts(), lambda: loop(rank), rtol=1e-6)
    assert applied.ops == ["MatMul", "Loop"]
    assert [n.op for n in applied.only("Loop").attrs["body"]] == ["Identity", "Gather", "Add"]


def test_rows_along_another_axis_stay() -> None:
    def draw() -> Graph:
        d = Draft()
        xs, w = d.input("xs", (2, 4, 3)), d.input("w", (3, 3))
        inner = Draft(d)
        i, going = inner.input("i", (), "int64"), inner.input("c", (), "bool")
        h = inner.input("h", (2, 3))
        product = inner.op("MatMul", inner.op("Gather", xs, i, axis=1), w)
        body = inner.done(inner.op("Identity", going), inner.op("Add", product, h))
        start = d.constant(np.ones((2, 3), np.float32))
        return d.done(d.op("Loop", 3, d.constant(np.array(True)), start, body=body))

    applied = apply(LoopProducts(), draw)
    assert applied.ops == ["Loop"] and "not a step's row" in applied.reasons


def test_products_with_the_state_stay() -> None:
    def draw() -> Graph:
        d = Draft()
        xs = d.input("xs", (4, 2, 3))
        inner = Draft(d)
        i, going = inner.input("i", (), "int64"), inner.input("c", (), "bool")
        h = inner.input("h", (3, 3))
        product = inner.op("MatMul", inner.op("Gather", xs, i, axis=0), h)
        total = inner.op("ReduceSum", product, keepdims=0)
        body = inner.done(inner.op("Identity", going), inner.op("Add", h, total))
        start = d.constant(np.ones((3, 3), np.float32))
        return d.done(d.op("Loop", 3, d.constant(np.array(True)), start, body=body))

    assert apply(LoopProducts(), draw).ops == ["Loop"]
