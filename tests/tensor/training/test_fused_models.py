"""Files that were optimized for inference learn all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import ranvier as rv
from ranvier import nn, optim

WIDTH, LENGTH, WORDS = 16, 6, 12


def encoder() -> onnx.ModelProto:
    """One layer of an encoder as ONNX Runtime's optimizer writes it."""
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return (draw.standard_normal(shape) * 0.2).astype(np.float32)

    constants = {
        "words": weight(WORDS, WIDTH),
        "positions": weight(LENGTH, WIDTH),
        "gain": 1 + weight(WIDTH),
        "shift": weight(WIDTH),
        "qkv": weight(WIDTH, 3 * WIDTH),
        "qkv_bias": weight(3 * WIDTH),
        "gain2": 1 + weight(WIDTH),
        "shift2": weight(WIDTH),
        "up": weight(WIDTH, 2 * WIDTH),
        "up_bias": weight(2 * WIDTH),
        "head": weight(2 * WIDTH, WORDS),
    }

    def node(op: str, inputs: list[str], outputs: list[str], **attrs: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, outputs, domain="com.microsoft", **attrs)

    nodes = [
        node("EmbedLayerNormalization", ["ids", "", "words", "positions", "", "gain", "shift"], ["e", "m"]),
        node("Attention", ["e", "qkv", "qkv_bias"], ["a"], num_heads=4),
        node("SkipLayerNormalization", ["a", "e", "gain2", "shift2"], ["n"]),
        helper.make_node("MatMul", ["n", "up"], ["h"]),
        node("BiasGelu", ["h", "up_bias"], ["g"]),
        node("FusedMatMul", ["g", "head"], ["y"], alpha=0.5),
    ]
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT32, ["n", LENGTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", LENGTH, WORDS])],
        [onnx.numpy_helper.from_array(a, name) for name, a in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets)


def test_a_fused_encoder_learns_to_turn_words_around(tmp_path: Path) -> None:
    given = encoder()
    model = rv.trainable(given)
    assert {name for name, _ in model.named_parameters()} == {each.name for each in given.graph.initializer}
    ids = np.random.default_rng(1).integers(0, WORDS, (32, LENGTH)).astype(np.int32)
    with rv.load(given, providers=["reference"]) as session:
        np.testing.assert_allclose(model(rv.Tensor(ids)).numpy(), session.run({"ids": ids})["y"], rtol=1e-4, atol=1e-5)
    opt = optim.AdamW(model.parameters(), lr=0.02)

    @rv.jit
    def step(ids: Any, labels: Any) -> rv.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).reshape((-1, WORDS)), labels)
        loss.backward()
        opt.step()
        return loss

    labels = ids[:, ::-1].reshape(-1).astype(np.int64)
    losses = [float(step(ids, labels)) for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    model.export(tmp_path / "learned.onnx")
    with rv.load(tmp_path / "learned.onnx", providers=["reference"]) as session:
        found = session.run({"ids": ids})["y"]
    assert (found.argmax(axis=-1).reshape(-1) == labels).mean() > 0.95
