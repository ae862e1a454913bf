"""Operators that take elements by index, put them there, or order them."""

from __future__ import annotations

import math
from typing import Any

from ranvier.errors import InvalidValue
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.ops.movement import EVERYTHING
from ranvier.providers.cuda.table import ALL, COMPLEX, NUMBERS, Call, lowers


def within(call: Call, indices: Any, size: int) -> Any:
    """Indices that may count from the end as ones that do not, none of them outside: on a GPU an index outside of a
    tensor ends the context, and everything in it."""
    indices = indices.to(torch.int64)
    if size == 0:
        if indices.numel():
            raise InvalidValue(f"{call.node.op}: nothing can be taken from an empty axis", op=call.node.op)
        return indices
    call.require(((indices >= -size) & (indices < size)).all(), f"an index is outside an axis of {size}")
    return torch.where(indices < 0, indices + size, indices).clamp(0, size - 1)


@lowers("Gather", types=EVERYTHING, moves=True)
def gather(call: Call, x: Any, indices: Any) -> Any:
    axis = call.attr("axis", 0) % x.ndim
    at = within(call, indices, x.shape[axis])
    taken = x.index_select(axis, at.reshape(-1))
    return taken.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


@lowers("GatherElements", since=11, types=EVERYTHING, moves=True)
def gather_elements(call: Call, x: Any, indices: Any) -> Any:
    axis = call.attr("axis", 0) % x.ndim
    if any(a > b for k, (a, b) in enumerate(zip(indices.shape, x.shape)) if k != axis):
        raise InvalidValue(f"GatherElements: indices {list(indices.shape)} do not fit {list(x.shape)}")
    return torch.gather(x, axis, within(call, indices, x.shape[axis]))


def _rows(call: Call, x: Any, indices: Any, batch: int = 0) -> tuple[Any, Any]:
    """``x`` as rows, and the rows that tuples of ``indices`` mean."""
    depth = indices.shape[-1]
    addressed = x.shape[batch : batch + depth]
    row = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=x.device)
    for k, size in enumerate(addressed):
        row = row * size + within(call, indices[..., k], size)
    if batch:
        lead = math.prod(x.shape[:batch])
        first = torch.arange(lead, device=x.device).reshape(*x.shape[:batch], *[1] * (row.ndim - batch))
        row = row + first * math.prod(addressed)
    return x.reshape(-1, *x.shape[batch + depth :]), row


@lowers("GatherND", since=11, types=EVERYTHING, moves=True)
def gather_nd(call: Call, x: Any, indices: Any) -> Any:
    rows, chosen = _rows(call, x, indices, call.attr("batch_dims", 0))
    return rows.index_select(0, chosen.reshape(-1)).reshape((*chosen.shape, *rows.shape[1:]))


@lowers("ArrayFeatureExtractor", domain="ai.onnx.ml", types=EVERYTHING, moves=True)
def array_feature_extractor(call: Call, x: Any, indices: Any) -> Any:
    at = within(call, indices.reshape(-1), x.shape[-1])
    found = x.index_select(x.ndim - 1, at)
    return found.reshape(1, -1) if x.ndim == 1 else found


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scattered(x: Any, axis: int, index: Any, updates: Any, reduction: str) -> Any:
    if reduction == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, _REDUCTIONS[reduction], include_self=True)


@lowers("ScatterND", since=11, types=ALL | COMPLEX)
def scatter_nd(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    rows, chosen = _rows(call, x, indices)
    flat = rows.reshape(rows.shape[0], -1)
    given = updates.reshape(chosen.numel(), flat.shape[1])
    index = chosen.reshape(-1, 1).expand_as(given)
    return _scattered(flat, 0, index, given, call.attr("reduction", "none")).reshape(x.shape)


@lowers("ScatterElements", since=11, types=ALL | COMPLEX)
def scatter_elements(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    axis = call.attr("axis", 0) % x.ndim
    return _scattered(x, axis, within(call, indices, x.shape[axis]), updates, call.attr("reduction", "none"))


@lowers("Scatter", types=ALL | COMPLEX)
def scatter(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    return scatter_elements(call, x, indices, updates)


@lowers("TensorScatter", since=24, types=EVERYTHING, moves=True)
def tensor_scatter(call: Call, past: Any, update: Any, starts: Any = None) -> Any:
    axis = call.attr("axis", -2) % past.ndim
    length, room = update.shape[axis], past.shape[axis]
    at = torch.arange(length, device=past.device).reshape(1, -1)
    if starts is not None:
        first = starts.to(torch.int64).reshape(-1, 1)
        if call.attr("mode", "linear") == "linear":
            call.require(((first >= 0) & (first + length <= room)).all(), f"an update goes beyond {room}")
        at = at + first
    at = (at % room).expand(past.shape[0], length)
    shape = [1] * past.ndim
    shape[0], shape[axis] = past.shape[0], length
    return past.scatter(axis, at.reshape(shape).expand_as(update), update)


@lowers("ReverseSequence", since=10, types=EVERYTHING, moves=True)
def reverse_sequence(call: Call, x: Any, lengths: Any) -> Any:
    time, batch = call.attr("time_axis", 0), call.attr("batch_axis", 1)
    steps = torch.arange(x.shape[time], device=x.device)
    shape = [1] * x.ndim
    shape[time] = x.shape[time]
    forward = steps.reshape(shape)
    shape = [1] * x.ndim
    shape[batch] = x.shape[batch]
    counts = lengths.to(torch.int64)
    call.require(((counts >= 0) & (counts <= x.shape[time])).all(), f"a length is beyond {x.shape[time]}")
    counts = counts.clamp(0, x.shape[time]).reshape(shape)
    at = torch.where(forward < counts, counts - 1 - forward, forward)
    return torch.gather(x, time, at.expand(x.shape))


@lowers("TopK", since=1, types=NUMBERS, host=(1,))
def top_k(call: Call, x: Any, k: Array | None = None) -> Any:
    axis, count = call.attr("axis", -1) % x.ndim, int(call.attr("k") if k is None else k.reshape(-1)[0])
    if not 0 <= count <= x.shape[axis]:
        raise InvalidValue(f"TopK: {count} of {x.shape[axis]} elements", op="TopK")
    # of equal elements the first comes first, which only a stable order promises
    values, order = torch.sort(x, dim=axis, descending=call.flag("largest", 1), stable=True)
    return values.narrow(axis, 0, count), order.narrow(axis, 0, count)
