"""Shape computations: known dimensions become constants, symbolic ones let a Reshape keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.graph import Graph, Value
from ranvier.passes import Cancel, DeadCode, FoldShapes
from tests.passes.pass_tools import Draft, apply, run


def dim(d: Draft, x: Value, axis: int) -> Value:
    """One dimension of ``x`` as a list of one, the way exporters write it."""
    return d.op("Unsqueeze", d.op("Gather", d.op("Shape", x), np.array(axis)), [0])


def test_known_shapes_become_constants() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input(shape=(2, 3, 4))
        target = d.op("Concat", dim(d, x, 0), [-1], axis=0)
        return d.done(d.op("Reshape", x, target), d.op("Size", x), d.op("Shape", x, start=1))

    applied = apply(FoldShapes(), draw)
    assert applied.ops == ["Reshape"]
    assert applied.only("Reshape").inputs[1].const.numpy().tolist() == [2, -1]
    assert applied.graph.outputs[1].const.numpy() == 24


def test_a_known_dimension_among_symbols() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input(shape=("batch", 3, 4))
        width = d.op("Gather", d.op("Shape", x), np.array(2))
        return d.done(d.op("Mul", x, d.op("Cast", width, to=1)))

    applied = apply(FoldShapes(), draw, sizes={"batch": 5})
    assert applied.ops == ["Shape", "Mul"]  # nobody reads the Shape any more
    run(DeadCode(), applied.graph)
    assert applied.ops == ["Mul"]


@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [
        (("n", "s", 12), (0, 1, 4, 3), [0, 0, 4, 3]),  # heads are split off
        (("n", "s", 4, 3), (0, 1, 12), [0, 0, 12]),  # and joined again
        (("n", "s", 12), (0, -1), [0, -1]),
        (("n", 6, "s"), ("s", 6, "n"), None),  # two symbols out of place
        (("n", 6, "s"), ("n", "s", 6), [0, -1, 6]),  # one is left over
        ((2, 6, "s"), (12, "s"), [12, -1]),
    ],
)
def test_symbolic_targets(shape: tuple[Any, ...], target: tuple[Any, ...], expected: list[int] | None) -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input(shape=shape)
        parts = []
        for k, entry in enumerate(target):
            if isinstance(entry, str):
                parts.append(dim(d, x, shape.index(entry)))
            elif isinstance(shape[k] if k < len(shape) else 0, str) and entry in (0, 1) and entry == k:
                parts.append(dim(d, x, k))
            else:
                parts.append(d.constant([entry]))
        return d.done(d.op("Reshape", x, d.op("Concat", *parts, axis=0)))

    for sizes in ({"n": 2, "s": 3}, {"n": 1, "s": 1}, {"n": 3, "s": 3}):
        applied = apply(FoldShapes(), draw, sizes=sizes)
        given = applied.only("Reshape").inputs[1].const
        assert (None if given is None else given.numpy().tolist()) == expected
    if expected is None:
        assert "more than one entry of its target is unknown" in applied.reasons


def test_a_target_that_is_data_is_left() -> None:
    def draw() -> Graph:
        d = Draft()
        return d.done(d.op("Reshape", d.input(shape=("n",)), d.input("target", (2,), "int64")))

    applied = apply(FoldShapes(), draw, feeds=[np.arange(6, dtype=np.float32), np.array([2, 3])])
    assert applied.ops == ["Reshape"] and "its target is data" in applied.reasons


def test_an_empty_batch_is_reshaped_too() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input(shape=("n", 4, 3))
        target = d.op("Concat", dim(d, x, 0), [12], axis=0)
        return d.done(d.op("Reshape", x, target))

    applied = apply(FoldShapes(), draw, sizes={"n": 0})
    assert applied.only("Reshape").inputs[1].const.numpy().tolist() == [0, 12]


def test_a_dimension_of_size_zero_needs_allowzero() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input(shape=(0, 3))
        y = d.input("y", shape=("n", 0))
        return d.done(d.op("Reshape", x, d.op("Shape", y), allowzero=1), d.op("Reshape", x, d.op("Shape", x)))

    applied = apply(FoldShapes(), draw, sizes={"n": 7})
    targets = [n.inputs[1].const for n in applied.graph if n.op == "Reshape"]
    assert targets[0] is None and targets[1].numpy().tolist() == [0, 3]


def test_expand_to_its_own_shape() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input(shape=("n", 3))
        other = d.input("other", shape=("m", 3))
        return d.done(
            d.op("Relu", d.op("Expand", x, d.op("Shape", x))),
            d.op("Relu", d.op("Expand", x, d.op("Concat", [1], dim(d, x, 1), axis=0))),
            d.op("Relu", d.op("Expand", x, d.op("Shape", other))),
        )

    applied = apply(FoldShapes(), draw, sizes={"n": 4, "m": 4})
    assert applied.ops.count("Expand") == 2  # the target of one became a constant
    run(Cancel(), applied.graph)
    assert applied.ops.count("Expand") == 1


def test_inside_a_loop_only_what_holds_at_every_step() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input(shape=(2, 3))
        body = Draft(d)
        _, going, carried = (body.graph.add_input(n, None) for n in ("step", "going", "carried"))
        grown = body.op("Concat", carried, x, axis=0)
        rows = body.op("Gather", body.op("Shape", grown), np.array(0))
        columns = body.op("Gather", body.op("Shape", x), np.array(1))
        total = body.op("Mul", rows, columns)
        bodies = body.done(body.op("Identity", going), grown, total)
        return d.done(*d.op("Loop", 3, np.array(True), x, body=bodies, outputs=2))

    applied = apply(FoldShapes(), draw)
    assert [n.op for n in applied.graph.all_nodes()].count("Gather") == 1


def test_shape_data_reaches_into_branches() -> None:
    def draw() -> Graph:
        d = Draft()
        x, condition = d.input(shape=("n", 4)), d.input("c", (), "bool")
        shape = d.op("Shape", x)
        then, other = Draft(d), Draft(d)
        target = then.op("Concat", then.op("Slice", shape, [0], [1]), [2, 2], axis=0)
        return d.done(
            d.op(
                "If",
                condition,
                then_branch=then.done(then.op("Reshape", x, target)),
                else_branch=other.done(other.op("Reshape", x, [0, 4, 1])),
            )
        )

    applied = apply(FoldShapes(), draw)
    first = next(n for n in applied.graph.all_nodes() if n.op == "Reshape")
    assert first.inputs[1].const.numpy().tolist() == [0, 2, 2]
