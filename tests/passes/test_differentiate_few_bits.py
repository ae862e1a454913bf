"""Gradients of products with weights of few bits; where tokens are rounded too, straight through."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.dtypes import of
from ranvier.errors import NotSupported
from ranvier.graph.ir import Graph
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.ops.contrib.weight_only import WIDTHS
from ranvier.ops.own.bitlinear import pack_codes
from ranvier.passes.differentiate import differentiate
from tests.passes.gradient_tools import Array, Case, check, r, run
from tests.passes.test_differentiate_contrib import fused


def codes(*shape: int, top: int = 256, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, top, shape).astype(np.uint8)


def nbits(bits: int, order: tuple[int | None, ...], given: list[Array], *others: Array) -> Case:
    """Six features in blocks of 16 would be one block; 20 make two, of which the second is not full."""
    attrs = {"K": 20, "N": 3, "bits": bits, "block_size": 16}
    return Case(fused("MatMulNBits", order=order, **attrs), given, [codes(3, 2, 2 * bits), *others], shape=(2, 3))


ROWS, SCALES, BIAS = r(2, 20), r(3, 2, low=0.5, seed=1), r(3, seed=2)
HALVES = codes(3, 8)
FLOAT8 = r(3, 6, seed=4).astype(ml_dtypes.float8_e4m3fn)
STEPS8 = r(3, 1, low=0.5).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
TABLE = codes(4, 8)
CASES = {
    **{f"MatMulNBits {bits}": nbits(bits, (0, 2, 3, None, None, 1), [ROWS, BIAS], SCALES) for bits in WIDTHS},
    "MatMulNBits with zeros": nbits(4, (0, 1, 2, 3), [ROWS], SCALES, codes(3, 1)),
    "MatMulNBits that learns": nbits(4, (0, 2, 1), [ROWS, SCALES]),
    "MatMulNBits that learns with zeros": nbits(4, (0, 3, 1, 2), [ROWS, SCALES, r(3, 2, seed=5)]),
    **{
        f"MatMulBnb4 {kind} {turned}": Case(
            fused("MatMulBnb4", order=order, K=8, N=3, block_size=16, quant_type=kind, transB=turned),
            [r(2, 8 if turned else 3), *([r(2, low=0.5)] if learns else [])],
            [codes(12), *([] if learns else [r(2, low=0.5)])],
            shape=(2, 3 if turned else 8),
        )
        for kind, turned, learns, order in ((0, 1, False, (0, 1, 2)), (1, 0, False, (0, 1, 2)), (1, 1, True, (0, 2, 1)))
    },
    "MatMulBlockQuantizedFp8Weight": Case(
        fused("MatMulBlockQuantizedFp8Weight", order=(0, 2, 3, None, 1), block_size=4),
        [r(2, 6), r(3)],
        [FLOAT8, r(3, 2, low=0.5)],
        shape=(2, 3),
    ),
    "MatMulBlockQuantizedFp8Weight that learns": Case(
        fused("MatMulBlockQuantizedFp8Weight", order=(0, 2, 1), block_size=4),
        [r(2, 6), r(3, 2, low=0.5).astype(np.float32).astype(np.float64)],
        [FLOAT8],
        shape=(2, 3),
    ),
    "MatMulBlockQuantizedFp4Weight": Case(
        fused("MatMulBlockQuantizedFp4Weight", order=(0, 2, 3, 4, None, 1)),
        [r(2, 16), r(3)],
        [HALVES, STEPS8, np.array([0.3], np.float32)],
        shape=(2, 3),
    ),
    "GatherBlockQuantized": Case(
        fused("GatherBlockQuantized", order=(1, 2, 0), block_size=16),
        [r(4, 1, low=0.5)],
        [TABLE, np.array([[1, 3], [1, -2]], np.int64)],
        shape=(2, 2, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


def test_groups_of_their_own_are_refused() -> None:
    order = (0, 1, 2, None, 3)
    with pytest.raises(NotSupported, match="g_idx"):
        check(nbits(4, order, [ROWS], SCALES, np.zeros(20, np.int32)))


def graph_of(build: Any, *arrays: Array) -> tuple[Graph, list[Any], Any]:
    graph = Graph("g", opsets={"": 21, "com.microsoft": 1, "ranvier": 1})
    given = [graph.add_input(f"x{k}", TensorType(of(a), a.shape)) for k, a in enumerate(arrays)]
    return graph, given, build(GraphOps(graph, None, "", complete), *given)


@pytest.mark.parametrize("each", [False, True])
def test_ternary_weights_pass_gradients_as_if_tokens_were_not_rounded(each: bool) -> None:
    rng = np.random.default_rng(5)
    weights = rng.integers(-1, 2, (3, 7)).astype(np.int8)
    x, scale = r(2, 7).astype(np.float32), r(3 if each else 1, low=0.5).astype(np.float32)
    bias, seed = r(3).astype(np.float32), r(2, 3, seed=7).astype(np.float32)

    def build(op: GraphOps, x: Any, scale: Any, bias: Any) -> Any:
        packed = op.graph.add_constant(ConstTensor.of(pack_codes(weights)))
        return op.node("BitLinear", [x, packed, scale, bias], {"K": 7, "N": 3}, domain="ranvier", version=1).output

    graph, given, y = graph_of(build, x, scale, bias)
    grads = differentiate(graph, [(y, graph.add_constant(ConstTensor.of(seed)))], given)
    graph.outputs = [y, *(g for g in grads if g is not None)]
    result, to_x, to_scale, to_bias = run(graph, {"x0": x, "x1": scale, "x2": bias})
    np.testing.assert_allclose(to_x, (seed * scale) @ weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(to_bias, seed.sum(0), rtol=1e-5, atol=1e-6)
    whole = (seed * (result - bias) / scale).sum(0)
    np.testing.assert_allclose(to_scale, whole if each else whole.sum(keepdims=True), rtol=1e-4, atol=1e-5)


def test_activations_that_go_through_float8() -> None:
    """Straight through, but not where they are beyond its range."""
    x = np.array([[0.3, -1.2, 900.0, 0.1, 0.2, -0.4]], np.float32)
    weight, scale = FLOAT8.astype(np.float32), np.full((3, 2), 0.5, np.float32)

    def build(op: GraphOps, x: Any) -> Any:
        operands = [x, FLOAT8, scale, np.array([1.0], np.float32)]
        attrs = {"block_size": 4}
        return op.node("MatMulBlockQuantizedFp8Weight", operands, attrs, domain="com.microsoft", version=1).output

    graph, given, y = graph_of(build, x)
    (grad,) = differentiate(graph, [(y, None)], given)
    assert grad is not None
    graph.outputs = [grad]
    expected = weight.sum(0, keepdims=True) * 0.5 * (np.abs(x) < 448)
    np.testing.assert_allclose(run(graph, {"x0": x})[0], expected, rtol=1e-5, atol=1e-6)
