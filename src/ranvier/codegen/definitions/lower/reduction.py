"""Reductions, arg-reductions and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

from ranvier.codegen.definitions.defs import RowBody
from ranvier.codegen.definitions.exprs import HALVES, add, cast, compare, const, div, mul, op, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS, INTEGERS
from ranvier.codegen.loops.ir import Expr, Fold, Index, Reduce, Result, Size, substitute
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value


def wide_type(dtype: DType) -> DType:
    """What elements of this type are accumulated in."""
    return DType.float32 if dtype in HALVES else dtype


def reduce_axes(n: NodeView) -> tuple[int, ...] | None:
    """The axes of a Reduce operator, normalised; None where it reduces nothing at all."""
    rank = n.rank(0)
    axes = n.axes(1)
    if axes is None or not axes:
        return None if n.attr("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({a % max(1, rank) for a in axes}))


def _mean(x: Expr, count: int) -> Expr:
    return div(x, cast(Size(count), x.dtype))


def _simple(fold: Fold) -> Callable[[Expr, int], RowBody]:
    def build(x: Expr, count: int) -> RowBody:
        return RowBody([Reduce(fold, x, x.dtype)], finals={0: Result(0, x.dtype)})

    return build


def _after(
    fold: Fold, before: Callable[[Expr], Expr], after: Callable[[Expr, int], Expr]
) -> Callable[[Expr, int], RowBody]:
    def build(x: Expr, count: int) -> RowBody:
        value = before(x)
        return RowBody([Reduce(fold, value, x.dtype)], finals={0: after(Result(0, x.dtype), count)})

    return build


def _log_sum_exp(x: Expr, count: int) -> RowBody:
    peak = Result(0, x.dtype)
    finite = op("not", op("isinf", peak, dtype=DType.bool), dtype=DType.bool)
    shift = where(finite, peak, const(0.0, x))
    shift = where(op("isnan", peak, dtype=DType.bool), const(0.0, x), shift)
    total = Reduce("sum", op("exp", sub(x, shift)), x.dtype)
    return RowBody([Reduce("max", x, x.dtype), total], finals={0: add(op("log", Result(1, x.dtype)), shift)})


def _keep(x: Expr) -> Expr:
    return x


_BODIES: dict[str, Callable[[Expr, int], RowBody]] = {
    "ReduceSum": _simple("sum"),
    "ReduceProd": _simple("prod"),
    "ReduceMax": _simple("max"),
    "ReduceMin": _simple("min"),
    "ReduceMean": _after("sum", _keep, _mean),
    "ReduceL1": _after("sum", lambda x: op("abs", x), lambda r, c: r),
    "ReduceL2": _after("sum", lambda x: mul(x, x), lambda r, c: op("sqrt", r)),
    "ReduceSumSquare": _after("sum", lambda x: mul(x, x), lambda r, c: r),
    "ReduceLogSum": _after("sum", _keep, lambda r, c: op("log", r)),
    "ReduceLogSumExp": _log_sum_exp,
}
_THROUGH_FLOAT = frozenset({"ReduceL2", "ReduceLogSum", "ReduceLogSumExp"})


def carried_type(name: str, dtype: DType) -> DType:
    """What a reduction computes in: integers in their own type, except where roots or logarithms follow, and means
    in one that holds any sum."""
    if dtype in INTEGERS and name in _THROUGH_FLOAT:
        return DType.float64
    if dtype in INTEGERS and name == "ReduceMean":
        return DType.uint64 if dtype.name.startswith("u") else DType.int64
    return wide_type(dtype)


def _numbers(node: Node) -> str | None:
    value = node.input(0)
    dtype = getattr(value.type, "dtype", None) if value is not None else None
    if dtype is DType.bool and node.op not in ("ReduceMax", "ReduceMin"):
        return f"{node.op} of bool"
    return None


@lowers(*_BODIES, values=(1,), check=_numbers)
def reduce(n: NodeView, b: Definitions) -> None:
    dtype, axes = n.dtype(0), reduce_axes(n)
    if axes is None or (not axes and n.rank(0) == 0):
        _unreduced(n, b)
        return
    count = math.prod(n.shape(0)[a] for a in axes)
    body, wide = _BODIES[n.op], carried_type(n.op, dtype)

    def build(x: list[Expr]) -> RowBody:
        if dtype is DType.bool:
            fold: Fold = "or" if n.op == "ReduceMax" else "and"
            return RowBody([Reduce(fold, x[0], dtype)], finals={0: Result(0, dtype)})
        made = body(cast(x[0], wide), count)
        return RowBody(made.reduces, finals={0: cast(made.finals[0], dtype)})

    b.rows(
        [n.input(0)],
        axes,
        build,
        [(dtype, False)],
        domain=n.shape(0),
        keepdims=bool(n.attr("keepdims", 1)),
        results=[n.outputs[0]],
    )


def _unreduced(n: NodeView, b: Definitions) -> None:
    """No axes: each element is its own row."""
    dtype, body, wide = n.dtype(0), _BODIES[n.op], carried_type(n.op, n.dtype(0))

    def compute(x: list[Expr]) -> Expr:
        if dtype is DType.bool:
            return x[0]
        return cast(_of_one(body, cast(x[0], wide)), dtype)

    b.pointwise([n.input(0)], compute, dtype, out=n.outputs[0])


def _of_one(body: Callable[[Expr, int], RowBody], x: Expr) -> Expr:
    """What a reduction gives for a single element."""
    made = body(x, 1)
    replaced: dict[Expr, Expr] = {}
    for k, stage in enumerate(made.reduces):
        replaced[Result(k, stage.dtype)] = substitute(stage.value, replaced)
    return substitute(made.finals[0], replaced)


@lowers("ArgMax", "ArgMin")
def arg_reduce(n: NodeView, b: Definitions) -> None:
    axis = n.attr("axis", 0) % max(1, n.rank(0))
    fold: Fold = "argmax" if n.op == "ArgMax" else "argmin"
    if n.attr("select_last_index", 0):
        fold = "argmax_last" if n.op == "ArgMax" else "argmin_last"
    b.rows(
        [n.input(0)],
        [axis],
        lambda x: RowBody([Reduce(fold, x[0], DType.int64)], finals={0: Result(0, DType.int64)}),
        [(DType.int64, False)],
        domain=n.shape(0),
        keepdims=bool(n.attr("keepdims", 1)),
        results=[n.outputs[0]],
    )


# -- softmax ----------------------------------------------------------------------------------------------------------


# A share below the smallest normal number is zero: beside a sum of one it is nothing, and whatever computes it or
# multiplies by it takes a hundred times as long. The largest weight of a row is 1, so its total is no less.
_LOWEST = -87.33654  # of the exponents of such weights: its power is a little above …
_NORMAL = 2.0**-126 * (1 + 2.0**-16)  # … the smallest normal number, and below this


def weight_of(shifted: Expr) -> Expr:
    """The exponential of what is at most zero; of what is far below, something :func:`share_of` takes for zero."""
    if shifted.dtype is not DType.float32:
        return op("exp", shifted)
    return op("exp", op("max", shifted, const(_LOWEST, shifted)))


def share_of(weight: Expr, total: Expr) -> Expr:
    """A part of a row's total, by one division a row; zero where it would be subnormal."""
    if weight.dtype is not DType.float32:
        return div(weight, total)
    there = compare("ge", weight, mul(total, const(_NORMAL, total)))
    return mul(where(there, weight, const(0.0, weight)), op("reciprocal", total))


def softmax(b: Definitions, x: Value, axis: int, log: bool = False, out: Value | None = None) -> Value:
    dtype = b.dtype(x)
    wide = wide_type(dtype)

    def by_steps(e: list[Expr]) -> RowBody:
        """Softmax of float16 as the standard's function defines it: every step rounds."""
        weight = op("exp", sub(e[0], Result(0, dtype)))
        reduces = [Reduce("max", e[0], dtype), Reduce("sum", cast(weight, wide), wide)]
        return RowBody(reduces, maps={0: div(weight, cast(Result(1, wide), dtype))})

    def build(e: list[Expr]) -> RowBody:
        value = cast(e[0], wide)
        shifted = sub(value, Result(0, wide))
        weight, total = weight_of(shifted), Result(1, wide)
        reduces = [Reduce("max", value, wide), Reduce("sum", weight, wide)]
        result = sub(shifted, op("log", total)) if log else share_of(weight, total)
        return RowBody(reduces, maps={0: cast(result, dtype)})

    body = by_steps if dtype is DType.float16 and not log else build
    return b.rows([x], [axis], body, [(dtype, True)], results=[out])[0]


@lowers("Softmax", "LogSoftmax", dtypes=FLOATS)
def softmax_(n: NodeView, b: Definitions) -> None:
    x, rank, log = n.input(0), n.rank(0), n.op == "LogSoftmax"
    if rank == 0 or 0 in n.shape(0):
        b.pointwise([x], lambda e: const(0.0 if log else 1.0, e[0]), n.dtype(0), out=n.outputs[0])
    elif n.version >= 13:
        softmax(b, x, n.attr("axis", -1) % rank, log, n.outputs[0])
    else:
        flat, axis = _flattened(n, b)
        b.reshape(softmax(b, flat, axis, log), n.out_shape(), out=n.outputs[0])


def _flattened(n: NodeView, b: Definitions) -> tuple[Value, int]:
    """The two-dimensional form that versions before 13 work on."""
    shape = n.shape(0)
    axis = n.attr("axis", 1) % len(shape)
    return b.reshape(n.input(0), (math.prod(shape[:axis]), math.prod(shape[axis:]))), 1


@lowers("Hardmax", dtypes=FLOATS)
def hardmax(n: NodeView, b: Definitions) -> None:
    dtype = n.dtype(0)
    x, axis = (n.input(0), n.attr("axis", -1) % max(1, n.rank(0))) if n.version >= 13 else _flattened(n, b)

    def build(e: list[Expr]) -> RowBody:
        first = Result(0, DType.int64)
        hot = where(compare("eq", Index(axis), first), const(1.0, dtype), const(0.0, dtype))
        return RowBody([Reduce("argmax", e[0], DType.int64)], maps={0: hot})

    (made,) = b.rows([x], [axis], build, [(dtype, True)], results=[n.outputs[0] if n.version >= 13 else None])
    if n.version < 13:
        b.reshape(made, n.out_shape(), out=n.outputs[0])
