"""8-bit models with recurrent layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from ranvier.errors import InvalidConfig
from ranvier.formats.onnx import read, save
from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing import Quantization, Quantizer
from ranvier.runtime.quantizing.recurrent import find_recurrent
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.samples import results
from tests.exact_peer import exact
from tests.runtime.test_quantizing_layers import CONFIG

RNG = np.random.default_rng(7)
WIDTH, HIDDEN, STEPS = 24, 48, 5
FEEDS = [{"x": RNG.standard_normal((STEPS, 2, WIDTH)).astype(np.float32)} for _ in range(4)]


def recurrent(tmp_path: Any, direction: str = "forward", dense: bool = True, **attrs: Any) -> Graph:
    """A recurrent layer and a product behind its last state."""
    both = 2 if direction == "bidirectional" else 1
    weights = {
        "w": RNG.standard_normal((both, 4 * HIDDEN, WIDTH)) * 0.3,
        "r": RNG.standard_normal((both, 4 * HIDDEN, HIDDEN)) * 0.2,
        "b": RNG.standard_normal((both, 8 * HIDDEN)) * 0.1,
        "d": RNG.standard_normal((HIDDEN, 16)) * 0.2,
    }
    nodes = [
        helper.make_node(
            "LSTM", ["x", "w", "r", "b"], ["all", "h"], "lstm", hidden_size=HIDDEN, direction=direction, **attrs
        )
    ]
    outputs = ["all", "h"]
    if dense:
        nodes.append(helper.make_node("MatMul", ["h", "d"], ["y"], "dense"))
        outputs = ["all", "y"]
    else:
        weights.pop("d")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [STEPS, 2, WIDTH])],
        [helper.make_tensor_value_info(name, 1, None) for name in outputs],
        [helper.make_tensor(n, 1, w.shape, w.astype(np.float32).tobytes(), raw=True) for n, w in weights.items()],
    )
    path = tmp_path / "m.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return read(str(path))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("dense", [True, False])
def test_recurrent_layers_are_coded(tmp_path: Any, direction: str, dense: bool) -> None:
    graph = recurrent(tmp_path, direction, dense)
    expected = list(results(graph, FEEDS, CONFIG))
    made, report = Quantizer(graph, FEEDS, Quantization(slower=1e9), CONFIG).run()
    assert [layer.name for layer in report.layers] == (["dense", "lstm"] if dense else ["lstm"])
    assert {layer.scheme for layer in report.layers} == {"int8"}
    layer = next(layer for layer in report.layers if layer.name == "lstm")
    assert layer.bytes_after < 0.3 * layer.bytes_before
    found = list(results(made, FEEDS, CONFIG))
    assert 1e-4 < difference(found, expected).error < 0.05
    save(made, tmp_path / "q.onnx")
    other = exact(tmp_path / "q.onnx")
    for feed, arrays in zip(FEEDS, expected):
        for array, original in zip(other.run(None, feed), arrays):
            assert difference([[array]], [[original]]).error < 0.05


def test_layers_that_stay(tmp_path: Any) -> None:
    """Those whose gates are not the usual ones, those that are asked for, and those that hurt."""
    assert not find_recurrent(recurrent(tmp_path, input_forget=1))
    assert not find_recurrent(recurrent(tmp_path, clip=3.0))
    assert not find_recurrent(recurrent(tmp_path, activations=["Sigmoid", "Relu", "Tanh"]))
    with pytest.raises(InvalidConfig, match="no layer of this model"):
        Quantizer(recurrent(tmp_path, dense=False, clip=3.0), FEEDS, Quantization(), CONFIG)
    _, asked = Quantizer(recurrent(tmp_path), FEEDS, Quantization(slower=1e9, keep=("ls*",)), CONFIG).run()
    assert {layer.name: layer.reason for layer in asked.layers} == {"dense": "", "lstm": "asked for"}
    near = Quantization(slower=1e9, max_error=0.003)
    made, report = Quantizer(recurrent(tmp_path), FEEDS, near, CONFIG).run(force=True)
    assert next(layer.reason for layer in report.layers if layer.name == "lstm") == "it hurt the results"
    assert report.difference.error <= 0.003 and find_recurrent(made)


def test_layers_that_share_weights_share_their_codes(tmp_path: Any) -> None:
    weights = {
        "w": RNG.standard_normal((1, 4 * HIDDEN, HIDDEN)) * 0.2,
        "r": RNG.standard_normal((1, 4 * HIDDEN, HIDDEN)) * 0.2,
    }
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["a", ""], "first", hidden_size=HIDDEN),
        helper.make_node("Squeeze", ["a", "directions"], ["s"]),
        helper.make_node("LSTM", ["s", "w", "r"], ["y", ""], "second", hidden_size=HIDDEN),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [STEPS, 2, HIDDEN])],
        [helper.make_tensor_value_info("y", 1, None)],
        [
            *(helper.make_tensor(n, 1, w.shape, w.astype(np.float32).tobytes(), raw=True) for n, w in weights.items()),
            helper.make_tensor("directions", 7, [1], [1]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    feeds = [{"x": RNG.standard_normal((STEPS, 2, HIDDEN)).astype(np.float32)}]
    _, report = Quantizer(read(model), feeds, Quantization(slower=1e9), CONFIG).run()
    assert [layer.scheme for layer in report.layers] == ["int8", "int8"]
    assert report.bytes_after < 0.3 * report.bytes_before
