"""Products that do more than operators with codes can: they are coded all the same, with the rest beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from ranvier.formats.onnx import read
from ranvier.runtime.quantizing import prepared
from ranvier.runtime.quantizing.options import ALL_SCHEMES
from tests.runtime.test_quantizing_cases import CONFIG, RNG, model_of, numbers, quantized, results_elsewhere

Array = np.ndarray[Any, Any]
BOUNDS = {"ternary": 0.7, "int2": 0.6, "uint2": 0.5}


def check(model: Any, data: dict[str, Array], path: Path, scheme: str) -> Any:
    """All layers are coded, another runtime reads the model, and it computes what it should."""
    made, report = quantized(model, data, scheme=scheme)
    found = results_elsewhere(made, path, data)[0]
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, data)[0]
    assert np.linalg.norm(found - expected) < BOUNDS.get(scheme, 0.15) * np.linalg.norm(expected)
    assert report.layers and all(layer.scheme == scheme and layer.error is not None for layer in report.layers)
    assert report.bytes_after < report.bytes_before
    return made, report


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_an_input_that_is_added_is_added_still(tmp_path: Path, scheme: str) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], "m"), helper.make_node("Add", ["a", "c"], ["y"], "add")]
    model = model_of(nodes, {"x": [4, 32], "c": [1, 48]}, ["y"], {"w": numbers(32, 48)})
    data = {"x": RNG.standard_normal((4, 32)).astype(np.float32), "c": numbers(1, 48)}
    made, _ = check(model, data, tmp_path / "q.onnx", scheme)
    assert [node.op for node in made][-1] == "Add"


@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4", "fp8", "awq"])
@pytest.mark.parametrize(
    "attrs, bias",
    [
        ({"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}, (48,)),
        ({"alpha": 3.0}, None),
        ({"beta": 0.5, "transB": 1}, (4, 48)),
        ({"transA": 1}, (4, 1)),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_whatever_a_gemm_does(
    tmp_path: Path, scheme: str, attrs: dict[str, Any], bias: tuple[int, ...] | None, given: bool
) -> None:
    """``given``: its bias is an input of the model."""
    x = RNG.standard_normal((32, 4) if attrs.get("transA") else (4, 32)).astype(np.float32)
    data, weights = {"x": x}, {"w": numbers(48, 32) if attrs.get("transB") else numbers(32, 48)}
    if bias is not None:
        (data if given else weights)["c"] = numbers(*bias) + np.float32(1)
    operands = ["x", "w"] if bias is None else ["x", "w", "c"]
    nodes = [helper.make_node("Gemm", operands, ["a"], "dense", **attrs), helper.make_node("Tanh", ["a"], ["y"], "t")]
    inputs = {name: list(array.shape) for name, array in data.items()}
    model = model_of(nodes, inputs, ["y"], weights)
    _, report = check(model, data, tmp_path / "q.onnx", scheme)
    assert report.bytes_before == sum(array.nbytes for array in weights.values())
    factor = 4 if given and "beta" in attrs else 0
    assert prepared(read(model), CONFIG).constant_bytes() == report.bytes_before + factor


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_batch_of_one_matrix_is_a_matrix(tmp_path: Path, scheme: str) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Tanh", ["a"], ["t"], "tanh"),
        helper.make_node("MatMul", ["t", "w"], ["y"], "second"),
    ]
    model = model_of(nodes, {"x": [3, 4, 32]}, ["y"], {"w": numbers(1, 32, 32)})
    made, _ = check(model, {"x": RNG.standard_normal((3, 4, 32)).astype(np.float32)}, tmp_path / "q.onnx", scheme)
    assert sum("codes" in name for name in made.constants) == 1
