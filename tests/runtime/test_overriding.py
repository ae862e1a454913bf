"""Inputs that have defaults are constants until a run gives one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import ranvier as rv
from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch

RNG = np.random.default_rng(5)
W = RNG.standard_normal((8, 6)).astype(np.float32)
B = RNG.standard_normal(6).astype(np.float32)
X = RNG.standard_normal((3, 8)).astype(np.float32)


def info(name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[onnx.NodeProto], defaults: dict[str, np.ndarray], declared: list[onnx.ValueInfoProto]) -> bytes:
    graph = helper.make_graph(
        nodes,
        "overridable",
        [info("x", ["n", 8]), *declared],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in defaults.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


def scaled_linear() -> bytes:
    """y = (x @ (w * s)) + b: the product of weights is folded where both are constants."""
    nodes = [
        helper.make_node("Mul", ["w", "s"], ["ws"]),
        helper.make_node("MatMul", ["x", "ws"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["y"]),
    ]
    defaults = {"w": W, "s": np.float32([2.0]), "b": B}
    return model(nodes, defaults, [info("w", [8, 6]), info("s", [1]), info("b", [6])])


def expected(feed: dict[str, np.ndarray]) -> np.ndarray:
    (found,) = ReferenceEvaluator(onnx.load_from_string(scaled_linear())).run(None, feed)
    return np.asarray(found)


def test_defaults_are_folded_and_packed() -> None:
    session = rv.load(scaled_linear())
    assert list(session.inputs) == ["x"]
    assert list(session.optional_inputs) == ["w", "s", "b"]
    assert "Mul" not in {node.op for node in session.graph}
    assert not session.signature.defaults
    assert "3 inputs with defaults are constants" in str(session.report)
    assert session.report.to_dict()["constants"]
    np.testing.assert_allclose(session.run({"x": X})["y"], expected({"x": X}), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [("b",), ("w",), ("s", "b"), ("w", "s", "b")])
def test_what_is_given_counts(given: tuple[str, ...]) -> None:
    others = {"w": W[::-1].copy(), "s": np.float32([-3.0]), "b": B + 1}
    session = rv.load(scaled_linear())
    feed = {"x": X, **{name: others[name] for name in given}}
    for _ in range(3):  # the way of the first call, and the short ones after it
        np.testing.assert_allclose(session.run(feed)["y"], expected(feed), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(session.run({"x": X})["y"], expected({"x": X}), rtol=1e-5, atol=1e-5)


def test_one_more_compilation_serves_runs_that_give_the_same_or_less(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = rv.Session._with_inputs
    monkeypatch.setattr(rv.Session, "_with_inputs", lambda self, graph: made.append(1) or original(self, graph))
    session = rv.load(scaled_linear())
    for count, given in [(1, "wb"), (1, "b"), (1, "w"), (2, "s"), (2, "wsb"), (2, "w")]:
        feed = {"x": X, **{name: {"w": -W, "s": np.float32([0.5]), "b": 2 * B}[name] for name in given}}
        np.testing.assert_allclose(session.run(feed)["y"], expected(feed), rtol=1e-5, atol=1e-5)
        assert len(made) == count


def test_what_is_wrong_is_said() -> None:
    session = rv.load(scaled_linear())
    with pytest.raises(ShapeMismatch, match="'b'"):
        session.run({"x": X, "b": B[:3]})
    with pytest.raises(DTypeMismatch, match="'b'"):
        session.run({"x": X, "b": np.ones(6, np.int64)})
    with pytest.raises(InvalidInput, match="'c'"):
        session.run({"x": X, "c": B})
    with pytest.raises(InvalidInput, match="'x' is missing"):
        session.run({"b": B})


def test_sizes_with_names_stay_inputs() -> None:
    """A default whose declared shape names a dimension of another input must agree with it, at every run."""
    nodes = [helper.make_node("Add", ["x", "r"], ["y"])]
    session = rv.load(model(nodes, {"r": np.ones((3, 8), np.float32)}, [info("r", ["n", 8])]))
    assert list(session.optional_inputs) == ["r"]
    np.testing.assert_array_equal(session.run({"x": X})["y"], X + 1)
    with pytest.raises(rv.errors.DimensionMismatch):
        session.run({"x": X[:2]})
    np.testing.assert_array_equal(session.run({"x": X[:2], "r": X[1:]})["y"], X[:2] + X[1:])


def test_a_default_that_is_a_result_of_a_branch_and_of_the_graph() -> None:
    then = helper.make_graph([], "then", [], [info("b", [6])])
    other = helper.make_graph([helper.make_node("Neg", ["b"], ["nb"])], "else", [], [info("nb", [6])])
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=then, else_branch=other),
    ]
    defaults = {"b": B, "zero": np.zeros((), np.float32)}
    session = rv.load(model(nodes, defaults, [info("b", [6])]))
    for x in (np.abs(X), -np.abs(X)):
        sign = np.float32(1 if x.sum() > 0 else -1)
        np.testing.assert_array_equal(session.run({"x": x})["y"], sign * B)
        np.testing.assert_array_equal(session.run({"x": x, "b": B + 1})["y"], sign * (B + 1))


def test_shapes_that_defaults_decide() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    shape = np.int64([-1, 4])
    session = rv.load(model(nodes, {"shape": shape}, [info("shape", [2], TensorProto.INT64)]))
    assert session.outputs["y"].shape[1] == 4
    assert session.run({"x": X})["y"].shape == (6, 4)
    assert session.run({"x": X, "shape": np.int64([2, -1])})["y"].shape == (2, 12)


def test_a_profile_and_the_memory_hold_both() -> None:
    session = rv.load(scaled_linear())
    feed = {"x": X, "w": -W}
    before = session.memory()
    with session.profile() as first:
        session.run(feed)
    with session.profile() as second:
        session.run(feed)
    for profile in (first, second):
        assert {event.op for event in profile.events} > {"run"}
        assert profile.summary() and profile.records() and profile.trace()
    session.run({"x": X})
    assert session.memory().total >= before.total
    session.trim()
    assert session.memory().arenas_waiting == 0
    session.close()
    with pytest.raises(rv.errors.SessionClosed):
        session.run(feed)


def test_the_saved_model_still_has_them(tmp_path: Path) -> None:
    options = rv.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = rv.InferenceSession(scaled_linear(), options)
    assert [arg.name for arg in session.get_overridable_initializers()] == ["w", "s", "b"]
    saved = onnx.load(options.optimized_model_filepath)
    assert [value.name for value in saved.graph.input] == ["x", "w", "s", "b"]
    feed = {"x": X, "s": np.float32([7.0])}
    again = rv.InferenceSession(options.optimized_model_filepath)
    np.testing.assert_allclose(again.run(None, feed)[0], expected(feed), rtol=1e-5, atol=1e-5)


def test_all_inputs_in_order_through_the_backend() -> None:
    prepared = rv.Backend.prepare(onnx.load_from_string(scaled_linear()))
    feed = {"x": X, "w": -W, "s": np.float32([4.0]), "b": B}
    np.testing.assert_allclose(prepared.run(list(feed.values()))[0], expected(feed), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(prepared.run([X])[0], expected({"x": X}), rtol=1e-5, atol=1e-5)
