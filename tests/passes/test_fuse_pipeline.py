"""Fusion at its place in the whole pipeline, on models of older opsets: what was folded and modernised then fuses."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import onnx
import pytest

from ranvier.formats.onnx import read, to_proto
from ranvier.graph import Graph, verify
from ranvier.passes import default_passes, passes_for
from ranvier.passes.evaluate import Evaluator
from ranvier.passes.fuse import fusion_passes
from tests.passes.fuse_tools import Sketch, random_feeds

TIME, WIDTH, HEADS = 6, 16, 2
SIZE = WIDTH // HEADS


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) / 4).astype(np.float32)


def linear(s: Sketch, x: str, seed: int) -> str:
    return s.Add(s.MatMul(x, weights(WIDTH, WIDTH, seed=seed)), weights(WIDTH, seed=seed))


def layer_norm(s: Sketch, x: str) -> str:
    d = s.Sub(x, s.ReduceMean(x, axes=[-1]))
    variance = s.ReduceMean(s.Pow(d, 2.0), axes=[-1])
    return s.Add(s.Mul(s.Div(d, s.Sqrt(s.Add(variance, 1e-5))), weights(WIDTH)), weights(WIDTH, seed=1))


def heads(s: Sketch, x: str, seed: int, perm: tuple[int, ...]) -> str:
    """The split into heads as a traced model computes it: sizes read from shapes, one by one."""
    y = linear(s, x, seed)
    batch, time = (s.Unsqueeze(s.Gather(s.Shape(y), np.array(k)), axes=[0]) for k in (0, 1))
    return s.Transpose(s.Reshape(y, s.Concat(batch, time, [HEADS], [SIZE], axis=0)), perm=perm)


def transformer(opset: int) -> onnx.ModelProto:
    s = Sketch(opset=opset)
    x = s.input("x", ["batch", TIME, WIDTH])
    y = layer_norm(s, x)
    q, k, v = (heads(s, y, seed, perm) for seed, perm in ((1, (0, 2, 1, 3)), (2, (0, 2, 3, 1)), (3, (0, 2, 1, 3))))
    causal = np.triu(np.full((TIME, TIME), np.float32(-np.inf)), 1)
    scores = s.Add(s.Div(s.MatMul(q, k), math.sqrt(SIZE)), causal)
    y = s.Transpose(s.MatMul(s.Softmax(scores, axis=3), v), perm=(0, 2, 1, 3))
    x = s.Add(x, linear(s, s.Reshape(y, [0, 0, WIDTH]), 4))
    y = linear(s, layer_norm(s, x), 5)
    y = s.Mul(s.Mul(y, s.Add(s.Erf(s.Div(y, math.sqrt(2))), 1.0)), 0.5)
    x = s.Add(x, linear(s, y, 6))
    clip = s.Clip(s.Add(x, 3.0), min=0.0, max=6.0) if opset < 11 else s.Clip(s.Add(x, 3.0), 0.0, 6.0)
    return s.model(s.Div(s.Mul(x, clip), 6.0))


def optimized(model: onnx.ModelProto, level: str) -> Graph:
    graph = read(model)
    manager = passes_for(level, default_passes())
    manager.check = True
    manager.run(graph)
    verify(graph)
    return graph


@pytest.mark.parametrize("opset", [9, 10, 12])
def test_a_transformer_block_of_an_old_opset(opset: int) -> None:
    model = transformer(opset)
    graph = optimized(model, "aggressive")
    ops = Counter(node.op for node in graph.all_nodes())
    assert ops["Attention"] == 1 and ops["LayerNormalization"] == 2 and ops["Gelu"] == 1 and ops["HardSwish"] == 1
    assert not ops.keys() & {"Softmax", "Erf", "Sqrt", "ReduceMean", "Clip"}
    (attention,) = [node for node in graph if node.op == "Attention"]
    assert attention.attrs["is_causal"] == 1
    plain = read(model)
    feeds = random_feeds(plain, {"batch": 2})
    before, after = Evaluator().graph(plain, feeds), Evaluator().graph(graph, feeds)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-5, atol=1e-5)
    onnx.checker.check_model(to_proto(graph))


def test_the_basic_level_keeps_every_rounding() -> None:
    graph = optimized(transformer(12), "basic")
    ops = Counter(node.op for node in graph.all_nodes())
    assert not ops.keys() & {"Attention", "LayerNormalization", "Gelu", "HardSwish"}


def test_new_nodes_name_their_rule_and_keep_the_name_of_the_node_they_replace() -> None:
    graph = optimized(transformer(12), "aggressive")
    (gelu,) = [node for node in graph if node.op == "Gelu"]
    assert gelu.origin == "FuseGelu"
    assert gelu.output.name.startswith("t")


def test_every_pass_has_a_name_of_its_own() -> None:
    names = [step.name for step in fusion_passes()]
    assert len(set(names)) == len(names) and all(names)
