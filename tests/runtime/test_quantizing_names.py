"""Names that are there twice, or that what is made would have: reports and results are those of the right values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from ranvier.formats.onnx import read
from ranvier.runtime.quantizing import prepared
from ranvier.runtime.quantizing.options import ALL_SCHEMES
from tests.runtime.test_quantizing_cases import CONFIG, RNG, model_of, numbers, quantized, results_elsewhere

DATA = {"x": RNG.standard_normal((4, 32)).astype(np.float32)}
BODY = (("k", 7, []), ("go", 9, []), ("h", 1, [4, 48]), ("on", 9, []), ("s", 1, [4, 48]))  # operands, then results


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_values_called_like_what_is_made(tmp_path: Path, scheme: str) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["w.codes"], "m"),
        helper.make_node("Tanh", ["w.codes"], ["v1"], "v2"),
        helper.make_node("MatMul", ["v1", "v"], ["v2"], "m.bias"),
        helper.make_node("Add", ["v2", "w.scale"], ["v3"], "add"),
        helper.make_node("Gemm", ["v3", "u", "v1"], ["y"], "last", alpha=0.5),
    ]
    weights = {"w": numbers(32, 48), "v": numbers(48, 32), "w.scale": numbers(4, 32), "u": numbers(32, 48)}
    model = model_of(nodes, {"x": [4, 32]}, ["y"], weights)
    made, report = quantized(model, DATA, scheme=scheme)
    found = results_elsewhere(made, tmp_path / "q.onnx", DATA)[0]
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, DATA)[0]
    bound = {"ternary": 1.0, "int2": 0.9, "uint2": 0.8}.get(scheme, 0.25)
    assert np.linalg.norm(found - expected) < bound * np.linalg.norm(expected)
    names = [value.name for value in made.values()]
    assert len(set(names)) == len(names) and made.outputs[0].name == "y"
    assert {layer.name for layer in report.layers} == {"m", "m.bias", "last"}
    assert len({layer.bytes_after for layer in report.layers}) <= 2  # as many weights, of other shapes
    for layer in report.layers:
        assert layer.error is not None and layer.error > 0 and 0 < layer.bytes_after < layer.bytes_before / 2


def test_nodes_of_one_name_are_told_apart() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "m"),
        helper.make_node("Tanh", ["a"], ["t"], "m"),
        helper.make_node("MatMul", ["t", "v"], ["y"], "m"),
    ]
    model = model_of(nodes, {"x": [4, 32]}, ["y"], {"w": numbers(32, 48), "v": numbers(48, 20)})
    _, report = quantized(model, DATA, scheme="int4", keep=("m",))
    assert [(layer.name, layer.scheme) for layer in report.layers] == [("m", "float32"), ("m.2", "int4")]


def test_results_keep_their_names() -> None:
    """Also those that look like names which passes give."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "c"], ["a"], "first", alpha=2.0, beta=2.0, transA=1),
        helper.make_node("Gemm", ["a", "v"], ["v1"], "last"),
    ]
    weights = {"w": numbers(32, 48), "v": numbers(48, 20)}
    model = model_of(nodes, {"x": [32, 4], "c": [48]}, ["v1"], weights)
    graph = prepared(read(model), CONFIG)
    assert [value.name for value in graph.outputs] == ["v1"]
    assert [value.name for value in quantized(model, {"x": numbers(32, 4), "c": numbers(48)})[0].outputs] == ["v1"]


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4"])
def test_nodes_called_like_what_is_made(tmp_path: Path, scheme: str) -> None:
    """Other runtimes refuse a file with two nodes of one name."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "x.quantize"),
        helper.make_node("Relu", ["a"], ["r"], "x.quantize.sums"),
        helper.make_node("MatMul", ["r", "v"], ["y"], "x.quantize.weight.dequantize"),
    ]
    model = model_of(nodes, {"x": [4, 32]}, ["y"], {"w": numbers(32, 48), "v": numbers(48, 20)})
    made, report = quantized(model, DATA, scheme=scheme)
    found = results_elsewhere(made, tmp_path / "q.onnx", DATA)[0]
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, DATA)[0]
    assert np.linalg.norm(found - expected) < 0.3 * np.linalg.norm(expected)
    assert [layer.name for layer in report.layers] == ["x.quantize", "x.quantize.weight.dequantize"]


def test_nodes_in_bodies_of_old_models(tmp_path: Path) -> None:
    """What had one node in an old opset, and has several in a newer one, has as many names."""
    body = helper.make_graph(
        [
            helper.make_node("Softmax", ["h"], ["s"], "s", axis=0),
            helper.make_node("Identity", ["go"], ["on"], "on"),
        ],
        "body",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in BODY[:3]],
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in BODY[3:]],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "m"),
        helper.make_node("Loop", ["n", "", "a"], ["y"], "loop", body=body),
    ]
    model = model_of(nodes, {"x": [4, 32]}, ["y"], {"w": numbers(32, 48), "n": np.array(2)})
    model.opset_import[0].version = 11
    made, _ = quantized(model, DATA, scheme="int4")
    found = results_elsewhere(made, tmp_path / "q.onnx", DATA)[0]
    np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-5)
