"""Sums, extremes and orders along axes."""

from __future__ import annotations

import math
from typing import Any

from ranvier.dtypes import DType
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.ops.movement import ints
from ranvier.providers.cuda.table import BOOL, FLOATS, NUMBERS, Call, lowers


def chosen_axes(call: Call, x: Any, axes: Array | None) -> tuple[int, ...] | None:
    """The axes to reduce; None where nothing is to be done."""
    chosen = call.attr("axes") if axes is None else ints(axes)
    if chosen:
        return tuple(int(axis) % max(x.ndim, 1) for axis in chosen)
    return None if call.flag("noop_with_empty_axes") else tuple(range(x.ndim))


def _sum(x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    return x.sum(dim=axes, keepdim=keep) if axes else x


def _empty(x: Any, axes: tuple[int, ...]) -> bool:
    return any(x.shape[axis] == 0 for axis in axes)


def _extreme(name: str, floor: bool) -> Any:
    def reduce(x: Any, axes: tuple[int, ...], keep: bool) -> Any:
        if not axes:
            return x
        if _empty(x, axes):  # torch has no extreme of nothing; the standard's is the farthest there is
            shape = [1 if k in axes else n for k, n in enumerate(x.shape) if keep or k not in axes]
            return torch.full(shape, _farthest(x.dtype, floor), dtype=x.dtype, device=x.device)
        return getattr(torch, name)(x, dim=axes, keepdim=keep)

    return reduce


def _farthest(dtype: Any, floor: bool) -> Any:
    if dtype.is_floating_point:
        return -math.inf if floor else math.inf
    if dtype == torch.bool:
        return not floor
    info = torch.iinfo(dtype)
    return info.min if floor else info.max


def _product(x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    for axis in sorted(axes, reverse=True):
        x = x.prod(dim=axis, keepdim=keep)
    return x


def _mean(x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    if not axes:
        return x
    if x.dtype.is_floating_point:
        return x.mean(dim=axes, keepdim=keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(x.sum(dim=axes, keepdim=keep), count, rounding_mode="trunc")


def _log_sum_exp(x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    return torch.logsumexp(x.to(torch.float64) if not x.dtype.is_floating_point else x, dim=axes, keepdim=keep)


def _reduced(reduce: Any, before: Any = None, after: Any = None) -> Any:
    """A reduction with what is done to every element before, and to every result after; both are done even where there
    is nothing to reduce."""

    def run(call: Call, x: Any, axes: Array | None = None) -> Any:
        chosen = chosen_axes(call, x, axes)
        y = x if before is None else before(x)
        if chosen is not None:
            y = reduce(y, chosen, call.flag("keepdims", 1))
        return y if after is None else after(y)

    return run


def _square(x: Any) -> Any:
    return x * x


def _root(x: Any) -> Any:
    return torch.sqrt(x if x.dtype.is_floating_point else x.to(torch.float64))


def _log(x: Any) -> Any:
    return torch.log(x if x.dtype.is_floating_point else x.to(torch.float64))


lowers("ReduceSum", types=NUMBERS | {DType.uint64}, host=(1,), wide=True)(_reduced(_sum))
lowers("ReduceMax", types=NUMBERS | BOOL, host=(1,))(_reduced(_extreme("amax", True)))
lowers("ReduceMin", types=NUMBERS | BOOL, host=(1,))(_reduced(_extreme("amin", False)))
lowers("ReduceProd", types=NUMBERS | {DType.uint64}, host=(1,), wide=True)(_reduced(_product))
lowers("ReduceMean", types=NUMBERS, host=(1,), wide=True)(_reduced(_mean))
lowers("ReduceL1", types=NUMBERS, host=(1,), wide=True)(_reduced(_sum, before=lambda x: x.abs()))
lowers("ReduceL2", types=NUMBERS, host=(1,), wide=True)(_reduced(_sum, before=_square, after=_root))
lowers("ReduceSumSquare", types=NUMBERS, host=(1,), wide=True)(_reduced(_sum, before=_square))
lowers("ReduceLogSum", types=NUMBERS, host=(1,), wide=True)(_reduced(_sum, after=_log))
lowers("ReduceLogSumExp", types=NUMBERS, host=(1,), wide=True)(_reduced(_log_sum_exp))


def _position(call: Call, x: Any, largest: bool) -> Any:
    axis, keep = call.attr("axis", 0) % max(x.ndim, 1), call.flag("keepdims", 1)
    last = call.flag("select_last_index")
    if last:
        x = x.flip(axis)
    extreme = (torch.amax if largest else torch.amin)(x, dim=axis, keepdim=True)
    # which of equal elements torch's argmax takes it does not say
    hit = x == extreme
    if x.dtype.is_floating_point:
        hit = hit | x.isnan()
    steps = torch.arange(x.shape[axis], device=x.device).reshape([-1 if k == axis else 1 for k in range(x.ndim)])
    found = torch.where(hit, steps, x.shape[axis]).amin(dim=axis, keepdim=True)
    if last:
        found = x.shape[axis] - 1 - found
    return found if keep else found.squeeze(axis)


@lowers("ArgMax", types=NUMBERS)
def arg_max(call: Call, x: Any) -> Any:
    return _position(call, x, True)


@lowers("ArgMin", types=NUMBERS)
def arg_min(call: Call, x: Any) -> Any:
    return _position(call, x, False)


def _rows(call: Call, x: Any, function: Any) -> Any:
    """Before version 13, all axes from one on are one row."""
    if call.version >= 13:
        return function(x, call.attr("axis", -1))
    axis = call.attr("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return function(x.reshape(math.prod(x.shape[:axis]), -1), 1).reshape(x.shape)


@lowers("Softmax")
def softmax(call: Call, x: Any) -> Any:
    return _rows(call, x, torch.softmax)


@lowers("LogSoftmax")
def log_softmax(call: Call, x: Any) -> Any:
    return _rows(call, x, torch.log_softmax)


def _hard(x: Any, axis: int) -> Any:
    steps = torch.arange(x.shape[axis], device=x.device).reshape(
        [-1 if k == axis % x.ndim else 1 for k in range(x.ndim)]
    )
    hit = torch.where(x == x.amax(dim=axis, keepdim=True), steps, x.shape[axis]).amin(dim=axis, keepdim=True)
    return (steps == hit).to(x.dtype)


@lowers("Hardmax")
def hardmax(call: Call, x: Any) -> Any:
    return _rows(call, x, _hard)


def _running(name: str, neutral: int) -> Any:
    def run(call: Call, x: Any, axis: Array) -> Any:
        along = int(axis.reshape(-1)[0]) % max(x.ndim, 1)
        y = x.flip(along) if call.flag("reverse") else x
        y = getattr(torch, name)(y, dim=along)
        if call.flag("exclusive"):
            first = torch.full_like(y.narrow(along, 0, 1), neutral)
            y = torch.cat([first, y.narrow(along, 0, y.shape[along] - 1)], dim=along)
        return y.flip(along) if call.flag("reverse") else y

    return run


lowers("CumSum", since=11, types=NUMBERS, host=(1,), wide=True)(_running("cumsum", 0))
lowers("CumProd", since=1, types=NUMBERS, host=(1,), wide=True)(_running("cumprod", 1))


@lowers("Det", since=11, types=FLOATS, wide=True)
def determinant(call: Call, x: Any) -> Any:
    return torch.linalg.det(x)
