"""Causal convolutions with a state, flexible attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.providers.cpu.compare import Array, check

RNG = np.random.default_rng(21)


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("time", "taps"), [(1, 4), (7, 4), (2, 5), (33, 1)])
def test_causal_convolution(time: int, taps: int, dtype: Any) -> None:
    x, w = numbers(2, 6, time, dtype=dtype), numbers(6, 1, taps, dtype=dtype)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype is np.float16 else {"rtol": 1e-4, "atol": 1e-5}
    check("CausalConvWithState", [x, w], outputs=2, opset=27, **close)
    operands = [x, w, numbers(6, dtype=dtype), numbers(2, 6, taps - 1, dtype=dtype)]
    check("CausalConvWithState", operands, {"activation": "silu"}, outputs=2, opset=27, **close)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_flexible_attention(dtype: Any) -> None:
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype is np.float16 else {"rtol": 1e-4, "atol": 1e-5}
    q, k, v = numbers(2, 4, 5, 8, dtype=dtype), numbers(2, 2, 7, 8, dtype=dtype), numbers(2, 2, 7, 16, dtype=dtype)
    for attrs in ({}, {"scale": 0.4}):
        check("FlexAttention", [q, k, v], attrs, domain="ai.onnx.preview", **close)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_linear_attention(rule: str, dtype: Any) -> None:
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is np.float16 else {"rtol": 1e-4, "atol": 1e-5}
    q, k, v = numbers(2, 6, 32, dtype=dtype), numbers(2, 6, 16, dtype=dtype), numbers(2, 6, 20, dtype=dtype)
    past, decay = numbers(2, 2, 8, 10, dtype=dtype), -np.abs(numbers(2, 6, 16, dtype=dtype))
    beta = np.abs(numbers(2, 6, 2, dtype=dtype)) / dtype(4)
    operands = [q, k, v, past, decay if "gated" in rule else None, beta if "delta" in rule else None]
    while operands[-1] is None:
        operands.pop()
    attrs = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}
    check("LinearAttention", operands, attrs, outputs=2, opset=27, **close)
