"""com.microsoft rotary embeddings by tables, and GroupQueryAttention over a cache of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.exprs import HALVES, add, cast, clamp, compare, const, mul, op, sub, where
from ranvier.codegen.definitions.lower.contraction import MICROSOFT
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.lower.rotary import counted, turned
from ranvier.codegen.definitions.lower.tables import no_other, part, rounded, rows_at, widened
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.attention import append
from ranvier.codegen.loops.ir import Expr, Index, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.passes.facts import is_wanted
from ranvier.providers.cpu.lower.attention import attend, split_heads
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser
from ranvier.varying import whole

INT64 = DType.int64
_TYPES = frozenset({DType.float32, DType.float16, DType.bfloat16, DType.int32, DType.int64})


# -- GroupQueryAttention ----------------------------------------------------------------------------------------------

_LATER = {
    11: "a sink per head",
    12: "a quantized cache",
    13: "a quantized cache",
    14: "normalized queries and keys",
    15: "normalized queries and keys",
}


def _grouped_check(node: Node) -> str | None:
    for k, reason in _LATER.items():
        if node.input(k) is not None:
            return reason
    attrs = node.attrs
    if not attrs.get("causal", 1):
        return "no causal limit"
    if attrs.get("sliding_window_cache", 0):
        return "a sliding cache"
    if attrs.get("smooth_softmax", -1) == 1:
        return "a smooth softmax"
    if attrs.get("local_window_size", -1) == 0:
        return "a window of no keys"
    if attrs.get("scale", 0.0) < 0:
        return "a negative scale"
    if any(attrs.get(name, "NONE") not in ("NONE", b"NONE") for name in ("k_quant_type", "v_quant_type")):
        return "a quantized cache"
    if (node.input(1) is None) != (node.input(2) is None) or (node.input(3) is None) != (node.input(4) is None):
        return "keys or values alone"
    if is_wanted(node, 3):
        return "scores as a result"
    return None


@lowers("GroupQueryAttention", domain=MICROSOFT, values=(6,), dtypes=_TYPES, check=_grouped_check)
def grouped(n: NodeView, b: Definitions) -> None:
    heads, groups, dtype = int(n.attr("num_heads")), int(n.attr("kv_num_heads")), n.dtype(0)
    if heads % groups or n.rank(0) != 3:
        raise Declined(f"{n.op}: {heads} heads share {groups}")
    q, k, v = _three(n, b, heads, groups)
    batch, _, time, size = b.shape(q)
    total = whole(n.need(6).reshape(-1)[0])
    past_rows = n.shape(3)[2] if n.has(3) else 0
    if time == 0 or b.shape(k)[2] != time or total < time or math.prod(n.shape(5)) != batch:
        raise Declined(f"{n.op}: {time} queries, {b.shape(k)[2]} new keys, {total} in all")
    if n.has(3) and (n.shape(3) != (batch, groups, past_rows, size) or n.shape(4) != n.shape(3)):
        raise Declined(f"{n.op}: a past of shape {n.shape(3)}")
    prompt, rows = time == total, max(total, past_rows)
    ends = b.reshape(n.input(5), (batch,))
    fresh = prompt or not n.has(3)  # the queries stand at the very beginning
    least, most = (0, total if prompt else rows) if fresh else (time - 1, min(rows, past_rows + time))
    if fresh and not prompt:
        least = time - 1
    no_other(b, ends, least, most, f"{n.op}: a number of keys does not fit those there are")
    first = b.pointwise(
        [ends],
        lambda e: (
            const(0, INT64)
            if fresh
            else clamp(add(cast(e[0], INT64), Size(1 - time)), const(0, INT64), Size(rows - time))
        ),
        INT64,
        shape=(batch,),
    )
    if n.attr("do_rotary", 0):
        q, k = _rotated(n, b, q, k, first, prompt)
    present_k = _grown(n, b, n.input(3) if n.has(3) else None, k, None if fresh else first, rows, 1)
    present_v = _grown(n, b, n.input(4) if n.has(4) else None, v, None if fresh else first, rows, 2)
    keys, values = (widened(b, part(b, x, 2, 0, total) if total < rows else x) for x in (present_k, present_v))
    lengths = b.pointwise([ends], lambda e: clamp(add(cast(e[0], INT64), Size(1)), const(0, INT64), Size(total)), INT64)
    mask = None
    if n.has(10):
        shape = n.shape(10)
        if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != (time, total):
            raise Declined(f"{n.op}: an attention bias of shape {shape}")
        mask = widened(b, n.input(10))
    window = int(n.attr("local_window_size", -1))
    if fresh and window > 0:
        mask = _window(b, lengths, mask, window, (batch, time, total))
        window = -1
    plain = dtype not in HALVES
    made = attend(
        b,
        widened(b, q),
        keys,
        values,
        scale=float(n.attr("scale", 0.0)) or 1 / math.sqrt(size or 1),
        mask=mask,
        causal=True,
        offset=0 if fresh else None,
        softcap=float(n.attr("softcap", 0.0)),
        lengths=lengths,
        windows=(window - 1 if window > 0 else -1, -1),
        merged=True,
        out=n.outputs[0] if plain else None,
    )
    if not plain:
        rounded(b, made, dtype, n.outputs[0])


def _three(n: NodeView, b: Definitions, heads: int, groups: int) -> tuple[Value, Value, Value]:
    if not n.has(1):
        if n.shape(0)[2] % (heads + 2 * groups):
            raise Declined(f"{n.op}: {n.shape(0)[2]} features as {heads} + 2 x {groups} heads")
        packed = split_heads(b, n.input(0), heads + 2 * groups)
        return (
            part(b, packed, 1, 0, heads),
            part(b, packed, 1, heads, groups),
            part(b, packed, 1, heads + groups, groups),
        )
    if n.shape(0)[2] % heads or n.shape(1) != n.shape(2) or n.shape(1)[2] * heads != n.shape(0)[2] * groups:
        raise Declined(f"{n.op}: query {n.shape(0)}, key {n.shape(1)}, value {n.shape(2)}")
    return (
        split_heads(b, n.input(0), heads),
        split_heads(b, n.input(1), groups),
        split_heads(b, n.input(2), groups),
    )


def _rotated(n: NodeView, b: Definitions, q: Value, k: Value, first: Value, prompt: bool) -> tuple[Value, Value]:
    batch, _, time, size = b.shape(q)
    if not n.has(7) or not n.has(8) or n.shape(7) != n.shape(8) or 2 * n.shape(7)[1] > size:
        raise Declined(f"{n.op}: tables of angles")
    if not n.has(9):
        positions = counted(b, first, time)
    elif prompt:
        positions = counted(b, part(b, b.reshape(n.input(9), (math.prod(n.shape(9)),)), 0, 0, 1), time)
    elif n.shape(9) in ((batch, time), (1, time)):
        positions = n.input(9)
    else:
        raise Declined(f"{n.op}: positions of shape {n.shape(9)}")
    rows = n.shape(7)[0]
    no_other(b, positions, 0, rows, f"{n.op}: a position is outside [0, {rows})")
    cos, sin = (rows_at(n, b, n.input(at), positions) for at in (7, 8))
    pairs = bool(n.attr("rotary_interleaved", 0))

    def of(x: Value) -> Value:
        return b.transpose(turned(b, b.transpose(x, (0, 2, 1, 3)), cos, sin, pairs), (0, 2, 1, 3))

    return of(q), of(k)


def _grown(
    n: NodeView, b: Definitions, past: Value | None, new: Value, first: Value | None, rows: int, output: int
) -> Value:
    """A cache of ``rows`` rows: per sequence ``first`` rows of the past (none where None), the new ones, zeros."""
    batch, heads, time, size = b.shape(new)
    dtype = b.dtype(new)
    out = n.outputs[output] if n.wants(output) else None
    if first is None and rows == time:
        return b.identity(new, out=out) if out is not None else new
    if past is not None and first is not None:
        start = first

        def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
            before, added, places = views
            added = added if added.strides[3] == 1 or size == 1 else r.dense(added)
            return append(r.dense(before), added, places, outs[0])

        return b.opaque([past, new, start], realise, [(dtype, (batch, heads, rows, size))], [out], dense=False)[0]

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        fresh = views[0]
        inside = between(const(0, INT64), Index(2), Size(time))
        steps = (fresh.strides[0], fresh.strides[1], 0, fresh.strides[3])
        return nest.load(fresh, steps, at=mul(Index(2), Size(fresh.strides[2])), guard=inside)

    return b.moved([new], compute, dtype, (batch, heads, rows, size), out)


def _window(b: Definitions, lengths: Value, bias: Value | None, window: int, sizes: tuple[int, int, int]) -> Value:
    """A mask of the last ``window`` keys before the end of what a query of a prompt sees.

    Rows of padding see the end of their sequence, not what stands before their own place.
    """
    batch, time, keys = sizes
    shape = (batch, 1, time, keys) if bias is None else (batch, b.shape(bias)[1], time, keys)
    kind = DType.bool if bias is None else DType.float32

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        valid = nest.load(views[0], (views[0].strides[0], 0, 0, 0))
        end = op("min", add(Index(2), const(1, INT64)), valid)
        near = compare("ge", Index(3), sub(end, Size(window)))
        if bias is None:
            return near
        return where(near, cast(nest.load(views[1]), DType.float32), const(-math.inf, DType.float32))

    return b.moved([lengths, *([bias] if bias is not None else [])], compute, kind, shape)
