"""LinearAttention: gates as factors, then one kernel over all steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.exprs import HALVES, cast, op
from ranvier.codegen.definitions.lower.tables import widened
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import linear_attention as kernels
from ranvier.codegen.loops.ir import Expr
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.attributes import text_of
from ranvier.graph.ir import Node, Value
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser

_PAST, _DECAY, _BETA = 3, 4, 5


def _rule(node: Node) -> str:
    return text_of(node.attrs.get("update_rule", "gated_delta"))


def _check(node: Node) -> str | None:
    rule = _rule(node)
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        return f"update_rule {rule}"
    for position, needed in ((_DECAY, "gated" in rule), (_BETA, "delta" in rule)):
        if (node.input(position) is not None) != needed:
            return f"operand {position} and update_rule {rule} do not fit"
    return None


@lowers("LinearAttention", dtypes=FLOATS, check=_check)
def linear_attention(n: NodeView, b: Definitions) -> None:
    heads, asking = int(n.attr("kv_num_heads")), int(n.attr("q_num_heads"))
    (batch, time, hidden), dtype = n.shape(1), n.dtype(0)
    size, width = hidden // max(1, heads), n.shape(2)[2] // max(1, heads)
    state = (batch, heads, size, width)
    fits = (
        heads > 0
        and asking % heads == 0
        and (hidden, n.shape(2)) == (heads * size, (batch, time, heads * width))
        and n.shape(0) == (batch, time, asking * size)
        and (not n.has(_PAST) or n.shape(_PAST) == state)
        and (not n.has(_DECAY) or n.shape(_DECAY) in ((batch, time, heads), (batch, time, hidden)))
        and (not n.has(_BETA) or n.shape(_BETA) in ((batch, time, heads), (batch, time, 1)))
    )
    if not fits or size == 0:
        raise Declined(f"{n.op}: {n.shape(0)}, {n.shape(1)}, {n.shape(2)} in {asking} and {heads} heads")
    work = DType.float32 if dtype in HALVES else dtype
    scale = float(n.attr("scale", 0.0)) or 1 / math.sqrt(size)
    past, keep, rate = (_wide(n, b, k, work) for k in (_PAST, _DECAY, _BETA))
    if keep is not None:
        keep = b.pointwise([keep], lambda e: op("exp", e[0]), work)
    optional = [past, keep, rate]
    sources = [*(widened(b, n.input(k)) for k in range(3)), *(x for x in optional if x is not None)]

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        rest = iter(views[3:])
        given = [None if x is None else next(rest) for x in optional]
        q, k, v = views[:3]
        return kernels.linear_attention(
            q, k, v, given[0], given[1], given[2], outs[0], outs[1], r.isa, heads=heads, scale=scale
        )

    kept = n.dtype(_PAST) if n.has(_PAST) else dtype
    results = [n.outputs[0] if dtype is work else None, n.outputs[1] if n.wants(1) and kept is work else None]
    made = b.opaque(sources, realise, [(work, (batch, time, asking * width)), (work, state)], results)
    for k, kind in enumerate((dtype, kept)):
        if kind is not work and n.wants(k):
            b.pointwise([made[k]], functools.partial(_cast_to, kind), kind, out=n.outputs[k])


def _cast_to(kind: DType, e: list[Expr]) -> Expr:
    return cast(e[0], kind)


def _wide(n: NodeView, b: Definitions, position: int, work: DType) -> Value | None:
    if not n.has(position):
        return None
    value = n.input(position)
    return value if b.dtype(value) is work else b.pointwise([value], lambda e: cast(e[0], work), work)
