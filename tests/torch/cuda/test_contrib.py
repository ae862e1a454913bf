"""Operators that the standard's cases do not have, against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier.dtypes import of  # noqa: E402
from ranvier.graph.ir import Graph  # noqa: E402
from ranvier.graph.types import TensorType  # noqa: E402
from ranvier.ops import complete  # noqa: E402
from tests.torch.device import options  # noqa: E402

MS = "com.microsoft"
rng = np.random.default_rng(3)


def f(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def u8(*shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


def i8(*shape: int) -> np.ndarray:
    return rng.integers(-128, 128, shape).astype(np.int8)


def s(value: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(value, dtype)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


ACT = {"activation": "LeakyRelu", "activation_alpha": 0.2}
HEADS = {"num_heads": 2}
GQA = {"num_heads": 4, "kv_num_heads": 2}
CASES: dict[str, tuple[str, list[Any], dict[str, Any], int]] = {
    "fused_gemm": ("FusedGemm", [f(3, 4), f(4, 5), f(5)], {"alpha": 0.5, **ACT}, 1),
    "fused_matmul": ("FusedMatMul", [f(2, 4, 3), f(2, 4, 5)], {"transA": 1, "alpha": 2.0}, 1),
    "gemm_fast_gelu": ("GemmFastGelu", [f(2, 3, 4), f(4, 5), f(5)], {}, 1),
    "fused_conv": ("FusedConv", [f(1, 2, 5, 5), f(3, 2, 3, 3), f(3)], {"activation": "Relu", "pads": [1, 0, 0, 1]}, 1),
    "nhwc_conv": ("NhwcConv", [f(1, 5, 5, 2), f(3, 3, 3, 2), f(3)], {"pads": [1, 1, 1, 1]}, 1),
    "bias_gelu": ("BiasGelu", [f(2, 6), f(6)], {}, 1),
    "fast_gelu": ("FastGelu", [f(2, 6), f(6)], {}, 1),
    "quick_gelu": ("QuickGelu", [f(2, 6)], {}, 1),
    "bias_split_gelu": ("BiasSplitGelu", [f(2, 3, 8), f(8)], {}, 1),
    "bias_softmax": ("BiasSoftmax", [f(2, 3, 4, 5), f(2, 1, 1, 5)], {"axis": 3, "is_inner_broadcast": 1}, 1),
    "skip_layer_norm": ("SkipLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)], {}, 4),
    "skip_rms_norm": ("SkipSimplifiedLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8)], {}, 1),
    "embed": (
        "EmbedLayerNormalization",
        [*(rng.integers(0, 4, (2, 3)).astype(np.int32) for _ in range(2)), f(9, 8), f(5, 8), f(4, 8), f(8), f(8)],
        {},
        2,
    ),
    "attention": ("Attention", [f(2, 4, 8), f(8, 24), f(24), i32(3, 4)], HEADS, 1),
    "attention_causal": ("Attention", [f(2, 4, 8), f(8, 24), f(24)], {**HEADS, "unidirectional": 1}, 2),
    "attention_past": ("Attention", [f(2, 1, 8), f(8, 24), f(24), None, f(2, 2, 2, 3, 4)], HEADS, 2),
    "multi_head": ("MultiHeadAttention", [f(2, 4, 8), f(2, 5, 8), f(2, 5, 8), f(24)], HEADS, 1),
    "multi_head_past": (
        "MultiHeadAttention",
        [f(2, 1, 8), f(2, 1, 8), f(2, 1, 8), None, None, None, f(2, 2, 3, 4), f(2, 2, 3, 4)],
        HEADS,
        3,
    ),
    "grouped_prompt": (
        "GroupQueryAttention",
        [f(2, 3, 16), f(2, 3, 8), f(2, 3, 8), None, None, i32(2, 2), s(3, np.int32)],
        GQA,
        3,
    ),
    "grouped_step": (
        "GroupQueryAttention",
        [
            f(2, 1, 16),
            f(2, 1, 8),
            f(2, 1, 8),
            f(2, 2, 6, 4),
            f(2, 2, 6, 4),
            i32(3, 4),
            s(5, np.int32),
            f(8, 2),
            f(8, 2),
        ],
        {**GQA, "do_rotary": 1, "local_window_size": 3},
        3,
    ),
    "rotary": ("RotaryEmbedding", [f(2, 3, 8), np.arange(6).reshape(2, 3), f(9, 2), f(9, 2)], {"num_heads": 2}, 1),
    "qlinear_add": (
        "QLinearAdd",
        [u8(2, 5), s(0.1), s(9, np.uint8), u8(5), s(0.2), s(3, np.uint8), s(0.3), s(7, np.uint8)],
        {},
        1,
    ),
    "qlinear_sigmoid": ("QLinearSigmoid", [u8(40), s(0.05), s(128, np.uint8), s(0.004), s(0, np.uint8)], {}, 1),
    "qlinear_concat": (
        "QLinearConcat",
        [s(0.1), s(5, np.uint8), u8(2, 3), s(0.1), s(5, np.uint8), u8(2, 4), s(0.2), s(9, np.uint8)],
        {"axis": 1},
        1,
    ),
    "qgemm": ("QGemm", [u8(3, 4), s(0.1), s(9, np.uint8), i8(5, 4), s(0.2), s(0, np.int8)], {"transB": 1}, 1),
    "dynamic_matmul": ("DynamicQuantizeMatMul", [f(3, 200), i8(200, 5), s(0.02), s(3, np.int8), f(5)], {}, 1),
    "matmul_to_float": ("MatMulIntegerToFloat", [u8(3, 7), i8(7, 5), s(0.1), f(5), s(9, np.uint8)], {}, 1),
    "four_bits": (
        "MatMulNBits",
        [f(3, 40), u8(6, 3, 8), np.abs(f(18)), u8(12)],
        {"K": 40, "N": 6, "bits": 4, "block_size": 16},
        1,
    ),
    **{
        f"{bits}_bits": (
            "MatMulNBits",
            [f(3, 40), u8(6, 3, 2 * bits), np.abs(f(18)), u8(6, -(-3 * bits // 8))],
            {"K": 40, "N": 6, "bits": bits, "block_size": 16},
            1,
        )
        for bits in (3, 5, 6)
    },
    "nf4": ("MatMulBnb4", [f(3, 16), u8(32), np.abs(f(4))], {"K": 16, "N": 4, "block_size": 16, "quant_type": 1}, 1),
    "fp8": (
        "MatMulBlockQuantizedFp8Weight",
        [f(3, 8), f(4, 8).astype(ml_dtypes.float8_e4m3fn), np.abs(f(4, 2))],
        {"block_size": 4},
        1,
    ),
    "quantized_lstm": (
        "DynamicQuantizeLSTM",
        [f(4, 2, 3), i8(1, 3, 20), i8(1, 5, 20), f(1, 40), i32(4, 2), None, None, None]
        + [np.full((1,), 0.01, np.float32), np.zeros(1, np.int8)] * 2,
        {"hidden_size": 5},
        3,
    ),
    "ranvier.BitLinear": (
        "BitLinear",
        [f(3, 8), rng.integers(0, 2, (5, 2)).astype(np.uint8) * 85, s(0.3)],
        {"K": 8, "N": 5},
        1,
    ),
    "ranvier.LSTMTraining": (
        "LSTMTraining",
        [f(4, 2, 3), f(2, 20, 3), f(2, 20, 5), f(2, 40), None, f(2, 2, 5), f(2, 2, 5), f(2, 15)],
        {"hidden_size": 5, "direction": "bidirectional"},
        5,
    ),
    "ranvier.LSTMTraining, without what may be absent": (
        "LSTMTraining",
        [f(4, 2, 3), f(1, 20, 3), f(1, 20, 5)],
        {"hidden_size": 5},
        5,
    ),
    "ranvier.LSTMSlopes": (
        "LSTMSlopes",
        [f(2, 20, 5), f(4, 2, 3, 20), f(4, 2, 3, 5), f(2, 3, 5), f(2, 15), f(4, 2, 3, 5), f(2, 3, 5), f(2, 3, 5)],
        {"direction": "bidirectional"},
        3,
    ),
    "ranvier.LSTMSlopes, without what may be absent": (
        "LSTMSlopes",
        [f(1, 20, 5), f(4, 1, 3, 20), f(4, 1, 3, 5), None, None, f(4, 1, 3, 5)],
        {"direction": "reverse"},
        3,
    ),
}


def _graph(op: str, domain: str, operands: list[Any], attrs: dict[str, Any], outputs: int) -> Graph:
    graph = Graph(op, opsets={"": 21, domain: 1})
    given = [
        None if x is None else graph.add_input(f"x{k}", TensorType(of(x), x.shape)) for k, x in enumerate(operands)
    ]
    node = graph.add(op, given, attrs, domain=domain, version=1, outputs=outputs, name="node")
    complete(node)
    graph.outputs = list(node.outputs)
    return graph


@pytest.mark.parametrize("name", CASES)
def test_as_the_reference(name: str) -> None:
    op, operands, attrs, outputs = CASES[name]
    domain = "ranvier" if name.startswith("ranvier.") else MS
    feeds = {f"x{k}": x for k, x in enumerate(operands) if x is not None}
    found = []
    for provider in ("reference", "cuda"):
        graph = _graph(op, domain, operands, attrs, outputs)
        with rv.load(graph, optimization="none", providers=[provider], provider_options=options()) as session:
            found.append(list(session.run(feeds).values()))
    for wanted, got in zip(*found):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=2e-4, atol=2e-5)
