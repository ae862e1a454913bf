"""com.microsoft attention: queries, keys and values from one projection or apart, masks of any form as summands."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.codegen.definitions.defs import Declined, Use, broadcast
from ranvier.codegen.definitions.exprs import HALVES, add, cast, compare, const, op, where
from ranvier.codegen.definitions.lower.contraction import MICROSOFT, multiply
from ranvier.codegen.definitions.lower.tables import part, rounded, widened
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Expr, Index, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.passes.facts import is_wanted
from ranvier.providers.cpu.lower.attention import attend, split_heads, with_past
from ranvier.providers.cpu.lower.index import lowers

INT64, FLOAT = DType.int64, DType.float32
_TYPES = frozenset({DType.float32, DType.float16, DType.bfloat16, DType.int32})
_MASKED = -10000.0
_LOWEST = float(np.finfo(np.float32).min)  # what a key of the future gets where a mask is given too


def summand(
    n: NodeView,
    b: Definitions,
    mask: Value | None,
    bias: Value | None,
    masked: float,
    causal: bool,
    sizes: tuple[int, int, int, int],
) -> tuple[Value | None, bool]:
    """What is added to the scores [batch, heads, time, keys], and whether the causal limit is left to the kernel.

    A masked score is only lowered by a finite number, so a row without any key that may be seen is spread over all
    of them; then the future has to be in the summand as well, lower than everything else.
    """
    batch, heads, time, keys = sizes
    allowed = None if mask is None else _allowed(n, b, mask, batch, time, keys)
    if bias is not None:
        shape = b.shape(bias)
        if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != (time, keys):
            raise Declined(f"{n.op}: an attention bias of shape {shape}")
        bias = widened(b, bias)
    if allowed is None:
        return bias, causal
    past, future = keys - time, causal and time > 1
    lead = (1, 1) if bias is None else b.shape(bias)[:2]
    domain = (max(lead[0], b.shape(allowed)[0]), lead[1], *broadcast(b.shape(allowed)[2:], (1, keys)))
    if future or bias is not None:
        domain = (*domain[:2], time, keys)

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        value = where(nest.load(views[0]), const(0.0, FLOAT), const(masked, FLOAT))
        if future:
            ahead = compare("gt", Index(3), add(Size(past), Index(2)))
            value = where(ahead, const(_LOWEST, FLOAT), value)
        return add(nest.load(views[1]), value) if bias is not None else value

    sources = [allowed, *([bias] if bias is not None else [])]
    return b.moved(sources, compute, FLOAT, domain), False


def _allowed(n: NodeView, b: Definitions, mask: Value, batch: int, time: int, keys: int) -> Value | None:
    """Which keys a mask lets through, [batch, 1, 1 or time, keys]; None where it says nothing."""
    shape, past = b.shape(mask), keys - time
    if len(shape) == 1 and shape[0] in (batch, 2 * batch, 3 * batch + 2):
        from_start = shape[0] == 2 * batch

        def compute(nest: NestBuilder, views: list[View]) -> Expr:
            step = views[0].strides[0]
            end = cast(nest.load(views[0], (step, 0, 0, 0)), INT64)
            inside = compare("lt", Index(3), end)
            if from_start:
                start = cast(nest.load(views[0], (step, 0, 0, 0), offset=batch * step), INT64)
                inside = op("and", inside, compare("ge", Index(3), start), dtype=DType.bool)
            return inside

        return b.moved([mask], compute, DType.bool, (batch, 1, 1, keys))
    if shape == (batch, keys):
        seen = b.reshape(mask, (batch, 1, 1, keys))
    elif len(shape) == 2 and shape[0] in (1, batch) and shape[1] == 1:
        return None
    elif shape == (batch, time, keys):
        seen = b.reshape(mask, (batch, 1, time, keys))
    elif len(shape) == 4 and shape[:2] == (batch, 1) and min(shape[2:]) >= keys:
        seen = part(b, part(b, mask, 2, past, time), 3, 0, keys)
    else:
        raise Declined(f"{n.op}: a mask of shape {shape}")
    return b.pointwise([seen], lambda e: compare("gt", e[0], const(0, e[0])), DType.bool)


# -- Attention --------------------------------------------------------------------------------------------------------


def special(node: Node) -> str | None:
    """What attention by a projection is asked for that is not done here."""
    if node.attrs.get("do_rotary", 0):
        return "rotary embedding without tables"
    if node.attrs.get("past_present_share_buffer", 0):
        return "a buffer shared by past and present"
    return "a negative scale" if node.attrs.get("scale", 0.0) < 0 else None


def _attention_check(node: Node) -> str | None:
    if reason := special(node):
        return reason
    sizes = node.attrs.get("qkv_hidden_sizes")
    if sizes and (len(sizes) != 3 or sizes[0] != sizes[1]):
        return "queries and keys of different sizes"
    if sizes and sizes[1] != sizes[2] and (node.input(4) is not None or is_wanted(node, 1)):
        return "a past of keys and values of different sizes"
    return None


@lowers("Attention", domain=MICROSOFT, dtypes=_TYPES, check=_attention_check)
def attention(n: NodeView, b: Definitions) -> None:
    heads, dtype = int(n.attr("num_heads")), n.dtype(0)
    batch, time, hidden = n.shape(0)
    rows, width = n.shape(1)
    sizes = [int(s) for s in n.attr("qkv_hidden_sizes") or (width // 3,) * 3]
    if rows != hidden or sum(sizes) != width or any(s % heads for s in sizes):
        raise Declined(f"{n.op}: {n.shape(0)} times {n.shape(1)} as {heads} heads")
    projected = multiply(b, widened(b, n.input(0)), widened(b, n.input(1)), (batch, time, width))
    if n.has(2):
        projected = b.pointwise([projected, widened(b, n.input(2))], lambda e: add(*e), FLOAT)
    q = split_heads(b, part(b, projected, 2, 0, sizes[0]), heads)
    if sizes[1] == sizes[2]:
        k, v = keys_and_values(n, b, projected, sizes[0], heads)
    else:
        k = split_heads(b, part(b, projected, 2, sizes[0], sizes[1]), heads)
        v = split_heads(b, part(b, projected, 2, sizes[0] + sizes[1], sizes[2]), heads)
    attended(n, b, q, k, v, n.input(3) if n.has(3) else None, n.input(5) if n.has(5) else None, dtype)


def keys_and_values(n: NodeView, b: Definitions, projected: Value, start: int, heads: int) -> tuple[Value, Value]:
    """Keys and values after those of the past; both together are the present state."""
    batch, time, width = b.shape(projected)
    size = (width - start) // 2 // heads
    split = b.reshape(part(b, projected, 2, start, width - start), (batch, time, 2, heads, size))
    state = b.transpose(split, (2, 0, 3, 1, 4))
    dtype = n.dtype(0)
    plain = dtype not in HALVES
    if n.has(4):
        past = n.shape(4)
        if len(past) != 5 or past[:3] != (2, batch, heads) or past[4] != size:
            raise Declined(f"{n.op}: a past of shape {past}")
        grown = (2, batch, heads, past[3] + time, size)
        out = n.outputs[1] if n.wants(1) and plain else None
        state = b.joined([widened(b, n.input(4)), state], 3, grown, out=out)
        if n.wants(1) and not plain:
            rounded(b, state, dtype, n.outputs[1])
    elif n.wants(1):
        rounded(b, state, dtype, n.outputs[1])
    shape = b.shape(state)[1:]
    k, v = (b.reshape(part(b, state, 0, which, 1), shape) for which in range(2))
    return k, v


def attended(
    n: NodeView, b: Definitions, q: Value, k: Value, v: Value, mask: Value | None, bias: Value | None, dtype: DType
) -> None:
    batch, heads, time, size = b.shape(q)
    keys = b.shape(k)[2]
    masked, causal = float(n.attr("mask_filter_value", _MASKED)), bool(n.attr("unidirectional", 0))
    added, causal = summand(n, b, mask, bias, masked, causal, (batch, heads, time, keys))
    scale = float(n.attr("scale", 0.0)) or 1 / math.sqrt(size or 1)
    plain = dtype not in HALVES
    out = n.outputs[0] if plain else None
    offset = keys - time
    made = attend(b, q, k, v, scale=scale, mask=added, causal=causal, offset=offset, merged=True, out=out)
    if not plain:
        rounded(b, made, dtype, n.outputs[0])


# -- MultiHeadAttention -----------------------------------------------------------------------------------------------


def _multi_head_check(node: Node) -> str | None:
    if node.input(8) is not None:
        return "a buffer shared by past and present"
    if node.input(9) is not None:
        return "cache indirection"
    if (node.input(6) is None) != (node.input(7) is None):
        return "a past of keys or values alone"
    if is_wanted(node, 3):
        return "scores as a result"
    if node.attrs.get("scale", 0.0) < 0:
        return "a negative scale"
    return None


@lowers("MultiHeadAttention", domain=MICROSOFT, dtypes=_TYPES, check=_multi_head_check)
def multi_head_attention(n: NodeView, b: Definitions) -> None:
    heads, dtype = int(n.attr("num_heads")), n.dtype(0)
    q, k, v, cached = _separate(n, b, heads)
    if n.has(3):
        q, k, v = _with_biases(n, b, q, k, v, cached)
    if b.shape(q)[0] != b.shape(k)[0] or b.shape(q)[3] != b.shape(k)[3] or b.shape(k)[:3] != b.shape(v)[:3]:
        raise Declined(f"{n.op}: queries {b.shape(q)}, keys {b.shape(k)} and values {b.shape(v)}")
    for past, fresh in ((6, k), (7, v)):
        if n.has(past) and (n.shape(past)[:2], n.shape(past)[3:]) != (b.shape(q)[:2], b.shape(fresh)[3:]):
            raise Declined(f"{n.op}: a past of shape {n.shape(past)}")
    if dtype in HALVES:
        k, v = (_wide_past(n, b, fresh, at, present) for fresh, at, present in ((k, 6, 1), (v, 7, 2)))
    else:
        k, v = with_past(b, n, k, 6, 1), with_past(b, n, v, 7, 2)
    attended(n, b, q, k, v, n.input(4) if n.has(4) else None, n.input(5) if n.has(5) else None, dtype)


def _wide_past(n: NodeView, b: Definitions, fresh: Value, past: int, present: int) -> Value:
    whole = fresh
    if n.has(past):
        batch, heads, time, size = b.shape(fresh)
        whole = b.joined([widened(b, n.input(past)), fresh], 2, (batch, heads, n.shape(past)[2] + time, size))
    if n.wants(present):
        rounded(b, whole, n.dtype(0), n.outputs[present])
    return whole


def _separate(n: NodeView, b: Definitions, heads: int) -> tuple[Value, Value, Value, bool]:
    """Queries, keys and values as heads, and whether the latter two come from a cache (then without bias)."""
    query = widened(b, n.input(0))
    if not n.has(1) and n.rank(0) == 5 and n.shape(0)[3] == 3:  # [batch, length, heads, 3, size]
        q, k, v = (_packed(b, query, which) for which in range(3))
        return q, k, v, False
    if n.rank(0) != 3 or n.shape(0)[2] % heads or not n.has(1):
        raise Declined(f"{n.op}: no known form of query, key and value")
    q = split_heads(b, query, heads)
    key = widened(b, n.input(1))
    if not n.has(2):
        if n.rank(1) != 5 or n.shape(1)[3] != 2:
            raise Declined(f"{n.op}: no known form of query, key and value")
        return q, _packed(b, key, 0), _packed(b, key, 1), False
    value = widened(b, n.input(2))
    if n.rank(1) == n.rank(2) == 4:
        return q, key, value, True
    if n.rank(1) != 3 or n.rank(2) != 3 or n.shape(1)[2] % heads or n.shape(2)[2] % heads:
        raise Declined(f"{n.op}: no known form of query, key and value")
    return q, split_heads(b, key, heads), split_heads(b, value, heads), False


def _packed(b: Definitions, x: Value, which: int) -> Value:
    batch, time, heads, _, size = b.shape(x)
    return b.transpose(b.reshape(part(b, x, 3, which, 1), (batch, time, heads, size)), (0, 2, 1, 3))


def _with_biases(n: NodeView, b: Definitions, *parts: Value | bool) -> Sequence[Value]:
    *values, cached = parts
    start, made = 0, []
    bias = widened(b, n.input(3))
    for k, x in enumerate(values):
        assert isinstance(x, Value)
        _, heads, _, size = b.shape(x)
        if start + heads * size > n.shape(3)[0]:
            raise Declined(f"{n.op}: a bias of shape {n.shape(3)}")
        if not (cached and k):
            own = part(b, bias, 0, start, heads * size)
            x = b.pointwise([x, Use(own, (heads, 1, size))], lambda e: add(*e), FLOAT)
        made.append(x)
        start += heads * size
    return made
