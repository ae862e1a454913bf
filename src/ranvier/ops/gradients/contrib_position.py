"""com.microsoft's operators that say where tokens stand, as plain operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops import registry
from ranvier.ops.gradients.base import Backward, attribute, constant_ints, first, operand
from ranvier.ops.gradients.contrib import MICROSOFT, heads_of, merged_heads
from ranvier.ops.gradients.parts import made_of

# -- rotary embeddings --------------------------------------------------------------------------------------------


def rotated(b: Backward, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """Pairs of the first features of ``[batch, heads, length, size]`` turned by ``[batch or 1, 1, length, half]``."""
    half, size = b.sizes(cos)[-1], b.sizes(x)[-1]
    last = b.whole(3)

    def part(start: int, end: int, step: int = 1) -> Value:
        return b.Slice(x, b.whole(start), b.whole(end), last, b.whole(step))

    left, right = (part(0, 2 * half, 2), part(1, 2 * half, 2)) if interleaved else (part(0, half), part(half, 2 * half))
    turned = [b.Sub(b.Mul(left, cos), b.Mul(right, sin)), b.Add(b.Mul(right, cos), b.Mul(left, sin))]
    if interleaved:
        pairs = b.node("Concat", [b.Unsqueeze(each, b.whole(4)) for each in turned], {"axis": 4}).output
        turned = [b.Reshape(pairs, b.whole(0, 0, 0, 2 * half))]
    rest = [part(2 * half, size)] if 2 * half < size else []
    return b.node("Concat", [*turned, *rest], {"axis": 3}).output if len(turned) + len(rest) > 1 else turned[0]


def angles(b: Backward, cache: Value, positions: Value) -> Value:
    """Rows of a table for ``[batch or 1, length]`` positions, with an axis for the heads."""
    return b.Unsqueeze(b.Gather(cache, positions, axis=0), b.whole(1))


def counted(b: Backward, starts: Value, length: int) -> Value:
    """Positions ``[batch or 1, length]`` from the first on."""
    steps = b.constant(np.arange(length, dtype=np.int64))
    return b.Add(b.Reshape(b.cast(starts, DType.int64), b.whole(-1, 1)), steps)


def _rotary(b: Backward, node: Node, cos: Value, sin: Value) -> Value:
    x = first(node)
    interleaved = bool(attribute(node, "interleaved", 0))
    if b.rank(x) == 4:
        return rotated(b, x, cos, sin, interleaved)
    given = int(attribute(node, "num_heads", 0))
    wide = b.sizes(x)[2]
    size = wide // given if given else int(attribute(node, "rotary_embedding_dim", 0)) or 2 * b.sizes(cos)[-1]
    return merged_heads(b, rotated(b, heads_of(b, x, wide // size), cos, sin, interleaved))


@made_of("RotaryEmbedding", domain=MICROSOFT)
def _rotary_embedding(b: Backward, node: Node) -> Sequence[Value]:
    x, places, cos, sin = node.inputs[:4]
    assert x is not None and places is not None and cos is not None and sin is not None
    at = counted(b, places, b.sizes(x)[-2]) if b.rank(places) < 2 else places
    return [_rotary(b, node, angles(b, cos, at), angles(b, sin, at))]


@made_of("MRotaryEmbedding", domain=MICROSOFT)
def _three_positions(b: Backward, node: Node) -> Sequence[Value]:
    """Each column's angle comes from one of three positions."""
    x, places, cos, sin = node.inputs[:4]
    assert x is not None and places is not None and cos is not None and sin is not None
    half, sections = b.sizes(cos)[1], [int(n) for n in node.attrs["mrope_section"]]
    stream = np.repeat(np.arange(3), sections)
    if int(attribute(node, "mrope_layout", 0)) == 1:
        stream = np.zeros(half, np.int64)
        stream[1 : 3 * sections[1] : 3] = 1
        stream[2 : 3 * sections[2] : 3] = 2
    chosen = (stream == np.arange(3)[:, None]).astype(b.dtype(cos).numpy).reshape(3, 1, 1, half)
    scale = b.number(float(attribute(node, "scale", 1.0)), cos)

    def table(cache: Value) -> Value:
        rows = b.Mul(b.Gather(cache, places, axis=0), b.constant(chosen))  # [3, batch, length, half]
        return b.Unsqueeze(b.Mul(b.ReduceSum(rows, b.whole(0), keepdims=0), scale), b.whole(1))

    return [_rotary(b, node, table(cos), table(sin))]


@made_of("GemmaRotaryEmbedding", domain=MICROSOFT)
def _gemma(b: Backward, node: Node) -> Sequence[Value]:
    emb, q, q_rot, k, k_rot = node.inputs
    assert emb is not None and q is not None and k is not None
    cos, sin = (b.cast(b.Unsqueeze(of(emb), b.whole(1)), b.dtype(q)) for of in (b.Cos, b.Sin))
    return [b.Add(b.Mul(x, cos), b.Mul(turned, sin)) for x, turned in ((q, q_rot), (k, k_rot))]


# -- relative positions -------------------------------------------------------------------------------------------


@made_of("RelativePositionBias", domain=MICROSOFT)
def _relative_position_bias(b: Backward, node: Node) -> Sequence[Value]:
    """Numbers of a table; which ones the operator itself tells of a table that holds its own places."""
    table = first(node)
    lengths = [
        np.array(constant_ints(node.inputs[k], "a length of RelativePositionBias"), np.int64).reshape(())
        for k in (1, 2)
    ]
    sizes = b.sizes(table)
    places = np.arange(int(np.prod(sizes)), dtype=np.float64).reshape(sizes)
    definition = registry.get(node.domain, node.op, node.version)
    (found,) = definition.run([places, *lengths], dict(node.attrs), registry.Call((True,), node.version, node=node))
    return [b.Gather(b.Reshape(table, b.whole(-1)), b.constant(found.astype(np.int64)), axis=0)]


@made_of("GatedRelativePositionBias", domain=MICROSOFT)
def _gated_bias(b: Backward, node: Node) -> Sequence[Value]:
    query, query_bias, relative, weight, bias, eco = node.inputs[:6]
    assert query is not None and query_bias is not None and bias is not None
    offsets = operand(node, 6)
    if offsets is not None:
        query = b.node("RestorePadding", [query, offsets], {}, domain=MICROSOFT, version=1).output
    heads = heads_of(b, b.Add(query, query_bias), int(node.attrs["num_heads"]))
    linear = b.Add(b.MatMul(heads, weight), bias)
    batch, count, length, wide = b.sizes(linear)
    apart = b.Reshape(linear, b.whole(batch, count, length, 2, wide // 2))
    gates = b.Sigmoid(b.ReduceSum(apart, b.whole(4), keepdims=0))
    update, reset = b.node("Split", [gates], {"axis": 3, "num_outputs": 2}, outputs=2).outputs
    inner = b.Sub(b.Mul(reset, eco), b.number(1.0, reset))
    return [b.Mul(b.Add(b.Mul(update, inner), b.number(2.0, update)), relative)]
