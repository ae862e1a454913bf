"""Matrix products: MatMul, Gemm, their fused forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody, broadcast
from ranvier.codegen.definitions.exprs import HALVES, add, cast, const, mul, op
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import NUMERIC
from ranvier.codegen.loops.ir import Expr, Reduce, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value

MICROSOFT = "com.microsoft"
_DIRECT = (DType.float32, DType.float64)


def multiply(
    b: Definitions, x: Value, y: Value, shape: Sequence[int], out: Value | None = None, alpha: float = 1.0
) -> Value:
    """x [..., M, K] times y [..., K, N], both of rank 2 or more."""
    dtype, left, right = b.dtype(x), b.shape(x), b.shape(y)
    if left[-1] != right[-2] or (left[-2], right[-1]) != tuple(shape[-2:]):
        raise Declined(f"inner sizes differ in {list(left)} @ {list(right)}")
    if dtype not in (*_DIRECT, *HALVES):
        return _integer_product(b, x, y, shape, out)
    return b.products.matmul(b, x, y, shape, out, alpha)


def _integer_product(b: Definitions, x: Value, y: Value, shape: Sequence[int], out: Value | None) -> Value:
    """Integers in plain loops: rare, and exact in their own type."""
    dtype, inner = b.dtype(x), b.shape(x)[-1]
    *batch, m, n = shape
    lead = len(batch)

    def loads(nest: NestBuilder, views: list[View]) -> list[Expr]:
        left, right = views
        a = left.expanded((*batch, m, inner)).strides
        c = right.expanded((*batch, inner, n)).strides
        return [
            nest.load(left, (*a[:lead], a[-2], 0, a[-1])),
            nest.load(right, (*c[:lead], 0, c[-1], c[-2])),
        ]

    def build(e: list[Expr]) -> RowBody:
        return RowBody([Reduce("sum", mul(*e), dtype)], finals={0: Result(0, dtype)})

    return b.rows(
        [],
        [lead + 2],
        build,
        [(dtype, False)],
        domain=(*batch, m, n, inner),
        keepdims=False,
        results=[out],
        sources=[x, y],
        gather=loads,
    )[0]


def matmul_of(
    n: NodeView, b: Definitions, x: Value, y: Value, shape: Sequence[int], out: Value | None, alpha: float = 1.0
) -> Value:
    """NumPy's matmul: vectors take part as a row or a column."""
    left, right = b.shape(x), b.shape(y)
    if len(left) > 1 and len(right) > 1:
        return multiply(b, x, y, shape, out, alpha)
    if len(left) == 1:
        x = b.reshape(x, (1, *left))
    if len(right) == 1:
        y = b.reshape(y, (*right, 1))
    p, q = b.shape(x), b.shape(y)
    full = (*broadcast(p[:-2], q[:-2]), p[-2], q[-1])
    return b.reshape(multiply(b, x, y, full, None, alpha), shape, out=out)


@lowers("MatMul", dtypes=NUMERIC)
def matmul_(n: NodeView, b: Definitions) -> None:
    matmul_of(n, b, n.input(0), n.input(1), n.out_shape(), n.outputs[0])


def _swap(b: Definitions, value: Value) -> Value:
    rank = len(b.shape(value))
    return b.transpose(value, (*range(rank - 2), rank - 1, rank - 2)) if rank > 1 else value


def _no_batch_swap(node: Node) -> str | None:
    return "transBatch" if node.attrs.get("transBatchA") or node.attrs.get("transBatchB") else None


@lowers("FusedMatMul", "TransposeMatMul", domain=MICROSOFT, dtypes=NUMERIC, check=_no_batch_swap)
def fused_matmul(n: NodeView, b: Definitions) -> None:
    x = _swap(b, n.input(0)) if n.attr("transA", 0) else n.input(0)
    y = _swap(b, n.input(1)) if n.attr("transB", 0) else n.input(1)
    matmul_of(n, b, x, y, n.out_shape(), n.outputs[0], float(n.attr("alpha", 1.0)))


ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "Relu": lambda x: op("max", x, const(0.0, x)),
    "Tanh": lambda x: op("tanh", x),
    "Sigmoid": lambda x: op("sigmoid", x),
}


def _known_activation(node: Node) -> str | None:
    name = node.attrs.get("activation", "")
    return None if not name or name in ACTIVATIONS else f"activation {name}"


@lowers("Gemm", dtypes=NUMERIC)
@lowers("FusedGemm", domain=MICROSOFT, dtypes=NUMERIC, check=_known_activation)
def gemm(n: NodeView, b: Definitions) -> None:
    x = _swap(b, n.input(0)) if n.attr("transA", 0) else n.input(0)
    y = _swap(b, n.input(1)) if n.attr("transB", 0) else n.input(1)
    alpha, beta = float(n.attr("alpha", 1.0)), float(n.attr("beta", 1.0))
    activation, dtype = ACTIVATIONS.get(n.attr("activation", "")), n.out_dtype()
    plain = dtype in (*_DIRECT, *HALVES)
    with_bias = n.has(2) and beta != 0.0
    last = not with_bias and activation is None and (plain or alpha == 1.0)
    shape = n.out_shape()
    product = multiply(b, x, y, shape, n.outputs[0] if last else None, alpha if plain else 1.0)
    if last:
        return

    def compute(e: list[Expr]) -> Expr:
        value = e[0] if plain or alpha == 1.0 else _scaled(e[0], alpha)
        if with_bias:
            value = add(value, e[1] if beta == 1.0 else _scaled(e[1], beta))
        return value if activation is None else activation(value)

    operands = [product, *([n.input(2)] if with_bias else [])]
    b.pointwise(operands, compute, dtype, shape=shape, out=n.outputs[0])


def _scaled(x: Expr, factor: float) -> Expr:
    if x.dtype in (*_DIRECT, *HALVES):
        return mul(x, const(factor, x))
    return cast(mul(cast(x, DType.float64), const(factor, DType.float64)), x.dtype)
