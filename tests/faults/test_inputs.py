"""What callers hand to ``run``: wrong names, types and shapes are refused by name; odd memory layouts just work."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import (
    DimensionMismatch,
    DTypeMismatch,
    InvalidInput,
    InvalidModel,
    RanvierError,
    SessionClosed,
    ShapeMismatch,
)
from tests.faults.models import model, zeros

TWO = "two (float[n, 3] pixels, int64[n] labels) => (float[n, 3] scaled) { f = Cast <to = 1> (labels) a = Constant \
<value_ints = [1]> () column = Unsqueeze(f, a) scaled = Mul(pixels, column) }"


@pytest.fixture(scope="module")
def session() -> rv.Session:
    return rv.load(model(TWO))


GOOD: dict[str, Any] = {"pixels": zeros(2, 3), "labels": np.array([1, 2])}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pixel": zeros(2, 3)}, InvalidInput, r"unknown input 'pixel' \(did you mean 'pixels'\?\)"),
        ({"zzz": zeros(2, 3)}, InvalidInput, r"unknown input 'zzz' \(known: labels, pixels\)"),
        ({7: zeros(2, 3)}, InvalidInput, "unknown input 7"),
        ({"labels": None}, InvalidInput, "input 'labels' is None"),
        ({"pixels": zeros(2, 3).astype(np.float64)}, DTypeMismatch, r"input 'pixels': expected float32\[n, 3\], got"),
        ({"pixels": zeros(2, 3).astype(np.float16)}, DTypeMismatch, r"got float16\[2, 3\]"),
        ({"labels": np.array([1, 2], np.int32)}, DTypeMismatch, "input 'labels': expected int64"),
        ({"labels": np.array([1.0, np.nan])}, DTypeMismatch, "input 'labels': expected int64"),
        ({"labels": [1.5, 2.5]}, DTypeMismatch, "input 'labels': cannot make a int64 tensor of this list"),
        ({"labels": [1, float("nan")]}, DTypeMismatch, "input 'labels'"),
        ({"labels": [1, 2**70]}, DTypeMismatch, "input 'labels'"),
        ({"labels": ["1", "2"]}, DTypeMismatch, "input 'labels'"),
        ({"labels": np.array(["a", "b"])}, DTypeMismatch, "input 'labels'"),
        ({"labels": np.array([object(), object()])}, DTypeMismatch, "input 'labels'"),
        ({"labels": np.array(["2020-01-01"] * 2, "M8[D]")}, DTypeMismatch, "input 'labels': no element type"),
        ({"labels": np.zeros(2, [("a", "i4")])}, DTypeMismatch, "input 'labels': no element type"),
        ({"labels": datetime.date(2020, 1, 1)}, InvalidInput, "input 'labels': cannot make a tensor of date"),
        ({"pixels": [[1.0, 2.0, 3.0], [4.0]]}, DTypeMismatch, "input 'pixels': cannot make a float32 tensor"),
        ({"pixels": {"a": 1}}, InvalidInput, "input 'pixels': cannot make a tensor of dict"),
        ({"pixels": iter([1.0])}, InvalidInput, "input 'pixels'"),
        ({"pixels": zeros(3)}, ShapeMismatch, r"input 'pixels': expected float32\[n, 3\], got float32\[3\]"),
        ({"pixels": zeros(2, 4)}, ShapeMismatch, r"input 'pixels': expected float32\[n, 3\], got float32\[2, 4\]"),
        ({"pixels": np.float32(1)}, ShapeMismatch, "input 'pixels'"),
        ({"pixels": zeros(5, 3)}, DimensionMismatch, r"input 'labels': dimension 'n' \(axis 0\) is 2, but 5"),
    ],
)
def test_bad_inputs_are_named(session: Any, changes: dict[Any, Any], error: type[RanvierError], message: str) -> None:
    with pytest.raises(error, match=message):
        session.run({**GOOD, **changes})
    assert session.run(GOOD)["scaled"].shape == (2, 3), "the session is as good as before"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"pixels": zeros(2, 3)}, "input 'labels' is missing: expected int64"),
        ({}, "input 'pixels' is missing"),
        ([], "0 inputs given, the model takes 2: 'pixels', 'labels'"),
        ([zeros(2, 3)] * 3, "3 inputs given, the model takes 2"),
        (None, "inputs must be a mapping from name to array, got NoneType"),
        ("pixels", "inputs must be a mapping"),
        (zeros(2, 3), "inputs must be a mapping"),
        (7, "inputs must be a mapping"),
    ],
)
def test_inputs_that_are_missing(session: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        session.run(inputs)


@pytest.mark.parametrize("outputs", [["scale"], ["scaled", "ghost"], [7], [["scaled"]], [None]])
def test_unknown_outputs(session: Any, outputs: Any) -> None:
    with pytest.raises(InvalidInput, match="the model has no output"):
        session.run(GOOD, outputs)


def test_a_bad_call_after_a_good_one_of_the_same_kind_is_still_checked() -> None:
    """A repeated call recalls its plan; what a plan cannot tell apart must be looked at every time."""
    words = rv.load(model("g (string[3] x) => (string[3] y) { y = Identity(x) }"))
    words.run({"x": np.array(["a", "b", "c"], object)})
    with pytest.raises(ShapeMismatch, match="input 'x'"):
        words.run({"x": np.array(["a"], object)})
    lists = rv.load(model("g (seq(float[2]) s) => (seq(float[2]) t) { t = Identity(s) }"))
    lists.run({"s": [zeros(2)]})
    with pytest.raises(ShapeMismatch, match=r"input 's\[1\]'"):
        lists.run({"s": [zeros(2), zeros(3)]})
    with pytest.raises(InvalidInput, match="input 's': expected sequence"):
        lists.run({"s": zeros(2)})
    with pytest.raises(DTypeMismatch, match=r"input 's\[0\]'"):
        lists.run({"s": ["text"]})


def test_a_closed_session_says_so() -> None:
    session = rv.load(model(TWO))
    session.close()
    with pytest.raises(SessionClosed, match="'two' is closed"):
        session.run(GOOD)
    session.close()


# -- these all work -------------------------------------------------------------------------------------------------

SQUARE = np.arange(12, dtype=np.float32).reshape(4, 3)


def read_only(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    data = np.zeros(x.nbytes + 1, np.uint8)
    view = data[1:].view(np.uint8)[: x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


LAYOUTS = {
    "plain": SQUARE,
    "column-major": np.asfortranarray(SQUARE),
    "every other row": np.repeat(SQUARE, 2, axis=0)[::2],
    "backwards": SQUARE[::-1].copy()[::-1],
    "transposed": SQUARE.T.copy().T,
    "broadcast": np.broadcast_to(SQUARE[0], (4, 3)),
    "big-endian": SQUARE.astype(">f4"),
    "read-only": read_only(SQUARE),
    "unaligned": unaligned(SQUARE),
    "a subclass": SQUARE.view(np.matrix),
    "a list": SQUARE.tolist(),
    "a memoryview": memoryview(SQUARE),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_layouts(layout: str) -> None:
    given = LAYOUTS[layout]
    with rv.load(model("g (float[n, m] x) => (float[n, m] y) { y = Neg(x) }")) as session:
        for _ in range(2):  # the second call recalls its plan
            out = session.run({"x": given})["y"]
            np.testing.assert_array_equal(out, -np.asarray(given, np.float32))
            assert out.dtype == np.float32 and out.dtype.isnative and out.flags.writeable


def test_empty_and_scalar_inputs() -> None:
    with rv.load(
        model("g (float[n, m] x) => (float[n, m] y, float s) { y = Neg(x) s = ReduceSum<keepdims=0>(x) }")
    ) as s:
        out = s.run({"x": zeros(0, 3)})
        assert out["y"].shape == (0, 3) and out["s"] == 0
        assert s.run({"x": zeros(2, 0)})["y"].shape == (2, 0)
    with rv.load(model("g (float x) => (float y) { y = Neg(x) }")) as session:
        for scalar in (np.array(3, np.float32), np.float32(3), 3, 3.0, True):
            out = session.run({"x": scalar})["y"]
            assert out.shape == () and out.dtype == np.float32 and out == -float(scalar)


def test_text_that_is_not_utf8_does_not_break_anything() -> None:
    with rv.load(model("g (string[n] x) => (string[n] y) { y = StringConcat(x, x) }")) as session:
        out = session.run({"x": np.array([b"\xff\xfe", b"ok"])})["y"]
        assert out[1] == "okok" and isinstance(out[0], str)
        lone = np.array(["\ud800"], object)  # half of a surrogate pair
        assert session.run({"x": lone})["y"][0] == "\ud800" * 2
    made = model('g (string[n] x) => (string[n] y) <string[1] c = {"a"}> { y = StringConcat(x, c) }')
    made.graph.initializer[0].string_data[0] = b"\xff\xfe"
    with pytest.raises(InvalidModel, match="tensor 'c' cannot be read: 'utf-8' codec"):
        rv.load(made)


def test_nothing_is_written_into_inputs() -> None:
    given = SQUARE.copy()
    with rv.load(model("g (float[n, m] x) => (float[n, m] y) { a = Relu(x) b = Add(a, x) y = Neg(b) }")) as session:
        session.run({"x": given})
    np.testing.assert_array_equal(given, SQUARE)
