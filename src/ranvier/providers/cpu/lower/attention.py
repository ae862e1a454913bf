"""Attention: heads are strides, so projections need no transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.definitions.defs import RowBody
from ranvier.codegen.definitions.exprs import HALVES, add, cast, compare, const, div, mul, op, sub, where
from ranvier.codegen.definitions.lower.contraction import multiply
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import ALL
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import attention as kernels
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser

INT64 = DType.int64


def split_heads(b: Definitions, x: Value, heads: int) -> Value:
    """[batch, time, heads * size] as [batch, heads, time, size]: strides only."""
    batch, time, hidden = b.shape(x)
    return b.transpose(b.reshape(x, (batch, time, heads, hidden // heads)), (0, 2, 1, 3))


def attend(
    b: Definitions,
    q: Value,
    k: Value,
    v: Value,
    *,
    scale: float,
    mask: Value | None = None,
    causal: bool = False,
    offset: int | None = None,
    softcap: float = 0.0,
    lengths: Value | None = None,
    windows: tuple[int, int] = (-1, -1),
    merged: bool = False,
    out: Value | None = None,
) -> Value:
    """softmax(scale q kᵀ + mask) v over [batch, heads, time, size]; ``merged`` gives [batch, time, heads * size]."""
    batch, heads, queries, _ = b.shape(q)
    size = b.shape(v)[3]
    dtype = b.dtype(q)
    sources = [q, k, v, *(x for x in (mask, lengths) if x is not None)]
    shape = (batch, queries, heads, size) if merged else (batch, heads, queries, size)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        rest = views[3:]
        seen = rest.pop(0) if mask is not None else None
        valid = rest.pop(0) if lengths is not None else None
        target = outs[0].transposed((0, 2, 1, 3)) if merged else outs[0]
        return kernels.attention(
            views[0],
            views[1],
            views[2],
            target,
            r.isa,
            scale=scale,
            mask=seen,
            causal=causal,
            offset=offset,
            softcap=softcap,
            kv_lengths=valid,
            left_window=windows[0],
            right_window=windows[1],
            threads=r.threads,
        )

    whole = None if merged else out
    (made,) = b.opaque(sources, realise, [(dtype, shape)], [whole], dense=False)
    return b.reshape(made, (batch, queries, heads * size), out=out) if merged else made


def _widened(b: Definitions, x: Value) -> Value:
    if b.dtype(x) not in HALVES:
        return x
    return b.pointwise([x], lambda e: cast(e[0], DType.float32), DType.float32)


def with_past(b: Definitions, n: NodeView, fresh: Value, past: int, present: int) -> Value:
    """Keys or values after those of earlier steps; the whole is an output of the node where it is wanted."""
    out = n.outputs[present] if n.wants(present) else None
    if not n.has(past):
        return b.identity(fresh, out=out) if out is not None else fresh
    before = n.input(past)
    shape = list(b.shape(fresh))
    shape[2] += b.shape(before)[2]
    return b.joined([before, fresh], 2, shape, out=out)


def _window_mask(
    b: Definitions,
    shape: tuple[int, ...],
    first: int,
    lengths: Value | None,
    causal: bool,
    left: int,
    right: int,
    bias: Value | None,
    dtype: DType,
) -> Value:
    """The bias with minus infinity where a query may not look: for scores that are a result."""
    batch, _, time, keys = shape
    lead = batch if lengths is not None or (bias is not None and _axis(b, bias, -4) != 1) else 1
    across = 1 if bias is None else _axis(b, bias, -3)
    domain = (lead, across, time, keys)
    sources = [x for x in (bias, lengths) if x is not None]

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        rest = list(views)
        added: Expr = const(0.0, dtype)
        if bias is not None:
            view = rest.pop(0)
            short = view.rank and view.shape[-1] not in (1, keys)
            guard = compare("lt", Index(3), Size(view.shape[-1])) if short else None
            fitted = View(view.storage, view.dtype, (*view.shape[:-1], keys), view.strides, view.offset)
            loaded = nest.load(fitted if short else view, guard=guard, other=-math.inf)
            added = cast(loaded, dtype)
        start: Expr = Size(first)
        if lengths is not None:
            valid = cast(nest.load(rest[0], (rest[0].strides[0], 0, 0, 0)), INT64)
            start = sub(valid, Size(time))
        distance = sub(Index(3), add(start, Index(2)))
        allowed: Expr = const(True, DType.bool)
        limits = [0] if causal else []
        limits += [right] if right >= 0 else []
        if limits:
            allowed = op("and", allowed, compare("le", distance, Size(min(limits))), dtype=DType.bool)
        if left >= 0:
            allowed = op("and", allowed, compare("ge", distance, Size(-left)), dtype=DType.bool)
        if lengths is not None:
            allowed = op("and", allowed, compare("lt", Index(3), valid), dtype=DType.bool)
        return where(allowed, added, const(-math.inf, dtype))

    return b.moved(sources, compute, dtype, domain)


def _axis(b: Definitions, value: Value, k: int) -> int:
    shape = b.shape(value)
    return shape[k] if len(shape) >= -k else 1


def _additive(b: Definitions, mask: Value, dtype: DType) -> Value:
    if b.dtype(mask) is DType.bool:
        return b.pointwise([mask], lambda e: where(e[0], const(0.0, dtype), const(-math.inf, dtype)), dtype)
    if b.dtype(mask) is dtype:
        return mask
    return b.pointwise([mask], lambda e: cast(e[0], dtype), dtype)


@lowers("Attention", dtypes=ALL)
def attention(n: NodeView, b: Definitions) -> None:
    packed, dtype = n.rank(0) == 3, n.dtype(0)
    work = DType.float32 if dtype in HALVES else dtype
    q, k, v = n.input(0), n.input(1), n.input(2)
    if packed:
        q = split_heads(b, q, int(n.attr("q_num_heads")))
        k = split_heads(b, k, int(n.attr("kv_num_heads")))
        v = split_heads(b, v, int(n.attr("kv_num_heads")))
    past = n.shape(4)[2] if n.has(4) else 0
    k, v = with_past(b, n, k, 4, 1), with_past(b, n, v, 5, 2)
    q, k, v = (_widened(b, x) for x in (q, k, v))
    lengths = n.input(6) if n.has(6) else None
    scale = n.attr("scale")
    factor = 1 / math.sqrt(b.shape(q)[3]) if scale is None else float(scale)
    causal = bool(n.attr("is_causal", 0))
    left, right = int(n.attr("left_window_size", -1)), int(n.attr("right_window_size", -1))
    mask = n.input(3) if n.has(3) else None
    shape = (*b.shape(q)[:3], b.shape(k)[2])
    softcap = float(n.attr("softcap", 0.0))
    final = n.outputs[0] if dtype is work else None
    if n.wants(3) or factor < 0:
        bias = None if mask is None else _additive(b, mask, work)
        if bias is not None or causal or left >= 0 or right >= 0 or lengths is not None:
            bias = _window_mask(b, shape, past, lengths, causal, left, right, bias, work)
        made = _expanded(n, b, q, k, v, factor, softcap, bias, work)
        if packed:
            flat = (shape[0], shape[2], shape[1] * b.shape(v)[3])
            made = b.reshape(b.transpose(made, (0, 2, 1, 3)), flat, out=final)
        elif final is not None:
            made = b.identity(made, out=final)
    else:
        if mask is not None and b.dtype(mask) not in (DType.bool, work):
            mask = _additive(b, mask, work)
        made = attend(
            b,
            q,
            k,
            v,
            scale=factor,
            mask=mask,
            causal=causal,
            offset=None if lengths is not None else past,
            softcap=softcap,
            lengths=lengths,
            windows=(left, right),
            merged=packed,
            out=final,
        )
    if final is None:
        b.pointwise([made], lambda e: cast(e[0], dtype), dtype, out=n.outputs[0])


def _expanded(
    n: NodeView,
    b: Definitions,
    q: Value,
    k: Value,
    v: Value,
    scale: float,
    softcap: float,
    bias: Value | None,
    work: DType,
) -> Value:
    """With the scores as tensors, because one of them is an output."""
    batch, heads, time, size = b.shape(q)
    groups, keys = b.shape(k)[1:3]
    mode, dtype = int(n.attr("qk_matmul_output_mode", 0)), n.dtype(0)
    full = (batch, groups, heads // groups, time, keys)
    grouped = b.reshape(q, (batch, groups, heads // groups, time, size))
    wide_k = b.reshape(b.transpose(k, (0, 1, 3, 2)), (batch, groups, 1, size, keys))
    flat = b.reshape(multiply(b, grouped, wide_k, full, alpha=scale), (batch, heads, time, keys))

    def show(value: Value, stage: int) -> None:
        if n.wants(3) and mode == stage:
            b.pointwise([value], lambda e: cast(e[0], dtype), dtype, out=n.outputs[3])

    show(flat, 0)
    if softcap:
        cap = softcap
        flat = b.pointwise([flat], lambda e: mul(op("tanh", div(e[0], const(cap, e[0]))), const(cap, e[0])), work)
    show(flat, 1)
    if bias is not None:
        flat = b.pointwise([flat, bias], lambda e: add(*e), work)
    show(flat, 2)

    def build(e: list[Expr]) -> RowBody:
        top, total = Result(0, work), Result(1, work)
        nothing = compare("eq", top, const(-math.inf, top))
        value = op("exp", sub(e[0], where(nothing, const(0.0, top), top)))
        reduces = [Reduce("max", e[0], work), Reduce("sum", value, work)]
        weight = div(value, where(compare("eq", total, const(0.0, total)), const(1.0, total), total))
        if bias is not None:  # NaN scores must not survive in a row that no key may enter
            reduces.append(Reduce("max", e[1], work))
            weight = where(compare("eq", Result(2, work), const(-math.inf, top)), const(0.0, top), weight)
        return RowBody(reduces, maps={0: weight})

    operands = [flat, *([bias] if bias is not None else [])]
    (weights,) = b.rows(operands, [3], build, [(work, True)], domain=(batch, heads, time, keys))
    show(weights, 3)
    split = b.reshape(weights, full)
    values = b.reshape(v, (batch, groups, 1, keys, b.shape(v)[3]))
    made = multiply(b, split, values, (*full[:4], b.shape(v)[3]))
    return b.reshape(made, (batch, heads, time, b.shape(v)[3]))
