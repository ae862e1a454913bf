"""Data that an operator cannot work with: indices out of range, NaN where a size is needed, shapes that do not fit.

Every message starts with the operator, says what came and what was expected, and the error names the node.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import InvalidValue, RanvierError, ShapeMismatch
from tests.faults.models import floats, ints, model, scalar, zeros

NAN = np.float32(np.nan)
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
IMAGE = zeros(1, 1, 4, 4)


# (declared inputs, node, inputs, expected error, expected message)
Case = tuple[str, str, dict[str, Any], type[RanvierError], str]

INDICES: list[Case] = [
    (
        "float[a, b] x, int64[k] i",
        "Gather <axis = 1> (x, i)",
        {"x": MATRIX, "i": ints(7)},
        InvalidValue,
        "Gather: index 7 is out of range for axis 1 of size 4",
    ),
    (
        "float[a, b] x, int64[k] i",
        "Gather (x, i)",
        {"x": MATRIX, "i": ints(-9)},
        InvalidValue,
        "Gather: index -9 is out of range for axis 0 of size 3",
    ),
    (
        "float[a, b] x, int64[k, l] i",
        "GatherElements (x, i)",
        {"x": MATRIX, "i": ints(3).reshape(1, 1)},
        InvalidValue,
        "GatherElements: index 3 is out of range",
    ),
    (
        "float[a, b] x, int64[k, l] i",
        "GatherND (x, i)",
        {"x": MATRIX, "i": ints(3, 0).reshape(1, 2)},
        InvalidValue,
        "GatherND: index 3 is out of range for axis 0",
    ),
    (
        "float[a, b] x, int64[k, l] i",
        "GatherND (x, i)",
        {"x": MATRIX, "i": ints(0, 0, 0).reshape(1, 3)},
        ShapeMismatch,
        "GatherND: indices",
    ),
    (
        "float[a, b] x, int64[k, l] i, float[k] u",
        "ScatterND (x, i, u)",
        {"x": MATRIX, "i": ints(0, 4).reshape(1, 2), "u": floats(1)},
        InvalidValue,
        "ScatterND: index 4 is out of range for axis 1",
    ),
    (
        "float[a, b] x, int64[k, l] i, float[m] u",
        "ScatterND (x, i, u)",
        {"x": MATRIX, "i": ints(0, 0).reshape(1, 2), "u": floats(1, 2)},
        ShapeMismatch,
        r"ScatterND: updates of shape \[1\] expected",
    ),
    (
        "float[a, b] x, int64[k, l] i, float[k, l] u",
        "ScatterElements (x, i, u)",
        {"x": MATRIX, "i": ints(5).reshape(1, 1), "u": zeros(1, 1)},
        InvalidValue,
        "ScatterElements: index 5 is out of range",
    ),
    (
        "float[a, b] x, int64[k] i, int64[j] t",
        "Slice (x, i, t)",
        {"x": MATRIX, "i": ints(0), "t": ints(1, 2)},
        ShapeMismatch,
        "Slice: starts, ends, axes and steps must have one length",
    ),
    (
        "float[a, b] x, int64[k] i",
        "Slice (x, i, i, i, i)",
        {"x": MATRIX, "i": ints(0)},
        InvalidValue,
        "Slice: a step must not be 0",
    ),
    (
        "float[a, b] x, int64[k] i, int64[k] s",
        "Slice (x, i, i, s)",
        {"x": MATRIX, "i": ints(0), "s": ints(9)},
        InvalidValue,
        "Slice: axis 9 is out of range for rank 2",
    ),
    (
        "float[n] i, int64 d, float[2] v",
        "OneHot (i, d, v)",
        {"i": floats(0), "d": scalar(-4), "v": floats(0, 1)},
        InvalidValue,
        "OneHot: negative size",
    ),
    (
        "int64[n] i, float d, float[2] v",
        "OneHot (i, d, v)",
        {"i": ints(0), "d": scalar(NAN, np.float32), "v": floats(0, 1)},
        InvalidValue,
        "OneHot: depth must be a number, got nan",
    ),
    (
        "float[a, b] x, float[k, 4] r, int64[k] i",
        "RoiAlign (x, r, i)",
        {"x": MATRIX, "r": zeros(1, 4), "i": ints(0)},
        ShapeMismatch,
        "RoiAlign",
    ),
    (
        "float[a, b, c, d] x, float[k, 4] r, int64[k] i",
        "RoiAlign (x, r, i)",
        {"x": IMAGE, "r": zeros(1, 4), "i": ints(5)},
        InvalidValue,
        "RoiAlign: image 5 is out of range for a batch of 1",
    ),
    (
        "float[a, b, c, d] x, float[k, 4] r, int64[k] i",
        "RoiAlign (x, r, i)",
        {"x": IMAGE, "r": np.full((1, 4), NAN), "i": ints(0)},
        InvalidValue,
        "RoiAlign: a region is not finite",
    ),
    (
        "float[a, b, 4] x, float[a, c, b] s, int64 m, float t",
        "NonMaxSuppression (x, s, m, t)",
        {"x": zeros(1, 2, 4), "s": zeros(1, 1, 2), "m": scalar(5), "t": scalar(NAN, np.float32)},
        InvalidValue,
        r"NonMaxSuppression: iou_threshold must be in \[0, 1\], got nan",
    ),
    (
        "float[a, b, c, d] x, int64[a, b, c, d] i",
        "MaxUnpool <kernel_shape = [1, 1]> (x, i)",
        {"x": IMAGE, "i": np.full((1, 1, 4, 4), 99)},
        InvalidValue,
        "MaxUnpool: index 99 is out of range",
    ),
    (
        "float[a, b] x, int64[a] i",
        "NegativeLogLikelihoodLoss (x, i)",
        {"x": MATRIX, "i": ints(0, 1, 9)},
        InvalidValue,
        "NegativeLogLikelihoodLoss: label 9 is out of range for 4 classes",
    ),
]
SIZES: list[Case] = [
    (
        "float[a, b] x, int64[1] k",
        "found, places = TopK (x, k)",
        {"x": MATRIX, "k": ints(9)},
        InvalidValue,
        "TopK: k is 9, and axis 1 has 4 elements",
    ),
    (
        "float[a, b] x, int64[1] k",
        "found, places = TopK (x, k)",
        {"x": MATRIX, "k": ints(-1)},
        InvalidValue,
        "TopK: k is -1",
    ),
    (
        "float[a, b] x, int64[k] s",
        "found, other = Split (x, s)",
        {"x": MATRIX, "s": ints(1, 9)},
        InvalidValue,
        r"Split: sizes \[1, 9\] do not add up to 3",
    ),
    (
        "float[a, b] x, int64[k] s",
        "Reshape (x, s)",
        {"x": MATRIX, "s": ints(5, 5)},
        ShapeMismatch,
        r"Reshape: 12 elements of shape \[3, 4\] do not fill \[5, 5\]",
    ),
    (
        "float[a, b] x, int64[k] s",
        "Reshape (x, s)",
        {"x": MATRIX, "s": ints(-3, 4)},
        InvalidValue,
        r"Reshape: \[-3, 4\] is not a shape",
    ),
    (
        "float[a, b] x, int64[k] s",
        "Reshape (x, s)",
        {"x": MATRIX, "s": ints(-1, -1)},
        InvalidValue,
        r"Reshape: \[-1, -1\] is not a shape",
    ),
    (
        "float[a, b] x, int64[k] s",
        "Tile (x, s)",
        {"x": MATRIX, "s": ints(-1, 1)},
        InvalidValue,
        "Tile: negative size",
    ),
    ("float[a, b] x, int64[k] s", "Tile (x, s)", {"x": MATRIX, "s": ints(1)}, ShapeMismatch, "Tile: 2 repeats"),
    (
        "float[a, b] x, int64[k] s",
        "Squeeze (x, s)",
        {"x": MATRIX, "s": ints(0)},
        ShapeMismatch,
        "Squeeze: axis 0 of shape",
    ),
    (
        "float[a, b] x, int64[k] s",
        "Unsqueeze (x, s)",
        {"x": MATRIX, "s": ints(7)},
        InvalidValue,
        "Unsqueeze: axis 7 is out of range",
    ),
    (
        "float[a, b] x, int64[k] s",
        "Expand (x, s)",
        {"x": MATRIX, "s": ints(2, 4)},
        ShapeMismatch,
        "Expand: shapes .* do not broadcast",
    ),
    (
        "float[a] x, int64[k] s",
        "Pad (x, s)",
        {"x": floats(1), "s": ints(-5, 0)},
        InvalidValue,
        "Pad: .* cuts off more than shape",
    ),
    (
        "float[a] x, float[k] s",
        "Resize (x, , s)",
        {"x": floats(1, 2), "s": floats(NAN)},
        InvalidValue,
        r"Resize: scales must be positive, got \[nan\]",
    ),
    (
        "float a, float b, float c",
        "Range (a, b, c)",
        {"a": scalar(0, np.float32), "b": scalar(NAN, np.float32), "c": scalar(1, np.float32)},
        InvalidValue,
        "Range: .* has no end",
    ),
    (
        "float a, float b, float c",
        "Range (a, b, c)",
        {"a": scalar(0, np.float32), "b": scalar(np.inf, np.float32), "c": scalar(1, np.float32)},
        InvalidValue,
        "Range: .* has no end",
    ),
    (
        "int64 a, int64 b, int64 c",
        "Range (a, b, c)",
        {"a": scalar(0), "b": scalar(5), "c": scalar(0)},
        InvalidValue,
        "Range: delta must not be 0",
    ),
    ("int64[k] s", "ConstantOfShape (s)", {"s": ints(-5)}, InvalidValue, "ConstantOfShape: negative size"),
    (
        "float[a, b] x, int64[k] l",
        "ReverseSequence (x, l)",
        {"x": MATRIX, "l": ints(9, 9, 9, 9)},
        InvalidValue,
        r"ReverseSequence: lengths must be in \[0, 3\]",
    ),
    (
        "float[a, b] x, bool[k] s",
        "Compress <axis = 0> (x, s)",
        {"x": MATRIX, "s": np.ones(9, bool)},
        ShapeMismatch,
        "Compress: at most 3 conditions",
    ),
    ("bool[n] c", "Not (c)", {"c": np.ones(3, np.int64)}, RanvierError, "input 'c'"),
]
SHAPES: list[Case] = [
    (
        "float[a, b] x, float[c, d] y",
        "MatMul (x, y)",
        {"x": MATRIX, "y": MATRIX},
        ShapeMismatch,
        r"MatMul: inner sizes differ in \[3, 4\] @ \[3, 4\]",
    ),
    (
        "float[a, b] x, float[c] y",
        "Add (x, y)",
        {"x": MATRIX, "y": floats(1, 2, 3)},
        ShapeMismatch,
        r"Add: shapes \[3, 4\] and \[3\] do not broadcast",
    ),
    (
        "float[a, b] x, float[c] y",
        "Concat <axis = 0> (x, y)",
        {"x": MATRIX, "y": floats(1)},
        ShapeMismatch,
        "Concat: shapes",
    ),
    (
        "float[a, b] x",
        "Transpose <perm = [1, 1]> (x)",
        {"x": MATRIX},
        InvalidValue,
        r"Transpose: \[1, 1\] is not a permutation",
    ),
    ("float[a, b] x", "Softmax <axis = 5> (x)", {"x": MATRIX}, InvalidValue, "Softmax: axis 5 is out of range"),
    (
        "float[n, c, h] x, float[m, k, l] w",
        "Conv <strides = [0]> (x, w)",
        {"x": zeros(1, 1, 4), "w": zeros(1, 1, 1)},
        InvalidValue,
        "Conv: strides must be at least 1",
    ),
    (
        "float[n, c, h] x, float[m, k, l] w",
        "Conv (x, w)",
        {"x": zeros(1, 1, 4), "w": zeros(1, 1, 9)},
        ShapeMismatch,
        "Conv: a window of 9 does not fit",
    ),
    (
        "float[n, c, h] x, float[m, k, l] w",
        "Conv (x, w)",
        {"x": zeros(1, 3, 4), "w": zeros(1, 2, 2)},
        ShapeMismatch,
        "Conv: X .* and W .* do not fit",
    ),
    (
        "float[a, b] x",
        'Einsum <equation = "ijk->i"> (x)',
        {"x": MATRIX},
        ShapeMismatch,
        "Einsum: term 'ijk' of 'ijk->i'",
    ),
    ("float[a, b] x", "Det (x)", {"x": MATRIX}, ShapeMismatch, "Det: needs square matrices"),
]
ARITHMETIC: list[Case] = [
    (
        "int64[n] x, int64[n] y",
        "Div (x, y)",
        {"x": ints(4, 0), "y": ints(0, 0)},
        InvalidValue,
        "Div: integer division by zero",
    ),
    ("int64[n] x", "Mod (x, x)", {"x": ints(0)}, InvalidValue, "Mod: integer division by zero"),
    ("int64[n] x", "Mod <fmod = 1> (x, x)", {"x": ints(0)}, InvalidValue, "Mod: integer division by zero"),
    ("int64[n] x, int64[n] y", "Pow (x, y)", {"x": ints(0), "y": ints(-1)}, InvalidValue, "Pow: integer zero"),
]
TEXT: list[Case] = [
    (
        "string[n] x",
        "Cast <to = 1> (x)",
        {"x": np.array(["1.5", "abc"], object)},
        InvalidValue,
        "Cast: 'abc' is not a number",
    ),
    (
        "string[n] x",
        'RegexFullMatch <pattern = "(a"> (x)',
        {"x": np.array(["a"], object)},
        InvalidValue,
        r"RegexFullMatch: missing \)",
    ),
    (
        "string[n] x",
        'RegexFullMatch <pattern = "((a{1,1000}){1,1000}){1,1000}"> (x)',
        {"x": np.array(["a"], object)},
        InvalidValue,
        "RegexFullMatch: the pattern needs more than",
    ),
]
SEQUENCES: list[Case] = [
    (
        "seq(float[n]) s, int64 k",
        "SequenceAt (s, k)",
        {"s": [floats(1)], "k": scalar(5)},
        InvalidValue,
        "SequenceAt: position 5 is out of range for a sequence of 1",
    ),
    (
        "seq(float[n]) s",
        "ConcatFromSequence <axis = 0> (s)",
        {"s": []},
        InvalidValue,
        "ConcatFromSequence: expected at least one tensor",
    ),
    ("optional(float[n]) o", "OptionalGetElement (o)", {"o": None}, InvalidValue, "OptionalGetElement: .* is empty"),
]
CASES = [*INDICES, *SIZES, *SHAPES, *ARITHMETIC, *TEXT, *SEQUENCES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
@pytest.mark.parametrize("level", ["none", "aggressive"])
def test_bad_data(case: Case, level: str) -> None:
    declared, node, inputs, error, message = case
    statement = node if node.startswith("found") else f"found = {node}"
    made = model(f"g ({declared}) => (out) {{ {statement} out = Identity(found) }}")
    made.graph.node[0].name = "the_node"
    with rv.load(made, optimization=level) as session:
        with pytest.raises(error, match=message) as caught:
            session.run(inputs)
        if "input" not in message:
            assert caught.value.node == "the_node"
            assert any("'the_node'" in note for note in caught.value.__notes__)


def test_constants_that_cannot_be_folded_fail_in_the_run_and_name_the_node() -> None:
    made = model(
        "g (float[2] x) => (float[2] y) <int64[1] i = {7}, float[2] w = {1, 2}> { v = Gather(w, i) y = Add(x, v) }"
    )
    made.graph.node[0].name = "lookup"
    with rv.load(made) as session, pytest.raises(InvalidValue, match="index 7 is out of range") as caught:
        session.run({"x": floats(1, 2)})
    assert caught.value.node == "lookup"


def test_an_error_inside_a_body_names_the_inner_operator() -> None:
    made = model(
        "g (int64 n, float[k] x) => (float[k] y) { y = Loop (n, , x) <body = b (int64 i, bool c, float[k] a) "
        "=> (bool d, float[k] r) { d = Identity(c) r = Gather(a, i) }> }"
    )
    with rv.load(made) as session, pytest.raises(RanvierError, match=r"Gather: index|Gather: axis|Gather") as caught:
        session.run({"n": np.array(3), "x": floats(1)})
    assert caught.value.node == "r"


# -- odd, but allowed -----------------------------------------------------------------------------------------------


def test_what_the_standard_allows_stays_allowed() -> None:
    def run(declared: str, node: str, **inputs: Any) -> np.ndarray[Any, Any]:
        made = model(f"g ({declared}) => (out) {{ out = {node} }}")
        found: np.ndarray[Any, Any] = rv.load(made).run(inputs)["out"]
        return found

    whole = run(
        "float[n] x, int64[k] s, int64[k] e", "Slice (x, s, e)", x=floats(1, 2), s=ints(-(2**63)), e=ints(2**63 - 1)
    )
    np.testing.assert_array_equal(whole, [1, 2])
    off = run("int64[n] i, int64 d, float[2] v", "OneHot (i, d, v)", i=ints(9, -9), d=scalar(3), v=floats(5, 1))
    np.testing.assert_array_equal(off, np.full((2, 3), 5))
    assert run("float[n] x", "Cast <to = 7> (x)", x=floats(np.nan, np.inf)).dtype == np.int64
    assert run("string[n] x", 'RegexFullMatch <pattern = "(a+)+$"> (x)', x=np.array(["a" * 5000 + "b"], object)) == [
        False
    ]
    assert run("float[n] x", "Neg (x)", x=floats()).shape == (0,)
    image = run("float[a, b, c, d] x", "LRN <size = 2000000001> (x)", x=np.ones((1, 2, 1, 1), np.float32))
    np.testing.assert_allclose(image, 1, rtol=1e-3)
