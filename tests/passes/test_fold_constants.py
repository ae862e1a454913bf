"""Constant folding: what is evaluated, what is left and why, and branches that are inlined."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.graph import Graph
from ranvier.passes import FoldConstants
from tests.passes.pass_tools import Draft, apply, run


def test_chains_of_constants_become_one() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        scale = d.op("Sqrt", d.op("Mul", 2.0, 8.0))
        return d.done(d.op("Div", x, scale))

    applied = apply(FoldConstants(), draw)
    assert applied.ops == ["Div"]
    assert applied.only("Div").inputs[1].const.numpy() == 4


def test_an_output_may_become_a_constant_and_keeps_its_name() -> None:
    def draw() -> Graph:
        d = Draft()
        d.input()
        kept = d.constant(1.0, "y1")  # the name is taken
        return d.done(d.op("Neg", 3.0), d.op("Add", kept, 1.0))

    applied = apply(FoldConstants(), draw)
    assert applied.ops == ["Identity"]
    assert applied.graph.outputs[0].const.numpy() == -3
    assert run(FoldConstants(), applied.graph).changes == 0


def test_several_results_of_which_one_is_unused() -> None:
    def draw() -> Graph:
        d = Draft()
        values, _ = d.op("TopK", np.array([3, 1, 2], np.float32), [2], outputs=2)
        return d.done(d.op("Add", d.input(shape=(2,)), values))

    assert apply(FoldConstants(), draw).ops == ["Add"]


def test_sub_byte_and_string_constants() -> None:
    def draw() -> Graph:
        d = Draft()
        words = d.op("Concat", np.array(["a"], object), np.array(["b"], object), axis=0)
        small = d.op("Cast", np.array([1, -2], np.int8), to=22)  # int4
        return d.done(words, d.op("Cast", small, to=1))

    applied = apply(FoldConstants(), draw)
    assert applied.ops == [] and [v.const.dtype.name for v in applied.graph.outputs] == ["string", "float32"]


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "reason"),
    [
        ("DequantizeLinear", (np.array([1, 2], np.uint8), np.float32(0.5)), {}, "stay quantized"),
        ("ConstantOfShape", ([4, 1024],), {}, "larger than fold_limit"),
        ("Expand", (np.float32(1), [4, 1024]), {}, "larger than fold_limit"),
        ("Tile", (np.ones(16, np.float32), [1024]), {}, "larger than fold_limit"),
        ("Range", (np.array(0), np.array(4096), np.array(1)), {}, "larger than fold_limit"),
        ("RandomUniform", (), {"shape": (2,), "seed": 1.0}, "not a function of its operands"),
        ("Dropout", (np.ones(4, np.float32), np.float32(0.5), np.array(True)), {"seed": 1}, "not a function"),
        ("SequenceConstruct", (np.float32(1),), {}, "not a tensor"),
    ],
)
def test_what_is_left_says_why(op: str, operands: tuple, attrs: dict, reason: str) -> None:
    def draw() -> Graph:
        d = Draft()
        return d.done(d.op(op, *operands, **attrs))

    if op in ("RandomUniform", "Dropout"):
        graph = draw()
        declined = run(FoldConstants(), graph).declined
        assert [n.op for n in graph] == [op] and reason in "; ".join(declined)
        return
    applied = apply(FoldConstants(), draw, fold_limit=1000)
    assert applied.ops == [op] and reason in applied.reasons


def test_a_large_result_of_large_operands_is_folded() -> None:
    def draw() -> Graph:
        d = Draft()
        w = d.op("Transpose", np.ones((64, 32), np.float32), perm=(1, 0))
        return d.done(d.op("MatMul", d.input(shape=(1, 32)), w))

    assert apply(FoldConstants(), draw, fold_limit=100).ops == ["MatMul"]


def test_errors_stay_for_the_run() -> None:
    d = Draft()
    graph = d.done(d.op("Gather", np.arange(3.0, dtype=np.float32), np.array(7)))
    assert "raised InvalidValue" in "; ".join(run(FoldConstants(), graph).declined)
    assert [n.op for n in graph] == ["Gather"]


def branches(condition: object, drawn_in: Draft, x: object) -> object:
    bodies = []
    for op in ("Relu", "Neg"):
        body = Draft(drawn_in)
        bodies.append(body.done(body.op("Mul", body.op(op, x), body.constant(2.0, "two"))))
    return drawn_in.op("If", condition, then_branch=bodies[0], else_branch=bodies[1])


@pytest.mark.parametrize("taken", [True, False])
def test_an_if_with_a_constant_condition_is_inlined(taken: bool) -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        d.constant(7.0, "two")  # a name the branch uses too
        return d.done(branches(d.op("Not", np.array(not taken)), d, x))

    applied = apply(FoldConstants(), draw)
    assert applied.ops == ["Relu" if taken else "Neg", "Mul"]
    assert applied.ctx.notes["If with a constant condition"] == 1
    assert applied.graph.outputs[0].type.shape == (2, 3)


def test_branches_nested_in_branches_and_results_that_are_constants() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        inner = Draft(d)
        nested = branches(np.array(False), inner, x)
        then = inner.done(nested, inner.op("Identity", inner.constant(5.0)))
        other = Draft(d)
        otherwise = other.done(other.op("Relu", x), other.constant(6.0))
        return d.done(*d.op("If", np.array([True]), then_branch=then, else_branch=otherwise, outputs=2))

    applied = apply(FoldConstants(), draw)
    assert applied.ops == ["Neg", "Mul"] and applied.graph.outputs[1].const.numpy() == 5


def test_a_condition_that_is_computed_stays_and_its_branches_are_folded() -> None:
    def draw() -> Graph:
        d = Draft()
        x, condition = d.input(), d.input("c", (), "bool")
        then, other = Draft(d), Draft(d)
        return d.done(
            d.op(
                "If",
                condition,
                then_branch=then.done(then.op("Add", x, then.op("Exp", 0.0))),
                else_branch=other.done(other.op("Relu", x)),
            )
        )

    applied = apply(FoldConstants(), draw)
    assert [n.op for n in applied.graph.all_nodes()] == ["If", "Add", "Relu"]


def loop(d: Draft, count: int, start: object, op: str = "Add") -> object:
    body = Draft(d)
    _, going, carried = (body.graph.add_input(n, None) for n in ("step", "going", "carried"))
    result = body.done(body.op("Identity", going), body.op(op, carried, 2.0) if op == "Add" else body.op(op, carried))
    return d.op("Loop", count, np.array(True), start, body=result)


def test_a_loop_over_constants_is_run() -> None:
    def draw() -> Graph:
        d = Draft()
        return d.done(d.op("Mul", d.input(), loop(d, 3, d.constant(1.0))))

    applied = apply(FoldConstants(), draw)
    assert applied.ops == ["Mul"] and applied.only("Mul").inputs[1].const.numpy() == 7


@pytest.mark.parametrize(
    ("count", "op", "reason"), [(10**9, "Add", "ResourceLimit"), (3, "RandomNormalLike", "function")]
)
def test_a_loop_that_is_long_or_random_is_left(count: int, op: str, reason: str) -> None:
    d = Draft()
    graph = d.done(loop(d, count, d.constant(1.0), op))
    declined = run(FoldConstants(), graph).declined
    assert [n.op for n in graph] == ["Loop"] and reason in "; ".join(declined)
