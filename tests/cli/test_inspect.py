"""``ranvier inspect``."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import onnx
from onnx import TensorProto, helper

from ranvier.cli import exit_codes

from .conftest import WHEEL, save_model


def test_facts(call, call_json, dense):
    found = call_json("inspect", dense)
    assert found["opsets"] == {"ai.onnx": 21} and found["node_count"] == 4
    assert found["inputs"] == {"x": "float32[batch, 4]"} and found["outputs"] == {"y": "float32[batch, 5]"}
    assert found["parameters"] == 25 and found["parameter_bytes"] == 100
    assert {o["op"]: o["count"] for o in found["operators"]} == {"MatMul": 1, "Add": 1, "Relu": 1, "Softmax": 1}
    assert found["file_bytes"] == dense.stat().st_size and found["unsupported"] == []
    text = call("inspect", dense).stdout
    assert "float32[batch, 4]" in text and "MatMul" in text and "opset" in text


def test_sizes_bind_types_and_work(call_json, dense):
    small, large = (call_json("inspect", dense, "--set", f"batch={n}") for n in (1, 10))
    assert large["outputs"] == {"y": "float32[10, 5]"}
    assert large["estimated_flops"] == 10 * small["estimated_flops"]


def test_text(call, call_json, dense):
    result = call("inspect", dense, "--text")
    assert result.stdout.startswith("graph small(%x: float32[batch, 4])") and "# rectify" in result.stdout
    assert call_json("inspect", dense, "--text")["text"] == result.stdout.rstrip("\n")


def test_nodes(call, call_json, branching):
    nodes = call_json("inspect", branching, "--nodes")["nodes"]
    assert {n["name"] for n in nodes} == {"choose", "inner_Neg", "inner_Abs"}
    assert "inner_Abs" in call("inspect", branching, "--nodes").stdout


def test_level_shows_the_optimized_graph(call_json, tmp_path):
    nodes = [
        helper.make_node("Identity", ["x"], ["i"], name="useless"),
        helper.make_node("Relu", ["i"], ["y"], name="useful"),
    ]
    path = save_model(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]})
    assert call_json("inspect", path)["node_count"] == 2
    assert call_json("inspect", path, "--level", "none")["node_count"] == 2
    assert call_json("inspect", path, "--level", "aggressive")["node_count"] <= 2


def test_memory(call, call_json, tmp_path):
    nodes = [helper.make_node("Softplus", [f"v{k}"], [f"v{k + 1}"], name=f"n{k}") for k in range(6)]
    path = save_model(tmp_path / "chain.onnx", nodes, {"v0": ["n", 100]}, {"v6": ["n", 100]})
    options = ("--set", "n=16", "--level", "none")
    memory = call_json("inspect", path, "--memory", *options, "--provider", "reference")["memory"]
    assert memory["sizes"] == {"n": 16} and memory["unplanned"] == []
    assert memory["planned"] == 5 and memory["all_tensors_bytes"] == 5 * 16 * 100 * 4
    assert memory["lower_bound_bytes"] <= memory["arena_bytes"] < memory["all_tensors_bytes"]
    assert memory["output_bytes"] == 16 * 100 * 4
    assert memory["weight_bytes"] == memory["weight_bytes_used"]
    assert memory["run_bytes"] == memory["weight_bytes_used"] + memory["arena_bytes"] + memory["output_bytes"]
    fused = call_json("inspect", path, "--memory", *options)["memory"]
    assert fused["arena_bytes"] == 0 and fused["output_bytes"] == 16 * 100 * 4
    assert call_json("inspect", path, "--memory")["memory"]["chosen"] == {"n": 1}
    assert "lower bound" in call("inspect", path, "--memory").stdout


def test_check(call, call_json, dense, tmp_path):
    assert all(not c["problem"] for c in call_json("inspect", dense, "--check")["checks"])
    # readable, but its declared output type contradicts what the node gives
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="r")]
    wrong = save_model(tmp_path / "wrong.onnx", nodes, {"x": [2]}, {"y": (TensorProto.INT64, [2])})
    found = call_json("inspect", wrong, "--check", code=exit_codes.CHECK_FAILED)
    assert found["checks"][0]["problem"] and not found["checks"][1]["problem"]
    assert call("inspect", tmp_path, "--check").exit_code == exit_codes.INVALID_MODEL


def test_svg_holds_every_node(call, branching, dense, tmp_path):
    for model, names in ((branching, ("choose", "inner_Neg", "inner_Abs")), (dense, ("multiply", "normalise"))):
        target = tmp_path / "graph.svg"
        assert call("inspect", model, "--svg", target).exit_code == 0
        root = ET.fromstring(target.read_text())
        titles = " ".join(t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title"))
        assert all(name in titles for name in names)


def test_svg_to_stdout(call, dense):
    result = call("inspect", dense, "--svg", "-")
    assert result.exit_code == 0 and ET.fromstring(result.stdout).tag.endswith("svg")
    assert call("inspect", dense, "--svg", "-", "--json").exit_code == exit_codes.USAGE


def test_models_of_the_wheel(call_json, tmp_path):
    model = WHEEL / "light" / "light_squeezenet.onnx"
    found = call_json("inspect", model, "--svg", tmp_path / "s.svg")
    proto = onnx.load(model)
    assert found["node_count"] == sum(n.op_type != "Constant" for n in proto.graph.node)
    text = (tmp_path / "s.svg").read_text()
    ET.fromstring(text)
    assert all(n.output[0] in text for n in proto.graph.node if n.op_type != "Constant")
