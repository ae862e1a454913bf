"""Gradients of what the standard defines by other operators, and of forms that rules see seldom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.dtypes import of
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.passes.differentiate import differentiate
from tests.passes.gradient_tools import Build, Case, check, op_of, r, run

I64 = np.int64


def node(name: str, output: int = 0, outputs: int = 1, order: tuple[int | None, ...] = (), version: int = 0,
         **attrs: Any) -> Build:  # fmt: skip
    """``order``: which of the given values is which operand."""

    def build(op: GraphOps, *values: Value) -> Value:
        operands = [None if k is None else values[k] for k in order] if order else list(values)
        return op.node(name, operands, attrs, outputs=outputs, version=version).outputs[output]

    return build


def scaled(name: str, version: int, *scales: float) -> Build:
    """The forms in which scales are the second operand."""
    attrs = {"mode": "linear"}
    return lambda op, x: op.node(name, [x, np.array(scales, np.float32)], attrs, version=version).output


def resized(
    shape: tuple[int, ...], operand: int, *numbers: float, roi: list[float] | None = None, **attrs: Any
) -> Case:
    def build(op: GraphOps, x: Value) -> Value:
        operands: list[Any] = [x, None if roi is None else np.array(roi), None, None]
        operands[operand] = np.array(numbers, np.float32 if operand == 2 else I64)
        return op.node("Resize", operands, attrs).output

    return Case(build, [r(*shape)])


def flex(changes: bool, heads: int) -> Case:
    """Scores that are bent, and weights that are scaled, by graphs of one's own."""

    def body(name: str, shape: tuple[int, ...]) -> Graph:
        graph = Graph(name, opsets={"": 26})
        scores = graph.add_input("scores", TensorType(of(np.float64(0)), shape))
        op = GraphOps(graph, None, "", complete)
        graph.outputs = [op.Tanh(scores) if name == "score" else op.Mul(scores, op.Cos(scores))]
        return graph

    def build(op: GraphOps, *given: Value) -> Value:
        shape = (1, 4, 3, 5)
        attrs = {"score_mod": body("score", shape), "prob_mod": body("prob", shape)} if changes else {"scale": 0.3}
        made = op.graph.add(
            "FlexAttention", list(given), attrs, [Value("", TensorType(of(np.float64(0)), (1, 4, 3, 2)))],
            domain="ai.onnx.preview", version=1,
        )  # fmt: skip
        return made.output

    return Case(build, [r(1, 4, 3, 4), r(1, heads, 5, 4, seed=1), r(1, heads, 5, 2, seed=2)])


KEYS, VALUES = r(1, 2, 5, 4, seed=1), r(1, 2, 5, 4, seed=2)
LINEAR = [r(2, 3, 8), r(2, 3, 4, seed=1), r(2, 3, 6, seed=2)]  # four heads of queries, two of keys
HEADS: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 2}
CAUSAL = [r(2, 3, 5), r(3, 1, 2), r(3), r(2, 3, 1)]
CASES = {
    "AffineGrid": Case(op_of("AffineGrid"), [r(2, 2, 3)], [np.array([2, 3, 3, 4], I64)], (2, 3, 4, 2)),
    "AffineGrid of a volume": Case(
        op_of("AffineGrid", align_corners=1), [r(1, 3, 4)], [np.array([1, 2, 2, 3, 2], I64)], (1, 2, 3, 2, 3)
    ),
    "CenterCropPad": Case(op_of("CenterCropPad"), [r(4, 5)], [np.array([3, 7], I64)], (3, 7)),
    "CenterCropPad of an axis": Case(op_of("CenterCropPad", axes=[1]), [r(4, 5)], [np.array([2], I64)], (4, 2)),
    "CausalConvWithState": Case(node("CausalConvWithState", 0, 2), CAUSAL, shape=(2, 3, 5)),
    "CausalConvWithState bent": Case(node("CausalConvWithState", 0, 2, activation="silu"), CAUSAL, shape=(2, 3, 5)),
    "CausalConvWithState's state": Case(node("CausalConvWithState", 1, 2), CAUSAL, shape=(2, 3, 1)),
    "LinearAttention": Case(node("LinearAttention", 0, 2, update_rule="linear", **HEADS), LINEAR, shape=(2, 3, 12)),
    "LinearAttention gated": Case(
        node("LinearAttention", 0, 2, (0, 1, 2, 3, 4), update_rule="gated", **HEADS),
        [*LINEAR, r(2, 2, 2, 3), r(2, 3, 4, seed=4)],
        shape=(2, 3, 12),
    ),
    "LinearAttention delta": Case(
        node("LinearAttention", 0, 2, (0, 1, 2, None, None, 3), update_rule="delta", scale=0.4, **HEADS),
        [*LINEAR, r(2, 3, 1)],
        shape=(2, 3, 12),
    ),
    "LinearAttention's memory": Case(
        node("LinearAttention", 1, 2, (0, 1, 2, 3, 4, 5), **HEADS),
        [*LINEAR, r(2, 2, 2, 3), r(2, 3, 2), r(2, 3, 2, seed=5)],
        shape=(2, 2, 2, 3),
    ),
    "FlexAttention": flex(False, 4),
    "FlexAttention by graphs": flex(True, 2),
    "Attention of shared heads": Case(
        node("Attention", 0, 4, softcap=1.5, qk_matmul_output_mode=1),
        [r(1, 4, 3, 4), KEYS, VALUES, r(3, 5)],
        shape=(1, 4, 3, 4),
    ),
    "Attention after others": Case(
        node("Attention", 0, 3, (0, 1, 2, None, 3, 4), is_causal=1),
        [r(1, 2, 3, 4), r(1, 2, 3, 4, seed=1), r(1, 2, 3, 4, seed=2), r(1, 2, 2, 4), r(1, 2, 2, 4, seed=4)],
        shape=(1, 2, 3, 4),
    ),
    "Attention of rows": Case(
        op_of("Attention", scale=0.4, **HEADS), [r(1, 3, 8), r(1, 5, 4, seed=1), r(1, 5, 4, seed=2)], shape=(1, 3, 8)
    ),
    "Attention's weights": Case(
        node("Attention", 3, 4, qk_matmul_output_mode=3), [r(1, 2, 3, 4), KEYS, VALUES], shape=(1, 2, 3, 5)
    ),
    "RotaryEmbedding side by side": Case(
        op_of("RotaryEmbedding", interleaved=1, num_heads=2),
        [r(1, 3, 8), r(5, 2), r(5, 2, seed=1)],
        [np.array([[0, 3, 1]], I64)],
        (1, 3, 8),
    ),
    "GroupNormalization 18": Case(
        node("GroupNormalization", version=18, num_groups=2), [r(2, 4, 3), r(2), r(2, seed=1)], shape=(2, 4, 3)
    ),
    "Upsample": Case(scaled("Upsample", 9, 1, 1, 2, 1.5), [r(1, 2, 3, 4)], shape=(1, 2, 6, 6)),
    "Upsample 7": Case(node("Upsample", version=7, scales=[1.0, 1.0, 2.0, 1.5]), [r(1, 2, 3, 4)], shape=(1, 2, 6, 6)),
    "Resize 10": Case(scaled("Resize", 10, 1, 1, 0.7, 2), [r(1, 1, 3, 3)], shape=(1, 1, 2, 6)),
    "Resize of a line": resized((5,), 2, 2.0, mode="linear"),
    "Resize a part": resized(
        (1, 2, 4, 5), 3, 1, 2, 3, 5, roi=[0, 0, 0.2, 0.1, 1, 1, 0.8, 1.2], mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=0.3,
    ),
    "Resize in shape": resized(
        (1, 2, 3, 4), 3, 5, 7, axes=[2, 3], mode="linear", keep_aspect_ratio_policy="not_larger"
    ),
    "Resize of axes": resized(
        (1, 1, 4, 5), 2, 1.7, 2.2, axes=[3, 2], mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5,
        coordinate_transformation_mode="align_corners",
    ),
    "DequantizeLinear by blocks": Case(
        lambda op, s, x: op.node("DequantizeLinear", [x, s], {"axis": 1, "block_size": 2}).output,
        [r(2, 3, low=0.5).astype(np.float32).astype(np.float64)],
        [np.arange(10).reshape(2, 5).astype(np.int8)],
    ),
    **{
        f"Einsum {equation}": Case(
            op_of("Einsum", equation=equation), [r(*each, seed=k) for k, each in enumerate(shapes)], shape=shape
        )
        for equation, shapes, shape in (
            ("bii->bi", [(2, 3, 3)], (2, 3)),
            ("ii", [(3, 3)], ()),
            ("iij,jk->k", [(2, 2, 3), (3, 2)], (2,)),
            ("...ij,jk->...ik", [(2, 2, 3), (3, 2)], (2, 2, 2)),
            ("...i,...i", [(2, 3, 4), (3, 4)], (2, 3)),
            ("...ij->...j", [(1, 2, 3)], (1, 3)),
            ("...ij,...jk->...ik", [(1, 2, 3), (4, 3, 2)], (4, 2, 2)),
        )
    },
    "Det of many": Case(op_of("Det"), [np.eye(33) + 0.1 * r(33, 33)]),
    "MaxPool apart": Case(
        op_of("MaxPool", kernel_shape=[2, 2], dilations=[2, 1], ceil_mode=1, strides=[2, 2]), [r(1, 2, 5, 5)]
    ),
    "LpPool apart": Case(
        op_of("LpPool", kernel_shape=[2, 2], dilations=[2, 1], auto_pad="SAME_UPPER"), [r(1, 2, 5, 5)]
    ),
    **{
        f"ConvTranspose {how}": Case(op_of("ConvTranspose", **attrs), [r(1, 2, 3, 3), r(2, 2, 3, 2), r(2)], shape=shape)
        for how, attrs, shape in (
            ("to a shape", {"strides": [2, 2], "output_shape": [6, 8]}, (1, 2, 6, 8)),
            ("to the upper", {"strides": [2, 1], "auto_pad": "SAME_UPPER"}, (1, 2, 6, 3)),
            ("to the lower", {"strides": [2, 1], "auto_pad": "SAME_LOWER"}, (1, 2, 6, 3)),
            ("of what is valid", {"auto_pad": "VALID", "dilations": [2, 1]}, (1, 2, 7, 4)),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


def test_scales_found_while_running() -> None:
    """A scale of DynamicQuantizeLinear follows the least and the largest number."""
    graph = Graph("g", opsets={"": 21})
    x = graph.add_input("x", TensorType(of(np.float32(0)), (5,)))
    op = GraphOps(graph, None, "", complete)
    made = op.node("DynamicQuantizeLinear", [x], {}, outputs=3)
    (grad,) = differentiate(graph, [(made.outputs[1], None)], [x])
    assert grad is not None
    graph.outputs = [grad]
    (found,) = run(graph, {"x": np.array([0.3, -1.2, 2.5, 0.1, -0.4], np.float32)})
    np.testing.assert_allclose(found, np.array([0, -1, 1, 0, 0]) / 255, rtol=1e-6)


def test_what_is_drawn_has_no_gradient() -> None:
    graph = Graph("g", opsets={"": 21})
    x = graph.add_input("x", TensorType(of(np.float64(0)), (5,)))
    op = GraphOps(graph, None, "", complete)
    assert differentiate(graph, [(op.Bernoulli(x), None)], [x]) == [None]
