"""``ranvier bench --suite``: with tiny models and runtimes made for the purpose."""

from __future__ import annotations

import fnmatch
import json
import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from bench import models as scripts
from bench.models.__main__ import write
from ranvier.cli import exit_codes, peers
from ranvier.cli.plots.speeds import draw
from ranvier.cli.suites import catalogue, feeds
from ranvier.cli.suites.measure import Prepared, largest_error
from ranvier.cli.suites.results import geometric_mean, summary
from ranvier.errors import InvalidConfig
from ranvier.formats import onnx as onnx_format
from tests.cli.conftest import save_model
from tests.cli.test_profile_plots import check_layout

QUICK = ("--suite", "cpu", "--seconds", "0.02", "--rounds", "2", "--warmup", "0", "--threads", "1", "--only", "own_*")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user's with two models that the catalogue does not know."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("RANVIER_PROVIDERS", "reference")
    monkeypatch.setenv(catalogue.FOLDER_VARIABLE, str(tmp_path / "models"))
    kinds = {"onnxruntime": "Agreeing", "openvino": "Agreeing", "refusing": "Refusing", "sleeping": "Sleeping"}
    for name, kind in {**kinds, "failing": "FailingLater"}.items():
        monkeypatch.setitem(peers.KNOWN, name, ("ranvier", f"fake_peer:{kind}"))
    (tmp_path / "models").mkdir()
    for name in ("own_a", "own_b"):
        node = helper.make_node("Relu", ["x"], ["y"], name="rectify")
        save_model(tmp_path / "models" / f"{name}.onnx", [node], {"x": ["n", 4]}, {"y": ["n", 4]})
    return tmp_path / "models"


def test_whole_suite(call_json, call, folder, tmp_path):
    target, plot = tmp_path / "out" / "results.json", tmp_path / "speeds.svg"
    options = (*QUICK, "--runners", "ranvier,onnxruntime,openvino", "--output", target, "--plot", plot)
    found = call_json("bench", *options)
    assert json.loads(target.read_text()) == found
    assert [c["name"] for c in found["cases"]] == ["own_a", "own_b"]
    for case in found["cases"]:
        (run,) = case["runs"]
        assert list(run["runners"]) == ["ranvier", "onnxruntime", "openvino"] and run["failed"] == {}
        ours = run["runners"]["ranvier"]
        assert ours["error"] == 0.0 and ours["nodes"] == {"reference": 1}
        assert set(ours["speed"]) == {"onnxruntime", "openvino"} and len(ours["round_medians"]) == 2
        assert ours["cold_setup_seconds"] > 0 and ours["setup_seconds"] > 0 and case["weight_bytes"] == 0
    (at,) = found["summary"]["threads"]
    assert at["speed"]["ranvier/onnxruntime"]["models"] == 2 and at["nodes"] == {"reference": 2}
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    text = call("bench", *options, "--resume").stdout
    assert "times the speed of onnxruntime (geometric mean of 2 models)" in text and "0%" in text
    assert json.loads(target.read_text()) == found  # nothing was measured again


def test_results_are_kept_after_every_case(call, folder, tmp_path, monkeypatch):
    from ranvier.cli import bench_suite

    target = tmp_path / "results.json"
    options = (*QUICK, "--runners", "onnxruntime", "--output", target)
    real = bench_suite._measure_case
    monkeypatch.setattr(
        bench_suite, "_measure_case", lambda case, *rest: 1 / 0 if case.name == "own_b" else real(case, *rest)
    )
    assert isinstance(call("bench", *options).exception, ZeroDivisionError)
    first = json.loads(target.read_text())["cases"]
    assert [c["name"] for c in first] == ["own_a"]
    monkeypatch.setattr(bench_suite, "_measure_case", real)
    assert call("bench", *options, "--resume").exit_code == 0
    second = json.loads(target.read_text())["cases"]
    assert [c["name"] for c in second] == ["own_a", "own_b"] and second[0] == first[0]
    other = call("bench", *options, "--resume", "--seed", "7")
    assert other.exit_code == exit_codes.USAGE and "other settings" in other.stderr


def test_failures_do_not_stop_the_suite(call_json, folder):
    (folder / "own_broken.onnx").write_bytes(b"no model at all")
    found = call_json("bench", *QUICK, "--runners", "onnxruntime,openvino,refusing,failing", "--only", "own_[!a]*")
    reasons = {(f["case"], f["runner"]): f["reason"] for f in found["summary"]["failures"]}
    assert set(reasons) == {("own_b", "refusing"), ("own_b", "failing")}
    assert "beyond me" in reasons["own_b", "refusing"] and "enough is enough" in reasons["own_b", "failing"]
    assert list(found["summary"]["unmeasured"]) == ["own_broken"]
    assert found["summary"]["threads"][0]["speed"]["openvino/onnxruntime"]["models"] == 1


def test_a_runner_that_does_not_answer_is_given_up(call_json, folder):
    found = call_json("bench", *QUICK, "--runners", "sleeping", "--budget", "0.1", "--only", "own_a")
    (failure,) = found["summary"]["failures"]
    assert failure["reason"] == "no answer within 0.1 s"


def test_wrong_results_are_found(call, folder, monkeypatch):
    monkeypatch.setitem(peers.KNOWN, "onnxruntime", ("ranvier", "fake_peer:Wrong"))
    result = call("bench", *QUICK, "--runners", "ranvier,onnxruntime", "--only", "own_a")
    assert result.exit_code == exit_codes.CHECK_FAILED and "WRONG: own_a (1 thread)" in result.stdout


def test_warm_runs_are_compared_too(call_json, folder, monkeypatch):
    monkeypatch.setitem(peers.KNOWN, "ranvier", ("ranvier", "fake_peer:WrongLater"))
    options = ("--runners", "ranvier,onnxruntime", "--only", "own_a")
    found = call_json("bench", *QUICK, *options, code=exit_codes.CHECK_FAILED)
    assert [w["case"] for w in found["summary"]["wrong"]] == ["own_a"]


def test_peers_alone(call, folder):
    result = call("bench", *QUICK, "--runners", "onnxruntime,openvino", "--only", "own_a")
    assert result.exit_code == 0 and "openvino has" in result.stdout and "ranvier has" not in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--runners", "onnxrunner"), "did you mean 'onnxruntime'"),
        (("--models", "reel"), "did you mean 'real'"),
        (("--threads", "0"), "not a list of numbers"),
        (("--only", "no_such_model"), "no model of the suite fits"),
        (("--resume",), "--output"),
    ],
)
def test_wrong_use(call, folder, options, message):
    result = call("bench", *QUICK, *options)
    assert result.exit_code == exit_codes.USAGE and message in result.stderr


def test_help_and_list(call, call_json, folder, tmp_path):
    assert "--suite" in call("bench", "--help").stdout
    assert "--runners" in call("bench", "--suite", "cpu", "--help").stdout
    found = call_json("bench", "--suite", "cpu", "--list", "--built", tmp_path)
    names = {c["name"]: c for c in found["cases"]}
    assert {"own_a", "ppocr_v4_rec", "light_resnet50", "gpt2_small_decode"} <= set(names)
    assert names["mlp_b256"]["inputs"] == {"x": "normal 256x784"}


# -- the catalogue --------------------------------------------------------------------------------------------------


def test_every_description_makes_values():
    rows = catalogue._table()
    assert {row["group"] for row in rows} == set(catalogue.GROUPS)
    assert len({row["name"] for row in rows}) == len(rows)
    rng = np.random.default_rng(0)
    for row in rows:
        for description in row["inputs"].values():
            feeds.parse(description)(rng)


def test_built_models_can_be_built():
    files = {row["file"] for row in catalogue._table() if row["group"] != "real"}
    assert files == {f"{name}.onnx" for name in scripts.names()}


def test_packaged_models_are_found_without_a_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(catalogue.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    inside = tmp_path / "model-packages" / "magika" / "models" / "standard_v3_3" / "model.onnx"
    inside.parent.mkdir(parents=True)
    inside.write_bytes(b"")
    (case,) = catalogue.cases(["real"], ["magika*"], tmp_path)
    assert case.path == inside
    (absent,) = catalogue.cases(["real"], ["dtln_1"], tmp_path)
    assert absent.path is None and catalogue.FOLDER_VARIABLE in absent.missing


# -- inputs ---------------------------------------------------------------------------------------------------------


def test_kinds_of_inputs():
    def made(text):
        return feeds.parse(text)(np.random.default_rng(3))

    assert made("normal(0.1) 2x500").std() == pytest.approx(0.1, rel=0.1)
    uniform = made("uniform(-1, 1) 1000")
    assert uniform.min() < -0.9 and uniform.max() > 0.9
    assert set(made("integers(2, 5) 100")) == {2, 3, 4}
    assert made("constant(16000) scalar") == 16000 and made("constant(1) 0x2").shape == (0, 2)
    assert made("counting(512) 1x3").tolist() == [[512, 513, 514]]
    assert (made("one_hot 2x6x5").sum(-1) == 1).all()
    boxes = made("boxes(640) 1x84x8400")
    assert (boxes[:, 2:4] > 0).all() and 20 < (boxes[:, 4:] > 0.25).sum() < 500


@pytest.mark.parametrize("text", ["normal", "normal 1xx3", "nrmal 1x3", "normal(0.1)1x3"])
def test_what_is_no_description(text):
    with pytest.raises(InvalidConfig):
        feeds.parse(text)


def test_an_input_without_axes(branching):
    made = feeds.make(onnx_format.read(str(branching)), {"c": "constant(1) scalar"})
    assert made["c"].shape == () and made["c"].dtype == np.bool_


def test_inputs_of_a_model(two_inputs):
    graph = onnx_format.read(str(two_inputs))
    made = feeds.make(graph, {"a": "constant(2) 3x2"})
    assert made["a"].dtype == np.float32 and made["b"].shape[1] == 2  # the second is made up
    both = feeds.make(graph, {"[ab]": "normal 3x2"}, seed=1)
    again = feeds.make(graph, {"[ab]": "normal 3x2"}, seed=1)
    assert all((both[name] == again[name]).all() for name in "ab")


# -- sums -----------------------------------------------------------------------------------------------------------


def entry(name, ratio, error=0.0, best=None):
    ours = {
        "speed": {"onnxruntime": {"ratio": ratio, "best": best or ratio}},
        "error": error,
        "cold_setup_seconds": 4.0,
    }
    figures = {"setup_seconds": 2.0, "peak_bytes": 10, "nodes": {"cpu": 3, "reference": 1}}
    theirs = {
        "speed": {"ranvier": {"ratio": 1 / ratio, "best": 1 / (best or ratio)}},
        "error": 0.0,
        "setup_seconds": 2.0,
        "peak_bytes": 5,
    }
    runners = {"ranvier": ours | figures, "onnxruntime": theirs}
    run = {"threads": 1, "load_average": 0.5, "runners": runners, "failed": {}}
    return {"name": name, "group": "real", "tolerance": 1e-3, "runs": [run]}


def test_summary():
    found = summary([entry("a", 2.0), entry("b", 0.5), entry("c", 1.0, "NaN"), entry("d", 0.95, 0.1)], [1])
    (at,) = found["threads"]
    assert at["speed"]["ranvier/onnxruntime"]["geometric_mean"] == pytest.approx(0.95**0.25)
    assert at["slower"] == ["b"] and [w["case"] for w in at["worst"]] == ["b", "d", "c", "a"]
    assert at["setup_cold"] == pytest.approx(2.0) and at["setup_cached"] == pytest.approx(1.0)
    assert at["more_memory"] == 4 and at["nodes"] == {"cpu": 12, "reference": 4}
    assert [w["case"] for w in found["wrong"]] == ["c", "d"]
    assert geometric_mean([]) is None and at["unsteady"] == []


def test_disturbed_measurements_are_named():
    (at,) = summary([entry("calm", 2.0, best=1.9), entry("shaken", 9.5, best=2.2)], [1])["threads"]
    assert at["unsteady"] == ["shaken"] and at["best"] == pytest.approx((1.9 * 2.2) ** 0.5)


def test_error():
    def found(case, *outputs):
        prepared = Prepared(case, Path("m"), {}, ("y",), 0, 1)
        return largest_error({"y": np.array([1.0, 4.0])}, {"y": np.array(outputs)}, prepared)

    case = catalogue.Case("m", "real", None)
    assert found(case, 1.0, 4.0) == 0.0 and found(case, 1.0, 5.0) == pytest.approx(0.2)
    assert found(case, 4.0, 1.0) > 0.5 and found(replace(case, any_order=True), 4.0, 1.0) == 0.0


def test_picture():
    cases = [entry(f"model_{k}", ratio) for k, ratio in enumerate([0.001, 0.3, 1.0, 1.9, 400.0])]
    cases.append({"name": "absent", "group": "built", "tolerance": 1e-3, "problem": "there is no such file"})
    for case in cases[:-1]:
        for figures in case["runs"][0]["runners"].values():
            figures["median_seconds"] = 0.0123
    settings = {"runners": ["ranvier", "onnxruntime"], "threads": [1], "seconds": 1.0}
    machine = {"model_name": "a processor", "machine": "x", "cores": 2}
    canvas = draw({"cases": cases, "settings": settings, "machine": machine})
    check_layout(canvas)
    text = canvas.svg()
    assert "0.001×" in text and "400×" in text and "not measured" in text and "model_3: ranvier" in text


# -- models that are built ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mobilenet_v2", "yolo_640", "light_squeezenet"])
def test_models_are_valid_and_always_the_same(name):
    model = scripts.make(name)
    onnx.checker.check_model(model, full_check=True)
    assert not [n for n in model.graph.node if n.op_type == "ConstantOfShape"]
    weights = {t.name: t for t in model.graph.initializer}
    again = {t.name: t for t in scripts.make(name).graph.initializer}
    assert weights.keys() == again.keys()
    assert all(weights[n].raw_data == again[n].raw_data for n in fnmatch.filter(weights, "*1*"))


def test_models_are_written_once(tmp_path, capsys):
    assert write(tmp_path, ["light_squeezenet"]) == []
    assert "light_squeezenet" in capsys.readouterr().err
    assert write(tmp_path, ["light_squeezenet"]) == [] and capsys.readouterr().err == ""
    (tmp_path / "light_squeezenet.stamp").write_text("older scripts")
    assert write(tmp_path, ["light_squeezenet"]) == [] and "light_squeezenet" in capsys.readouterr().err
    assert write(tmp_path, ["no_such"]) != [] and sorted(p.suffix for p in tmp_path.iterdir()) == [".onnx", ".stamp"]
