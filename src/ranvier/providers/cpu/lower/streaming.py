"""Operators of streaming models: causal convolutions that keep their last inputs, attention in its flexible form."""

from __future__ import annotations

import math

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import HALVES, add, cast, compare, const, div, mul, op, sub, where
from ranvier.codegen.definitions.lower.activation import silu
from ranvier.codegen.definitions.lower.contraction import multiply
from ranvier.codegen.definitions.lower.tables import part, rounded, widened
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, from_onnx
from ranvier.graph.ir import Graph, Node, Value
from ranvier.providers.cpu.lower.attention import attend
from ranvier.providers.cpu.lower.index import lowers

_TAPS = 16  # of a filter, written out one after the other


def _few_taps(node: Node) -> str | None:
    weights = node.input(1)
    shape = getattr(weights.type, "shape", None) if weights is not None else None
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int) or not 1 <= shape[2] <= _TAPS:
        return "a kernel of many taps, or of unknown size"
    if _text(node.attrs.get("activation", "none")) not in ("none", "silu", "swish"):
        return f"activation {node.attrs.get('activation')}"
    return None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@lowers("CausalConvWithState", dtypes=FLOATS, check=_few_taps)
def causal_conv(n: NodeView, b: Definitions) -> None:
    (batch, channels, time), taps, dtype = n.shape(0), n.shape(1)[2], n.dtype(0)
    before = taps - 1
    if n.shape(1) != (channels, 1, taps) or (n.has(3) and n.shape(3) != (batch, channels, before)):
        raise Declined(f"{n.op}: {n.shape(0)}, {n.shape(1)}")
    seen = _after(n, b, before) if before else n.input(0)
    weights = b.reshape(n.input(1), (channels, taps))
    operands: list[Value | Use] = []
    for tap in range(taps):
        operands.append(part(b, seen, 2, tap, time))
        operands.append(Use(part(b, weights, 1, tap, 1), (channels, 1)))
    if n.has(2):
        operands.append(Use(n.input(2), (channels, 1)))
    work = DType.float32 if dtype in HALVES else dtype
    gated = _text(n.attr("activation", "none")) != "none"

    def compute(e: list[Expr]) -> Expr:
        e = [cast(x, work) for x in e]
        total = mul(e[0], e[1])
        for tap in range(1, taps):
            total = add(total, mul(e[2 * tap], e[2 * tap + 1]))
        if len(e) > 2 * taps:
            total = add(total, e[-1])
        return cast(silu(total) if gated else total, dtype)

    b.pointwise(operands, compute, dtype, shape=(batch, channels, time), out=n.outputs[0])
    if n.wants(1):
        if before:
            b.identity(part(b, seen, 2, time, before), out=n.outputs[1])
        else:
            b.reshape(part(b, n.input(0), 2, 0, 0), (batch, channels, 0), out=n.outputs[1])


def _after(n: NodeView, b: Definitions, before: int) -> Value:
    """The input behind the last inputs of an earlier call, or behind zeros."""
    batch, channels, time = n.shape(0)
    shape = (batch, channels, before + time)
    if n.has(3):
        return b.joined([n.input(3), n.input(0)], 2, shape)

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        (x,) = views
        at = sub(Index(2), Size(before))
        inside = compare("ge", Index(2), Size(before))
        return nest.load(x, (x.strides[0], x.strides[1], 0), at=mul(at, Size(x.strides[2])), guard=inside)

    return b.moved([n.input(0)], compute, n.dtype(0), shape)


def _flex_check(node: Node) -> str | None:
    if node.attrs.get("scale") is not None and node.attrs["scale"] < 0:
        return "a negative scale"
    precision, q = node.attrs.get("softmax_precision") or 0, node.input(0)
    if precision == 11 and getattr(getattr(q, "type", None), "dtype", None) is not DType.float64:
        return "a softmax in float64"
    if precision not in (0, 1, 10, 11, 16):
        return f"softmax_precision {precision}"
    return None


@lowers("FlexAttention", domain="ai.onnx.preview", dtypes=FLOATS, check=_flex_check, inlines="a graph over the scores")
def flex_attention(n: NodeView, b: Definitions) -> None:
    q, k, v = (n.shape(i) for i in range(3))
    if not len(q) == len(k) == len(v) == 4 or k[1] == 0 or q[1] % k[1] or k[:3] != v[:3] or q[3] != k[3]:
        raise Declined(f"{n.op}: {q}, {k}, {v}")
    dtype, scale = n.dtype(0), n.attr("scale")
    factor = 1 / math.sqrt(q[3] or 1) if scale is None else float(scale)
    plain = dtype not in HALVES
    wide = [widened(b, n.input(i)) for i in range(3)]
    out = n.outputs[0] if plain else None
    if n.node.has_subgraphs:
        made = _through_graphs(n, b, wide[0], wide[1], wide[2], factor)
        rounded(b, made, dtype, n.outputs[0])
        return
    made = attend(b, wide[0], wide[1], wide[2], scale=factor, out=out)
    if not plain:
        rounded(b, made, dtype, n.outputs[0])


def _through_graphs(n: NodeView, b: Definitions, q: Value, k: Value, v: Value, scale: float) -> Value:
    """With scores and weights as tensors, because graphs change them."""
    (batch, heads, time, size), (_, groups, keys, width) = b.shape(q), b.shape(v)
    flat, work = (batch, heads, time, keys), b.dtype(q)
    full = (batch, groups, heads // groups, time, keys)
    asking = b.reshape(q, (*full[:4], size))
    asked = b.reshape(b.transpose(k, (0, 1, 3, 2)), (batch, groups, 1, size, keys))
    scores = b.reshape(multiply(b, asking, asked, full, alpha=scale), flat)
    scores = _changed(n, b, scores, "score_mod")

    def build(e: list[Expr]) -> RowBody:
        top, total = Result(0, work), Result(1, work)
        nothing = compare("eq", top, const(-math.inf, top))
        value = op("exp", sub(e[0], where(nothing, const(0.0, top), top)))
        weight = div(value, where(compare("eq", total, const(0.0, total)), const(1.0, total), total))
        return RowBody([Reduce("max", e[0], work), Reduce("sum", value, work)], maps={0: weight})

    (weights,) = b.rows([scores], [3], build, [(work, True)], domain=flat)
    weights = _changed(n, b, weights, "prob_mod")
    split, values = b.reshape(weights, full), b.reshape(v, (batch, groups, 1, keys, width))
    return b.reshape(multiply(b, split, values, (*full[:4], width)), (batch, heads, time, width))


def _changed(n: NodeView, b: Definitions, scores: Value, name: str) -> Value:
    """The scores after one of the node's graphs, which sees them in the precision that was asked for."""
    body = n.attrs.get(name)
    if not isinstance(body, Graph):
        return scores
    work, precision = b.dtype(scores), n.attr("softmax_precision", 0)
    seen = from_onnx(int(precision)) if precision else work
    entering = body.inputs[0]
    b.pointwise([scores], lambda e: cast(e[0], seen), seen, out=entering)
    assert b.expand is not None
    b.expand(body)
    leaving = body.outputs[0]
    if leaving not in b.types or b.shape(leaving) != b.shape(scores):
        raise Declined(f"{n.op}: {name} does not give scores")
    return b.pointwise([leaving], lambda e: cast(e[0], work), work)
