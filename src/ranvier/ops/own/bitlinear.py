"""``ranvier::BitLinear``: weights of -1, 0 and 1, activations of 8 bits with a scale for each token (BitNet b1.58).

The body is the definition. It follows the arithmetic that such models are trained with (Ma et al., "The Era of 1-bit
LLMs", 2024, and its training notes): 127 over the largest magnitude of a token is what the token is multiplied by and
rounded to integers, their product with the weights is exact, and both scales are applied to the sum. A runtime that
gets the integers right is lossless against the trained model, whatever float type that was stored in.

Weights are stored as ``w + 1`` in 2 bits, ``[N, ceil(K / 4)]`` bytes: the code of column k is in byte k // 4 at bit
2 · (k mod 4). ``scale`` is one number, or one for each of the N outputs, so that layers which read the same tokens can
be one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType, Type
from ranvier.ops.costs import dims, traffic
from ranvier.ops.registry import Array, Cost, TypeCall, op

DOMAIN = "ranvier"
LEAST = 1e-5  # the largest magnitude of a token counts as at least this, as in training


def pack_codes(weights: Array) -> Array:
    """[N, K] of -1, 0 and 1 as the operator stores them."""
    n, k = weights.shape
    raised = np.zeros((n, -(-k // 4) * 4), np.uint8)
    np.add(np.asarray(weights, np.int8), np.int8(1), out=raised[:, :k].view(np.int8))
    if raised.max(initial=0) > 2:
        raise InvalidValue("BitLinear: weights must be -1, 0 or 1", op="BitLinear")
    words = raised.view("<u4")  # four codes: brought together in the lowest byte
    words |= words >> np.uint32(6)
    words |= words >> np.uint32(12)
    return words.astype(np.uint8)


def are_codes(packed: Array, k: int) -> bool:
    """Whether each of K codes in every row is 0, 1 or 2; behind them anything may stand."""
    three = packed & (packed >> np.uint8(1)) & np.uint8(0x55)
    if k % 4 and three.size:
        three[:, -1] &= np.uint8((1 << 2 * (k % 4)) - 1)
    return not three.any()


def unpack_codes(packed: Array, k: int) -> Array:
    """The weights [N, K], as int8."""
    raised = (packed[..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    weights = raised.reshape(packed.shape[0], packed.shape[1] * 4)[:, :k].view(np.int8) - np.int8(1)
    if not are_codes(packed, k):
        raise InvalidValue("BitLinear: a code is 0, 1 or 2; 3 was found", op="BitLinear")
    return weights


def quantized_tokens(x: Array) -> tuple[Array, Array]:
    """int8 codes of activations, and for each token what it was multiplied by before it was rounded."""
    values = np.asarray(x).astype(np.float32)
    reach = np.abs(values).max(axis=-1, keepdims=True, initial=0.0)
    factor = np.float32(127.0) / np.maximum(reach, np.float32(LEAST))
    return np.clip(np.rint(values * factor), -128, 127).astype(np.int8), factor


@op("BitLinear", domain=DOMAIN)
def bitlinear(x: Array, codes: Array, scale: Array, bias: Array | None = None, *, K: int, N: int) -> Array:
    if x.ndim < 1 or x.shape[-1] != K or codes.shape != (N, -(-K // 4)) or codes.dtype != np.uint8:
        raise ShapeMismatch(
            f"BitLinear: {N} x {K} weights take x [..., {K}] and codes uint8 [{N}, {-(-K // 4)}], "
            f"got {list(x.shape)} and {codes.dtype} {list(codes.shape)}"
        )
    if scale.size not in (1, N) or (bias is not None and bias.shape != (N,)):
        raise ShapeMismatch(f"BitLinear: scale has 1 or {N} numbers and bias {N}")
    tokens, factor = quantized_tokens(x)
    weights = unpack_codes(codes, K)
    # exact in a float type whose mantissa holds every sum, and far faster than NumPy's integer products
    exact = np.float32 if K * 128 < 1 << 24 else np.float64
    total = np.matmul(tokens.astype(exact), weights.T.astype(exact)).astype(np.int32)
    y: Array = total.astype(np.float32) * (scale.astype(np.float32).reshape(-1) / factor)
    if bias is not None:
        y = y + bias.astype(np.float32)
    return y.astype(x.dtype, copy=False)


@bitlinear.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = call.type(0)
    if not isinstance(x, TensorType):
        return [TensorType(None, None)]
    return [TensorType(x.dtype, None if x.shape is None else (*x.shape[:-1], int(call.attr("N"))))]


@bitlinear.cost
def _(call: TypeCall) -> Cost:
    return Cost(2.0 * math.prod(dims(call.type(0))) * int(call.attr("N")), traffic(call))
