"""Operators that pick or place elements by index: Gather, Scatter, OneHot, NonZero, Compress, Unique and their kin.

Index tuples become positions in row-major order first, so that one bounds check, one error message and NumPy's fast
paths for a single index array serve all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import widened
from ranvier.ops.allocation import checked_shape, may_outgrow
from ranvier.ops.operands import index_array, normal_axis, same_dtype, whole_number
from ranvier.ops.registry import Array, op

Positions = np.ndarray[Any, np.dtype[np.int64]]


def _counted_from_front(name: str, indices: Array, size: int, axis: int) -> Positions:
    """Indices along one axis with the negative ones counted from its end; an error when one is out of range."""
    indices = index_array(name, indices)
    outside = (indices < -size) | (indices >= size)
    if np.any(outside):
        worst = indices[outside].flat[0]
        raise InvalidValue(f"{name}: index {worst} is out of range for axis {axis} of size {size}", op=name)
    indices = indices.astype(np.int64, copy=False)
    return np.where(indices < 0, indices + size, indices)


def _positions(name: str, tuples: Array, sizes: Sequence[int], first_axis: int = 0) -> Positions:
    """Row-major positions of the index tuples in the last dimension of ``tuples``, within ``sizes``."""
    found: Positions = np.zeros(tuples.shape[:-1], np.int64)
    for k, size in enumerate(sizes):
        found = found * size + _counted_from_front(name, tuples[..., k], size, first_axis + k)
    return found


def _element_positions(name: str, shape: tuple[int, ...], indices: Array, axis: int) -> Positions:
    """Positions of the elements whose coordinates are those of ``indices``, except along ``axis``."""
    if indices.ndim != len(shape):
        raise ShapeMismatch(f"{name}: data has rank {len(shape)} and indices have rank {indices.ndim}")
    for k, (size, limit) in enumerate(zip(indices.shape, shape)):
        if k != axis and size > limit:
            raise ShapeMismatch(f"{name}: indices of shape {list(indices.shape)} reach beyond data {list(shape)}")
    along = _counted_from_front(name, indices, shape[axis], axis)
    coordinates: list[Array] = list(np.indices(indices.shape, sparse=True))
    coordinates[axis] = along
    found: Positions = np.zeros((), np.int64)
    for coordinate, size in zip(coordinates, shape):
        found = found * size + coordinate
    return found


# -- picking --------------------------------------------------------------------------------------------------------


@op("Gather", since=1)
def gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    axis = normal_axis("Gather", axis, x.ndim)
    if may_outgrow(x, indices):
        checked_shape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype, "Gather")
    try:
        return np.asarray(np.take(x, index_array("Gather", indices), axis=axis), x.dtype)
    except IndexError:
        _counted_from_front("Gather", indices, x.shape[axis], axis)  # raises, with the index
        raise


@op("GatherElements", since=11)
def gather_elements(x: Array, indices: Array, *, axis: int = 0) -> Array:
    axis = normal_axis("GatherElements", axis, x.ndim)
    return x.reshape(-1)[_element_positions("GatherElements", x.shape, indices, axis)]


@op("GatherND", since=11)
def gather_nd(x: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    depth = indices.shape[-1] if indices.ndim else 0
    if not (0 <= batch_dims < min(x.ndim, indices.ndim) and 1 <= depth <= x.ndim - batch_dims):
        raise ShapeMismatch(
            f"GatherND: indices {list(indices.shape)} with batch_dims={batch_dims} do not fit data {list(x.shape)}"
        )
    batch = x.shape[:batch_dims]
    if indices.shape[:batch_dims] != batch:
        raise ShapeMismatch(f"GatherND: batches {list(batch)} of the data and {list(indices.shape)} differ")
    sizes = x.shape[batch_dims : batch_dims + depth]
    positions = _positions("GatherND", indices, sizes, batch_dims)
    number = np.arange(math.prod(batch)).reshape(batch + (1,) * (positions.ndim - batch_dims))
    positions = number * math.prod(sizes) + positions
    slices = x.reshape(math.prod(batch) * math.prod(sizes), *x.shape[batch_dims + depth :])
    checked_shape((*positions.shape, *slices.shape[1:]), x.dtype, "GatherND")
    return np.asarray(np.take(slices, positions, axis=0), x.dtype)


@op("Compress", since=9)
def compress(x: Array, condition: Array, *, axis: int | None = None) -> Array:
    """The slices along ``axis`` (elements, without one) at which ``condition`` is true; it may be too short."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = normal_axis("Compress", axis, x.ndim)
    if condition.ndim != 1 or condition.size > x.shape[axis]:
        raise ShapeMismatch(
            f"Compress: at most {x.shape[axis]} conditions in one dimension expected, got {list(condition.shape)}"
        )
    return np.compress(condition, x, axis)


@op("NonZero", since=9)
def non_zero(x: Array) -> Array:
    """Coordinates as columns; a scalar has none, so its result has shape [0, 0 or 1]."""
    if x.ndim == 0:
        return np.zeros((0, int(bool(x))), np.int64)
    return np.asarray(np.nonzero(x), np.int64)


@op("Unique", since=11)
def unique(x: Array, *, axis: int | None = None, sorted: int = 1) -> tuple[Array, Array, Array, Array]:
    """Distinct elements (or slices along ``axis``), where each comes first, which one stands where, how often."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = normal_axis("Unique", axis, x.ndim)
    # Slices of any type are compared by the ranks of their elements: NumPy's own `axis` takes plain numbers alone.
    _, ranks = np.unique(widened(x) if x.dtype.kind != "O" else x, return_inverse=True)
    slices = np.moveaxis(ranks.reshape(x.shape), axis, 0).reshape(x.shape[axis], x.size // max(x.shape[axis], 1))
    if slices.shape[1] == 0:
        slices = np.zeros((len(slices), 1), np.int64)  # slices without elements are all equal
    _, first, inverse, counts = np.unique(slices, axis=0, return_index=True, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        first, counts = first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return (
        np.take(x, first, axis=axis),
        first.astype(np.int64, copy=False),
        inverse.astype(np.int64, copy=False),
        counts.astype(np.int64, copy=False),
    )


# -- placing --------------------------------------------------------------------------------------------------------

REDUCTIONS: dict[str, np.ufunc] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(
    name: str, data: Array, rows: tuple[int, ...], positions: Positions, updates: Array, reduction: str
) -> Array:
    """A copy of ``data``, seen as ``rows``, with ``updates`` placed in or combined into the rows at ``positions``."""
    if reduction == "none":
        result = data.copy(order="C")
        result.reshape(rows)[positions] = updates
        return result
    combine = REDUCTIONS.get(reduction)
    if combine is None:
        known = ", ".join(["none", *REDUCTIONS])
        raise InvalidValue(f"{name}: reduction must be one of {known}, got {reduction!r}", op=name)
    if data.dtype.kind == "O":
        raise DTypeMismatch(f"{name}: strings cannot be combined by {reduction!r}")
    result = np.array(widened(data), order="C")
    combine.at(result.reshape(rows), positions, widened(updates))
    return result.astype(data.dtype, copy=False)


def _scatter_elements(
    name: str, data: Array, indices: Array, updates: Array, axis: int, reduction: str = "none"
) -> Array:
    same_dtype(name, data, updates)
    if indices.shape != updates.shape:
        raise ShapeMismatch(f"{name}: indices {list(indices.shape)} and updates {list(updates.shape)} differ")
    positions = _element_positions(name, data.shape, indices, normal_axis(name, axis, data.ndim))
    return _scatter(name, data, (data.size,), positions.reshape(-1), updates.reshape(-1), reduction)


@op("ScatterElements", since=11)
def scatter_elements(data: Array, indices: Array, updates: Array, *, axis: int = 0, reduction: str = "none") -> Array:
    return _scatter_elements("ScatterElements", data, indices, updates, axis, reduction)


@op("Scatter", since=9)
def scatter(data: Array, indices: Array, updates: Array, *, axis: int = 0) -> Array:
    return _scatter_elements("Scatter", data, indices, updates, axis)


@op("ScatterND", since=11)
def scatter_nd(data: Array, indices: Array, updates: Array, *, reduction: str = "none") -> Array:
    same_dtype("ScatterND", data, updates)
    depth = indices.shape[-1] if indices.ndim else 0
    if not 1 <= depth <= data.ndim:
        raise ShapeMismatch(f"ScatterND: indices {list(indices.shape)} do not fit data {list(data.shape)}")
    expected = (*indices.shape[:-1], *data.shape[depth:])
    if updates.shape != expected:
        raise ShapeMismatch(f"ScatterND: updates of shape {list(expected)} expected, got {list(updates.shape)}")
    sizes = data.shape[:depth]
    rows = (math.prod(sizes), *data.shape[depth:])
    return _scatter("ScatterND", data, rows, _positions("ScatterND", indices, sizes), updates, reduction)


@op("TensorScatter", since=24)
def tensor_scatter(
    past: Array, update: Array, write_indices: Array | None = None, *, axis: int = -2, mode: str = "linear"
) -> Array:
    """A cache with ``update`` written along ``axis``, from ``write_indices[b]`` on in sample b."""
    name = "TensorScatter"
    same_dtype(name, past, update)
    axis = normal_axis(name, axis, past.ndim)
    if axis == 0:
        raise InvalidValue(f"{name}: axis 0 is the batch; it cannot be the sequence too", op=name)
    if past.shape[:axis] != update.shape[:axis] or past.shape[axis + 1 :] != update.shape[axis + 1 :]:
        raise ShapeMismatch(
            f"{name}: past {list(past.shape)} and update {list(update.shape)} differ beside axis {axis}"
        )
    batch, capacity, length = past.shape[0], past.shape[axis], update.shape[axis]
    starts = np.zeros(batch, np.int64) if write_indices is None else index_array(name, write_indices)
    if starts.shape != (batch,):
        raise ShapeMismatch(f"{name}: {batch} write indices expected, got shape {list(starts.shape)}")
    places = starts.astype(np.int64)[:, None] + np.arange(length)
    if mode == "circular":
        places = places % max(capacity, 1)
    elif mode != "linear":
        raise InvalidValue(f"{name}: mode must be linear or circular, got {mode!r}", op=name)
    if length > capacity or (places.size and not 0 <= places.min() <= places.max() < capacity):
        raise InvalidValue(
            f"{name}: {length} entries from {starts.tolist()} do not fit into {capacity} places", op=name
        )
    result = past.copy()
    # both sides as [batch, sequence, …]; assignment through the view writes into `result`
    np.moveaxis(result, axis, 1)[np.arange(batch)[:, None], places] = np.moveaxis(update, axis, 1)
    return result


# -- one-hot --------------------------------------------------------------------------------------------------------


def _one_hot(indices: Array, depth: Array, values: Array, axis: int, fold: Callable[[Array, int], Array]) -> Array:
    if values.shape != (2,):
        raise ShapeMismatch(f"OneHot: values must be [off, on], got shape {list(values.shape)}")
    size = whole_number("OneHot", "depth", depth)
    axis = normal_axis("OneHot", axis, indices.ndim + 1)
    shape = (*indices.shape[:axis], size, *indices.shape[axis:])
    checked_shape(shape, values.dtype, "OneHot")
    chosen = np.expand_dims(fold(indices.astype(np.int64), size), axis)
    classes = np.arange(size).reshape(-1, *(1,) * (indices.ndim - axis))
    return np.asarray(values[np.equal(chosen, classes).astype(np.intp)])


@op("OneHot", since=11)
def one_hot(indices: Array, depth: Array, values: Array, *, axis: int = -1) -> Array:
    """Negative indices count from the end; any outside [-depth, depth-1] choose nothing."""
    return _one_hot(indices, depth, values, axis, lambda index, size: np.where(index < 0, index + size, index))


@op("OneHot", since=9)
def one_hot_9(indices: Array, depth: Array, values: Array, *, axis: int = -1) -> Array:
    """The first version knows no negative indices: they choose nothing."""
    return _one_hot(indices, depth, values, axis, lambda index, size: index)
