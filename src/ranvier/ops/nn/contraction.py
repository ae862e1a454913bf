"""Matrix products and their relatives: MatMul, Gemm, Einsum, Det."""

from __future__ import annotations

import math

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import exact_carrier, from_carrier, wide, wide_matmul, widened
from ranvier.ops.allocation import checked_shape, may_outgrow
from ranvier.ops.costs import dims, traffic
from ranvier.ops.registry import Array, Cost, TypeCall, op


@op("MatMul")
def matmul(a: Array, b: Array) -> Array:
    depth = b.shape[-2] if b.ndim > 1 else b.shape[0] if b.ndim else None
    if a.ndim == 0 or depth != a.shape[-1]:
        raise ShapeMismatch(f"MatMul: inner sizes differ in {list(a.shape)} @ {list(b.shape)}")
    try:
        if may_outgrow(a, b):
            leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            checked_shape((*leading, *a.shape[-2:-1], *b.shape[-1:][: b.ndim - 1]), a.dtype, "MatMul")
        return wide_matmul(a, b)
    except ValueError:
        raise ShapeMismatch(f"MatMul: leading axes of {list(a.shape)} and {list(b.shape)} do not broadcast") from None


@matmul.cost
def _matmul_cost(call: TypeCall) -> Cost:
    a, b = dims(call.type(0)), dims(call.type(1))
    depth = a[-1] if a else 1
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    batch = max(math.prod(a[:-2]), math.prod(b[:-2]))
    return Cost(2.0 * batch * rows * columns * depth, traffic(call))


@op("Gemm", since=1)
def gemm_with_broadcast_flag(
    a: Array,
    b: Array,
    c: Array,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    broadcast: int = 0,
) -> Array:
    y_shape = (a.shape[1 if transA else 0], b.shape[0 if transB else 1]) if a.ndim == b.ndim == 2 else None
    if not broadcast and y_shape is not None and c.shape != y_shape:
        raise ShapeMismatch(f"Gemm: C must be {list(y_shape)} when broadcast is 0, got {list(c.shape)}")
    return _gemm(a, b, c, alpha, beta, transA, transB)


@op("Gemm", since=7)
def gemm(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    return _gemm(a, b, c, alpha, beta, transA, transB)


def _gemm(a: Array, b: Array, c: Array | None, alpha: float, beta: float, trans_a: int, trans_b: int) -> Array:
    if a.ndim != 2 or b.ndim != 2:
        raise ShapeMismatch(f"Gemm: A and B must be matrices, got {list(a.shape)} and {list(b.shape)}")
    left = a.T if trans_a else a
    right = b.T if trans_b else b
    if left.shape[1] != right.shape[0]:
        raise ShapeMismatch(
            f"Gemm: inner sizes differ: A {list(a.shape)} (transA={trans_a}), B {list(b.shape)} (transB={trans_b})"
        )
    shape = checked_shape((left.shape[0], right.shape[1]), a.dtype, "Gemm")
    if c is not None and (c.ndim > 2 or any(s not in (1, t) for s, t in zip(c.shape[::-1], shape[::-1]))):
        raise ShapeMismatch(f"Gemm: C {list(c.shape)} does not broadcast to {list(shape)}")
    if a.dtype.kind in "iu":
        return _integer_gemm(left, right, c, alpha, beta)
    y: Array = np.matmul(widened(left), widened(right))
    if alpha != 1:
        y *= y.dtype.type(alpha)
    if c is not None and beta != 0:
        term = widened(c)
        y += term if beta == 1 else term * y.dtype.type(beta)
    return y.astype(a.dtype, copy=False)


def _integer_gemm(left: Array, right: Array, c: Array | None, alpha: float, beta: float) -> Array:
    carrier = exact_carrier(left, right, left.shape[1])
    y: Array = np.matmul(left.astype(carrier), right.astype(carrier))
    if float(alpha).is_integer() and float(beta).is_integer():
        y = from_carrier(y, np.dtype(np.int64)) * int(alpha)
        return from_carrier(y if c is None else y + c.astype(np.int64) * int(beta), left.dtype)
    scaled = y.astype(np.float64) * alpha
    return from_carrier(scaled if c is None else scaled + c.astype(np.float64) * beta, left.dtype)


@gemm_with_broadcast_flag.cost
@gemm.cost
def _gemm_cost(call: TypeCall) -> Cost:
    a, b = dims(call.type(0)), dims(call.type(1))
    rows = a[1 if call.attr("transA", 0) else 0] if len(a) == 2 else 1
    columns = b[0 if call.attr("transB", 0) else 1] if len(b) == 2 else 1
    depth = math.prod(a) // max(rows, 1)
    return Cost(2.0 * rows * columns * depth, traffic(call))


@op("Einsum", since=12)
def einsum(*operands: Array, equation: str) -> Array:
    dtype = operands[0].dtype
    terms = _terms(equation, operands)
    summed = wide(dtype)
    try:
        y = np.einsum(terms, *(x.astype(summed, copy=False) for x in operands), optimize=len(operands) > 1)
    except ValueError as error:
        raise InvalidValue(f"Einsum: {equation!r}: {error}", op="Einsum") from None
    return np.asarray(y).astype(dtype, copy=False)


def _terms(equation: str, operands: tuple[Array, ...]) -> str:
    """The equation without spaces, checked so far that every operand has a term of its own rank."""
    compact = equation.replace(" ", "")
    shapes = [list(x.shape) for x in operands]
    left, arrow, right = compact.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise InvalidValue(f"Einsum: {equation!r} names {len(terms)} operand(s), got {len(operands)}", op="Einsum")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes):
        labels = term.replace("...", "")
        if not all(c.isascii() and c.isalpha() for c in labels) or term.count("...") > 1:
            raise InvalidValue(f"Einsum: {term!r} in {equation!r} is not letters and one ellipsis", op="Einsum")
        if len(labels) > len(shape) or ("..." not in term and len(labels) != len(shape)):
            raise ShapeMismatch(f"Einsum: term {term!r} of {equation!r} does not fit an operand of shape {shape}")
        before = len(term.partition("...")[0])
        aligned = shape[:before] + shape[len(shape) - len(labels) + before :]
        for label, size in zip(labels, aligned):
            known = sizes.setdefault(label, size)
            if known != size:
                if 1 not in (known, size):
                    raise ShapeMismatch(f"Einsum: {label!r} of {equation!r} is {known} and {size} in shapes {shapes}")
                sizes[label] = max(known, size)
    if arrow:
        kept = right.replace("...", "")
        if len(set(kept)) != len(kept) or not set(kept) <= sizes.keys():
            raise InvalidValue(
                f"Einsum: the result {right!r} of {equation!r} must name operand labels, each once", op="Einsum"
            )
        checked_shape([sizes[label] for label in kept], operands[0].dtype, "Einsum")
    return compact


@einsum.cost
def _einsum_cost(call: TypeCall) -> Cost:
    """Every label loops once: the cost of the naive nest, an upper bound for a good contraction order."""
    sizes: dict[str, int] = {}
    left = str(call.attr("equation", "")).replace(" ", "").partition("->")[0]
    for term, kind in zip(left.split(","), call.types):
        shape = dims(kind)
        before, _, after = term.partition("...")
        labelled = zip(before + after, shape[: len(before)] + (shape[-len(after) :] if after else ()))
        for label, size in labelled:
            sizes[label] = max(size, sizes.get(label, 1))
        inner = shape[len(before) : len(shape) - len(after)]
        for k, size in enumerate(reversed(inner)):
            sizes[f"...{k}"] = max(size, sizes.get(f"...{k}", 1))
    return Cost(float(len(call.types)) * math.prod(sizes.values()), traffic(call))


@op("Det", since=11)
def det(x: Array) -> Array:
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeMismatch(f"Det: needs square matrices, got shape {list(x.shape)}")
    return np.asarray(np.linalg.det(widened(x))).astype(x.dtype, copy=False)
