"""Inputs whose model gives one name to sizes that differ: refused, unless the names are taken apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.errors import DimensionMismatch, ShapeMismatch
from ranvier.graph import Symbol

RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((1, 5, 8)).astype(np.float32)
BOXES = RNG.integers(0, 8, (1, 5, 4))


def model() -> onnx.ModelProto:
    """Exporters name axes by habit: width is 8 in one input, and 4 in the other."""
    return onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[batch, height, width] features, int64[batch, height, width] boxes) => (float[batch, height, width] y) {
            picked = GatherElements <axis = 2> (features, boxes)
            shape = Shape (boxes)
            other = Shape (features)
            flat = Reshape (picked, shape)
            total = ReduceSum <keepdims = 1> (features)
            y = Mul (flat, total)
        }""")


def feeds(features: Any = FEATURES, boxes: Any = BOXES) -> dict[str, Any]:
    return {"features": features, "boxes": boxes}


WANTED = np.take_along_axis(FEATURES, BOXES, 2) * FEATURES.sum()


def test_a_session_tells_how() -> None:
    with pytest.raises(DimensionMismatch, match="is 4, but 8 in input 'features'; dims_apart=True"):
        rv.load(model()).run(feeds())


@pytest.mark.parametrize("provider", ["cpu", "reference"])
def test_dims_apart(provider: str) -> None:
    session = rv.load(model(), providers=[provider], dims_apart=True)
    np.testing.assert_allclose(session.run(feeds())["y"], WANTED, rtol=1e-5)
    names = {s.name for t in session.inputs.values() for s in t.shape}  # type: ignore[union-attr]
    assert len(names) == 6 and "boxes.width.2" in names
    again = session.run(feeds(FEATURES[:, :3], BOXES[:, :3, :2]))["y"]
    assert again.shape == (1, 3, 2)


def test_what_agrees_gives_the_same() -> None:
    boxes = RNG.integers(0, 8, (1, 5, 8))
    one, apart = (rv.load(model(), dims_apart=k).run(feeds(boxes=boxes))["y"] for k in (False, True))
    np.testing.assert_array_equal(one, apart)


def test_names_of_one_input_stay_and_bounds_are_kept() -> None:
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n, m] a, float[n, k] b) => (float[m, k] y) { t = Transpose (a)  y = MatMul (t, b) }""")
    session = rv.load(proto, dims_apart=True, symbol_bounds={"n": (1, 4)})
    assert {n: str(t) for n, t in session.inputs.items()} == {"a": "float32[a.n.0, m]", "b": "float32[b.n.0, k]"}
    with pytest.raises(ShapeMismatch, match=r"outside its bounds \[1, 4\]"):
        session.run({"a": np.ones((5, 2), np.float32), "b": np.ones((5, 2), np.float32)})
    with pytest.raises(ShapeMismatch):  # now the product says so
        session.run({"a": np.ones((3, 2), np.float32), "b": np.ones((2, 2), np.float32)})
    assert session.inputs["a"].shape[0] == Symbol("a.n.0")  # type: ignore[union-attr]


def test_onnx_runtimes_interface_runs_it_as_onnx_runtime_does() -> None:
    session = rv.InferenceSession(model().SerializeToString())
    for _ in range(3):
        np.testing.assert_allclose(session.run(None, feeds())[0], WANTED, rtol=1e-5)
    assert [each.shape for each in session.get_inputs()] == [["batch", "height", "width"]] * 2
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: session.run(["y"], feeds())[0], range(16)):
            np.testing.assert_allclose(result, WANTED, rtol=1e-5)


def test_what_cannot_be_run_so_is_told_as_before() -> None:
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n] a, float[n] b) => (float[n] y) { y = Add(a, b) }""")
    session = rv.InferenceSession(proto.SerializeToString())
    good = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    for _ in range(2):
        with pytest.raises(Exception, match="is 3, but 2 in input 'a'"):
            session.run(None, {**good, "b": np.ones(3, np.float32)})
        assert session.run(None, good)[0].tolist() == [2, 2]


def test_profiles_go_on(tmp_path: Any) -> None:
    options = rv.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "p")
    session = rv.InferenceSession(model().SerializeToString(), options)
    session.run(None, feeds())
    session.run(None, feeds())
    assert session.end_profiling()
