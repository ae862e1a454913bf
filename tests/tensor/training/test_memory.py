"""The estimate of a training step, against counting by hand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.errors import InvalidConfig
from ranvier.formats import onnx as onnx_format
from ranvier.tensor.training.memory import bytes_of_text, estimate_training, optimizer_bytes


def perceptron(layers: int = 3, width: int = 32) -> onnx.ModelProto:
    """Products with a weight of its own each, and a tanh between them."""
    nodes, weights, value = [], [], "x"
    for k in range(layers):
        weights.append(numpy_helper.from_array(np.ones((width, width), np.float32) * 0.1, f"w{k}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{k}"], [f"h{k}"]))
        nodes.append(helper.make_node("Tanh", [f"h{k}"], [f"t{k}" if k < layers - 1 else "y"]))
        value = f"t{k}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", width]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "perceptron", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_of_a_perceptron() -> None:
    found = estimate_training(onnx_format.read(perceptron()), batch=64, optimizer="adam")
    weight, layer = 32 * 32 * 4, 64 * 32 * 4
    assert found.weights == found.learned == found.gradients == 3 * weight
    assert found.optimizer == 2 * 3 * weight
    assert found.inputs == layer
    # a tanh is derived from its result; the last one is an output and belongs to the caller
    assert found.activations == 3 * layer
    assert 2 * layer <= found.working <= 5 * layer
    assert found.total == 3 * weight * 4 + layer + found.working


def test_it_grows_with_the_batch_and_shrinks_with_what_is_frozen() -> None:
    small = estimate_training(onnx_format.read(perceptron()), batch=8)
    large = estimate_training(onnx_format.read(perceptron()), batch=80)
    assert large.activations == 10 * small.activations and large.gradients == small.gradients
    head = estimate_training(onnx_format.read(perceptron()), batch=80, learned=["w2"])
    assert head.gradients == large.gradients // 3 and head.activations < large.activations


def test_what_optimizers_keep() -> None:
    shapes = [(10, 20), (20,)]
    assert optimizer_bytes("sgd", shapes) == 0
    assert optimizer_bytes("momentum", shapes) == 220 * 4
    assert optimizer_bytes("adamw", shapes) == 440 * 4
    assert optimizer_bytes("adafactor", shapes) == (10 + 20 + 20) * 4
    with pytest.raises(InvalidConfig, match="did you mean 'adam'"):
        estimate_training(onnx_format.read(perceptron()), optimizer="adan")


def test_sizes_as_people_write_them() -> None:
    assert [bytes_of_text(x) for x in (7, "7", "1.5 kB", "2GiB")] == [7, 7, 1500, 2 << 30]
    with pytest.raises(InvalidConfig):
        bytes_of_text("much")
