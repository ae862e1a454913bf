"""Models and data that ask for more memory than there is: refused before anything is allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import ResourceLimit
from tests.faults.models import floats, ints, model, scalar, zeros

HUGE = 10**15
ABSURD: dict[str, tuple[str, dict[str, Any]]] = {
    "ConstantOfShape (s)": ("int64[k] s", {"s": ints(HUGE)}),
    "Expand (x, s)": ("float[1] x, int64[k] s", {"x": floats(1), "s": ints(10**8, 10**8)}),
    "Tile (x, s)": ("float[1] x, int64[k] s", {"x": floats(1), "s": ints(HUGE)}),
    "Range (a, b, c)": ("int64 a, int64 b, int64 c", {"a": scalar(0), "b": scalar(HUGE), "c": scalar(1)}),
    "Pad (x, s)": ("float[1] x, int64[k] s", {"x": floats(1), "s": ints(HUGE, 0)}),
    'Pad <mode = "edge"> (x, s)': ("float[1] x, int64[k] s", {"x": floats(1), "s": ints(0, HUGE)}),
    "Resize (x, , , s)": ("float[n] x, int64[k] s", {"x": floats(1, 2), "s": ints(HUGE)}),
    "Resize (x, , s)": ("float[n] x, float[k] s", {"x": floats(1, 2), "s": floats(1e30)}),
    "OneHot (i, d, v)": ("int64[n] i, int64 d, float[2] v", {"i": ints(1), "d": scalar(HUGE), "v": floats(0, 1)}),
    "RandomNormal <shape = [1000000000, 1000000000]> ()": ("", {}),
    "RandomUniform <shape = [1000000000, 1000000000]> ()": ("", {}),
    "Multinomial <sample_size = 1000000000000000> (x)": ("float[1, 2] x", {"x": zeros(1, 2)}),
    "HannWindow (n)": ("int64 n", {"n": scalar(HUGE)}),
    "DFT (x, n)": ("float[1, 4, 1] x, int64 n", {"x": zeros(1, 4, 1), "n": scalar(HUGE)}),
    "MelWeightMatrix (a, a, a, f, f)": (
        "int64 a, float f",
        {"a": scalar(10**9), "f": scalar(1, np.float32)},
    ),
    "CenterCropPad (x, s)": ("float[1] x, int64[k] s", {"x": floats(1), "s": ints(HUGE)}),
    "AffineGrid (t, s)": ("float[1, 2, 3] t, int64[k] s", {"t": zeros(1, 2, 3), "s": ints(1, 1, 10**8, 10**8)}),
    "Where (c, x, z)": (
        "bool[a, 1, 1] c, float[1, b, 1] x, float[1, 1, d] z",
        {"c": np.ones((10**5, 1, 1), bool), "x": zeros(1, 10**5, 1), "z": zeros(1, 1, 10**5)},
    ),
    "Add (x, z)": ("float[a, 1] x, float[1, b] z", {"x": zeros(10**6, 1), "z": zeros(1, 10**6)}),
    "MatMul (x, z)": ("float[a, 1] x, float[1, b] z", {"x": zeros(10**6, 1), "z": zeros(1, 10**6)}),
    "Gemm (x, z)": ("float[a, 1] x, float[1, b] z", {"x": zeros(10**6, 1), "z": zeros(1, 10**6)}),
    "Gather (x, i)": ("float[a, b] x, int64[k] i", {"x": zeros(1, 10**6), "i": np.zeros(10**6, np.int64)}),
    "GatherND (x, i)": ("float[a, b] x, int64[k, 1] i", {"x": zeros(1, 10**6), "i": np.zeros((10**6, 1), np.int64)}),
    "Conv <pads = [1000000000000000, 0]> (x, w)": (
        "float[a, b, c] x, float[d, e, f] w",
        {"x": zeros(1, 1, 4), "w": zeros(1, 1, 1)},
    ),
    "ConvTranspose <strides = [1000000000000000]> (x, w)": (
        "float[a, b, c] x, float[d, e, f] w",
        {"x": zeros(1, 1, 4), "w": zeros(1, 1, 1)},
    ),
    "MaxPool <kernel_shape = [1], pads = [0, 1000000000000000]> (x)": ("float[a, b, c] x", {"x": zeros(1, 1, 4)}),
}


@pytest.mark.parametrize("node", ABSURD)
@pytest.mark.parametrize("level", ["none", "aggressive"])
def test_absurd_sizes(node: str, level: str) -> None:
    declared, inputs = ABSURD[node]
    made = model(f"g ({declared}) => (out) {{ out = {node} }}")
    with rv.load(made, optimization=level) as session, pytest.raises(ResourceLimit, match="tensor_bytes") as caught:
        session.run(inputs)
    assert caught.value.actual > caught.value.allowed == 1 << 34


@pytest.mark.parametrize("node", [n for n, (declared, _) in ABSURD.items() if declared])
def test_absurd_sizes_where_no_plan_sees_them(node: str) -> None:
    """Inside a loop shapes may change at every step, so operators themselves must ask before they allocate."""
    declared, inputs = ABSURD[node]
    body = f"b (int64 step, bool going) => (more, found) {{ more = Identity(going) found = {node} }}"
    made = model(f"g (int64 once, bool go, {declared}) => (out) {{ out = Loop (once, go) <body = {body}> }}")
    with rv.load(made) as session, pytest.raises(ResourceLimit, match="tensor_bytes"):
        session.run({"once": np.array(1), "go": np.array(True), **inputs})


def test_two_large_factors_multiply() -> None:
    made = model("g (float[n, m] x, float[2] s) => (y) { y = Resize(x, , s) }")
    with rv.load(made) as session, pytest.raises(ResourceLimit, match="Resize of shape"):
        session.run({"x": zeros(2, 2), "s": floats(1e8, 1e8)})


def test_an_empty_result_with_one_absurd_size() -> None:
    """Zero elements take no memory, but positions along the other axes would."""
    made = model("g (float[n, m] x, int64[2] s) => (y) { y = Resize(x, , , s) }")
    with rv.load(made) as session, pytest.raises(ResourceLimit, match="tensor_bytes"):
        session.run({"x": zeros(2, 2), "s": ints(0, HUGE)})
