"""Attention in its flexible form, with graphs over its scores."""

from __future__ import annotations

import math

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import HALVES, cast, compare, const, div, op, sub, where
from ranvier.codegen.definitions.lower.contraction import multiply
from ranvier.codegen.definitions.lower.tables import rounded, widened
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr, Reduce, Result
from ranvier.dtypes import DType, from_onnx
from ranvier.graph.ir import Graph, Node, Value
from ranvier.providers.cpu.lower.attention import attend
from ranvier.providers.cpu.lower.index import lowers


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
