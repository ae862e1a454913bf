"""Operators whose definition in the standard has control flow or unknown shapes inside, as plain operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.bodies import copy_body
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops.gradients.base import Backward, attribute, constant_ints, first, operand
from ranvier.ops.gradients.contrib import heads_of, merged_heads
from ranvier.ops.gradients.parts import made_of
from ranvier.ops.nn.conv import transposed_frame

_LONGEST = 512


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found


@made_of("AffineGrid")
def _affine_grid(b: Backward, node: Node) -> Sequence[Value]:
    """The points of the grid, times each map."""
    theta = first(node)
    batch, _, *spatial = constant_ints(node.inputs[1], "the size of AffineGrid")
    lines = [
        np.linspace(-1, 1, n) if attribute(node, "align_corners", 0) and n > 1 else (2 * np.arange(n) + 1) / n - 1
        for n in spatial
    ]
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(spatial)], axis=-1)
    flat = b.constant(points.reshape(-1, len(spatial) + 1).astype(b.dtype(theta).numpy))
    moved = b.MatMul(flat, b.Transpose(theta, perm=[0, 2, 1]))
    return [b.Reshape(moved, b.whole(batch, *spatial, len(spatial)))]


@made_of("DynamicQuantizeLinear")
def _dynamic_quantize(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    zero = b.number(0.0, x)
    low, high = b.Min(b.ReduceMin(x, keepdims=0), zero), b.Max(b.ReduceMax(x, keepdims=0), zero)
    scale = b.Div(b.Sub(high, low), b.number(255.0, x))
    place = b.Clip(b.Round(b.Div(b.Neg(low), scale)), zero, b.number(255.0, x))
    point = b.Cast(place, to=DType.uint8.onnx)
    return [b.QuantizeLinear(x, scale, point), scale, point]


def _has_a_frame(node: Node) -> bool:
    auto = _text(attribute(node, "auto_pad", "NOTSET"))
    return bool(attribute(node, "output_shape", None)) or auto not in ("NOTSET", "")


@made_of("ConvTranspose", when=_has_a_frame)
def _framed(b: Backward, node: Node) -> Sequence[Value]:
    """All that windows reach, then what the frame shows of it."""
    x, w, bias = first(node), node.inputs[1], operand(node, 2)
    assert w is not None
    kernel, sizes = b.sizes(w)[2:], b.sizes(x)[2:]
    rank = len(kernel)
    strides, dilations = (tuple(attribute(node, k, None) or [1] * rank) for k in ("strides", "dilations"))
    more = attribute(node, "output_padding", None) or [0] * rank
    full = [s * (n - 1) + (k - 1) * d + 1 for s, n, k, d in zip(strides, sizes, kernel, dilations)]
    natural = tuple(f + int(p) for f, p in zip(full, more))
    auto = _text(attribute(node, "auto_pad", "NOTSET"))
    begins, shown = transposed_frame(
        auto, attribute(node, "pads", None), attribute(node, "output_shape", None), natural, tuple(sizes), strides
    )
    frame = ("auto_pad", "output_padding", "output_shape", "pads")
    kept = {key: value for key, value in node.attrs.items() if key not in frame}
    y = b.node("ConvTranspose", [x, w], kept).output
    ends = [n + begin - f for n, begin, f in zip(shown, begins, full)]
    y = b.Pad(y, b.whole(0, 0, *(-begin for begin in begins), 0, 0, *ends), b.number(0.0, y))
    return [y if bias is None else b.Add(y, b.Reshape(bias, b.whole(-1, *[1] * rank)))]


# -- attention --------------------------------------------------------------------------------------------------------


@made_of("FlexAttention", domain="ai.onnx.preview")
def _flex_attention(b: Backward, node: Node) -> Sequence[Value]:
    """Attention with the user's graphs on scores and weights."""
    q, k, v = node.inputs[:3]
    assert q is not None and k is not None and v is not None
    batch, heads, length, size = b.sizes(q)
    shared = b.sizes(k)[1]
    grouped = b.whole(batch, shared, heads // shared * length, -1)
    scale = attribute(node, "scale", None)
    scores = b.MatMul(b.Reshape(q, grouped), b.Transpose(k, perm=[0, 1, 3, 2]))
    scores = b.Mul(b.Reshape(scores, b.whole(batch, heads, length, -1)), b.number(scale or 1 / math.sqrt(size), q))
    weights = b.Softmax(_changed(b, node, "score_mod", scores), axis=-1)
    weights = _changed(b, node, "prob_mod", weights)
    y = b.MatMul(b.Reshape(weights, grouped), v)
    return [b.Reshape(y, b.whole(batch, heads, length, -1))]


def _changed(b: Backward, node: Node, which: str, scores: Value) -> Value:
    body: Graph | None = attribute(node, which, None)
    if body is None:
        return scores
    asked, kind = attribute(node, "softmax_precision", None), b.dtype(scores)
    entering = b.Cast(scores, to=int(asked)) if asked and int(asked) != kind.onnx else scores
    made = copy_body(body, {body.inputs[0]: entering}, b.graph, b.before)
    found = made[body.outputs[0]]
    found.type = entering.type  # of one shape by its definition
    return b.cast(found, kind)


@made_of("LinearAttention")
def _linear_attention(b: Backward, node: Node) -> Sequence[Value]:
    """Step by step: each writes a product of key and value into a memory, and reads it by its query."""
    query, key, value = node.inputs[:3]
    assert query is not None and key is not None and value is not None
    heads = int(node.attrs["kv_num_heads"])
    q = heads_of(b, query, int(node.attrs["q_num_heads"]))
    k, v = heads_of(b, key, heads), heads_of(b, value, heads)
    batch, _, time, size = b.sizes(k)
    if time > _LONGEST:
        raise NotSupported(f"the gradient of LinearAttention is known for up to {_LONGEST} steps; this one has {time}")
    q = b.Mul(q, b.number(float(attribute(node, "scale", 0.0)) or 1 / math.sqrt(size), q))
    decay, rate = (_per_step(b, operand(node, place), heads, time) for place in (4, 5))
    kept = None if decay is None else [b.Transpose(b.Exp(each), perm=[0, 1, 3, 2]) for each in decay]
    memory = operand(node, 3)
    if memory is None:
        memory = b.constant(np.zeros((batch, heads, size, b.sizes(v)[3]), b.dtype(k).numpy))
    rows: list[Value] = []
    for t, (asked, row, write) in enumerate(zip(*(_steps(b, x, time) for x in (q, k, v)))):  # [batch, heads, 1, size]
        memory = memory if kept is None else b.Mul(memory, kept[t])
        if rate is not None:
            write = b.Mul(rate[t], b.Sub(write, b.MatMul(row, memory)))
        memory = b.Add(memory, b.MatMul(b.Transpose(row, perm=[0, 1, 3, 2]), write))
        together = b.Reshape(asked, b.whole(batch, heads, -1, size))  # queries that share a memory
        rows.append(b.Reshape(b.MatMul(together, memory), b.whole(batch, b.sizes(q)[1], 1, -1)))
    y = rows[0] if time == 1 else b.node("Concat", rows, {"axis": 2}).output
    return [merged_heads(b, y), memory]


def _steps(b: Backward, x: Value, time: int) -> list[Value]:
    if time == 1:
        return [x]
    return list(b.node("Split", [x], {"axis": 2, "num_outputs": time}, outputs=time).outputs)


def _per_step(b: Backward, gate: Value | None, heads: int, time: int) -> list[Value] | None:
    """A gate ``[batch, time, width]`` as ``[batch, heads or 1, 1, size or 1]`` for each step."""
    if gate is None:
        return None
    return _steps(b, heads_of(b, gate, min(heads, b.sizes(gate)[-1])), time)
