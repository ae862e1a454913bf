"""com.microsoft activations and the additions fused into them: the Gelu family, bias, gate, dropout, softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.rules import MICROSOFT, at, divided, rounded, same_as, tensor
from ranvier.ops.operands import normal_axis, scalar
from ranvier.ops.registry import Array, Call, TypeCall, op
from ranvier.ops.seed import fresh_generator
from ranvier.ops.tensor.special import erf


def sigmoid(x: Array) -> Array:
    """The logistic function, without overflow for large negative arguments."""
    return np.asarray(np.tanh(x * 0.5) * 0.5 + 0.5)


def exact_gelu(x: Array) -> Array:
    """x·Φ(x), with Φ the normal distribution."""
    return np.asarray(x * 0.5 * (erf(x * math.sqrt(0.5)) + 1.0))


def tanh_gelu(x: Array) -> Array:
    """Gelu by its usual tanh approximation."""
    return np.asarray(x * 0.5 * (np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)) + 1.0))


def with_bias(name: str, x: Array, bias: Array | None) -> Array:
    """``x`` plus a bias along its last axis, wide enough to go on computing with."""
    if bias is None:
        return widened(x)
    if bias.ndim != 1 or not x.ndim or x.shape[-1] != bias.shape[0]:
        raise ShapeMismatch(
            f"{name}: the bias must be a vector as long as the last axis of {list(x.shape)}, got {list(bias.shape)}"
        )
    return np.asarray(widened(x) + widened(bias))


# -- Gelu -------------------------------------------------------------------------------------------------------------


@op("Gelu", domain=MICROSOFT, traits=("elementwise",))
def gelu(x: Array) -> Array:
    return rounded(exact_gelu(widened(x)), x.dtype)


@op("BiasGelu", domain=MICROSOFT)
def bias_gelu(a: Array, b: Array) -> Array:
    return rounded(exact_gelu(with_bias("BiasGelu", a, b)), a.dtype)


@op("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Array, bias: Array | None = None) -> Array:
    return rounded(tanh_gelu(with_bias("FastGelu", x, bias)), x.dtype)


@op("QuickGelu", domain=MICROSOFT, traits=("elementwise",))
def quick_gelu(x: Array, *, alpha: float = 1.702) -> Array:
    wide = widened(x)
    return rounded(wide * sigmoid(wide * float(alpha)), x.dtype)


@op("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(x: Array, bias: Array) -> Array:
    if not x.ndim or x.shape[-1] % 2:
        raise ShapeMismatch(f"BiasSplitGelu: the last axis must be even, got {list(x.shape)}")
    left, right = np.split(with_bias("BiasSplitGelu", x, bias), 2, axis=-1)
    return rounded(left * exact_gelu(right), x.dtype)


@op("ScaledSiLU", domain=MICROSOFT)
def scaled_silu(x: Array, scale: Array | None = None, *, alpha: float = 1.0) -> Array:
    wide = widened(x) * float(alpha if scale is None else scalar("ScaledSiLU", "scale", scale))
    return rounded(wide * sigmoid(wide), x.dtype)


# -- sums -------------------------------------------------------------------------------------------------------------


@op("BiasAdd", domain=MICROSOFT)
def bias_add(x: Array, bias: Array, skip: Array) -> Array:
    if skip.shape != x.shape:
        raise ShapeMismatch(f"BiasAdd: skip must have the shape of X {list(x.shape)}, got {list(skip.shape)}")
    return rounded(with_bias("BiasAdd", x, bias) + widened(skip), x.dtype)


@op("GatedAdd", domain=MICROSOFT)
def gated_add(x: Array, y: Array, gate: Array) -> Array:
    if y.shape != x.shape or gate.shape != (*x.shape[:-1], 1):
        raise ShapeMismatch(
            f"GatedAdd: X {list(x.shape)} needs a Y of its shape and one gate per row, got {list(y.shape)} and "
            f"{list(gate.shape)}"
        )
    return rounded(widened(x) + widened(y) * widened(gate), x.dtype)


@op("BiasDropout", domain=MICROSOFT, traits=("random",))
def bias_dropout(
    data: Array,
    bias: Array,
    residual: Array | None = None,
    ratio: Array | None = None,
    training_mode: Array | None = None,
    *,
    seed: int | None = None,
    ctx: Call,
) -> tuple[Array, Array | None]:
    y = widened(data) + widened(bias)
    training = training_mode is not None and bool(scalar("BiasDropout", "training_mode", training_mode))
    dropped = (0.5 if ratio is None else float(scalar("BiasDropout", "ratio", ratio))) if training else 0.0
    if not 0 <= dropped < 1:
        raise InvalidValue(f"BiasDropout: ratio must be in [0, 1), got {dropped}", op="BiasDropout")
    mask: Array = np.ones(data.shape, bool)
    if dropped:
        generator = fresh_generator() if seed is None else np.random.default_rng(seed)
        mask = np.asarray(generator.random(data.shape) >= dropped)
        y = y * mask * (1 / (1 - dropped))
    if residual is not None:
        y = y + widened(residual)
    return y.astype(data.dtype, copy=False), mask if ctx.wants(1) else None


@op("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(data: Array, bias: Array, *, axis: int = 1, is_inner_broadcast: int) -> Array:
    """Softmax over all axes from ``axis`` on of ``data + bias``.

    The bias holds fewer rows than the data: with an inner broadcast neighbouring rows share one, with an outer
    broadcast the rows of the bias repeat as a whole.
    """
    split = normal_axis("BiasSoftmax", axis, data.ndim)
    width = math.prod(data.shape[split:])
    count = math.prod(data.shape[:split])
    rows = bias.size // width if width else 0
    if data.size == 0:
        return data.copy()
    if not rows or bias.size % width or count % rows:
        raise ShapeMismatch(f"BiasSoftmax: bias {list(bias.shape)} does not fit data {list(data.shape)}, axis {split}")
    scores = widened(data).reshape((rows, -1, width) if is_inner_broadcast else (-1, rows, width))
    shift = widened(bias).reshape((rows, 1, width) if is_inner_broadcast else (1, rows, width))
    scores = scores + shift
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return rounded(weights.reshape(data.shape), data.dtype)


@op("IsAllFinite", domain=MICROSOFT)
def is_all_finite(*inputs: Array, isinf_only: int = 0, isnan_only: int = 0) -> Array:
    if isinf_only and isnan_only:
        raise InvalidValue("IsAllFinite: isinf_only and isnan_only exclude each other", op="IsAllFinite")
    bad = np.isinf if isinf_only else np.isnan if isnan_only else lambda x: ~np.isfinite(x)
    return np.asarray(not any(bool(bad(widened(x)).any()) for x in inputs))


# -- types ------------------------------------------------------------------------------------------------------------

for _op in (gelu, bias_gelu, fast_gelu, quick_gelu, scaled_silu, bias_add, gated_add, bias_softmax):
    _op.infer(same_as(0))


@bias_split_gelu.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = tensor(call, 0)
    return [TensorType(x.dtype, None if x.shape is None else (*x.shape[:-1], divided(at(x.shape, -1), 2)))]


@bias_dropout.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [call.type(0), TensorType(DType.bool, tensor(call, 0).shape)]


@is_all_finite.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [TensorType(DType.bool, ())]
