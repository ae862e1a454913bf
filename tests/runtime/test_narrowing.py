"""What a sample tells about a precision: which nodes stay in float32, and how large values get."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier.codegen.llvm import isa
from ranvier.codegen.llvm.gemm.halves import multiplies_halves
from ranvier.errors import InvalidConfig, InvalidInput
from ranvier.formats import onnx as onnx_format
from ranvier.providers.base import LARGEST_VALUES
from ranvier.providers.cpu.narrow.effective import effective
from ranvier.runtime.compiled import Compiled
from ranvier.runtime.narrowing.by_definition import worked_out
from ranvier.runtime.narrowing.fewest import fewest, measured
from ranvier.runtime.narrowing.pieces import Pieces
from ranvier.runtime.narrowing.search import Search

Array = np.ndarray[Any, Any]
needs_products = pytest.mark.skipif(
    effective("bf16", isa.host())[0] != "bf16", reason="this processor has no bfloat16 products"
)
needs_float16 = pytest.mark.skipif(not multiplies_halves(isa.host()), reason="this processor has no float16 arithmetic")


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


# -- what nodes do, piece by piece -----------------------------------------------------------------------------------


class Adding:
    """Pieces whose nodes' squared errors add up, in the piece and in the results."""

    def __init__(self, pieces: list[dict[str, float]]) -> None:
        self.names = [tuple(piece) for piece in pieces]
        self.harm = {name: harm for piece in pieces for name, harm in piece.items()}
        self.runs = 0

    def made(self, k: int, narrow: Collection[str]) -> float:
        assert set(narrow) <= set(self.names[k])
        return sum(self.harm[name] ** 2 for name in narrow)

    def off(self, k: int, made: float) -> float:
        return made / (k + 1)  # whatever a piece makes has a scale of its own

    def error(self, k: int, made: float) -> float:
        return math.sqrt(made)

    def whole(self, kept: frozenset[str]) -> float:
        self.runs += 1
        return float(sum(h**2 for name, h in self.harm.items() if name not in kept) ** 0.5)

    def found(self, bound: float, work: dict[str, float] | None = None) -> set[str]:
        before = self.whole(frozenset())
        batches = measured(self, work or dict.fromkeys(self.harm, 1.0), bound, before)
        return set(fewest(batches, self.whole, bound, before))


def test_nodes_that_do_harm_are_found_in_their_pieces() -> None:
    harm = {f"n{k}": 1e-4 for k in range(100)} | {"n3": 0.5, "n47": 0.4, "n99": 0.3}
    pieces = Adding([{n: harm[n] for n in list(harm)[k : k + 10]} for k in range(0, 100, 10)])
    kept = pieces.found(bound=0.01)
    assert {"n3", "n47", "n99"} <= kept and len(kept) <= 6
    assert pieces.whole(frozenset(kept)) <= 0.01 and pieces.runs <= 12


def test_of_nodes_that_do_as_much_harm_those_with_less_work_are_kept() -> None:
    pieces = Adding([{"a": 0.5, "b": 0.5}, {"c": 0.5, "d": 0.5}])
    kept = pieces.found(bound=0.75, work={"a": 9.0, "b": 1.0, "c": 1.0, "d": 9.0})
    assert kept == {"b", "c"}


def test_all_nodes_are_kept_where_pieces_show_nothing() -> None:
    class Blind(Adding):
        def made(self, k: int, narrow: Collection[str]) -> float:
            return 0.0

    pieces = Blind([{"a": 1.0, "b": 1.0}, {"c": 1.0}])
    assert pieces.found(bound=0.1) == {"a", "b", "c"}


def test_nodes_that_are_narrow_only_together_are_not_kept_both() -> None:
    class Together(Adding):
        def made(self, k: int, narrow: Collection[str]) -> float:
            return super().made(k, narrow) if {"a", "b"} <= set(narrow) else 0.0

        def whole(self, kept: frozenset[str]) -> float:
            return 0.0 if {"a", "b"} & kept else super().whole(kept)

    assert len(Together([{"a": 1.0, "b": 1.0}, {"c": 1e-3}]).found(bound=0.1)) == 1


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


def in_a_branch(made: onnx.ModelProto) -> onnx.ModelProto:
    """The network as what a branch computes."""
    inner, kind = made.graph, TensorProto.BOOL
    then = helper.make_graph(inner.node, "then", [], inner.output, inner.initializer)
    minus = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["n"])], "else", [], [helper.make_tensor_value_info("n", 1, None)]
    )
    node = helper.make_node("If", ["up"], ["z"], "if", then_branch=then, else_branch=minus)
    inputs = [*inner.input, helper.make_tensor_value_info("up", kind, [])]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("z", 1, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@needs_products
def test_nodes_in_branches_are_told_of_and_kept() -> None:
    made, x = network(scale=50.0)
    feed = {"x": x, "up": np.array(True)}
    exact = rv.load(made, providers=["cpu"]).run({"x": x})["y"]

    def error(**options: Any) -> tuple[float, rv.Session]:
        session = rv.load(in_a_branch(made), providers=["cpu", "reference"], precision="bf16", **options)
        return float(np.abs(session.run(feed)["z"] - exact).max() / np.abs(exact).max()), session

    off, session = error()
    kinds = {name: found.computes for name, found in session.report.precisions.items()}
    assert off > 0.02 and {name for name, kind in kinds.items() if kind == "bf16"} == {"first", "second[*]", "third"}
    assert session.report.by_precision()["bf16"] == 3 and ", 3 bf16" in str(session.report)
    assert [node.name for node in session.report.nodes] == ["if"], "which a provider placed as one"
    close, session = error(calibration=feed, max_error=0.02)
    kinds = {name: found.computes for name, found in session.report.precisions.items()}
    assert close <= 0.02 and kinds["second[*]"] == "f32" and "bf16" in kinds.values()
    assert "kept in float32" in session.report.calibration


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of nodes of the graphs that are compiled from now on."""
    found: list[int] = []
    plain = Compiled.__init__

    def init(self: Compiled, graph: Any, *rest: Any) -> None:
        found.append(len(graph))
        plain(self, graph, *rest)

    monkeypatch.setattr(Compiled, "__init__", init)
    return found


@needs_float16
def test_float16_is_compiled_once_where_it_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = network(scale=1.0)
    compiled = counted(monkeypatch)
    with rv.load(made, providers=["cpu"], precision="fp16", calibration={"x": x}) as session:
        assert session.config.keep_f32 == () and "error on the sample" in session.report.calibration
        assert "fp16" in {n.precision for n in session.report.nodes}
        session.run({"x": x})
    assert len(compiled) == 1


@needs_float16
def test_float16_keeps_the_node_that_does_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = network(scale=300.0)
    exact = rv.load(made, providers=["cpu"]).run({"x": x})["y"]
    compiled = counted(monkeypatch)
    options: dict[str, Any] = {"providers": ["cpu"], "precision": "fp16", "calibration": {"x": x}}
    with rv.load(made, max_error=1.0, **options) as session:
        off = float(np.abs(session.run({"x": x})["y"] - exact).max() / np.abs(exact).max())
    compiled.clear()
    with rv.load(made, max_error=off / 3, **options) as session:
        kinds = {n.name: n.precision for n in session.report.nodes}
        close = float(np.abs(session.run({"x": x})["y"] - exact).max() / np.abs(exact).max())
    assert close <= off / 3 and kinds["second[*]"] == "f32" and "fp16" in kinds.values()
    assert max(compiled) == compiled[0] and len(compiled) < 20


@needs_float16
def test_pieces_of_a_graph_make_what_the_whole_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranvier.runtime.narrowing.pieces._LEAST", 1)
    made, x = network(scale=300.0)
    graph = onnx_format.read(made)
    graph.metadata[LARGEST_VALUES] = worked_out(graph, {graph.inputs[0]: x}).largest
    config = rv.SessionConfig(providers=("cpu",), precision="fp16")
    names = ["first", "second[*]", "third"]
    with (
        rv.load(made, providers=["cpu"]) as session,
        Pieces(graph, session.providers, config, [x], {}, names, {"first"}) as pieces,
    ):
        assert pieces.names == [("first",), ("second[*]",), ("third",)]
        errors = []
        for k, part in enumerate(pieces.names):
            exact = pieces.made(k, ())
            assert pieces.off(k, exact) == pieces.error(k, exact) == 0.0
            narrow = pieces.made(k, part)
            assert 0.0 < pieces.off(k, narrow) < 1.0
            errors.append(pieces.error(k, narrow))
    assert errors[1] > 0.01 > max(errors[0], errors[2])


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


def test_a_graph_worked_out_by_its_definitions() -> None:
    made, x = network(scale=1.0)
    graph = onnx_format.read(made)
    found = worked_out(graph, {graph.inputs[0]: x})
    a = x @ numpy_helper.to_array(made.graph.initializer[0])
    assert found.largest["x"] == np.abs(x).max() and found.largest["a"] == pytest.approx(np.abs(a).max(), rel=1e-5)
    assert found.largest["a2"] == pytest.approx(np.abs(a[:, :64]).max(), rel=1e-5)
    assert found.outputs is not None and set(found.largest) >= {"b", "y"}
    exact = rv.load(made, providers=["cpu"]).run({"x": x})["y"]
    np.testing.assert_allclose(found.outputs[0], exact, rtol=1e-4, atol=1e-4)
    x[0, 0] = np.inf
    assert worked_out(graph, {graph.inputs[0]: x}).largest["a"] == np.inf


def test_what_nodes_with_bodies_make_is_not_worked_out() -> None:
    body = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["z"])], "body", [], [helper.make_tensor_value_info("z", 1, [2])]
    )
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [2]), helper.make_tensor_value_info("c", 9, [])],
        [helper.make_tensor_value_info("a", 1, [2]), helper.make_tensor_value_info("y", 1, [2])],
    )
    read = onnx_format.read(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    given = {read.inputs[0]: np.array([1.0, -3.0], np.float32), read.inputs[1]: np.array(True)}
    found = worked_out(read, given)
    assert found.outputs is None and found.largest == {"x": 3.0, "a": 3.0}


@pytest.mark.parametrize(
    ("given", "name"),
    [("float32", "float32"), ("FP32", "float32"), ("bfloat16", "bf16"), (" BF16 ", "bf16"), ("half", "fp16")],
)
def test_spellings(given: str, name: str) -> None:
    assert rv.SessionConfig(precision=given).precision == name


def test_an_unknown_precision() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'bf16'"):
        rv.SessionConfig(precision="bf61")
