"""What a sample tells about a precision: which nodes stay in float32, and how large values get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ranvier as rv
from ranvier.codegen.llvm import isa
from ranvier.errors import InvalidConfig, InvalidInput
from ranvier.formats import onnx as onnx_format
from ranvier.providers.cpu.narrow.effective import effective
from ranvier.runtime.narrowing.ranges import largest_values
from ranvier.runtime.narrowing.search import Search

Array = np.ndarray[Any, Any]
needs_products = pytest.mark.skipif(
    effective("bf16", isa.host())[0] != "bf16", reason="this processor has no bfloat16 products"
)


def search(harm: dict[str, float], bound: float, trials: int = 48) -> tuple[set[str], int]:
    """What is kept where errors add up, and how often that was measured."""
    calls = 0

    def measure(kept: frozenset[str]) -> float:
        nonlocal calls
        calls += 1
        return sum(h for name, h in harm.items() if name not in kept)

    return set(Search(measure, bound, trials).run(list(harm))), calls


def test_nothing_is_kept_where_the_error_is_low_enough() -> None:
    assert search({"a": 1.0, "b": 2.0}, bound=3.0) == (set(), 1)
    assert search({}, bound=0.0) == (set(), 1)


@pytest.mark.parametrize("worst", [0, 37, 99])
def test_the_one_node_that_does_harm_is_found_among_many(worst: int) -> None:
    harm = {f"n{k}": 1e-4 for k in range(100)} | {f"n{worst}": 1.0}
    kept, calls = search(harm, bound=0.02)
    assert kept == {f"n{worst}"} and calls < 40


def test_several_that_lie_apart() -> None:
    harm = {f"n{k}": 1e-5 for k in range(60)} | {"n3": 0.5, "n31": 0.4, "n58": 0.3}
    kept, _ = search(harm, bound=0.01)
    assert kept == {"n3", "n31", "n58"}


def test_all_are_kept_where_fewer_do_not_suffice() -> None:
    assert search({"a": 1.0, "b": 1.0}, bound=0.0)[0] == {"a", "b"}


def test_few_trials_keep_more_but_enough() -> None:
    harm = {f"n{k}": 1e-5 for k in range(100)} | {"n50": 1.0}
    kept, calls = search(harm, bound=0.01, trials=14)
    assert "n50" in kept and len(kept) <= 9 and calls <= 15


# -- sessions -------------------------------------------------------------------------------------------------------


def network(scale: float) -> tuple[onnx.ModelProto, Array]:
    """Three products, of which the second adds what cancels, ``scale`` times as large as what remains."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 128)).astype(np.float32)
    w = {f"w{k}": rng.standard_normal((128, 128)).astype(np.float32) / np.float32(12) for k in range(3)}
    w["w1"][64:] = -w["w1"][:64] + w["w1"][64:] / np.float32(scale)
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
        helper.make_node("Slice", ["a", "zero", "half", "one"], ["a1"], name="cut"),
        helper.make_node("Concat", ["a1", "a1"], ["a2"], name="twice", axis=1),
        helper.make_node("MatMul", ["a2", "w1"], ["b"], name="second[*]"),
        helper.make_node("MatMul", ["b", "w2"], ["y"], name="third"),
    ]
    constants = {**w, "zero": np.array([0]), "half": np.array([64]), "one": np.array([1])}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, x.shape)],
        [helper.make_tensor_value_info("y", 1, x.shape)],
        [numpy_helper.from_array(c, name) for name, c in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), x


@needs_products
def test_a_session_keeps_what_its_sample_asks_for(tmp_path: Path) -> None:
    made, x = network(scale=50.0)
    exact = rv.load(made, providers=["cpu"]).run({"x": x})["y"]

    def error(**options: Any) -> tuple[float, Any]:
        session = rv.load(made, providers=["cpu"], precision="bf16", **options)
        return float(np.abs(session.run({"x": x})["y"] - exact).max() / np.abs(exact).max()), session

    off, _ = error()
    assert off > 0.02
    close, session = error(calibration={"x": x}, max_error=0.02)
    kinds = {n.name: n.precision for n in session.report.nodes}
    assert close <= 0.02 and kinds["second[*]"] == "f32" and "bf16" in kinds.values()
    assert "kept in float32" in session.report.calibration and session.report.calibration in str(session.report)
    np.savez(tmp_path / "sample.npz", x=x)
    again, from_file = error(calibration=tmp_path / "sample.npz", max_error=0.02)
    assert again == close and from_file.config.keep_f32 == session.config.keep_f32


@needs_products
def test_a_sample_that_shows_no_harm_keeps_nothing() -> None:
    made, x = network(scale=1.0)
    with rv.load(made, providers=["cpu"], precision="bf16", calibration={"x": x}, max_error=0.1) as session:
        assert session.config.keep_f32 == () and "error on the sample" in session.report.calibration


@needs_products
def test_samples_that_are_none(tmp_path: Path) -> None:
    made, x = network(scale=1.0)
    (tmp_path / "no.npz").write_text("text")
    with pytest.raises(InvalidConfig, match=r"no \.npz file"):
        rv.load(made, precision="bf16", calibration=str(tmp_path / "no.npz"))
    with pytest.raises(InvalidInput, match="unknown input 'z'"):
        rv.load(made, precision="bf16", calibration={"z": x})
    with pytest.raises(InvalidConfig, match="calibration must be"):
        rv.load(made, precision="bf16", calibration=3)


def test_the_largest_values_of_a_graph() -> None:
    made, x = network(scale=1.0)
    graph = onnx_format.read(made)
    found = largest_values(graph, {graph.inputs[0]: x})
    a = x @ numpy_helper.to_array(made.graph.initializer[0])
    assert found["x"] == np.abs(x).max() and found["a"] == pytest.approx(np.abs(a).max(), rel=1e-5)
    assert found["a2"] == pytest.approx(np.abs(a[:, :64]).max(), rel=1e-5) and set(found) >= {"b", "y"}
    x[0, 0] = np.inf
    assert largest_values(graph, {graph.inputs[0]: x})["a"] == np.inf


@pytest.mark.parametrize(
    ("given", "name"),
    [("float32", "float32"), ("FP32", "float32"), ("bfloat16", "bf16"), (" BF16 ", "bf16"), ("half", "fp16")],
)
def test_spellings(given: str, name: str) -> None:
    assert rv.SessionConfig(precision=given).precision == name


def test_an_unknown_precision() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'bf16'"):
        rv.SessionConfig(precision="bf61")
