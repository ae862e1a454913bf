"""Gradients of com.microsoft's positions, grouped and packed attention and experts against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.errors import NotSupported
from tests.passes.gradient_tools import Array, Case, check, r
from tests.passes.test_differentiate_contrib import fused
from tests.passes.test_differentiate_few_bits import codes

I32, I64 = np.int32, np.int64
COS, SIN = r(8, 2, seed=1), r(8, 2, seed=2)
PLACES = np.array([[0, 3, 1], [2, 2, 5]], I64)
Q, K, V = r(2, 3, 8), r(2, 3, 4, seed=1), r(2, 3, 4, seed=2)  # two heads of four share one of keys
PAST = [r(2, 1, 3, 4, seed=3), r(2, 1, 3, 4, seed=4)]
HEADS: dict[str, Any] = {"num_heads": 2, "kv_num_heads": 1}


def grouped(lengths: list[int], total: int, given: list[Array], order: tuple[int | None, ...], *more: Array,
            output: int = 0, shape: tuple[int, ...] | None = None, **attrs: Any) -> Case:  # fmt: skip
    """Constants stand behind what is derived by: lengths, their largest, then others."""
    others = [np.array(lengths, I32) - 1, np.array(total, I32), *more]
    build = fused("GroupQueryAttention", output, 4, order, **{**HEADS, **attrs})
    return Case(build, given, others, shape=shape)


def sparse(total: int, lengths: list[int], query: Array, **attrs: Any) -> Case:
    """Two layouts over blocks of two."""
    rows = np.array([[0, 1, 2, 4], [0, 1, 3, 5]], I32)
    columns = np.array([[0, 1, 0, 2, -1], [0, 0, 1, 1, 2]], I32)
    size = query.shape[1]
    given = [query, r(2, size, 4, seed=1), r(2, size, 4, seed=2), r(2, 1, 6, 4, seed=3), r(2, 1, 6, 4, seed=4)]
    build = fused("SparseAttention", 0, 3, sparse_block_size=2, **{**HEADS, **attrs})
    others = [rows, columns, np.array(total, I32), np.array(lengths, I32), r(8, 2, seed=1), r(8, 2, seed=2)]
    return Case(build, given, others)


TOKENS = [np.array([[0, 1, 3, 2], [4, 5, 6, 7]], I32)[:, :3], np.array([0, 2, 5], I32)]  # sequences of two and three
WEIGHTS = [r(3, 6, 4, seed=1), r(3, 6, seed=2), r(3, 4, 6, seed=3), r(3, 4, seed=4)]
CASES = {
    "RotaryEmbedding": Case(fused("RotaryEmbedding", order=(0, 3, 1, 2)), [r(2, 2, 3, 4), COS, SIN], [PLACES]),
    "RotaryEmbedding side by side": Case(
        fused("RotaryEmbedding", order=(0, 3, 1, 2), interleaved=1, num_heads=2, rotary_embedding_dim=4),
        [r(1, 3, 12), COS, SIN],
        [np.array([2], I64)],
    ),
    **{
        f"MRotaryEmbedding {layout}": Case(
            fused(
                "MRotaryEmbedding", order=(0, 3, 1, 2), mrope_section=[1, 1, 1], mrope_layout=layout, scale=0.5,
                num_heads=2,
            ),
            [r(2, 3, 12), r(6, 3, seed=1), r(6, 3, seed=2)],
            [np.stack([PLACES, PLACES[::-1], PLACES[:, ::-1]])],
        )
        for layout in (0, 1)
    },
    **{
        f"GemmaRotaryEmbedding {k}": Case(
            fused("GemmaRotaryEmbedding", k, 2),
            [r(1, 3, 4), *(r(1, 2, 3, 4, seed=seed) for seed in range(4))],
        )
        for k in (0, 1)
    },
    **{
        f"RelativePositionBias {both}": Case(
            fused("RelativePositionBias", max_distance=8, is_bidirectional=both),
            [r(8, 2)],
            [np.array([4], I64), np.array([6], I64)],
            shape=(1, 2, 4, 6),
        )
        for both in (0, 1)
    },
    "GatedRelativePositionBias": Case(
        fused("GatedRelativePositionBias", num_heads=2),
        [r(1, 3, 4), r(4), r(1, 2, 3, 3), r(2, 8), r(8), r(1, 2, 1, 1)],
    ),
    "GatedRelativePositionBias packed": Case(
        fused("GatedRelativePositionBias", num_heads=2),
        [r(5, 4), r(4), r(1, 2, 3, 3), r(2, 8), r(8), r(1, 2, 1, 1)],
        [np.array([[0, 1, 3], [4, 5, 2]], I32)],
    ),
    "GroupQueryAttention": grouped([3, 2], 3, [Q, K, V], (0, 1, 2, None, None, 3, 4)),
    "GroupQueryAttention packed": grouped([3, 3], 3, [r(2, 3, 16)], (0, None, None, None, None, 1, 2), softcap=1.5),
    "GroupQueryAttention keys": grouped(
        [3, 2], 3, [Q, K, V], (0, 1, 2, None, None, 3, 4), output=1, shape=(2, 1, 3, 4)
    ),
    "GroupQueryAttention of a window": grouped(
        [3, 3], 3, [Q, K, V, r(1, 2, 3, 3)], (0, 1, 2, None, None, 4, 5, None, None, None, 3), local_window_size=2
    ),
    "GroupQueryAttention after others": grouped(
        [5, 4], 5, [r(2, 2, 8), r(2, 2, 4, seed=1), r(2, 2, 4, seed=2), *PAST], (0, 1, 2, 3, 4, 5, 6)
    ),
    "GroupQueryAttention turned": grouped(
        [5, 4], 5, [r(2, 2, 8), r(2, 2, 4, seed=1), r(2, 2, 4, seed=2), *PAST, COS, SIN],
        (0, 1, 2, 3, 4, 7, 8, 5, 6), do_rotary=1,
    ),
    "GroupQueryAttention turned by places": grouped(
        [3, 3], 3, [Q, K, V, COS, SIN], (0, 1, 2, None, None, 5, 6, 3, 4, 7), PLACES, do_rotary=1,
        rotary_interleaved=1,
    ),
    "GroupQueryAttention with a sink": grouped(
        [3, 2], 3, [Q, K, V, r(2)], (0, 1, 2, None, None, 4, 5, None, None, None, None, 3), causal=0, scale=0.4
    ),
    "GroupQueryAttention smooth": grouped([3, 2], 3, [Q, K, V], (0, 1, 2, None, None, 3, 4), smooth_softmax=1),
    "GroupQueryAttention of scaled heads": grouped(
        [3, 2], 3, [Q, K, V, r(4), r(4, seed=1)], (0, 1, 2, None, None, 5, 6, *[None] * 7, 3, 4)
    ),
    **{
        f"GroupQueryAttention's {what}": grouped(
            [3, 2], 3, [Q, K], (0, 1, 4, None, None, 2, 3), V, output=3, shape=(2, 2, 3, 3), qk_output=k
        )
        for k, what in ((1, "scores"), (2, "weights"))
    },
    "SparseAttention": sparse(6, [6, 5], r(2, 6, 8)),
    "SparseAttention turned": sparse(5, [5, 4], r(2, 1, 8), do_rotary=1, scale=0.3),
    "PackedAttention": Case(
        fused("PackedAttention", num_heads=2), [r(5, 4), r(4, 12), r(12)], [TOKENS[0], TOKENS[1]], shape=(5, 4)
    ),
    "PackedAttention with a bias": Case(
        fused("PackedAttention", num_heads=2, order=(0, 1, 2, 4, 5, 3)),
        [r(5, 4), r(4, 12), r(12), r(2, 2, 3, 3)],
        TOKENS,
        shape=(5, 4),
    ),
    "PackedMultiHeadAttention": Case(
        fused("PackedMultiHeadAttention", num_heads=2, order=(0, 1, 2, 3, 5, 6, 4), scale=0.3),
        [r(5, 4), r(5, 4, seed=1), r(5, 4, seed=2), r(12), r(1, 2, 3, 3)],
        TOKENS,
        shape=(5, 4),
    ),
    "PackedMultiHeadAttention in one": Case(
        fused("PackedMultiHeadAttention", num_heads=2, order=(0, None, None, None, 1, 2)),
        [r(5, 2, 3, 2)],
        TOKENS,
        shape=(5, 4),
    ),
    "RemovePadding": Case(fused("RemovePadding", outputs=4), [r(2, 3, 2)], [np.array([2, 3], I32)], shape=(5, 2)),
    "RemovePadding alone": Case(fused("RemovePadding"), [r(2, 3, 2)], [np.array([2, 1], I32)], shape=(3, 2)),
    "RestorePadding": Case(fused("RestorePadding"), [r(4, 2)], [np.array([[0, 1, 4], [5, 2, 3]], I32)]),
    "MoE": Case(fused("MoE", k=2), [r(2, 2, 4), r(4, 3, seed=9), *WEIGHTS]),
    "MoE normalized": Case(
        fused("MoE", k=2, normalize_routing_weights=1, activation_type="silu", order=(0, 1, 2, None, 3, None, 4)),
        [r(4, 4), r(4, 3, seed=9), WEIGHTS[0], WEIGHTS[2], r(3, 6, 4, seed=5)],
    ),
    **{
        f"MoE swiglu {fusion}": Case(
            fused(
                "MoE", activation_type="swiglu", swiglu_fusion=fusion, activation_alpha=1.3, activation_beta=1.0,
                swiglu_limit=1.7, order=(0, 1, 2, None, 3),
            ),
            [r(4, 4), r(4, 3, seed=9), r(3, 12, 4, seed=1), WEIGHTS[2]],
        )
        for fusion in (1, 2)
    },
    **{
        f"QMoE of {bits} bits": Case(
            fused("QMoE", k=2, expert_weight_bits=bits, activation_type="silu", order=(0, 1, 4, 5, 2, 6, 7, 3)),
            [r(4, 4), r(4, 3, seed=9), r(3, 8, seed=5), r(3, 4, seed=6)],
            [
                codes(3, 8, -(-bits // 2)), r(3, 8, low=0.2, seed=3) / (1 << bits),
                codes(3, 4, bits, seed=1), r(3, 4, low=0.2, seed=4) / (1 << bits),
            ],
        )
        for bits in (4, 5, 6, 8)
    },
    "QMoE weighed apart": Case(
        fused("QMoE", k=2, expert_weight_bits=8, order=(0, 1, 3, 4, None, 5, 6, *[None] * 7, 2)),
        [r(4, 4), r(4, 3, seed=9), r(4, 3, low=0.2, seed=2)],
        [codes(3, 8, 4), r(3, 8, low=0.2, seed=3) / 256, codes(3, 4, 8, seed=1), r(3, 4, low=0.2, seed=4) / 256],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


def test_a_cache_of_codes_is_refused() -> None:
    case = grouped([3, 2], 3, [Q, K, V], (0, 1, 2, None, None, 3, 4), k_quant_type="PER_TENSOR", kv_cache_bit_width=8)
    with pytest.raises(NotSupported, match="cache of codes"):
        check(case)
