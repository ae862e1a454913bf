"""com.microsoft's attention over shared key heads, listed blocks and packed sequences, as plain operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, constant_ints, first, gradient, operand, text
from ranvier.ops.gradients.contrib import MICROSOFT, added, heads_of, merged_heads
from ranvier.ops.gradients.contrib_position import angles, counted, rotated
from ranvier.ops.gradients.nn import rms_scaled
from ranvier.ops.gradients.parts import made_of

_HIDDEN = float(np.finfo(np.float32).min)


def _in_heads(b: Backward, node: Node) -> list[Value]:
    """Queries, keys and values as heads; all three come in one where there is no key."""
    heads, shared = int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"])
    query, key, value = first(node), operand(node, 1), operand(node, 2)
    if key is not None and value is not None:
        return [heads_of(b, query, heads), heads_of(b, key, shared), heads_of(b, value, shared)]
    packed = heads_of(b, query, heads + 2 * shared)
    return list(b.node("Split", [packed, b.whole(heads, shared, shared)], {"axis": 1}, outputs=3).outputs)


def _attended(
    b: Backward,
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    visible: Value,
    bias: Value | None = None,
    sink: Value | None = None,
) -> tuple[Value, Value, Value]:
    """The result as heads, scores and weights; what is not visible has no weight. A sink takes its share of weight."""
    batch, heads, length, size = b.sizes(q)
    shared, total = b.sizes(k)[1:3]
    grouped = b.whole(batch, shared, heads // shared * length, -1)
    scale = float(attribute(node, "scale", 0.0)) or 1.0 / math.sqrt(size)
    scores = b.MatMul(b.Reshape(q, grouped), b.Transpose(k, perm=[0, 1, 3, 2]))
    scores = b.Mul(b.Reshape(scores, b.whole(batch, heads, length, total)), b.number(scale, q))
    cap = float(attribute(node, "softcap", 0.0))
    if cap > 0:
        scores = b.Mul(b.Tanh(b.Div(scores, b.number(cap, q))), b.number(cap, q))
    scores = added(b, scores, bias)
    entering = b.Where(visible, scores, b.number(_HIDDEN, scores))
    if sink is not None:
        wide = b.Expand(b.Reshape(b.cast(sink, b.dtype(q)), b.whole(1, -1, 1, 1)), b.whole(batch, heads, length, 1))
        entering = b.node("Concat", [entering, wide], {"axis": 3}).output
    weights = b.Softmax(entering, axis=-1)
    if sink is not None:
        weights = b.Slice(weights, b.whole(0), b.whole(total), b.whole(3))
    weights = b.where(visible, weights)  # a query that sees nothing gives zeros
    y = b.MatMul(b.Reshape(weights, grouped), v)
    return b.Reshape(y, b.whole(batch, heads, length, -1)), b.where(visible, scores), weights


def _rows(b: Backward, x: Value, count: int) -> Value:
    """The first rows of a cache, with zeros behind those that it has."""
    have = b.sizes(x)[2]
    if have < count:
        return b.Pad(x, b.whole(0, 0, 0, 0, 0, 0, count - have, 0), b.number(0.0, x))
    return b.Slice(x, b.whole(0), b.whole(count), b.whole(2)) if have > count else x


def _numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


# -- GroupQueryAttention ------------------------------------------------------------------------------------------


@made_of("GroupQueryAttention", domain=MICROSOFT)
def _group_query_attention(b: Backward, node: Node) -> Sequence[Value]:
    if any(text(node, f"{which}_quant_type") not in ("", "NONE") for which in "kv"):
        raise NotSupported("the gradient of GroupQueryAttention over a cache of codes is not known")
    q, k, v = _in_heads(b, node)
    batch, _, length, _ = b.sizes(q)
    past_key, past_value = operand(node, 3), operand(node, 4)
    total = _total(b, node, length, past_key)
    lengths = node.inputs[5]
    assert lengths is not None
    totals = b.Add(b.Reshape(b.cast(lengths, DType.int64), b.whole(batch)), b.whole(1))
    prompt = length == total or past_key is None
    starts = b.constant(np.zeros(batch, np.int64)) if prompt else b.Sub(totals, b.whole(length))
    norms = operand(node, 14), operand(node, 15)
    if norms[0] is not None and norms[1] is not None:
        epsilon = attribute(node, "qk_norm_epsilon", 1e-6)
        q, k = (b.Mul(rms_scaled(b, x, b.whole(3), epsilon)[0], weight) for x, weight in zip((q, k), norms))
    if attribute(node, "do_rotary", 0):
        q, k = _turned(b, node, (q, k), starts, length == total, (operand(node, 7), operand(node, 8)))
    rows = max(total, 0 if past_key is None else b.sizes(past_key)[2])
    caches = [_grown(b, None if prompt else past, new, starts, rows) for past, new in ((past_key, k), (past_value, v))]
    keys, values = (_rows(b, cache, total) for cache in caches)
    y, scores, weights = _attended(
        b, node, q, keys, values, _visible(b, node, starts, totals, length, total), operand(node, 10), _sink(b, node, q)
    )
    wanted = scores if int(attribute(node, "qk_output", 0)) == 1 else weights
    return [merged_heads(b, y), *caches, wanted]


def _total(b: Backward, node: Node, length: int, past: Value | None) -> int:
    given = operand(node, 6)
    if given is not None and given.const is not None:
        return constant_ints(given, "total_sequence_length")[0]
    if past is None or b.sizes(past)[2] == 0:
        return length
    raise NotSupported("the gradient of GroupQueryAttention after others needs its total_sequence_length as a constant")


def _turned(
    b: Backward, node: Node, given: Sequence[Value], starts: Value, prompt: bool, caches: Sequence[Value | None]
) -> list[Value]:
    cos, sin = caches
    assert cos is not None and sin is not None
    places, length = operand(node, 9), b.sizes(given[0])[2]
    if places is None:
        at = counted(b, starts, length)
    elif prompt:  # of which a prompt uses only the very first
        at = counted(b, b.Slice(b.Reshape(places, b.whole(-1)), b.whole(0), b.whole(1), b.whole(0)), length)
    else:
        at = places
    tables = angles(b, cos, at), angles(b, sin, at)
    interleaved = bool(attribute(node, "rotary_interleaved", 0))
    return [rotated(b, x, *tables, interleaved) for x in given]


def _grown(b: Backward, past: Value | None, new: Value, starts: Value, rows: int) -> Value:
    """A cache: of each sequence the past up to its start, the new rows, then zeros."""
    if past is None:
        return _rows(b, new, rows)
    before = b.Less(b.constant(_numbers(rows)), b.Unsqueeze(starts, b.whole(1)))
    kept = b.where(b.Unsqueeze(before, b.whole(1, 3)), _rows(b, past, rows))
    return b.TensorScatter(kept, new, starts, axis=2)


def _visible(b: Backward, node: Node, starts: Value, totals: Value, length: int, total: int) -> Value:
    """Which keys each query sees, [batch, 1, length or 1, total]."""
    places, ends = b.constant(_numbers(total)), b.Unsqueeze(totals, b.whole(1))
    if attribute(node, "causal", 1):
        ends = b.Min(b.Add(counted(b, starts, length), b.whole(1)), ends)
    ends = b.Unsqueeze(ends, b.whole(1, 3))
    seen = b.Less(places, ends)
    window = int(attribute(node, "local_window_size", -1))
    return seen if window < 0 else b.And(seen, b.GreaterOrEqual(places, b.Sub(ends, b.whole(window))))


def _sink(b: Backward, node: Node, q: Value) -> Value | None:
    given = operand(node, 11)
    if given is None and int(attribute(node, "smooth_softmax", -1)) == 1:
        return b.constant(np.zeros(1, b.dtype(q).numpy))
    return given


# -- SparseAttention ----------------------------------------------------------------------------------------------


@made_of("SparseAttention", domain=MICROSOFT)
def _sparse_attention(b: Backward, node: Node) -> Sequence[Value]:
    q, k, v = _in_heads(b, node)
    batch, heads, length, _ = b.sizes(q)
    pasts, lengths = (operand(node, 3), operand(node, 4)), node.inputs[8]
    assert pasts[0] is not None and pasts[1] is not None and lengths is not None
    (total,) = constant_ints(node.inputs[7], "the total_sequence_length of SparseAttention")
    totals = b.Reshape(b.cast(lengths, DType.int64), b.whole(batch))
    prompt = length == total
    starts = b.constant(np.zeros(batch, np.int64)) if prompt else b.Sub(totals, b.whole(length))
    if attribute(node, "do_rotary", 0):
        caches = operand(node, 9), operand(node, 10)
        assert caches[0] is not None and caches[1] is not None
        tables = [angles(b, cache, counted(b, starts, length)) for cache in caches if cache is not None]
        q, k = (rotated(b, x, tables[0], tables[1], bool(attribute(node, "rotary_interleaved", 0))) for x in (q, k))
    caches_now = [b.TensorScatter(past, new, starts, axis=2) for past, new in zip(pasts, (k, v))]
    keys, values = (_rows(b, cache, total) for cache in caches_now)
    block = int(node.attrs["sparse_block_size"])
    layouts = _layouts(b, node).repeat(block, axis=1).repeat(block, axis=2)[:, :, :total]
    at = counted(b, starts, length)
    listed = b.Transpose(b.Gather(b.constant(layouts), at, axis=1), perm=[1, 0, 2, 3])
    repeated = b.node("Concat", [listed] * (heads // len(layouts)), {"axis": 1}).output
    behind = b.LessOrEqual(b.constant(_numbers(total)), b.Unsqueeze(at, b.whole(1, 3)))
    y, _, _ = _attended(b, node, q, keys, values, b.And(repeated, behind))
    return [merged_heads(b, y), *caches_now]


def _layouts(b: Backward, node: Node) -> np.ndarray:
    """Block masks ``[layouts, blocks, blocks]``."""
    rows, columns = node.inputs[5:7]
    if rows is None or columns is None or rows.const is None or columns.const is None:
        raise NotSupported("the gradient of SparseAttention needs its blocks as constants")
    ends, listed = rows.const.numpy(), columns.const.numpy()
    found = np.zeros((len(ends), ends.shape[1] - 1, ends.shape[1] - 1), bool)
    for layout, bounds, places in zip(found, ends, listed):
        for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
            layout[row, places[begin:end]] = True
    return found


# -- packed sequences ---------------------------------------------------------------------------------------------


@made_of("PackedAttention", domain=MICROSOFT)
def _packed_attention(b: Backward, node: Node) -> Sequence[Value]:
    x, weight, bias = node.inputs[:3]
    assert weight is not None
    width = b.sizes(weight)[1]
    sizes = [int(n) for n in attribute(node, "qkv_hidden_sizes", None) or [width // 3] * 3]
    joined = added(b, b.MatMul(x, weight), bias)
    q, k, v = b.node("Split", [joined, b.whole(*sizes)], {"axis": 1}, outputs=3).outputs
    return [_packed(b, node, q, k, v, operand(node, 4), operand(node, 5))]


@made_of("PackedMultiHeadAttention", domain=MICROSOFT)
def _packed_multi_head(b: Backward, node: Node) -> Sequence[Value]:
    query, key, value, bias = (operand(node, k) for k in range(4))
    assert query is not None
    if key is None or value is None:  # [tokens, heads, 3, size]
        parts = b.node("Split", [query], {"axis": 2, "num_outputs": 3}, outputs=3).outputs
        q, k, v = (b.Reshape(part, b.whole(0, -1)) for part in parts)
    else:
        q, k, v = query, key, value
    if bias is not None:
        widths = [b.sizes(each)[1] for each in (q, k, v)]
        own = b.node("Split", [bias, b.whole(*widths)], {"axis": 0}, outputs=3).outputs
        q, k, v = (b.Add(each, part) for each, part in zip((q, k, v), own))
    return [_packed(b, node, q, k, v, operand(node, 5), operand(node, 6))]


def _packed(b: Backward, node: Node, q: Value, k: Value, v: Value, ends: Value | None, bias: Value | None) -> Value:
    """Attention of tokens to those of their own sequence, which starts at the last bound before them."""
    assert ends is not None
    heads = int(node.attrs["num_heads"])
    tokens = b.sizes(q)[0]
    numbers = b.constant(_numbers(tokens))
    bounds = b.Reshape(b.cast(ends, DType.int64), b.whole(-1, 1))
    passed = b.cast(b.LessOrEqual(bounds, numbers), DType.int64)  # [bounds, tokens]
    own = b.Sub(b.ReduceSum(passed, b.whole(0), keepdims=0), b.whole(1))
    same = b.Equal(b.Unsqueeze(own, b.whole(1)), own)
    q, k, v = (heads_of(b, b.Unsqueeze(x, b.whole(0)), heads) for x in (q, k, v))
    if bias is not None:
        place = b.Sub(numbers, b.Gather(b.Reshape(bounds, b.whole(-1)), own, axis=0))
        of = own if b.sizes(bias)[0] > 1 else b.Mul(own, b.whole(0))
        square = b.whole(tokens, tokens, 1)
        index = [b.Expand(b.Unsqueeze(n, b.whole(*axes)), square) for n, axes in
                 ((of, (1, 2)), (place, (1, 2)), (place, (0, 2)))]  # fmt: skip
        turned = b.Transpose(bias, perm=[0, 2, 3, 1])
        found = b.GatherND(turned, b.node("Concat", index, {"axis": 2}).output)  # [tokens, tokens, heads or 1]
        bias = b.Unsqueeze(b.Transpose(found, perm=[2, 0, 1]), b.whole(0))
    y, _, _ = _attended(b, node, q, k, v, same, bias)
    return b.Squeeze(merged_heads(b, y), b.whole(0))


@gradient("RemovePadding", domain=MICROSOFT)
def _remove_padding(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    if grads[0] is None:
        return [None, None]
    made = node
    if len(node.outputs) < 2:
        made = b.node("RemovePadding", list(node.inputs), {}, outputs=4, domain=MICROSOFT, version=1)
    restored = b.node("RestorePadding", [grads[0], made.outputs[1]], {}, domain=MICROSOFT, version=1)
    return [b.like(restored.output, first(node)), None]


@gradient("RestorePadding", domain=MICROSOFT)
def _restore_padding(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x, offsets = grads[0], first(node), node.inputs[1]
    assert grad is not None and offsets is not None
    count = b.Slice(b.shape(x), b.whole(0), b.whole(1), b.whole(0))
    places = b.Slice(b.Reshape(offsets, b.whole(-1)), b.whole(0), count, b.whole(0))
    rows = b.Reshape(grad, b.whole(-1, b.sizes(grad)[-1]))
    return [b.Gather(rows, places, axis=0), None]
