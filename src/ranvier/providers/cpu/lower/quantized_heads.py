"""Attention over a projection of 8-bit codes: QAttention. Behind the projection it is com.microsoft's Attention."""

from __future__ import annotations

import math

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.exprs import add, cast, mul
from ranvier.codegen.definitions.lower.contraction import MICROSOFT
from ranvier.codegen.definitions.lower.tables import part
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Expr
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.providers.cpu.lower.attention import split_heads
from ranvier.providers.cpu.lower.heads_by_projection import attended, keys_and_values, special
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.lower.integer_product import QUANTIZED, by_column, multiply, operand_type, product_of_scales

FLOAT = DType.float32
_REAL = frozenset({DType.float32, DType.float16})


def _check(node: Node) -> str | None:
    if reason := special(node):
        return reason
    kind = operand_type(node, 2)
    if kind not in _REAL or any(operand_type(node, k) not in (None, kind) for k in (3, 4, 8)):
        return f"a bias of {kind}, or scales and past of another type"
    return None


@lowers("QAttention", domain=MICROSOFT, dtypes=QUANTIZED, check=_check)
def qattention(n: NodeView, b: Definitions) -> None:
    heads = int(n.attr("num_heads"))
    projected = _projected(n, b, heads)
    width = b.shape(projected)[2] // 3
    view = _AsAttention(n, b)
    q = split_heads(b, part(b, projected, 2, 0, width), heads)
    k, v = keys_and_values(view, b, projected, width, heads)
    attended(view, b, q, k, v, n.input(5) if n.has(5) else None, None, n.dtype(2))


def _projected(n: NodeView, b: Definitions, heads: int) -> Value:
    if n.rank(0) != 3 or n.rank(1) != 2 or n.shape(0)[2] != n.shape(1)[0] or n.shape(2) != n.shape(1)[1:]:
        raise Declined(f"{n.op}: {list(n.shape(0))} times {list(n.shape(1))} and {list(n.shape(2))}")
    (batch, time, _), width = n.shape(0), n.shape(1)[1]
    columns = [n.shape(k) for k in (4, 7) if n.has(k)]
    if any(math.prod(n.shape(k)) != 1 for k in (3, 6) if n.has(k)) or width % (3 * heads):
        raise Declined(f"{n.op}: {width} features of {heads} heads, or several scales of the input")
    if any(math.prod(shape) != 1 and shape != (width,) for shape in columns):
        raise Declined(f"{n.op}: scales and zero points of {[list(shape) for shape in columns]} for {width} columns")
    zeros = [n.input(k) if n.has(k) else None for k in (6, 7)]
    shape = (batch, time, width)
    total = multiply(b, n.input(0), n.input(1), zeros[0], zeros[1], None, shape)
    scale = product_of_scales(b, (n.input(3), ()), (n.input(4), by_column(n.shape(4))))

    def compute(e: list[Expr]) -> Expr:
        return add(mul(cast(e[0], FLOAT), e[1]), cast(e[2], FLOAT))

    return b.pointwise([Use(total), Use(scale), Use(n.input(2))], compute, FLOAT, shape=shape)


class _AsAttention(NodeView):
    """The node with its operands where Attention has them: the first says of what type the results are."""

    def __init__(self, n: NodeView, b: Definitions) -> None:
        super().__init__(n.node, b)
        past = n.input(8) if n.has(8) else None
        self.inputs = (n.input(2), None, None, None, past)
