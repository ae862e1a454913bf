"""``ranvier explain`` and ``profile`` of a model over two memories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import helper

from ranvier.cli import exit_codes
from tests.cli.conftest import save_model
from tests.cli.pictures import of_class, read_html

SPLIT = ("--provider", "sim,reference", "--level", "none", "--option", "provider_options.sim.ops=MatMul,Add")


@pytest.fixture
def listed(dense: Path) -> Path:
    """MatMul, Add, Relu, Softmax over a free batch: the first two go to ``sim``."""
    return dense


def test_text(call, listed):
    text = call("explain", listed, *SPLIT).stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "sim", "2"] in [words[:3] for words in lines]
    assert ["cpu", "→", "sim:0", "1", "float32[batch,"] in [words[:5] for words in lines]
    (reason,) = (line for line in text.splitlines() if "does not have the operator" in line and "Relu, Softmax" in line)
    assert reason.split()[0] == "sim" and " 2 " in reason


def test_sizes_that_are_set_give_bytes(call, call_json, listed):
    assert [t["bytes"] for t in call_json("explain", listed, *SPLIT)["transfers"]] == [None, None]
    found = call_json("explain", listed, *SPLIT, "--set", "batch=8")
    assert [(t["source"], t["target"], t["bytes"]) for t in found["transfers"]] == [
        ("cpu", "sim:0", 8 * 4 * 4),
        ("sim:0", "cpu", 8 * 5 * 4),
    ]
    assert "128 B" in call("explain", listed, *SPLIT, "--set", "batch=8").stdout
    assert call("explain", listed, "--set", "bach=8").exit_code == exit_codes.USAGE


def test_costs_are_predicted_for_the_sizes_that_are_set(call, call_json, listed):
    few, many = (call_json("explain", listed, *SPLIT, "--set", f"batch={n}")["predicted"] for n in (1, 100_000))
    assert 0 < few["seconds"] < many["seconds"] and set(few["sources"]) == {"sim", "reference"}
    assert [o["reason"] for o in many["options"][2]] == ["this accelerator does not have the operator", "chosen"]
    assert "parts; predicted" in call("explain", listed, *SPLIT).stdout


def test_json_holds_what_is_drawn(call_json, listed):
    found = call_json("explain", listed, *SPLIT)
    assert found["model"] == str(listed) and found["providers"] == ["sim", "reference"]
    assert [p["provider"] for p in found["parts"]][:2] == ["sim", "reference"]
    assert found["declined"][0]["count"] == 2 and found["moved"] == [] and found["fallbacks"] == []
    assert {"name", "op", "provider", "part", "inputs", "outputs", "types", "declined"} <= set(found["nodes"][0])


def test_pictures(call, listed, tmp_path):
    svg, page = tmp_path / "a" / "graph.svg", tmp_path / "graph.html"
    result = call("explain", listed, *SPLIT, "--svg", svg, "--html", page)
    assert result.exit_code == 0 and "placement" in result.stdout and f"wrote {svg}" in result.stderr
    assert len(of_class(svg.read_text("utf-8"), "node")) == 4
    assert of_class(svg.read_text("utf-8"), "part")[0].element.get("data-provider") == "sim"
    root = read_html(page.read_text("utf-8"))
    assert root.all("h1")[0].text == listed.name
    assert len([g for g in root.all("g") if g.attrs.get("class") == "node"]) == 4


def test_a_picture_on_stdout_is_alone_there(call, listed):
    result = call("explain", listed, *SPLIT, "--svg", "-")
    assert len(of_class(result.stdout, "node")) == 4
    read_html(call("explain", listed, *SPLIT, "--html", "-").stdout)
    for both in (("--svg", "-", "--html", "-"), ("--svg", "-", "--json")):
        assert call("explain", listed, *both).exit_code == exit_codes.USAGE


def test_parts_beyond_the_first_are_listed_when_asked(call, tmp_path):
    nodes = [helper.make_node("Abs" if k % 2 else "Relu", [f"v{k}"], [f"v{k + 1}"]) for k in range(50)]
    model = save_model(tmp_path / "long.onnx", nodes, {"v0": [2]}, {"v50": [2]})
    options = ("--provider", "sim,reference", "--level", "none", "--option", "provider_options.sim.ops=Relu")
    short, whole = call("explain", model, *options).stdout, call("explain", model, *options, "--nodes").stdout
    assert "and 30 more (--nodes lists all)" in short and "lists all" not in whole
    assert len(whole.splitlines()) > len(short.splitlines()) + 60


def test_profile_lists_transfers(call, call_json, listed, tmp_path):
    trace = tmp_path / "trace.json"
    options = (*SPLIT, "--set", "batch=8", "--repeat", 3)
    found = call_json("profile", listed, *options, "-o", trace)
    assert [(t["from"], t["to"], t["transfers_per_run"], t["bytes_per_run"]) for t in found["transfers"]] == [
        ("cpu", "sim:0", 1, 128),
        ("sim:0", "cpu", 1, 160),
    ]
    moves = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "transfer"]
    assert [e["args"]["bytes"] for e in moves] == [128, 160] * 3
    rows = [line.split() for line in call("profile", listed, *options).stdout.splitlines()]
    assert ["cpu", "→", "sim:0", "1", "1", "128", "B"] in [words[:7] for words in rows]
    assert call_json("profile", listed, "--provider", "reference")["transfers"] == []
