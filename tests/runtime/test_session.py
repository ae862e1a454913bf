"""Sessions: running, selecting, binding sizes, limits, threads, profiles, and what happens at the end."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier.errors import (
    Cancelled,
    DeadlineExceeded,
    DimensionMismatch,
    DTypeMismatch,
    InvalidConfig,
    InvalidInput,
    InvalidValue,
    ProviderUnavailable,
    ResourceLimit,
    SessionClosed,
    ShapeMismatch,
    UnsupportedOp,
)

RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 3)).astype(np.float32)


def model(text: str, **initializers: np.ndarray) -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    parsed.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in initializers.items())
    return parsed


def two_outputs() -> onnx.ModelProto:
    return model("g (float[n,4] x) => (float[n,3] y, float[n,4] z) { h = MatMul(x, w) y = Relu(h) z = Neg(x) }", w=W)


def endless() -> onnx.ModelProto:
    return model(
        """g (float[k] x) => (float[k] y) {
            m = Constant <value_int: int = 9000000000000000000> ()
            t = Constant <value = bool {1}> ()
            y = Loop (m, t, x) <body = b (int64 i, bool c, float[k] v) => (bool d, float[k] u) {
                d = Identity(c) u = Add(v, v) }>
        }"""
    )


def x(rows: int = 2) -> np.ndarray:
    return RNG.standard_normal((rows, 4)).astype(np.float32)


def test_dict_in_dict_out() -> None:
    with rv.load(two_outputs()) as session:
        given = x()
        out = session.run({"x": given})
        assert list(out) == ["y", "z"]
        np.testing.assert_allclose(out["y"], np.maximum(given @ W, 0), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(session.run([given])["z"], -given)
        assert str(session.inputs["x"]) == "float32[n, 4]" and str(session.outputs["y"]) == "float32[n, 3]"


def test_a_domain_that_is_listed_and_not_used_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ranvier.passes.gradient_operator", None)  # whoever imports it fails
    listed = two_outputs()
    listed.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    with rv.load(listed) as session:
        assert set(session.run({"x": x()})) == set(session.outputs)


def test_selected_outputs_run_only_what_they_need() -> None:
    with rv.load(two_outputs()) as session, session.profile() as profile:
        assert list(session.run({"x": x()}, outputs=["z"])) == ["z"]
    assert [e.op for e in profile.events if e.op != "run"] == ["Neg"]
    with pytest.raises(InvalidInput, match=r"no output 'q'"):
        rv.load(two_outputs()).run({"x": x()}, outputs=["q"])


def test_constant_outputs_stand_among_computed_ones_and_belong_to_the_caller() -> None:
    text = """g (float[n,4] x) => (float[2] first, float[n,3] y, float[2] middle, float[n,4] z, float[2] last) {
        h = MatMul(x, w) y = Relu(h) z = Neg(x) }"""
    kept = {name: RNG.standard_normal(2).astype(np.float32) for name in ("first", "middle", "last")}
    with rv.load(model(text, w=W, **kept)) as session:
        assert session.bind(n=2)._direct is not None  # the short way, which every run but the first one takes
        for _ in range(3):
            given = x()
            out = session.run({"x": given})
            assert list(out) == ["first", "y", "middle", "z", "last"]
            np.testing.assert_allclose(out["y"], np.maximum(given @ W, 0), rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(out["z"], -given)
            for name, expected in kept.items():
                np.testing.assert_array_equal(out[name], expected)
                out[name][:] = np.nan  # of the caller: the next run gives the constant again
        target = np.empty(2, np.float32)
        out = session.run({"x": given}, into={"middle": target, "z": np.empty((2, 4), np.float32)})
        np.testing.assert_array_equal(out["middle"], kept["middle"])
        np.testing.assert_array_equal(out["z"], -given)


def test_outputs_that_are_inputs_are_copies() -> None:
    with rv.load(model("g (float[n,4] x) => (float[n,4] x, float[n,4] y) { y = Neg(x) }")) as session:
        for _ in range(3):
            given = x()
            out = session.run({"x": given})
            np.testing.assert_array_equal(out["x"], given)
            np.testing.assert_array_equal(out["y"], -given)
            assert not np.shares_memory(out["x"], given)


def test_arrays_of_any_layout_give_the_same_at_every_call() -> None:
    """Also those after the first, which are not looked at as long."""
    source = model("g (float[6,4] x) => (float[6,3] y) { y = MatMul(x, w) }", w=W)
    plain = x(6)
    moved = np.zeros(plain.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(6, 4)
    moved[:] = plain
    wide = np.repeat(plain, 2, axis=1)
    shapes = [plain, wide[:, ::2], np.asfortranarray(plain), plain[::-1][::-1], moved, plain]
    with rv.load(source) as session:
        drop_in = rv.InferenceSession(source)
        for given in shapes * 2:
            np.testing.assert_allclose(session.run({"x": given})["y"], plain @ W, rtol=1e-5)
            for names in (None, ["y"]):
                np.testing.assert_allclose(drop_in.run(names, {"x": given})[0], plain @ W, rtol=1e-5)


def test_every_size_gets_a_plan_and_old_ones_go() -> None:
    with rv.load(two_outputs(), plan_cache=3) as session:
        for rows in (1, 2, 4, 7, 5, 1, 0):
            given = x(rows)
            np.testing.assert_allclose(session.run({"x": given})["y"], np.maximum(given @ W, 0), rtol=1e-5, atol=1e-6)
        assert len(session._compiled.plans()) == 3
        assert session.bind(n=8).output_bytes() == 8 * (3 + 4) * 4
        with pytest.raises(InvalidConfig, match="no dimension 'm'"):
            session.bind(m=8)


def test_values_between_nodes_share_an_arena() -> None:
    text = "g (float[n] x) => (float[n] y) { a = Exp(x) b = Neg(a) c = Exp(b) y = Neg(c) }"
    with rv.load(model(text), providers=["reference"], optimization="none") as session:
        plan = session.bind(n=1000)
        assert plan.memory.total >= 3 * 4000 and plan.memory.total > plan.memory.arena > 0


def test_generated_code_works_in_the_arena() -> None:
    text = "g (float[n,n] x) => (float[n,n] y) { a = MatMul(x, x) y = MatMul(a, x) }"
    with rv.load(model(text)) as session:
        plan = session.bind(n=64)
        assert plan.memory.arena >= 64 * 64 * 4  # the first product
        session.run({"x": np.eye(64, dtype=np.float32)})
        assert session.memory().arenas_waiting == plan.memory.arena
        session.trim()
        assert session.memory().arenas_waiting == 0


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({}, InvalidInput, r"input 'x' is missing: expected float32\[n, 4\]"),
        ({"X": np.zeros((1, 4), np.float32)}, InvalidInput, r"unknown input 'X' \(did you mean 'x'\?\)"),
        ({"x": np.zeros((1, 4))}, DTypeMismatch, r"input 'x': expected float32\[n, 4\], got float64\[1, 4\]"),
        ({"x": np.zeros((1, 5), np.float32)}, ShapeMismatch, r"expected float32\[n, 4\], got float32\[1, 5\]"),
        ({"x": np.zeros(4, np.float32)}, ShapeMismatch, r"got float32\[4\]"),
        ({"x": None}, InvalidInput, "input 'x' is None"),
        ({"x": object()}, InvalidInput, "input 'x': cannot make a tensor of object"),
        ({"x": [[1, 2], [3]]}, DTypeMismatch, "input 'x': cannot make a float32 tensor"),
        ([], InvalidInput, "0 inputs given, the model takes 1"),
        (5, InvalidInput, "must be a mapping"),
    ],
)
def test_wrong_inputs_are_named(inputs, error, message) -> None:
    with pytest.raises(error, match=message):
        rv.load(two_outputs()).run(inputs)


def test_plain_lists_take_the_models_element_type() -> None:
    assert rv.load(two_outputs()).run({"x": [[1, 2, 3, 4]]})["z"].dtype == np.float32


def test_the_order_of_onnx_runtime_is_told_from_ours() -> None:
    with pytest.raises(InvalidInput, match=r"run\(inputs, outputs\)"):
        rv.load(two_outputs()).run(None, {"x": np.zeros((1, 4), np.float32)})  # type: ignore[arg-type]


def test_one_symbol_has_one_size() -> None:
    session = rv.load(model("g (float[n] a, float[n] b) => (float[n] y) { y = Add(a, b) }"))
    with pytest.raises(DimensionMismatch, match=r"dimension 'n' \(axis 0\) is 3, but 2 in input 'a'"):
        session.run({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)})


# -- stopping a run -------------------------------------------------------------------------------------------------


def test_a_deadline_ends_an_endless_loop() -> None:
    given = {"x": np.ones(2, np.float32)}
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"limit of 0.2 s"):
        rv.load(endless()).run(given, options=rv.RunOptions(timeout=0.2))
    with pytest.raises(DeadlineExceeded):
        rv.load(endless(), limits=rv.Limits(run_seconds=0.2)).run(given)
    assert time.monotonic() - started < 5


def test_cancelling_from_another_thread() -> None:
    options = rv.RunOptions()
    timer = threading.Timer(0.2, lambda: setattr(options, "terminate", True))
    timer.start()
    with pytest.raises(Cancelled, match="cancelled"):
        rv.load(endless()).run({"x": np.ones(2, np.float32)}, options=options)
    timer.join()


def test_memory_limits() -> None:
    grow = """g (float[n] x) => (float[m] y) {
        a = Concat <axis=0> (x, x) b = Concat <axis=0> (a, a) y = Concat <axis=0> (b, b) }"""
    with pytest.raises(ResourceLimit, match="memory_bytes"):
        rv.load(model(grow), limits=rv.Limits(memory_bytes=10_000)).run({"x": np.zeros(1000, np.float32)})
    with pytest.raises(ResourceLimit, match="tensor_bytes"):
        rv.load(model(grow), limits=rv.Limits(tensor_bytes=20_000)).run({"x": np.zeros(1000, np.float32)})
    rv.load(model(grow), limits=rv.Limits(memory_bytes=100_000)).run({"x": np.zeros(1000, np.float32)})


# -- many threads ---------------------------------------------------------------------------------------------------


def test_one_session_from_many_threads() -> None:
    with rv.load(two_outputs(), plan_cache=2) as session:

        def work(seed: int) -> bool:
            given = np.random.default_rng(seed).standard_normal((seed % 5 + 1, 4)).astype(np.float32)
            out = session.run({"x": given})
            return np.allclose(out["y"], np.maximum(given @ W, 0), rtol=1e-5, atol=1e-6) and np.array_equal(
                out["z"], -given
            )

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(400)))


def test_arenas_are_counted_while_many_threads_run() -> None:
    """Each run has one of its own, none is lost, and those that wait go when they are asked to."""
    source = model("g (float[64,4] x) => (float[64,1] y) { h = MatMul(x, w) s = Softmax(h) y = ReduceMax(s) }", w=W)
    with rv.load(source, threads=1) as session:
        given = x(64)
        expected = session.run({"x": given})["y"]
        arena = session.bind().memory.arena
        assert arena and session.memory().arenas_waiting == arena

        def work(_: int) -> bool:
            return all(np.array_equal(session.run({"x": given})["y"], expected) for _ in range(200))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
        assert session.memory().arenas_in_use == 0
        assert session.memory().arenas_waiting in [arena * count for count in range(1, 9)]
        session.trim()
        assert session.memory().arenas_waiting == session.memory().arenas_in_use == 0


# -- looking at it, and the end -------------------------------------------------------------------------------------


def test_profile_writes_a_trace(tmp_path: Path) -> None:
    session = rv.load(two_outputs(), optimization="none", providers=["reference"])
    with session.profile(tmp_path / "trace.json") as profile:
        session.run({"x": x()})
    session.run({"x": x()})
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["cat"] for e in trace if e["ph"] == "X"]
    assert sorted(names) == ["MatMul", "Neg", "Relu", "run"]
    assert {row.op for row in profile.summary()} == {"MatMul", "Neg", "Relu"}
    assert sum(row.share for row in profile.summary()) == pytest.approx(1)


def test_a_trace_shows_the_kernels_inside_a_part(tmp_path: Path) -> None:
    session = rv.load(two_outputs(), optimization="none", providers=["cpu"])
    with session.profile(tmp_path / "trace.json") as profile:
        session.run({"x": x()})
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [e for e in trace if e["ph"] == "X"]
    whole = [e for e in shown if e["cat"] in ("run", "3 nodes")]
    kernels = [e for e in shown if e not in whole]
    # some instruction sets have a kernel more for a product of three columns, which copies those apart
    assert len(whole) == 2 and {e["args"]["op"] for e in kernels} == {"MatMul + Relu", "Neg"}
    outer = min(whole, key=lambda e: e["dur"])
    for kernel in kernels:
        assert kernel["args"]["kernel"] and kernel["args"]["provider"] == "cpu" and kernel["args"]["threads"] >= 1
        assert outer["ts"] <= kernel["ts"] and kernel["ts"] + kernel["dur"] <= outer["ts"] + outer["dur"]
    assert {row.op for row in profile.summary()} == {e["args"]["kernel"] for e in kernels}
    assert sum(row.share for row in profile.summary()) == pytest.approx(1)


def test_the_report_says_where_everything_ran() -> None:
    session = rv.load(two_outputs())
    assert {n.provider for n in session.report.nodes} == {"cpu"}
    assert session.report.nodes_loaded == 3 and set(session.report.seconds) == {"load", "optimize", "compile"}
    assert "on cpu" in str(session.report)
    json.dumps(session.report.to_dict())


def test_sizes_known_at_load_are_prepared_at_load() -> None:
    session = rv.load(model("g (float[2,4] x) => (float[2,3] y) { y = MatMul(x, w) }", w=W))
    assert "generate" in session.report.seconds and len(session._compiled.plans()) == 1


def test_what_one_provider_declines_the_next_one_takes() -> None:
    made = model("g (string[n] s, float[n] x) => (string[n] t, float[n] y) { t = StringNormalizer(s) y = Neg(x) }")
    session = rv.load(made)
    assert {n.op: n.provider for n in session.report.nodes} == {"StringNormalizer": "reference", "Neg": "cpu"}
    declined = next(n.declined for n in session.report.nodes if n.op == "StringNormalizer")
    assert [who for who, _ in declined] == ["cpu"]
    with pytest.raises(UnsupportedOp, match="StringNormalizer") as caught:
        rv.load(made, providers=["cpu"])
    assert [m.op for m in caught.value.missing] == ["StringNormalizer"]
    with pytest.raises(UnsupportedOp, match="StringNormalizer"):
        rv.load(made, fallback="off")
    assert rv.load(made, providers=["CPUExecutionProvider"]).report.providers == ("cpu", "reference")


def test_debug_levels_show_more_and_more_of_generated_code(capsys) -> None:
    shown = []
    for level in range(5):
        session = rv.load(two_outputs(), debug=level, optimization="none", providers=["cpu"])
        session.bind(n=2)
        session.run({"x": x()})
        shown.append(capsys.readouterr().err)
    assert shown[0] == ""
    assert "cpu        MatMul" in shown[1] and "GFLOP/s" not in shown[1]
    assert "GFLOP/s" in shown[2] and "of peak" in shown[2] and "h + y" in shown[2]


def test_debug_levels_show_more_and_more(capsys) -> None:
    shown = []
    for level in range(4):
        rv.load(two_outputs(), debug=level, optimization="none", providers=["reference"]).run({"x": x()})
        shown.append(capsys.readouterr().err)
    assert shown[0] == ""
    assert "reference  MatMul" in shown[1] and "GFLOP/s" not in shown[1]
    assert "GFLOP/s" in shown[2] and "def relu" not in shown[2]
    assert "def relu" in shown[3]


def test_a_closed_session_says_so() -> None:
    session = rv.load(two_outputs())
    session.run({"x": x()})
    session.close()
    session.close()
    with pytest.raises(SessionClosed):
        session.run({"x": x()})


def test_unsupported_operators_are_listed_all_at_once() -> None:
    nodes = [
        helper.make_node("Strange", ["x"], ["a"], name="s1", domain="nowhere"),
        helper.make_node("Odd", ["a"], ["b"], name="o1", domain="nowhere"),
        helper.make_node("Strange", ["b"], ["y"], name="s2", domain="nowhere"),
    ]
    io = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy"]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("nowhere", 1)]
    with pytest.raises(UnsupportedOp) as caught:
        rv.load(helper.make_model(helper.make_graph(nodes, "g", io[:1], io[1:]), opset_imports=opsets))
    assert [(m.op, m.nodes) for m in caught.value.missing] == [("Strange", ("s1", "s2")), ("Odd", ("o1",))]
    assert "nowhere::Strange-1 at 's1', 's2'" in str(caught.value)


def test_an_error_in_a_node_names_it() -> None:
    session = rv.load(model("g (float[4] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }"))
    with pytest.raises(InvalidValue, match="out of range") as caught:
        session.run({"x": np.zeros(4, np.float32), "i": np.array([9])})
    assert any("Gather 'y'" in note for note in caught.value.__notes__)


# -- options --------------------------------------------------------------------------------------------------------


def test_unknown_options_and_providers() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown option 'optimisation' \(did you mean 'optimization'\?\)"):
        rv.load(two_outputs(), optimisation="none")
    with pytest.raises(InvalidConfig, match="optimization cannot be 'fast'"):
        rv.load(two_outputs(), optimization="fast")
    with pytest.raises(InvalidConfig, match=r"unknown provider 'refrence' \(did you mean 'reference'\?\)"):
        rv.load(two_outputs(), providers=["refrence"])
    with pytest.raises(ProviderUnavailable, match="ROCMExecutionProvider"):
        rv.load(two_outputs(), providers=["ROCMExecutionProvider"])
    with pytest.raises(InvalidConfig, match="unknown pass"):
        rv.load(two_outputs(), disabled_passes=["no_such_pass"])
    with pytest.raises(InvalidConfig, match="symbol_bounds"):
        rv.load(two_outputs(), symbol_bounds={"q": (1, 2)})


def test_a_listed_provider_that_is_absent_is_passed_over_with_a_warning(caplog) -> None:
    wanted = ["ROCMExecutionProvider", "CPUExecutionProvider"]
    session = rv.load(two_outputs(), providers=wanted)
    assert session.report.providers == ("cpu", "reference")
    assert "ROCMExecutionProvider" in session.report.fallbacks[0]
    with pytest.raises(ProviderUnavailable, match="ROCMExecutionProvider"):
        rv.load(two_outputs(), providers=wanted, fallback="off")


def test_environment_sets_defaults(monkeypatch) -> None:
    monkeypatch.setenv("RANVIER_OPTIMIZATION", "none")
    assert rv.load(two_outputs()).report.optimization == "none"
    assert rv.load(two_outputs(), optimization="basic").report.optimization == "basic"
    monkeypatch.setenv("RANVIER_THREADS", "many")
    with pytest.raises(InvalidConfig, match="RANVIER_THREADS"):
        rv.load(two_outputs())


# -- control flow ---------------------------------------------------------------------------------------------------


def test_branches_capture_values_of_enclosing_graphs() -> None:
    session = rv.load(
        model(
            """g (bool c, float[n] x) => (float[n] y) {
                h = Neg(x)
                y = If (c) <
                    then_branch = t () => (float[n] a) { a = If (c) <
                        then_branch = t2 () => (float[n] b) { b = Add(h, x) },
                        else_branch = e2 () => (float[n] d) { d = Identity(h) }> },
                    else_branch = e () => (float[n] f) { f = Mul(h, x) }>
            }"""
        )
    )
    given = np.float32([1, 2, 3])
    np.testing.assert_array_equal(session.run({"c": True, "x": given})["y"], np.zeros(3, np.float32))
    np.testing.assert_array_equal(session.run({"c": False, "x": given})["y"], -given * given)


def test_a_loop_collects_scan_outputs_also_for_no_steps() -> None:
    session = rv.load(
        model(
            """g (int64 m, float[n] x) => (float[n] y, float[k,n] all) {
                t = Constant <value = bool {1}> ()
                y, all = Loop (m, t, x) <body = b (int64 i, bool c, float[n] v) => (bool d, float[n] u, float[n] s) {
                    d = Identity(c) u = Add(v, v) s = Identity(u) }>
            }"""
        )
    )
    out = session.run({"m": 3, "x": np.float32([1])})
    assert out["y"] == 8 and out["all"].ravel().tolist() == [2, 4, 8]
    none = session.run({"m": 0, "x": np.float32([1])})
    assert none["y"] == 1 and none["all"].shape[0] == 0
