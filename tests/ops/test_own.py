"""Operators of our own domain, against what their definition says in plain integers."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Symbol, TensorType
from ranvier.ops import evaluate, get
from ranvier.ops.own.bitlinear import DOMAIN, pack_codes, quantized_tokens, unpack_codes
from ranvier.ops.registry import TypeCall

RNG = np.random.default_rng(5)


def weights(n, k):
    return RNG.integers(-1, 2, (n, k)).astype(np.int8)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5, 7), (8, 130), (2, 0), (0, 5)])
def test_codes_survive_packing(shape):
    w = weights(*shape)
    packed = pack_codes(w)
    assert packed.shape == (shape[0], -(-shape[1] // 4))
    np.testing.assert_array_equal(unpack_codes(packed, shape[1]), w)


def test_a_code_stands_where_the_definition_says():
    w = np.zeros((1, 6), np.int8)
    w[0, 5] = 1
    # codes of nothing are 1; that of column 5 is 2, in the second byte at bit 2
    assert pack_codes(w).tolist() == [[0b01010101, 0b00001001]]


def test_tokens_by_plain_arithmetic():
    x = np.float32([[0.5, -1.0, 0.25, 0.0], [0, 0, 0, 0], [3e-6, -1e-6, 0, 0]])
    codes, factor = quantized_tokens(x)
    assert codes[0].tolist() == [64, -127, 32, 0]  # 63.5 goes to the even 64, 31.75 to 32
    assert codes[1].tolist() == [0, 0, 0, 0]
    assert codes[2].tolist() == [38, -13, 0, 0]  # as if the largest were 1e-5
    np.testing.assert_array_equal(factor[:, 0], np.float32(127) / np.float32([1, 1e-5, 1e-5]))


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("each", [False, True])
def test_product(lead, each):
    k, n = 37, 9
    w, x = weights(n, k), RNG.standard_normal((*lead, k)).astype(np.float32)
    scale = RNG.random(n if each else 1).astype(np.float32)
    bias = RNG.standard_normal(n).astype(np.float32)
    found = evaluate("BitLinear", x, pack_codes(w), scale, bias, domain=DOMAIN, K=k, N=n)
    codes, factor = quantized_tokens(x)
    for place in np.ndindex(*lead):
        for j in range(n):
            total = sum(int(codes[(*place, i)]) * int(w[j, i]) for i in range(k))
            step = np.float32(scale[j if each else 0] / factor[(*place, 0)])
            assert found[(*place, j)] == np.float32(np.float32(total) * step) + bias[j]


def test_sums_are_exact_where_float32_would_not_be():
    k = 140_000
    w, x = np.ones((1, k), np.int8), np.ones((1, k), np.float32)
    x[0, 0] = 0.5
    found = evaluate("BitLinear", x, pack_codes(w), np.float32(1), domain=DOMAIN, K=k, N=1)
    assert found[0, 0] == np.float32(127 * (k - 1) + 64) * (np.float32(1) / np.float32(127))


def test_result_has_the_type_of_x():
    x = RNG.standard_normal((2, 8)).astype(np.float16)
    found = evaluate("BitLinear", x, pack_codes(weights(4, 8)), np.float32(1), domain=DOMAIN, K=8, N=4)
    assert found.dtype == np.float16
    call = TypeCall([TensorType(DType.float16, (Symbol("batch"), 8))], [None], {"K": 8, "N": 4}, 1, 1)
    rule = get(DOMAIN, "BitLinear").infer_rule
    assert rule is not None
    assert rule(call) == [TensorType(DType.float16, (Symbol("batch"), 4))]


def test_cost_counts_multiplications():
    definition = get(DOMAIN, "BitLinear")
    types = [TensorType(DType.float32, (3, 8)), TensorType(DType.uint8, (4, 2)), TensorType(DType.float32, ())]
    call = TypeCall(types, [None] * 3, {"K": 8, "N": 4}, 1, 1, result_types=[TensorType(DType.float32, (3, 4))])
    assert definition.cost_rule is not None
    cost = definition.cost_rule(call)
    assert cost.flops == 2 * 3 * 8 * 4
    assert cost.bytes == 3 * 8 * 4 + 8 + 4 + 3 * 4 * 4


def test_bad_operands_are_named():
    x, codes = np.zeros((2, 8), np.float32), pack_codes(weights(4, 8))
    one = np.float32(1)
    for bad in ([x[:, :7], codes, one], [x, codes[:3], one], [x, codes, np.ones(3, np.float32)]):
        with pytest.raises(ShapeMismatch, match="BitLinear"):
            evaluate("BitLinear", *bad, domain=DOMAIN, K=8, N=4)
    with pytest.raises(InvalidValue, match="3 was found"):
        evaluate("BitLinear", x, codes | np.uint8(3), one, domain=DOMAIN, K=8, N=4)
    with pytest.raises(InvalidValue, match="-1, 0 or 1"):
        pack_codes(np.full((1, 4), 2, np.int8))
