"""Matrix products: MatMul, Gemm, their fused forms, Einsum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody, broadcast
from ranvier.codegen.definitions.exprs import HALVES, add, cast, const, mul, op
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import NUMERIC
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.gemm import PackedB, matmul, pack_b
from ranvier.codegen.llvm.gemm.pack import multiplies_pairs, tuned_vectors
from ranvier.codegen.loops.ir import Epilogue, Expr, Reduce, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.narrow.rates import Pace, product_pace
from ranvier.providers.cpu.realise import Realiser
from ranvier.providers.cpu.target import Same, Target
from ranvier.varying import value_at

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
_DIRECT = (DType.float32, DType.float64)


def folded_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of all axes taken as one (row-major), or None where they do not lie like that."""
    step: int | None = None
    span = 1
    for d, s in zip(reversed(shape), reversed(strides)):
        if d == 1:
            continue
        if step is None:
            step, span = s, d
        elif s != step * span:
            return None
        else:
            span *= d
    return 0 if step is None else step


def content(view: View) -> Array:
    """The data of a view of a constant."""
    base = view.storage.array
    assert base is not None
    flat = base.reshape(-1).view(view.dtype.numpy)[view.offset :]
    item = view.dtype.numpy.itemsize
    return np.lib.stride_tricks.as_strided(flat, view.shape, [s * item for s in view.strides], writeable=False)


def _rows_class(m: int) -> int:
    """Weights are packed for a kind of M, not for each: a few forms at most are kept."""
    return 1 if m <= 1 else 8 if m <= 16 else 256


def packed_b(r: Realiser, b: View, m: int, dtype: DType | None = None) -> PackedB:
    hint = _rows_class(m)
    vectors = tuned_vectors(m, b.shape, dtype or b.dtype, r.isa)
    key = ("b", Same(b.storage.array), b.offset, b.shape, b.strides, hint, dtype, vectors)
    return r.packs.get(key, lambda: pack_b(content(b), r.isa, rows_hint=hint, dtype=dtype, vectors=vectors))


def multiply(
    b: Definitions, x: Value, y: Value, shape: Sequence[int], out: Value | None = None, alpha: float = 1.0
) -> Value:
    """x [..., M, K] times y [..., K, N], both of rank 2 or more."""
    dtype, left, right = b.dtype(x), b.shape(x), b.shape(y)
    if left[-1] != right[-2] or (left[-2], right[-1]) != tuple(shape[-2:]):
        raise Declined(f"inner sizes differ in {list(left)} @ {list(right)}")
    if dtype not in (*_DIRECT, *HALVES):
        return _integer_product(b, x, y, shape, out)
    result = tuple(shape)

    def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        left, right = views
        rows = left.shape[-2] * (math.prod(left.shape[:-2]) if right.rank == 2 else 1)
        factor: View | PackedB = right
        if right.storage.kind == "const" and right.size > 256:
            factor = packed_b(r, right, rows, left.dtype if left.dtype in HALVES else None)
        return matmul(left, factor, target, r.isa, epilogue=epilogue, threads=r.threads, alpha=alpha)

    def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
        batch = folded_stride(result[:-2], strides[:-2])
        return None if batch is None else (batch, strides[-2], strides[-1])

    flops = 2.0 * math.prod(result) * left[-1]
    narrow = _narrow if dtype is DType.float32 else None

    def pace(target: Target) -> Pace:
        (depth,) = value_at([left[-1]], 0)
        return product_pace(target.isa, target.narrow or DType.bfloat16, max(1, depth))

    return b.contraction([x, y], realise, fold, dtype, result, out, flops=flops, narrow=narrow, pace=pace)


def _narrow(target: Target) -> str | None:
    """Why a product cannot be had of operands of 16 bits. float16 is widened by the micro-kernel: it saves bytes."""
    if target.narrow is DType.bfloat16 and not multiplies_pairs(target.isa):
        return f"{target.isa.name} multiplies no bfloat16"
    return None


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


def _by_codes(n: NodeView, b: Definitions) -> bool:
    """Whether the weight is one that stays coded: then the product is made of its codes."""
    weight = n.input(1).producer
    if weight is None or weight.op != "DequantizeLinear":
        return False
    from ranvier.providers.cpu.lower import dequantized_weights  # only models that have such weights need it

    return dequantized_weights.multiplied(n, b)


@lowers("MatMul", dtypes=NUMERIC)
def matmul_(n: NodeView, b: Definitions) -> None:
    if _by_codes(n, b):
        return
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
    if _by_codes(n, b):
        return
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
