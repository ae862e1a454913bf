"""Sums, extremes and orders along axes."""

from __future__ import annotations

from typing import Any

from ranvier.graph.ir import Node
from ranvier.providers.base import Array
from ranvier.providers.mlx.library import mx
from ranvier.providers.mlx.table import ALL, NUMBERS, Call, lowers


def _axes(call: Call, x: Any, axes: Array | None) -> tuple[int, ...] | None:
    """The axes to reduce; None where nothing is to be done."""
    chosen = call.attr("axes") if axes is None else axes.reshape(-1).tolist()
    if chosen:
        return tuple(int(axis) for axis in chosen)
    return None if call.attr("noop_with_empty_axes", 0) else tuple(range(x.ndim))


def _reduced(name: str, before: str | None = None, after: str | None = None) -> Any:
    """A reduction of mlx with what is done to every element before, and to every result after; both are done even
    where there is nothing to reduce."""

    def run(call: Call, x: Any, axes: Array | None = None) -> Any:
        chosen = _axes(call, x, axes)
        y = x if before is None else getattr(mx, before)(x)
        if chosen is not None:
            y = getattr(mx, name)(y, axis=chosen, keepdims=bool(call.attr("keepdims", 1)))
        if after is not None:
            y = getattr(mx, after)(y)
        return y.astype(x.dtype)

    return run


lowers("ReduceSum", types=NUMBERS, host=(1,))(_reduced("sum"))
lowers("ReduceMax", types=ALL, host=(1,))(_reduced("max"))
lowers("ReduceMin", types=ALL, host=(1,))(_reduced("min"))
lowers("ReduceProd", types=NUMBERS, host=(1,))(_reduced("prod"))
lowers("ReduceMean", host=(1,), wide=True)(_reduced("mean"))
lowers("ReduceL1", host=(1,), wide=True)(_reduced("sum", before="abs"))
lowers("ReduceL2", host=(1,), wide=True)(_reduced("sum", before="square", after="sqrt"))
lowers("ReduceSumSquare", host=(1,), wide=True)(_reduced("sum", before="square"))
lowers("ReduceLogSum", host=(1,), wide=True)(_reduced("sum", after="log"))


@lowers("ReduceLogSumExp", host=(1,), wide=True)
def log_sum_exp(call: Call, x: Any, axes: Array | None = None) -> Any:
    chosen = _axes(call, x, axes)
    return x if chosen is None else mx.logsumexp(x, axis=chosen, keepdims=bool(call.attr("keepdims", 1)))


def _last_of_equals(node: Node) -> str | None:
    return "the last of equal elements is not lowered to mlx" if node.attrs.get("select_last_index", 0) else None


@lowers("ArgMax", types=NUMBERS, refuses=_last_of_equals)
def arg_max(call: Call, x: Any) -> Any:
    return mx.argmax(x, axis=call.attr("axis", 0), keepdims=bool(call.attr("keepdims", 1))).astype(mx.int64)


@lowers("ArgMin", types=NUMBERS, refuses=_last_of_equals)
def arg_min(call: Call, x: Any) -> Any:
    return mx.argmin(x, axis=call.attr("axis", 0), keepdims=bool(call.attr("keepdims", 1))).astype(mx.int64)


@lowers("Softmax", since=13, wide=True)
def softmax(call: Call, x: Any) -> Any:
    return mx.softmax(x, axis=call.attr("axis", -1), precise=True)


@lowers("LogSoftmax", since=13, wide=True)
def log_softmax(call: Call, x: Any) -> Any:
    axis = call.attr("axis", -1)
    return x - mx.logsumexp(x, axis=axis, keepdims=True)


@lowers("CumSum", since=11, types=NUMBERS, host=(1,), wide=True)
def cumsum(call: Call, x: Any, axis: Array) -> Any:
    return mx.cumsum(
        x,
        axis=int(axis.reshape(())),
        reverse=bool(call.attr("reverse", 0)),
        inclusive=not call.attr("exclusive", 0),
    ).astype(x.dtype)


@lowers("TopK", since=10, types=NUMBERS, host=(1,))
def top_k(call: Call, x: Any, k: Array) -> Any:
    axis, count = call.attr("axis", -1) % x.ndim, int(k.reshape(()))
    if not 0 < count <= x.shape[axis]:
        raise ValueError(f"{count} of {x.shape[axis]} elements")
    key = x
    if call.attr("largest", 1):  # turned around, so that of equal elements the first still comes first
        key = mx.negative(x) if mx.issubdtype(x.dtype, mx.floating) else mx.bitwise_invert(x)
    order = mx.argsort(key, axis=axis)[(*[slice(None)] * axis, slice(0, count))]
    return mx.take_along_axis(x, order, axis=axis), order.astype(mx.int64)
