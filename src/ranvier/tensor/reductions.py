"""Functions that take many elements to one: sums, extremes, statistics, and running sums."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput
from ranvier.tensor.core import Tensor, as_tensor, beside, call
from ranvier.tensor.elementwise import divide, multiply, sqrt, square, subtract
from ranvier.tensor.expr import spec
from ranvier.tensor.host import hosted
from ranvier.tensor.manipulate import astype, broadcast_to, concat, flatten, reshape
from ranvier.tensor.shapes import axes_of, count, reduced
from ranvier.tensor.types import COMPLEX, DEFAULT_INT, FLOATS, SIGNED, UNSIGNED, floating

Axis = int | Sequence[int] | None
_SMALL = (DType.int8, DType.int16, DType.uint8, DType.uint16, DType.bool)


def _reduction(op: str, x: Tensor, axis: Axis, keepdims: bool, dtype: DType) -> Tensor:
    axes = axes_of(axis, x.ndim)
    shape = reduced(x.shape, axes, keepdims)
    if not axes:
        return x  # of one element each, sums and extremes are the elements
    return call(spec(op, (("keepdims", int(keepdims)),), ((1, axes),)), (x,), dtype, shape)


def _summed(dtype: DType, asked: Any) -> DType:
    if asked is not None:
        return dtypes.of(asked)
    if dtype in UNSIGNED:
        return DType.uint64
    return DEFAULT_INT if dtype in SIGNED or dtype is DType.bool else dtype


def sum(x: Any, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    """The sum along axes; small integers are added up in 64 bits."""
    own = as_tensor(x)
    kind = _summed(own.dtype, dtype)
    if kind in COMPLEX:
        return hosted(np.sum, own, axis=_host_axis(axis), dtype=kind.numpy, keepdims=keepdims)
    return _in("ReduceSum", own, axis, keepdims, kind)


def prod(x: Any, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    """The product along axes; small integers are multiplied in 64 bits."""
    own = as_tensor(x)
    kind = _summed(own.dtype, dtype)
    if kind in COMPLEX:
        return hosted(np.prod, own, axis=_host_axis(axis), dtype=kind.numpy, keepdims=keepdims)
    return _in("ReduceProd", own, axis, keepdims, kind)


def _in(op: str, x: Tensor, axis: Axis, keepdims: bool, kind: DType) -> Tensor:
    """A sum or product in a type; in one that operators do not add up in, by way of one in which they do."""
    wide = DEFAULT_INT if kind in _SMALL else kind
    return astype(_reduction(op, astype(x, wide), axis, keepdims, wide), kind)


def mean(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    own = as_tensor(x)
    if own.dtype in COMPLEX:
        return hosted(np.mean, own, axis=_host_axis(axis), keepdims=keepdims)
    own = astype(own, floating(own.dtype))
    return _reduction("ReduceMean", own, axis, keepdims, own.dtype)


def var(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """The mean square distance from the mean; ``correction`` is taken off the number of elements."""
    own = as_tensor(x)
    own = astype(own, floating(own.dtype))
    if own.dtype in COMPLEX:
        return hosted(np.var, own, axis=_host_axis(axis), ddof=correction, keepdims=keepdims)
    axes = axes_of(axis, own.ndim)
    number = count(tuple(own.shape[k] for k in axes))
    apart = square(subtract(own, mean(own, axis=axes, keepdims=True)))
    total = _reduction("ReduceSum", apart, axes, keepdims, own.dtype)
    return divide(total, builtins.max(float(number - correction), 0.0))


def std(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    return sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def max(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return _extreme("ReduceMax", x, axis, keepdims)


def min(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return _extreme("ReduceMin", x, axis, keepdims)


def _extreme(op: str, x: Any, axis: Axis, keepdims: bool) -> Tensor:
    own = as_tensor(x)
    if own.dtype in COMPLEX:
        raise DTypeMismatch("complex numbers have no order")
    axes = axes_of(axis, own.ndim)
    if not count(tuple(own.shape[k] for k in axes)) and count(reduced(own.shape, axes, keepdims)):
        raise InvalidInput(f"nothing to compare: shape {list(own.shape)} along axes {list(axes)}")
    wide = DType.int32 if own.dtype in _SMALL else own.dtype  # not all types are among those of the operator
    return astype(_reduction(op, astype(own, wide), axes, keepdims, wide), own.dtype)


def any(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return _truth("ReduceMax", x, axis, keepdims)


def all(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return _truth("ReduceMin", x, axis, keepdims)


def _truth(op: str, x: Any, axis: Axis, keepdims: bool) -> Tensor:
    own = astype(as_tensor(x), DType.bool)
    axes = axes_of(axis, own.ndim)
    if not count(own.shape):
        return beside(Tensor(np.full(reduced(own.shape, axes, keepdims), op == "ReduceMin")), own)
    return astype(_reduction(op, astype(own, DType.int32), axes, keepdims, DType.int32), DType.bool)


def count_nonzero(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return sum(astype(as_tensor(x), DType.bool), axis=axis, keepdims=keepdims)


def argmax(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    return _place("ArgMax", x, axis, keepdims)


def argmin(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    return _place("ArgMin", x, axis, keepdims)


def _place(op: str, x: Any, axis: int | None, keepdims: bool) -> Tensor:
    own = as_tensor(x)
    if own.dtype in COMPLEX:
        raise DTypeMismatch("complex numbers have no order")
    if not own.size:
        raise InvalidInput(f"nothing to compare: shape {list(own.shape)}")
    if own.dtype in _SMALL:
        own = astype(own, DType.int32)
    kept = (1,) * own.ndim
    if axis is None:
        found = _place(op, flatten(own), 0, False)
        return reshape(found, kept) if keepdims else found
    (at,) = axes_of(axis, own.ndim)
    attrs = (("axis", at), ("keepdims", int(keepdims)))
    return call(spec(op, attrs), (own,), DType.int64, reduced(own.shape, (at,), keepdims))


def cumulative_sum(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Tensor:
    """Running sums along an axis."""
    return _running("CumSum", np.cumsum, 0, x, axis, dtype, include_initial)


def cumulative_prod(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Tensor:
    """Running products along an axis."""
    return _running("CumProd", np.cumprod, 1, x, axis, dtype, include_initial)


def _running(op: str, on_host: Any, start: int, x: Any, axis: int | None, dtype: Any, initial: bool) -> Tensor:
    own = as_tensor(x)
    if axis is None:
        if own.ndim > 1:
            raise InvalidInput("an axis is needed where there are several")
        axis = 0
    own = reshape(own, (1,)) if not own.ndim else own
    (at,) = axes_of(axis, own.ndim)
    kind = _summed(own.dtype, dtype)
    if kind in COMPLEX:
        found = hosted(on_host, own, axis=at, dtype=kind.numpy)
    else:
        wide = DEFAULT_INT if kind in _SMALL else kind
        found = astype(call(spec(op, (), ((1, at),)), (astype(own, wide),), wide, own.shape), kind)
    if not initial:
        return found
    edge = Tensor(np.full((*own.shape[:at], 1, *own.shape[at + 1 :]), start, kind.numpy))
    return concat([beside(edge, found), found], axis=at)


def diff(x: Any, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighbours along an axis, ``n`` times over."""
    own = as_tensor(x)
    (at,) = axes_of(axis, own.ndim)
    beside = [None if p is None else as_tensor(p) for p in (prepend, append)]
    parts = [p for p in (beside[0], own, beside[1]) if p is not None]
    own = concat(parts, axis=at) if len(parts) > 1 else own
    lead = (slice(None),) * at
    for _ in range(index(n)):
        after, before = own[(*lead, slice(1, None))], own[(*lead, slice(None, -1))]
        own = after != before if own.dtype is DType.bool else after - before
    return own


def softmax(x: Any, /, *, axis: int = -1) -> Tensor:
    """exp(x) as shares of their sum along an axis."""
    return _normalised("Softmax", x, axis)


def log_softmax(x: Any, /, *, axis: int = -1) -> Tensor:
    """The logarithm of ``softmax``."""
    return _normalised("LogSoftmax", x, axis)


def _normalised(op: str, x: Any, axis: int) -> Tensor:
    own = as_tensor(x)
    if own.dtype not in FLOATS:
        raise DTypeMismatch(f"{op} is defined for floats, not {own.dtype}")
    (at,) = axes_of(axis, own.ndim)
    return call(spec(op, (("axis", at),)), (own,), own.dtype, own.shape)


def logsumexp(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The logarithm of the sum of exponentials along axes."""
    own = as_tensor(x)
    own = astype(own, floating(own.dtype))
    return _reduction("ReduceLogSumExp", own, axis, keepdims, own.dtype)


def _host_axis(axis: Axis) -> Any:
    return tuple(axis) if isinstance(axis, list) else axis


def average(x: Any, /, *, axis: Axis = None, weights: Any = None, keepdims: bool = False) -> Tensor:
    """The mean, each element counted by its weight."""
    if weights is None:
        return mean(x, axis=axis, keepdims=keepdims)
    own = as_tensor(x)
    share = broadcast_to(as_tensor(weights, own), own.shape)
    total = sum(multiply(own, share), axis=axis, keepdims=keepdims)
    return divide(total, sum(share, axis=axis, keepdims=keepdims))


_OF_TENSORS = True
