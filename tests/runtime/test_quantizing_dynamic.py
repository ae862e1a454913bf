"""Activations that are rounded by the range they have when they come."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from ranvier.errors import InvalidConfig
from ranvier.formats.onnx import read
from ranvier.formats.onnx.retarget import retarget
from ranvier.quantize import Integers
from ranvier.runtime.quantizing import Quantization, Quantizer, prepared
from ranvier.runtime.quantizing.dynamic import DYNAMIC, dynamic_sites, quantize_dynamic
from ranvier.runtime.quantizing.samples import results
from tests.runtime.test_quantizing_cases import CONFIG, RNG, model_of, numbers, quantized, results_elsewhere
from tests.runtime.test_quantizing_recurrent import FEEDS, recurrent

Array = np.ndarray[Any, Any]


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def rounded(x: Array) -> Array:
    """What 8 bits over the range of ``x``, zero among it, leave of it: the standard's definition, in double."""
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    step = np.float32((np.float32(high) - np.float32(low)) / np.float32(255)) or np.float32(1)
    zero = np.clip(np.rint(-np.float32(low) / step), 0, 255)
    return np.asarray((np.clip(np.rint(x / step) + zero, 0, 255) - zero) * np.float64(step))


def attention() -> Any:
    """Three products of the same data, one with a bias of its own, and one that shares weights with another."""
    nodes = [
        helper.make_node("Gemm", ["x", "q", "b"], ["a"], "query", transB=1),
        helper.make_node("MatMul", ["x", "k"], ["c"], "key"),
        helper.make_node("Add", ["a", "c"], ["s"], "sum"),
        helper.make_node("MatMul", ["s", "k"], ["y"], "again"),
    ]
    weights = {"q": numbers(48, 48), "k": numbers(48, 48), "b": numbers(48)}
    return model_of(nodes, {"x": ["n", 48]}, ["y"], weights)


def test_a_model_without_samples(tmp_path: Path) -> None:
    model, x = attention(), normal(6, 48)
    graph = prepared(read(model), CONFIG)
    made, report = Quantizer(graph, [], Quantization(DYNAMIC), CONFIG).run()
    kinds = Counter(node.op for node in made)
    assert kinds["MatMulInteger"] == 3 and kinds["DynamicQuantizeLinear"] == 2  # x is rounded once for both
    assert len({id(node.inputs[1]) for node in made if node.op == "MatMulInteger"}) == 2
    assert {layer.scheme for layer in report.layers} == {DYNAMIC} and not report.samples
    (theirs,) = results_elsewhere(made, tmp_path / "q.onnx", {"x": x})
    ((ours,),) = results(made, [{"x": x}], CONFIG)
    ((original,),) = results(read(model), [{"x": x}], CONFIG)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert 1e-4 < np.linalg.norm(ours - original) / np.linalg.norm(original) < 0.03


@given(
    signed=st.booleans(),
    per_channel=st.booleans(),
    turned=st.booleans(),
    shift=st.sampled_from([-3.0, 0.0, 3.0]),
    rows=st.integers(1, 5),
)
def test_products_are_those_of_rounded_operands(
    signed: bool, per_channel: bool, turned: bool, shift: float, rows: int
) -> None:
    rng = np.random.default_rng(rows)
    w, b = (rng.standard_normal(size).astype(np.float32) for size in ((24, 16), (24,)))
    x = (rng.standard_normal((rows, 16)) + shift).astype(np.float32)
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], "layer", transB=int(turned))
    graph = read(model_of([node], {"x": ["n", 16]}, ["y"], {"w": w if turned else w.T.copy(), "b": b}))
    quantize_dynamic(dynamic_sites(graph), signed=signed, per_channel=per_channel)
    (layer,) = (node for node in graph if node.op == "MatMulInteger")
    assert layer.inputs[1] is not None and layer.inputs[1].const is not None
    assert layer.inputs[1].const.numpy().dtype == (np.int8 if signed else np.uint8)
    ((found,),) = results(graph, [{"x": x}], CONFIG)
    weights = Integers(8, True, "channel" if per_channel else "tensor").quantize(w).dequantize().astype(np.float64)
    np.testing.assert_allclose(found, rounded(x) @ weights.T + b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spatial", [1, 2])
@pytest.mark.parametrize("signed, per_channel", [(True, True), (False, False)])
def test_convolutions(tmp_path: Path, spatial: int, signed: bool, per_channel: bool) -> None:
    """Padding is zero, whatever code zero has."""
    attrs = {"pads": [1] * (2 * spatial), "strides": [2] * spatial, "group": 2}
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], "conv", **attrs)
    weights = {"w": numbers(12, 16, *[3] * spatial), "b": numbers(12)}
    shape = [2, 32, *[7] * spatial]
    model, x = model_of([node], {"x": shape}, ["y"], weights), normal(*shape) + np.float32(1)
    graph = read(model)
    sites = dynamic_sites(graph)
    assert [site.name for site in sites] == ["conv"]
    quantize_dynamic(sites, signed=signed, per_channel=per_channel)
    retarget(graph, graph.opsets[""])  # what was added came in its newest version
    ((original,),) = results(read(model), [{"x": x}], CONFIG)
    ((ours,),) = results(graph, [{"x": x}], CONFIG)
    assert np.linalg.norm(ours - original) < 0.02 * np.linalg.norm(original)
    (theirs,) = results_elsewhere(graph, tmp_path / "q.onnx", {"x": x})
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_convolutions_of_short_sums_stay() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "d"], ["a"], "depthwise", group=32, pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["a", "p"], ["y"], "pointwise"),
    ]
    weights = {"d": numbers(32, 1, 3, 3), "p": numbers(48, 32, 1, 1)}
    model = model_of(nodes, {"x": [1, 32, 6, 6]}, ["y"], weights)
    made, report = quantized(model, {"x": normal(1, 32, 6, 6)}, scheme=DYNAMIC)
    assert [layer.name for layer in report.layers] == ["pointwise"]
    assert [node.op for node in made if "Conv" in node.op] == ["Conv", "ConvInteger"]


def test_recurrent_layers_too(tmp_path: Path) -> None:
    made, report = Quantizer(recurrent(tmp_path), FEEDS, Quantization(DYNAMIC, slower=1e9), CONFIG).run()
    assert {node.op for node in made} >= {"DynamicQuantizeLSTM", "MatMulInteger"}
    assert {layer.name: layer.scheme for layer in report.layers} == {"lstm": DYNAMIC, "dense": DYNAMIC}


def test_layers_that_hurt_stay() -> None:
    """A channel a thousand times as large as the others leaves those with few codes."""
    nodes = [helper.make_node("MatMul", ["x", "v"], ["a"], "good"), helper.make_node("Mul", ["a", "s"], ["b"], "scale")]
    nodes.append(helper.make_node("MatMul", ["b", "w"], ["y"], "bad"))
    scale = np.ones(32, np.float32)
    scale[3] = 1000.0
    second = numbers(32, 24)
    second[3] = 0.0
    model = model_of(nodes, {"x": [8, 48]}, ["y"], {"v": numbers(48, 32), "s": scale, "w": second})
    data = {"x": normal(8, 48)}
    _, all_coded = quantized(model, data, scheme=DYNAMIC)
    _, report = quantized(model, data, scheme=DYNAMIC, max_error=0.05)
    assert all_coded.difference.error > 0.05 >= report.difference.error
    assert {layer.name: layer.scheme for layer in report.layers} == {"good": DYNAMIC, "bad": "float32"}


def test_weights_that_are_no_numbers_are_named() -> None:
    weights = numbers(32, 24)
    weights[3, 4] = np.inf
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"], "broken")], {"x": [2, 32]}, ["y"], {"w": weights})
    with pytest.raises(InvalidConfig) as raised:
        quantized(model, {"x": normal(2, 32)}, scheme=DYNAMIC)
    assert any("'broken'" in note for note in raised.value.__notes__)
