"""Layers that ONNX Runtime's optimizer made part of something larger: they are coded as those of the model it had."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.formats.onnx import read, save
from ranvier.formats.onnx.retarget import retarget
from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing import prepared
from ranvier.runtime.quantizing.samples import results
from ranvier.runtime.quantizing.sites import find_sites
from tests.runtime.test_quantizing_cases import CONFIG, RNG, numbers, quantized, results_elsewhere

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
BATCH, TIME, HEADS, SIZE, PAST = 2, 3, 4, 8, 5
WIDTH, KEYS = HEADS * SIZE, PAST + TIME
LENGTHS = np.array([KEYS, KEYS - 2], np.int32)
OF_KEYS = np.array([[1] * KEYS, [1] * (KEYS - 1) + [0]], np.int32)


def model_of(
    nodes: list[Any], inputs: dict[str, Array], outputs: list[str], weights: dict[str, Array], opset: int = 21
) -> onnx.ModelProto:
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8 if opset < 19 else 10)


def fused(op: str, inputs: str, outputs: str = "y", **attrs: Any) -> onnx.NodeProto:
    names = [name if name != "_" else "" for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), "layer", domain=MICROSOFT, **attrs)


def taken_apart(model: onnx.ModelProto, data: dict[str, Array]) -> Graph:
    """The graph with plain layers, which has the same results and outputs."""
    original, graph = read(model), prepared(read(model), CONFIG)
    assert [value.name for value in graph.outputs] == [value.name for value in original.outputs]
    for expected, found in zip(*(next(iter(results(each, [data], CONFIG))) for each in (original, graph))):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    return graph


def operators(graph: Graph) -> list[str]:
    return [node.op for node in graph]


# -- attention --------------------------------------------------------------------------------------------------------


def attention(given: dict[str, Array], outputs: str = "y", **attrs: Any) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A node with these operands beside data, weights and their bias."""
    data = {"x": RNG.standard_normal((BATCH, TIME, WIDTH)).astype(np.float32), **given}
    sizes = attrs.get("qkv_hidden_sizes") or [WIDTH] * 3
    names = [name if name in given else "_" for name in ("mask", "past", "added")]
    node = fused("Attention", " ".join(["x w b", *names]), outputs, num_heads=HEADS, **attrs)
    weights = {"w": numbers(WIDTH, sum(sizes)), "b": numbers(sum(sizes))}
    return model_of([node], data, outputs.split(), weights), data


def past() -> Array:
    return RNG.standard_normal((2, BATCH, HEADS, PAST, SIZE)).astype(np.float32)


@pytest.mark.parametrize(
    "given, outputs, attrs",
    [
        ({}, "y", {}),
        ({}, "y", {"unidirectional": 1, "scale": 0.3}),
        ({}, "y", {"qkv_hidden_sizes": [WIDTH, WIDTH, 2 * WIDTH]}),
        ({"mask": np.array([TIME, 1], np.int32)}, "y", {}),
        ({"mask": OF_KEYS[:, PAST:]}, "y", {"mask_filter_value": -50.0}),
        ({"added": numbers(1, HEADS, TIME, TIME)}, "y", {}),
        ({"past": past()}, "y present", {"unidirectional": 1}),
        ({"past": past(), "mask": LENGTHS}, "y present", {}),
        ({"past": past(), "mask": OF_KEYS}, "y present", {"unidirectional": 1}),
        ({"past": past(), "mask": OF_KEYS[:, None].repeat(TIME, 1)}, "y present", {}),
        ({"past": past(), "added": numbers(1, HEADS, TIME, KEYS)}, "y present", {}),
        ({"past": past()}, "y", {}),
    ],
)
def test_projection_becomes_a_layer(
    tmp_path: Path, given: dict[str, Array], outputs: str, attrs: dict[str, Any]
) -> None:
    model, data = attention(given, outputs, **attrs)
    graph = taken_apart(model, data)
    assert [(site.name, site.node.op) for site in find_sites(graph)] == [("layer", "MatMul")]
    assert "MultiHeadAttention" in operators(graph)
    retarget(graph, 21)
    save(graph, tmp_path / "apart.onnx")
    elsewhere = onnxruntime.InferenceSession(str(tmp_path / "apart.onnx"))
    for expected, found in zip(next(iter(results(graph, [data], CONFIG))), elsewhere.run(None, data)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "given, outputs, attrs",
    [
        ({}, "y", {"do_rotary": 1}),
        ({}, "y present", {}),  # MultiHeadAttention of other runtimes has none without a past
        ({"mask": np.array([TIME, 2, 0, 0], np.int32)}, "y", {}),  # ends and starts of keys
        ({"mask": np.ones((BATCH, 1, TIME, TIME), np.int32)}, "y", {}),  # of the longest sequence
    ],
)
def test_what_has_no_other_form_stays(given: dict[str, Array], outputs: str, attrs: dict[str, Any]) -> None:
    model, data = attention(given, outputs, **attrs)
    assert operators(taken_apart(model, data)) == ["Attention"]


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4", "gptq", "nf4"])
def test_schemes_code_projections(tmp_path: Path, scheme: str) -> None:
    model, data = attention({"past": past(), "mask": OF_KEYS}, "y present", unidirectional=1)
    made, report = quantized(model, data, scheme=scheme)
    assert [(layer.name, layer.scheme) for layer in report.layers] == [("layer", scheme)]
    expected = next(iter(results(read(model), [data], CONFIG)))
    for one, other in zip(results_elsewhere(made, tmp_path / "q.onnx", data), expected):
        assert np.linalg.norm(one - other) < 0.15 * np.linalg.norm(other)


# -- convolutions and products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation, parameters",
    [("", []), ("Relu", []), ("LeakyRelu", [0.3]), ("Clip", [-0.5, 0.7]), ("HardSigmoid", [0.3, 0.4])],
)
@pytest.mark.parametrize("operands", ["x w", "x w b", "x w b z", "x w _ z"])
def test_convolutions(activation: str, parameters: list[float], operands: str) -> None:
    attrs: dict[str, Any] = {"activation": activation} if activation else {}
    attrs |= {"activation_params": parameters} if parameters else {}
    data = {"x": numbers(1, 8, 9, 9)} | ({"z": numbers(1, 16, 5, 5)} if "z" in operands else {})
    node = fused("FusedConv", operands, pads=[1, 1, 1, 1], strides=[2, 2], **attrs)
    weights = {"w": numbers(16, 8, 3, 3)} | ({"b": numbers(16)} if "b" in operands else {})
    graph = taken_apart(model_of([node], data, ["y"], weights), data)
    assert operators(graph) == ["Conv", *(["Add"] if "z" in operands else []), *([activation] if activation else [])]
    assert [site.name for site in find_sites(graph)] == ["layer"]


@pytest.mark.parametrize(
    "op, attrs, expected",
    [
        ("FusedGemm", {"activation": "Relu", "alpha": 0.5}, ["Gemm", "Relu"]),
        ("FusedGemm", {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1}, ["Gemm", "LeakyRelu"]),
        ("FusedGemm", {"transA": 1, "activation": "Tanh"}, ["Transpose", "Gemm", "Tanh"]),
        ("FusedMatMul", {"alpha": 0.25}, ["MatMul"]),
        ("FusedMatMul", {"transA": 1, "transB": 1}, ["Transpose", "MatMul"]),
        ("TransposeMatMul", {"transB": 1, "alpha": 2.0}, ["MatMul"]),
        ("FusedMatMulActivation", {"activation": "Softmax", "activation_axis": -1}, ["MatMul", "Softmax"]),
    ],
)
def test_products(op: str, attrs: dict[str, Any], expected: list[str]) -> None:
    data = {"x": numbers(32, 6) if attrs.get("transA") else numbers(6, 32)}
    weights = {"w": numbers(48, 32) if attrs.get("transB") else numbers(32, 48)}
    graph = taken_apart(model_of([fused(op, "x w", **attrs)], data, ["y"], weights), data)
    assert operators(graph) == expected
    assert [site.name for site in find_sites(graph)] == ["layer"]
    assert graph.constant_bytes() == weights["w"].nbytes  # what was there before is gone


def test_products_that_share_weights_share_them_still() -> None:
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["a"], "first", domain=MICROSOFT, transB=1),
        helper.make_node("Tanh", ["a"], ["t"]),
        helper.make_node("FusedMatMul", ["t", "w"], ["y"], "second", domain=MICROSOFT, transB=1),
    ]
    data, weights = {"x": numbers(2, 4, 32)}, {"w": numbers(32, 32)}
    graph = taken_apart(model_of(nodes, data, ["y"], weights), data)
    assert len({site.weight for site in find_sites(graph)}) == 1
    assert graph.constant_bytes() == weights["w"].nbytes


def test_products_of_two_inputs_stay() -> None:
    data = {"x": numbers(6, 32), "w": numbers(48, 32)}
    model = model_of([fused("FusedMatMul", "x w", transB=1)], data, ["y"], {})
    assert operators(taken_apart(model, data)) == ["FusedMatMul"]


# -- whole models -----------------------------------------------------------------------------------------------------


def optimized(path: Path, into: Path) -> onnx.ModelProto:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(into)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(into)


def test_an_optimized_model_has_the_layers_of_its_original(tmp_path: Path) -> None:
    source = Path(str(resources.files("ranvier") / "models" / "digits.onnx"))
    data = {"image": RNG.random((4, 1, 8, 8)).astype(np.float32)}
    model = optimized(source, tmp_path / "optimized.onnx")
    assert {node.op_type for node in model.graph.node} & {"FusedConv", "FusedGemm"}
    graph = taken_apart(model, data)
    plain = prepared(read(str(source)), CONFIG)
    assert len(find_sites(graph)) == len(find_sites(plain)) == 3
    made, report = quantized(model, data, scheme="int8", cosine=None)
    assert [layer.scheme for layer in report.layers] == ["int8"] * 3
    assert results_elsewhere(made, tmp_path / "q.onnx", data)[0].shape == (4, 10)


def test_a_normalization_older_than_the_standards_own_is_brought_to_it(tmp_path: Path) -> None:
    """ONNX Runtime writes it into models of any opset; files of quantized models are of opset 19 at least."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "layer"),
        helper.make_node("LayerNormalization", ["a", "s", "o"], ["y"], "norm", axis=-1),
    ]
    data = {"x": numbers(2, 4, 32)}
    model = model_of(nodes, data, ["y"], {"w": numbers(32, 48), "s": numbers(48), "o": numbers(48)}, opset=12)
    graph = taken_apart(model, data)
    assert [(node.op, node.version) for node in graph] == [("MatMul", 13), ("LayerNormalization", 17)]
    made, _ = quantized(model, data, scheme="int8")
    assert len(results_elsewhere(made, tmp_path / "q.onnx", data)) == 1
