"""Gradients through quantization against what they are defined to be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ranvier as rv
from ranvier import nn, optim
from ranvier.dtypes import of
from ranvier.graph.ir import Graph
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.passes.differentiate import differentiate
from tests.passes.gradient_tools import r, run


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("code", [np.int8, np.uint8])
def test_straight_through(axis: int | None, code: Any) -> None:
    x = r(3, 40, low=-3.0, high=3.0).astype(np.float32)
    scale = np.array([0.02, 0.01, 0.03] if axis == 0 else 0.015, np.float32)
    zero = np.array([3, -20, 0] if axis == 0 else 5, np.int64).astype(code)
    graph = Graph("q", opsets={"": 21})
    given = [graph.add_input(n, TensorType(of(a), a.shape)) for n, a in (("x", x), ("scale", scale))]
    offset = graph.add_constant(ConstTensor.of(zero))
    op = GraphOps(graph, None, "", complete)
    attrs = {} if axis is None else {"axis": axis}
    codes = op.node("QuantizeLinear", [*given, offset], attrs).output
    y = op.node("DequantizeLinear", [codes, given[1], offset], attrs).output
    seed = graph.add_input("seed", TensorType(of(x), x.shape))
    grads = differentiate(graph, [(y, seed)], given)
    graph.outputs = [g for g in grads if g is not None]
    weights = r(3, 40, seed=4).astype(np.float32)
    by_x, by_scale = run(graph, {"x": x, "scale": scale, "seed": weights})
    step, shift = (a.reshape(3, 1).astype(np.float64) if axis == 0 else a.astype(np.float64) for a in (scale, zero))
    places = np.round(x / step) + shift
    low, high = np.iinfo(code).min, np.iinfo(code).max
    inside = (places >= low) & (places <= high)
    assert 0 < inside.sum() < inside.size
    np.testing.assert_allclose(by_x, weights * inside, rtol=1e-5)
    lost = weights * (np.clip(places, low, high) - shift - inside * (x / step))
    np.testing.assert_allclose(by_scale, lost.sum(axis=1) if axis == 0 else lost.sum(), rtol=1e-3, atol=1e-3)


def through_codes(x: Any, scale: Any, zero: Any, domain: str, attrs: dict[str, Any]) -> list[Any]:
    """Gradients of numbers and scales, of the sum of what codes stand for weighed by ``seed``."""
    graph = Graph("q", opsets={"": 21, "com.microsoft": 1})
    given = [graph.add_input(n, TensorType(of(a), a.shape)) for n, a in (("x", x), ("scale", scale))]
    op = GraphOps(graph, None, "", complete)
    codes = op.node("QuantizeLinear", [*given, zero], attrs, domain=domain).output
    y = op.node("DequantizeLinear", [codes, given[1], zero], attrs, domain=domain).output
    seed = graph.add_input("seed", TensorType(of(x), x.shape))
    grads = differentiate(graph, [(y, seed)], given)
    graph.outputs = [g for g in grads if g is not None]
    return run(graph, {"x": x, "scale": scale, "seed": r(*x.shape, seed=4).astype(np.float32)})


def test_blocks() -> None:
    """A scale gets what its block loses; the last block is not full."""
    x = r(3, 10, low=-3.0, high=3.0).astype(np.float32)
    scale = r(3, 4, low=0.01, high=0.03).astype(np.float32)
    by_x, by_scale = through_codes(x, scale, np.zeros((3, 4), np.int8), "", {"axis": 1, "block_size": 3})
    weights = r(3, 10, seed=4).astype(np.float32)
    step = np.repeat(scale, 3, axis=1)[:, :10].astype(np.float64)
    places = np.round(x / step)
    inside = (places >= -128) & (places <= 127)
    assert 0 < inside.sum() < inside.size
    np.testing.assert_allclose(by_x, weights * inside, rtol=1e-5)
    lost = weights * (np.clip(places, -128, 127) - inside * (x / step))
    expected = np.add.reduceat(lost, [0, 3, 6, 9], axis=1)
    np.testing.assert_allclose(by_scale, expected, rtol=1e-3, atol=1e-3)


def test_floating_point_codes() -> None:
    x = np.array([[0.3, -5.0, 3.0, 1.1], [-0.2, 0.7, -2.0, 4.9]], np.float32)
    scale = np.float32(0.01)
    by_x, by_scale = through_codes(x, scale, np.zeros((), ml_dtypes.float8_e4m3fn), "", {})
    weights = r(2, 4, seed=4).astype(np.float32)
    inside = np.abs(x / scale) <= 448
    codes = np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert 0 < inside.sum() < inside.size
    np.testing.assert_allclose(by_x, weights * inside, rtol=1e-5)
    np.testing.assert_allclose(by_scale, (weights * (codes - inside * (x / scale))).sum(), rtol=1e-3, atol=1e-3)


def test_the_early_form() -> None:
    x, scale, zero = r(3, 5).astype(np.float32), np.float32(0.01), np.int8(4)
    for early, now in zip(*(through_codes(x, scale, zero, domain, {}) for domain in ("com.microsoft", ""))):
        np.testing.assert_array_equal(early, now)


def test_a_quantized_model_learns() -> None:
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((4, 2)).astype(np.float32)
    constants = {"w": weight, "s": np.float32(0.02), "z": np.int8(0), "t": np.float32(0.05), "u": np.uint8(128)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "t", "u"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "t", "u"], ["xd"]),
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["wq"]),
        helper.make_node("DequantizeLinear", ["wq", "s", "z"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items()],
    )
    model = rv.trainable(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    assert [name for name, _ in model.named_parameters()] == ["w"]
    x = draw.standard_normal((64, 4)).astype(np.float32)
    target = x @ (weight + 0.3)
    opt = optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)

    @rv.jit
    def step(x: Any, t: Any) -> rv.Tensor:
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), t)
        loss.backward()
        opt.step()
        return loss

    losses = [float(step(x, target)) for _ in range(60)]
    assert losses[-1] < 0.02 * losses[0]
