"""Nodes that change nothing go, pairs that undo each other go; a bit that would change keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranvier.dtypes import DType
from ranvier.graph import Graph, Value
from ranvier.passes import Cancel
from ranvier.passes.neutral import holds
from tests.passes.pass_tools import Draft, apply, run

Body = Callable[[Draft, Value], Any]
MAX = 2**63 - 1
ROUND = (1, 2, 0)
ONE_BY_THREE = np.ones((1, 3), np.float32)


def drawing(body: Body, shape: tuple[Any, ...] = (2, 3), dtype: str = "float32") -> Callable[[], Graph]:
    """A graph around ``body``, which no rule can touch itself: Cos before and after, or Abs for other types."""
    outer = "Cos" if dtype.startswith("float") else "Abs"

    def draw() -> Graph:
        d = Draft()
        x = d.input("x", shape, dtype)
        before = d.op(outer, x) if dtype != "bool" else d.op("Xor", x, d.input("z", shape, dtype))
        result = body(d, before)
        return d.done(d.op("Cast", result, to=DType.float64.onnx) if dtype == "bool" else d.op("Sin", result))

    return draw


def without_frame(ops: list[str]) -> list[str]:
    return [op for op in ops if op not in ("Cos", "Sin")]


DROPPED: dict[str, tuple[Body, tuple[Any, ...]]] = {
    "Identity": (lambda d, x: d.op("Identity", x), (2, 3)),
    "Dropout": (lambda d, x: d.op("Dropout", x, 0.5), (2, 3)),
    "Dropout with a flag": (lambda d, x: d.op("Dropout", x, 0.5, np.array(False)), (2, 3)),
    "Dropout of nothing": (lambda d, x: d.op("Dropout", x, 0.0, np.array(True)), (2, 3)),
    "Dropout-7": (lambda d, x: d.op("Dropout", x, version=7), (2, 3)),
    "Cast": (lambda d, x: d.op("Cast", x, to=1), (2, 3)),
    "CastLike": (lambda d, x: d.op("CastLike", x, np.float32(3)), (2, 3)),
    "Cast there and back": (lambda d, x: d.op("Cast", d.op("Cast", x, to=11), to=1), (2, 3)),
    "Transpose": (lambda d, x: d.op("Transpose", x, perm=(0, 1)), (2, 3)),
    "Transpose of a vector": (lambda d, x: d.op("Transpose", x), (4,)),
    "Transpose twice": (lambda d, x: d.op("Transpose", d.op("Transpose", x), perm=(1, 0)), (2, 3)),
    "Transpose three times": (
        lambda d, x: d.op("Transpose", d.op("Transpose", d.op("Transpose", x, perm=ROUND), perm=ROUND), perm=ROUND),
        (2, 3, 4),
    ),
    "Reshape": (lambda d, x: d.op("Reshape", x, [2, -1]), (2, 3)),
    "Reshape of symbols": (lambda d, x: d.op("Reshape", x, [0, 0]), ("n", "m")),
    "Reshape with an unknown dimension": (lambda d, x: d.op("Reshape", x, [-1, 3]), (None, 3)),
    "Reshape there and back": (lambda d, x: d.op("Reshape", d.op("Reshape", x, [-1]), [2, 3]), (2, 3)),
    "Flatten": (lambda d, x: d.op("Flatten", x), (2, 3)),
    "Squeeze and Unsqueeze": (lambda d, x: d.op("Unsqueeze", d.op("Squeeze", x, [0]), [0]), (1, "n")),
    "Unsqueeze and Squeeze": (lambda d, x: d.op("Squeeze", d.op("Unsqueeze", x, [1, 0]), [0, 1]), (None, None)),
    "Pad": (lambda d, x: d.op("Pad", x, [0, 0, 0, 0]), ("n", 3)),
    "Slice": (lambda d, x: d.op("Slice", x, [0, 0], [MAX, 3], [0, 1]), ("n", 3)),
    "Concat": (lambda d, x: d.op("Concat", x, axis=0), (2, 3)),
    "Concat with nothing": (lambda d, x: d.op("Concat", np.zeros((0, 3), np.float32), x, axis=0), ("n", 3)),
    "Split": (lambda d, x: d.op("Split", x, axis=0, num_outputs=1), ("n", 3)),
    "Expand": (lambda d, x: d.op("Expand", x, [1, 3]), ("n", 3)),
    "Tile": (lambda d, x: d.op("Tile", x, [1, 1]), ("n", 3)),
    "Gather": (lambda d, x: d.op("Gather", x, [0, 1, 2], axis=1), ("n", 3)),
    "Max": (lambda d, x: d.op("Max", x), (2, 3)),
    "Mul": (lambda d, x: d.op("Mul", 1.0, x), ("n", None)),
    "Mul by ones": (lambda d, x: d.op("Mul", x, ONE_BY_THREE), ("n", 3)),
    "Div": (lambda d, x: d.op("Div", x, 1.0), (2, 3)),
    "Pow": (lambda d, x: d.op("Pow", x, 1.0), (2, 3)),
    "Add of -0.0": (lambda d, x: d.op("Add", x, -0.0), (2, 3)),
    "Sub of +0.0": (lambda d, x: d.op("Sub", x, 0.0), (2, 3)),
    "Neg twice": (lambda d, x: d.op("Neg", d.op("Neg", x)), (2, 3)),
    "Where": (lambda d, x: d.op("Where", np.array(True), x, 0.0), (2, 3)),
    "ReduceSum": (lambda d, x: d.op("ReduceSum", x, noop_with_empty_axes=1), (2, 3)),
    "SequenceAt": (lambda d, x: d.op("SequenceAt", d.op("SequenceConstruct", x, x), np.array(-1)), (2, 3)),
    "OptionalGetElement": (lambda d, x: d.op("OptionalGetElement", d.op("Optional", x)), (2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("case", DROPPED)
def test_changes_nothing(case: str) -> None:
    body, shape = DROPPED[case]
    feeds = [np.linspace(-2, 2, num=int(np.prod([d if isinstance(d, int) else 2 for d in shape])), dtype=np.float32)]
    feeds[0] = feeds[0].reshape([d if isinstance(d, int) else 2 for d in shape])
    applied = apply(Cancel(), drawing(body, shape), feeds=feeds)
    (cos,) = [n for n in applied.graph if n.op == "Cos"]
    (sin,) = [n for n in applied.graph if n.op == "Sin"]
    assert sin.inputs[0] is cos.output
    assert without_frame(applied.ops) == []


KEPT: dict[str, tuple[Body, tuple[Any, ...], str, str]] = {
    "Add of +0.0": (lambda d, x: d.op("Add", x, 0.0), (2, 3), "float32", "-0.0"),
    "Sub of -0.0": (lambda d, x: d.op("Sub", x, -0.0), (2, 3), "float32", "-0.0"),
    "Sub from 0": (lambda d, x: d.op("Sub", 0.0, x), (2, 3), "float32", ""),
    "Div of 1": (lambda d, x: d.op("Div", 1.0, d.op("Exp", x)), (2, 3), "float32", ""),
    "Mul that widens": (lambda d, x: d.op("Mul", x, np.ones((1, 2, 3), np.float32)), (2, 3), "float32", ""),
    "Mul that repeats": (lambda d, x: d.op("Mul", x, np.ones((4, 3), np.float32)), (1, 3), "float32", ""),
    "Cast through a narrower type": (lambda d, x: d.op("Cast", d.op("Cast", x, to=10), to=1), (2, 3), "float32", ""),
    "Cast that wraps": (lambda d, x: d.op("Cast", d.op("Cast", x, to=3), to=7), (2, 3), "int64", ""),
    "Transpose": (lambda d, x: d.op("Transpose", x, perm=(1, 0)), (2, 3), "float32", ""),
    "Reshape": (lambda d, x: d.op("Reshape", x, [3, 2]), (2, 3), "float32", ""),
    "Reshape of two unknowns": (lambda d, x: d.op("Reshape", x, [-1, 2]), (None, None), "float32", ""),
    "Reshape to a symbol": (lambda d, x: d.op("Reshape", x, [-1, 2]), ("n", "m"), "float32", ""),
    "Slice": (lambda d, x: d.op("Slice", x, [0], [3], [0]), ("n", 3), "float32", ""),
    "Slice backwards": (lambda d, x: d.op("Slice", x, [-1], [-MAX], [0], [-1]), ("n", 3), "float32", ""),
    "Pad": (lambda d, x: d.op("Pad", x, [0, 0, 0, 1]), (2, 3), "float32", ""),
    "Expand": (lambda d, x: d.op("Expand", x, [2, 3]), ("n", 3), "float32", ""),
    "Gather": (lambda d, x: d.op("Gather", x, [0, 2, 1], axis=1), (2, 3), "float32", ""),
    "Where": (lambda d, x: d.op("Where", np.array([[True]] * 4), x, 0.0), (1, 3), "float32", "widens"),
    "Clip with other bounds": (
        lambda d, x: d.op("Clip", d.op("Clip", x, 0.0, 6.0), 0.0, 5.0), (2, 3), "float32", "",
    ),
    "And False": (lambda d, x: d.op("And", x, np.array(False)), (2, 3), "bool", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_changes_something_stays(case: str) -> None:
    body, shape, dtype, reason = KEPT[case]
    before = [n.op for n in drawing(body, shape, dtype)()]
    sizes = {"n": 1} if case == "Expand" else {}
    applied = apply(Cancel(), drawing(body, shape, dtype), sizes=sizes)
    assert applied.ops == before and reason in applied.reasons


def test_dropout_that_trains_or_shows_its_mask_stays() -> None:
    d = Draft()
    x, flag = d.input(), d.input("training", (), "bool")
    y, mask = d.op("Dropout", x, 0.5, outputs=2)
    graph = d.done(d.op("Dropout", x, 0.5, flag), d.op("Dropout", x, version=6), y, mask)
    ctx = run(Cancel(), graph)
    assert [n.op for n in graph] == ["Dropout"] * 3
    for reason in ("may be training", "drops at random", "mask is used"):
        assert reason in "; ".join(ctx.declined)


def test_zero_is_added_away_when_asked_for_speed() -> None:
    body: Body = lambda d, x: d.op("Add", x, 0.0)  # noqa: E731
    assert without_frame(apply(Cancel(), drawing(body), optimization="aggressive").ops) == []


@pytest.mark.parametrize("op", ["Relu", "Abs", "Floor", "Ceil", "Round", "Sign"])
def test_once_is_enough(op: str) -> None:
    applied = apply(Cancel(), drawing(lambda d, x: d.op(op, d.op(op, x))))
    assert without_frame(applied.ops) == [op]


def test_clip_once_is_enough() -> None:
    applied = apply(Cancel(), drawing(lambda d, x: d.op("Clip", d.op("Clip", x, 0.0, 0.5), 0.0, 0.5)))
    assert without_frame(applied.ops) == ["Clip"]


@pytest.mark.parametrize(("op", "neutral"), [("And", True), ("Or", False), ("Xor", False)])
def test_logic_with_a_neutral_operand(op: str, neutral: bool) -> None:
    applied = apply(
        Cancel(), drawing(lambda d, x: d.op(op, np.array(neutral), d.op("Not", d.op("Not", x))), dtype="bool")
    )
    assert applied.ops == ["Xor", "Cast"]


def test_integers_have_one_zero() -> None:
    applied = apply(Cancel(), drawing(lambda d, x: d.op("Cast", d.op("Add", x, 0), to=1), dtype="int64"))
    assert applied.ops == ["Abs", "Cast", "Sin"]


@pytest.mark.parametrize(
    ("first", "middle", "last", "shorter"),
    [
        ("int8", "int32", "int16", True),
        ("int32", "int64", "int8", True),  # wraps alike
        ("uint8", "float32", "int32", True),
        ("float16", "float32", "float64", True),
        ("float64", "float32", "float64", False),
        ("int32", "float32", "int64", False),  # float32 has 24 bits
        ("int16", "float32", "int8", False),  # out of range a float is undefined
        ("float32", "int32", "float32", False),
    ],
)
def test_detours_of_casts(first: str, middle: str, last: str, shorter: bool) -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (2, 3), first)
        return d.done(d.op("Cast", d.op("Cast", x, to=DType[middle].onnx), to=DType[last].onnx))

    applied = apply(Cancel(), draw)
    last_cast = list(applied.graph)[-1]
    assert (last_cast.inputs[0] is applied.graph.inputs[0]) == shorter


def test_holding_is_what_numpy_says() -> None:
    """Every value of the narrow type survives the way through the wide one, tried on all there are or on the limits."""
    types = [DType[n] for n in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")]
    for narrow in types:
        low, high = (0, 1) if narrow is DType.bool else (np.iinfo(narrow.numpy).min, np.iinfo(narrow.numpy).max)
        numbers = {n for n in (low, low + 1, high, high - 1, high // 2 + 1) if low <= n <= high}
        for wide in [*types, DType.float16, DType.bfloat16, DType.float32, DType.float64]:
            if holds(wide, narrow):
                assert all(int(np.array(n, narrow.numpy).astype(wide.numpy)) == n for n in numbers), (wide, narrow)


def test_requantizing_with_the_same_parameters() -> None:
    def draw() -> Graph:
        d = Draft()
        q = d.input("q", (256,), "uint8")
        same = d.op("QuantizeLinear", d.op("DequantizeLinear", q, 0.013, np.uint8(7)), 0.013, np.uint8(7))
        other = d.op("QuantizeLinear", d.op("DequantizeLinear", q, 0.013, np.uint8(7)), 0.02, np.uint8(7))
        return d.done(d.op("Cast", same, to=1), d.op("Cast", other, to=1))

    applied = apply(Cancel(), draw, feeds=[np.arange(256, dtype=np.uint8)])
    assert applied.ops.count("QuantizeLinear") == 1


# -- reshaping --------------------------------------------------------------------------------------------------------


def test_only_the_last_of_several_reshapes_counts() -> None:
    def body(d: Draft, x: Value) -> Value:
        return d.op("Reshape", d.op("Flatten", d.op("Unsqueeze", x, [0]), axis=2), [3, -1])

    applied = apply(Cancel(), drawing(body, (2, 3, 4)))
    reshape = applied.only("Reshape")
    assert reshape.inputs[0].producer.op == "Cos" and reshape.inputs[1].const.numpy().tolist() == [3, -1]


def test_a_copied_dimension_is_that_of_the_shape_between() -> None:
    def resolved(d: Draft, x: Value) -> Value:
        return d.op("Reshape", d.op("Reshape", x, [4, 6]), [0, 2, 3])

    def kept(d: Draft, x: Value) -> Value:
        return d.op("Reshape", d.op("Reshape", x, [0, 12]), [0, 3, 4])

    applied = apply(Cancel(), drawing(resolved, (2, 3, 4)))
    assert list(applied.graph)[-2].inputs[1].const.numpy().tolist() == [4, 2, 3]
    applied = apply(Cancel(), drawing(kept, ("n", 6, 2)))
    assert list(applied.graph)[-2].inputs[1].const.numpy().tolist() == [0, 3, 4]


def test_a_shape_between_that_is_needed_stays() -> None:
    def body(d: Draft, x: Value) -> Value:
        return d.op("Reshape", d.op("Reshape", x, [-1, 2, 0]), [0, -1, 0])

    applied = apply(Cancel(), drawing(body, ("n", "m", "k")))
    assert without_frame(applied.ops) == ["Reshape", "Reshape"]
    assert "depends on the shape between" in applied.reasons


# -- transposes -------------------------------------------------------------------------------------------------------

TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def test_transposes_around_elementwise_work_meet() -> None:
    def body(d: Draft, x: Value) -> Value:
        inner = d.op("Transpose", x, perm=TO_LAST)
        scaled = d.op("Mul", inner, np.array([1, 2, 4], np.float32))  # along the last axis, which is axis 1 outside
        shifted = d.op("Add", scaled, np.arange(15, dtype=np.float32).reshape(5, 3))
        return d.op("Transpose", d.op("Clip", shifted, 0.0, 6.0), perm=TO_FIRST)

    applied = apply(Cancel(), drawing(body, ("n", 3, 4, 5)))
    assert without_frame(applied.ops) == ["Mul", "Add", "Clip"]
    assert applied.only("Mul").inputs[1].const.shape == (3, 1, 1)
    assert [str(d) for d in applied.only("Mul").output.type.shape] == ["n", "3", "4", "5"]


def test_transposes_of_several_operands_meet() -> None:
    def draw() -> Graph:
        d = Draft()
        x, z = d.input("x", (2, 3, 4)), d.input("z", (2, 3, 1))
        a, b = (d.op("Transpose", v, perm=(2, 0, 1)) for v in (x, z))
        return d.done(d.op("Transpose", d.op("Max", d.op("Exp", a), b), perm=(1, 2, 0)))

    assert apply(Cancel(), draw).ops == ["Exp", "Max"]


def test_a_sum_of_transposes_is_transposed_once() -> None:
    def draw() -> Graph:
        d = Draft()
        a, b = (d.op("Transpose", d.input(n, (2, 3, 4)), perm=(2, 0, 1)) for n in "xz")
        return d.done(d.op("Relu", d.op("Add", a, b)))

    applied = apply(Cancel(), draw)
    assert applied.ops == ["Add", "Transpose", "Relu"]


@pytest.mark.parametrize("blocker", ["used elsewhere", "not elementwise", "another order", "computed operand"])
def test_transposes_that_do_not_meet(blocker: str) -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (3, 3, 3))
        inner = d.op("Transpose", x, perm=(1, 2, 0))
        middle = d.op("Softmax" if blocker == "not elementwise" else "Exp", inner)
        if blocker == "computed operand":
            middle = d.op("Add", middle, d.op("Sin", x))
        outer = d.op("Transpose", middle, perm=(1, 0, 2) if blocker == "another order" else (2, 0, 1))
        return d.done(outer, *([d.op("Neg", middle)] if blocker == "used elsewhere" else []))

    assert apply(Cancel(), draw).ops.count("Transpose") == 2


# -- graph outputs and nested graphs ----------------------------------------------------------------------------------


def test_outputs_keep_their_names_and_stay_distinct() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input()
        inner = d.op("Exp", x)
        return d.done(d.op("Identity", inner), d.op("Identity", inner), d.op("Identity", x), d.op("Mul", x, 1.0))

    applied = apply(Cancel(), draw)
    assert applied.ops == ["Exp", "Identity", "Identity", "Identity"]
    assert run(Cancel(), applied.graph).changes == 0


def test_nested_graphs() -> None:
    def draw() -> Graph:
        d = Draft()
        x, condition = d.input(), d.input("c", (), "bool")
        then, other = Draft(d), Draft(d)
        return d.done(
            d.op(
                "If",
                condition,
                then_branch=then.done(then.op("Relu", then.op("Mul", then.op("Identity", x), 1.0))),
                else_branch=other.done(other.op("Identity", x)),  # hands on a value from outside
            )
        )

    applied = apply(Cancel(), draw)
    assert [n.op for n in applied.graph.all_nodes()] == ["If", "Relu", "Identity"]
