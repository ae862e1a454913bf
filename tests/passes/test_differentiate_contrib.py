"""Gradients of fused operators against finite differences of the operators themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.errors import NotSupported
from ranvier.graph.ir import Value
from ranvier.graph.rewrite import GraphOps
from tests.passes.gradient_tools import Array, Build, Case, check, r

I32 = np.int32
LETTERS = (2, 3, 8)  # batch, length, width


def fused(name: str, output: int = 0, outputs: int = 1, order: tuple[int | None, ...] = (), **attrs: Any) -> Build:
    """``order``: which of the given values is which operand."""

    def build(op: GraphOps, *values: Value) -> Value:
        operands = [None if k is None else values[k] for k in order] if order else list(values)
        node = op.node(name, operands, attrs, outputs=outputs, domain="com.microsoft", version=1)
        return node.outputs[output]

    return build


def attention(mask: Array | None = None, **attrs: Any) -> Case:
    given = [r(*LETTERS), r(8, 24, seed=1), r(24, seed=2)]
    return Case(fused("Attention", num_heads=2, **attrs), given, [] if mask is None else [mask])


QUERY, KEY, VALUE = r(2, 3, 4), r(2, 4, 4, seed=1), r(2, 4, 4, seed=2)
CASES = {
    "Gelu": Case(fused("Gelu"), [r(7)]),
    "BiasGelu": Case(fused("BiasGelu"), [r(2, 3), r(3)]),
    "FastGelu": Case(fused("FastGelu"), [r(2, 3), r(3)]),
    "FastGelu alone": Case(fused("FastGelu"), [r(2, 3)]),
    "QuickGelu": Case(fused("QuickGelu", alpha=1.5), [r(7)]),
    "BiasSplitGelu": Case(fused("BiasSplitGelu"), [r(2, 6), r(6)]),
    "BiasAdd": Case(fused("BiasAdd"), [r(2, 3), r(3), r(2, 3, seed=1)]),
    "GatedAdd": Case(fused("GatedAdd"), [r(2, 3), r(2, 3, seed=1), r(2, 1)]),
    "FusedMatMul": Case(fused("FusedMatMul", alpha=0.3, transA=1, transB=1), [r(2, 4, 3), r(2, 5, 4)]),
    "FusedMatMul batches": Case(fused("FusedMatMul", transBatchA=1, transB=1, transA=1), [r(3, 2, 4), r(2, 5, 3)]),
    "TransposeMatMul": Case(fused("TransposeMatMul", alpha=0.3, transA=1), [r(2, 4, 3), r(2, 4, 2)]),
    "FusedMatMulActivation": Case(
        fused("FusedMatMulActivation", activation="LeakyRelu", activation_alpha=0.2, transB=1), [r(3, 4), r(2, 4)]
    ),
    "FusedGemm": Case(
        fused("FusedGemm", activation="LeakyRelu", activation_alpha=0.1, transB=1, beta=0.5), [r(3, 4), r(2, 4), r(2)]
    ),
    "GemmFastGelu": Case(fused("GemmFastGelu"), [r(3, 4), r(4, 2), r(2)]),
    "FusedConv": Case(
        fused("FusedConv", activation="Relu", kernel_shape=[2, 2], pads=[0, 0, 1, 1]),
        [r(1, 2, 3, 3), r(2, 2, 2, 2), r(2), r(1, 2, 3, 3, seed=5)],
    ),
    "FusedConv clipped": Case(
        fused("FusedConv", activation="Clip", activation_params=[-1.0, 2.0], kernel_shape=[2]), [r(1, 2, 5), r(2, 2, 2)]
    ),
    "SkipLayerNormalization": Case(
        fused("SkipLayerNormalization", epsilon=1e-5),
        [r(2, 3, 4), r(2, 3, 4, seed=1), r(4), r(4, seed=1), r(4, seed=2)],
    ),
    "SkipLayerNormalization sum": Case(
        fused("SkipLayerNormalization", 3, 4), [r(1, 2, 4), r(1, 2, 4, seed=1), r(4), r(4, seed=1)]
    ),
    "SkipSimplifiedLayerNormalization": Case(
        fused("SkipSimplifiedLayerNormalization", epsilon=1e-5), [r(2, 3, 4), r(2, 3, 4, seed=1), r(4)]
    ),
    "EmbedLayerNormalization": Case(
        fused("EmbedLayerNormalization", outputs=2, order=(5, 6, 0, 1, 2, 3, 4), epsilon=1e-5),
        [r(5, 4), r(3, 4), r(2, 4), r(4), r(4, seed=1)],
        [np.array([[1, 4, 0], [2, 2, 1]], I32), np.array([[0, 0, 1], [1, 0, 1]], I32)],
    ),
    "Attention": attention(),
    "Attention causal": attention(unidirectional=1, scale=0.7),
    "Attention lengths": attention(np.array([2, 3], I32)),
    "Attention of keys": attention(np.array([[1, 1, 0], [0, 1, 1]], I32), mask_filter_value=-3.0),
    "Attention present": Case(
        fused("Attention", 1, 2, num_heads=2), [r(1, 2, 4), r(4, 12, seed=1), r(12, seed=2)], shape=(2, 1, 2, 2, 2)
    ),
    "Attention after others": Case(
        fused("Attention", outputs=2, num_heads=2, unidirectional=1, order=(0, 1, None, None, 2)),
        [r(1, 2, 4), r(4, 12), r(2, 1, 2, 3, 2)],
    ),
    "MultiHeadAttention after others": Case(
        fused("MultiHeadAttention", num_heads=2, order=(0, 1, 2, None, None, None, 3, 4)),
        [r(1, 2, 4), r(1, 2, 4, seed=1), r(1, 2, 4, seed=2), r(1, 2, 3, 2), r(1, 2, 3, 2, seed=1)],
    ),
    "MultiHeadAttention": Case(fused("MultiHeadAttention", num_heads=2), [QUERY, KEY, VALUE]),
    "MultiHeadAttention with all": Case(
        fused("MultiHeadAttention", num_heads=2, order=(0, 1, 2, 3, 5, 4)),
        [QUERY, KEY, VALUE, r(12), r(1, 2, 3, 4, seed=3)],
        [np.array([[1, 1, 0, 1], [1, 0, 1, 1]], I32)],
    ),
    "MultiHeadAttention packed": Case(fused("MultiHeadAttention", num_heads=2), [r(1, 3, 2, 3, 2)], shape=(1, 3, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


def test_a_shared_buffer_is_refused() -> None:
    build = fused("Attention", outputs=2, num_heads=2, order=(0, 1, None, None, 2), past_present_share_buffer=1)
    case = Case(build, [r(1, 2, 4), r(4, 12)], [r(2, 1, 2, 2, 2)], shape=(1, 2, 4))
    with pytest.raises(NotSupported, match="shared buffer"):
        check(case)
