"""Pads that add on one side and cut on the other: every element comes from where NumPy finds it, or is the filling."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.errors import InvalidValue

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[%s] x, int64[%d] pads, float fill) => (float[%s] y) { y = Pad(x, pads, fill) }"""


def padded(x: np.ndarray, pads: list[int]) -> np.ndarray:
    model = onnx.parser.parse_model(TEXT % (",".join("abc"[: x.ndim]), 2 * x.ndim, ",".join("xyz"[: x.ndim])))
    with rv.load(model, providers=["cpu", "reference"]) as session:
        found: np.ndarray = session.run({"x": x, "pads": np.array(pads), "fill": np.float32(9)})["y"]
        return found


@pytest.mark.parametrize("pads", list(itertools.product((-4, -3, -1, 0, 2), (-4, -2, 0, 1, 5))))
def test_one_axis(pads: tuple[int, int]) -> None:
    x = np.float32([1, 2, 3, 4, 5])
    before, after = pads
    if max(-before, 0) + max(-after, 0) > len(x):
        with pytest.raises(InvalidValue):
            padded(x, list(pads))
        return
    kept = x[max(-before, 0) : len(x) - max(-after, 0)]
    wanted = np.pad(kept, (max(before, 0), max(after, 0)), constant_values=9)
    np.testing.assert_array_equal(padded(x, list(pads)), wanted)


def test_both_ways_on_two_axes() -> None:
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    wanted = np.pad(x[2:, :4], ((0, 3), (1, 0)), constant_values=9)
    np.testing.assert_array_equal(padded(x, [-2, 1, 3, -1]), wanted)
