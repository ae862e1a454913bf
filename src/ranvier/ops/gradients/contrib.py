"""Operators of com.microsoft, which fused models are made of, as the plain operators that were fused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, attribute, first, operand, text
from ranvier.ops.gradients.nn import rms_scaled, standard_score
from ranvier.ops.gradients.parts import made_of

MICROSOFT = "com.microsoft"
_KEPT_AS_IT_IS = ("", "Identity")


def two(node: Node) -> tuple[Value, Value]:
    x, y = node.inputs[:2]
    assert x is not None and y is not None
    return x, y


def added(b: Backward, x: Value, *others: Value | None) -> Value:
    return b.add_all([x, *(each for each in others if each is not None)])


# -- activations ----------------------------------------------------------------------------------------------------


@made_of("Gelu", "BiasGelu", domain=MICROSOFT)
def _gelu(b: Backward, node: Node) -> Sequence[Value]:
    return [b.Gelu(added(b, first(node), operand(node, 1)))]


@made_of("FastGelu", domain=MICROSOFT)
def _fast_gelu(b: Backward, node: Node) -> Sequence[Value]:
    return [b.Gelu(added(b, first(node), operand(node, 1)), approximate="tanh")]


@made_of("QuickGelu", domain=MICROSOFT)
def _quick_gelu(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    return [b.Mul(x, b.Sigmoid(b.Mul(x, b.number(float(attribute(node, "alpha", 1.702)), x))))]


@made_of("BiasSplitGelu", domain=MICROSOFT)
def _bias_split_gelu(b: Backward, node: Node) -> Sequence[Value]:
    x, bias = two(node)
    last = b.rank(x) - 1
    left, right = b.node("Split", [b.Add(x, bias)], {"axis": last, "num_outputs": 2}, outputs=2).outputs
    return [b.Mul(left, b.Gelu(right))]


@made_of("BiasAdd", domain=MICROSOFT)
def _bias_add(b: Backward, node: Node) -> Sequence[Value]:
    return [added(b, first(node), *node.inputs[1:])]


@made_of("GatedAdd", domain=MICROSOFT)
def _gated_add(b: Backward, node: Node) -> Sequence[Value]:
    x, y = two(node)
    return [b.Add(x, b.Mul(y, node.inputs[2]))]


def _activated(b: Backward, node: Node, y: Value, parameters: dict[str, float]) -> Value:
    name = text(node, "activation")
    if name in _KEPT_AS_IT_IS:
        return y
    if name == "Clip":
        return b.Clip(y, b.number(parameters["alpha"], y), b.number(parameters["beta"], y))
    return b.node(name, [y], dict(parameters)).output


# -- products -------------------------------------------------------------------------------------------------------


def _turned(b: Backward, x: Value, last_two: int, batch: int) -> Value:
    rank = b.rank(x)
    order = list(range(rank))
    if batch and rank > 2:
        order = [*order[1:-1], 0, order[-1]]
    if last_two and rank > 1:
        order[-1], order[-2] = order[-2], order[-1]
    return x if order == list(range(rank)) else b.Transpose(x, perm=order, _name=f"{x.name}.turned")


@made_of("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", domain=MICROSOFT)
def _fused_matmul(b: Backward, node: Node) -> Sequence[Value]:
    x, y = two(node)
    left = _turned(b, x, attribute(node, "transA", 0), attribute(node, "transBatchA", 0))
    right = _turned(b, y, attribute(node, "transB", 0), attribute(node, "transBatchB", 0))
    made, alpha = b.MatMul(left, right), float(attribute(node, "alpha", 1.0))
    made = made if alpha == 1.0 else b.Mul(made, b.number(alpha, made))
    return [_activated(b, node, made, _parameters(node, "alpha", "beta", "gamma", "axis"))]


def _parameters(node: Node, *names: str) -> dict[str, float]:
    return {k: node.attrs[f"activation_{k}"] for k in names if f"activation_{k}" in node.attrs}


@made_of("FusedGemm", domain=MICROSOFT)
def _fused_gemm(b: Backward, node: Node) -> Sequence[Value]:
    attrs = {k: v for k, v in node.attrs.items() if not k.startswith("activation")}
    made = b.node("Gemm", list(node.inputs), attrs).output
    return [_activated(b, node, made, _parameters(node, "alpha", "beta", "gamma"))]


@made_of("GemmFastGelu", domain=MICROSOFT)
def _gemm_fast_gelu(b: Backward, node: Node) -> Sequence[Value]:
    x, weight = two(node)
    return [b.Gelu(added(b, b.MatMul(x, weight), operand(node, 2)), approximate="tanh")]


@made_of("FusedConv", domain=MICROSOFT)
def _fused_conv(b: Backward, node: Node) -> Sequence[Value]:
    return [fused_conv(b, node, list(node.inputs))]


def fused_conv(b: Backward, node: Node, operands: Sequence[Value | None]) -> Value:
    """A convolution, a sum and an activation; the operands are those of FusedConv."""
    attrs = {k: v for k, v in node.attrs.items() if not k.startswith("activation")}
    made = added(b, b.node("Conv", operands[:3], attrs).output, *operands[3:])
    counts = {"LeakyRelu": 1, "Clip": 2, "HardSigmoid": 2}
    given = list(attribute(node, "activation_params", None) or [])[: counts.get(text(node, "activation"), 0)]
    return _activated(b, node, made, dict(zip(("alpha", "beta"), map(float, given))))


# -- normalization --------------------------------------------------------------------------------------------------


@made_of("SkipLayerNormalization", domain=MICROSOFT)
def _skip_layer_normalization(b: Backward, node: Node) -> Sequence[Value]:
    x, skip = two(node)
    total = added(b, x, skip, operand(node, 4))
    y, mean, inverse = standard_score(b, total, b.whole(b.rank(x) - 1), attribute(node, "epsilon", 1e-12))
    y = added(b, b.Mul(y, node.inputs[2]), operand(node, 3))
    return [y, b.cast(mean, DType.float32), b.cast(inverse, DType.float32), total]


@made_of("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_rms(b: Backward, node: Node) -> Sequence[Value]:
    x, skip = two(node)
    total = added(b, x, skip, operand(node, 3))
    y, inverse = rms_scaled(b, total, b.whole(b.rank(x) - 1), attribute(node, "epsilon", 1e-12))
    kept = b.cast(inverse, DType.float32)
    return [b.Mul(y, node.inputs[2]), kept, kept, total]  # the second is never computed: nobody can be reading it


@made_of("EmbedLayerNormalization", domain=MICROSOFT)
def _embed(b: Backward, node: Node) -> Sequence[Value]:
    ids, words, positions = first(node), node.inputs[2], node.inputs[3]
    assert words is not None and positions is not None
    batch, length = b.sizes(ids)
    places = operand(node, 8)
    if places is None:
        places = b.constant(np.arange(length, dtype=np.int64)[None])
    total = b.Add(b.Gather(words, ids, axis=0), b.Gather(positions, places, axis=0))
    segments, kinds = operand(node, 1), operand(node, 4)
    if segments is not None and kinds is not None:
        total = b.Add(total, b.Gather(kinds, segments, axis=0))
    y, _, _ = standard_score(b, total, b.whole(2), attribute(node, "epsilon", 1e-12))
    mask = operand(node, 7)
    if mask is None:
        counts = b.constant(np.zeros(batch, np.int32))
    else:
        ones = b.Equal(mask, b.constant(np.ones((), b.dtype(mask).numpy)))
        counts = b.ReduceSum(b.Cast(ones, to=DType.int32.onnx), b.whole(1), keepdims=0)
    return [added(b, b.Mul(y, node.inputs[5]), operand(node, 6)), counts, total]


# -- attention ------------------------------------------------------------------------------------------------------


def heads_of(b: Backward, x: Value, heads: int) -> Value:
    """``[batch, sequence, heads * size]`` as ``[batch, heads, sequence, size]``."""
    return b.Transpose(b.Reshape(x, b.whole(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def merged_heads(b: Backward, x: Value) -> Value:
    return b.Reshape(b.Transpose(x, perm=[0, 2, 1, 3]), b.whole(0, 0, -1))


def _attended(
    b: Backward, node: Node, q: Value, k: Value, v: Value, mask: Value | None, bias: Value | None
) -> tuple[Value, Value]:
    """The result with its heads merged, and the scores that went into the softmax."""
    batch, _, length, size = b.sizes(q)
    total = b.sizes(k)[2]
    scale = float(attribute(node, "scale", 0.0)) or 1.0 / math.sqrt(size)
    scores = b.Mul(b.MatMul(q, b.Transpose(k, perm=[0, 1, 3, 2])), b.number(scale, q))
    scores = added(b, scores, bias)
    allowed = None if mask is None else _allowed(b, mask, batch, length, total)
    if allowed is not None:
        lowered = b.number(float(attribute(node, "mask_filter_value", -10000.0)), scores)
        scores = b.Add(scores, b.Where(allowed, b.number(0.0, scores), lowered))
    if attribute(node, "unidirectional", 0) and length > 1:
        future = np.arange(total) > total - length + np.arange(length)[:, None]
        scores = b.Where(b.constant(future), b.number(float(np.finfo(np.float32).min), scores), scores)
    y = b.MatMul(b.Softmax(scores, axis=-1), v)
    return merged_heads(b, y), scores


def _allowed(b: Backward, mask: Value, batch: int, length: int, total: int) -> Value | None:
    """Which keys a mask lets through, in any of the forms it may have."""
    shape = b.sizes(mask)
    zero = b.constant(np.zeros((), b.dtype(mask).numpy))
    if len(shape) == 1 and shape[0] in (batch, 2 * batch):
        places = b.constant(np.arange(total).astype(b.dtype(mask).numpy))
        ends = b.Unsqueeze(b.Slice(mask, b.whole(0), b.whole(batch), b.whole(0)), b.whole(1))
        inside = b.Less(places, ends)
        if shape[0] == 2 * batch and batch:
            starts = b.Unsqueeze(b.Slice(mask, b.whole(batch), b.whole(2 * batch), b.whole(0)), b.whole(1))
            inside = b.And(inside, b.GreaterOrEqual(places, starts))
        return b.Unsqueeze(inside, b.whole(1, 2))
    if shape == (batch, total):
        return b.Unsqueeze(b.Greater(mask, zero), b.whole(1, 2))
    if len(shape) == 2 and shape[1] == 1:
        return None
    if shape == (batch, length, total):
        return b.Unsqueeze(b.Greater(mask, zero), b.whole(1))
    if len(shape) == 4:
        past = total - length
        part = b.Slice(mask, b.whole(past, 0), b.whole(past + length, total), b.whole(2, 3))
        return b.Greater(part, zero)
    raise NotSupported(f"the gradient of attention with a mask of shape {list(shape)} is not known")


def _without(node: Node, places: Sequence[int], *attributes: str) -> None:
    """Refuse what only a decoder's fixed buffers and their like use."""
    if any(operand(node, k) is not None for k in places) or any(attribute(node, name, 0) for name in attributes):
        raise NotSupported(f"the gradient of {node.op} with a shared buffer, or with rotation, is not known")


@made_of("Attention", domain=MICROSOFT)
def _attention(b: Backward, node: Node) -> Sequence[Value]:
    x, weight = two(node)
    _without(node, (6,), "do_rotary", "past_present_share_buffer")
    heads, width = int(node.attrs["num_heads"]), b.sizes(weight)[1]
    sizes = [int(n) for n in attribute(node, "qkv_hidden_sizes", None) or [width // 3] * 3]
    joined = added(b, b.MatMul(x, weight), operand(node, 2))
    parts = b.node("Split", [joined, b.whole(*sizes)], {"axis": 2}, outputs=3).outputs
    q, k, v = (heads_of(b, part, heads) for part in parts)
    past = operand(node, 4)
    if past is not None:
        before = b.node("Split", [past], {"axis": 0, "num_outputs": 2}, outputs=2).outputs
        k, v = (_behind(b, b.Squeeze(old, b.whole(0)), new) for old, new in zip(before, (k, v)))
    y, _ = _attended(b, node, q, k, v, operand(node, 3), operand(node, 5))
    if len(node.outputs) < 2 or sizes[1] != sizes[2]:
        return [y]
    wide = [b.Unsqueeze(each, b.whole(0)) for each in (k, v)]
    return [y, b.node("Concat", wide, {"axis": 0}).output]


@made_of("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(b: Backward, node: Node) -> Sequence[Value]:
    query, key, value = first(node), operand(node, 1), operand(node, 2)
    _without(node, (8, 9))
    heads = int(node.attrs["num_heads"])
    if key is None:  # [batch, length, heads, 3, size]
        q, k, v = _unpacked(b, query, 3)
    elif value is None:
        q, (k, v) = heads_of(b, query, heads), _unpacked(b, key, 2)
    else:
        q = heads_of(b, query, heads)
        k, v = (each if b.rank(each) == 4 else heads_of(b, each, heads) for each in (key, value))
    bias = operand(node, 3)
    if bias is not None:
        widths = [heads * b.sizes(each)[3] for each in (q, k, v)]
        parts = b.node("Split", [bias, b.whole(*widths)], {"axis": 0}, outputs=3).outputs
        own = [b.Reshape(part, b.whole(heads, 1, -1)) for part in parts]
        q = b.Add(q, own[0])
        if key is None or b.rank(key) != 4:  # what comes as heads has its bias already
            k, v = b.Add(k, own[1]), b.Add(v, own[2])
    k, v = (_behind(b, operand(node, 6 + place), new) for place, new in enumerate((k, v)))
    y, scores = _attended(b, node, q, k, v, operand(node, 4), operand(node, 5))
    return [y, k, v, scores]


def _behind(b: Backward, past: Value | None, new: Value) -> Value:
    """Rows after those of calls before."""
    return new if past is None else b.node("Concat", [past, new], {"axis": 2}).output


def _unpacked(b: Backward, packed: Value, count: int) -> list[Value]:
    """Parts of ``[batch, length, heads, count, size]`` as heads."""
    parts = b.node("Split", [packed], {"axis": 3, "num_outputs": count}, outputs=count).outputs
    return [b.Transpose(b.Squeeze(part, b.whole(3)), perm=[0, 2, 1, 3]) for part in parts]
