"""Resampling of images at free positions: GridSample and AffineGrid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.allocation import checked_shape
from ranvier.ops.nn.resample import cubic_kernel, interpolation_dtype, linear_kernel, rounded_to
from ranvier.ops.registry import Array, op


@op("GridSample", since=16)
def grid_sample_16(
    x: Array, grid: Array, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Array:
    return _grid_sample(x, grid, align_corners, mode, padding_mode)


@op("GridSample", since=20)
def grid_sample(
    x: Array, grid: Array, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Array:
    return _grid_sample(x, grid, align_corners, mode, padding_mode)


def _grid_sample(x: Array, grid: Array, align_corners: int, mode: str, padding: str) -> Array:
    name = "GridSample"
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    if method not in ("nearest", "linear", "cubic"):
        raise InvalidValue(f"{name}: mode must be nearest, linear or cubic, got {mode!r}", op=name)
    if padding not in ("zeros", "border", "reflection"):
        raise InvalidValue(f"{name}: padding_mode must be zeros, border or reflection, got {padding!r}", op=name)
    rank = x.ndim - 2
    if rank < 1 or grid.ndim != x.ndim or grid.shape[0] != x.shape[0] or grid.shape[-1] != rank:
        raise ShapeMismatch(
            f"{name}: needs X [N, C, spatial …] and grid [N, output …, {max(rank, 1)}], got {list(x.shape)} and "
            f"{list(grid.shape)}"
        )
    batch, channels = x.shape[:2]
    spatial: tuple[int, ...] = x.shape[2:]
    y_shape = checked_shape((batch, channels, *grid.shape[1:-1]), x.dtype, name)
    if 0 in spatial and 0 not in y_shape:
        raise ShapeMismatch(f"{name}: nothing to sample in shape {list(x.shape)}")
    # the grid names the last axis first
    points = grid.reshape(batch, math.prod(grid.shape[1:-1]), rank)[:, :, ::-1]
    points = np.moveaxis(points, -1, 0).astype(np.float64)
    taps = [_axis_taps(p, n, bool(align_corners), method, padding) for p, n in zip(points, spatial)]
    pixels = x.reshape(batch, channels, math.prod(spatial))
    if method == "nearest":
        index, inside, _ = _combined([axis_taps[0] for axis_taps in taps], spatial)
        found = np.take_along_axis(pixels, index[:, None], axis=2)
        blank = "" if x.dtype.kind == "O" else x.dtype.type(0)
        return np.where(inside[:, None], found, blank).astype(x.dtype, copy=False).reshape(y_shape)
    arithmetic = interpolation_dtype(x.dtype, name)
    source = pixels.astype(arithmetic, copy=False)
    total = np.zeros((batch, channels, points.shape[2]), arithmetic)
    for chosen in itertools.product(*taps):
        index, inside, weight = _combined(chosen, spatial)
        weight = np.where(inside, weight, 0).astype(np.float32 if arithmetic == np.float32 else np.float64)
        for n in range(batch):
            total[n] += source[n][:, index[n]] * weight[n]
    return rounded_to(total, x.dtype).reshape(y_shape)


Tap = tuple[Array, Array, Array]  # along one axis: element, whether it exists, weight


def _axis_taps(points: Array, length: int, align: bool, method: str, padding: str) -> list[Tap]:
    """The elements one axis contributes to each point, whose coordinates run from -1 to 1."""
    low, high = (0.0, length - 1.0) if align else (-0.5, length - 0.5)
    at = (points + 1) / 2 * (high - low) + low
    at = np.where(np.isfinite(at), at, low - 2)  # a point that is nowhere lies outside
    if method == "nearest":
        at = np.rint(at)
    if padding == "border" and method != "cubic":  # a cubic only clamps the elements it reads, as PyTorch has it
        at = np.where((at < low) | (at > high), np.clip(at, 0, length - 1), at)
    elif padding == "reflection":
        at = _reflected(at, low, high)
    floor = np.floor(at)
    if method == "nearest":
        neighbours = [(at, np.ones_like(at))]
    else:
        first, kernel = (0, linear_kernel) if method == "linear" else (-1, cubic_kernel(-0.75))
        neighbours = [(floor + k, kernel(floor + k - at)) for k in range(first, 2 - first)]
    taps: list[Tap] = []
    for element, weight in neighbours:
        if padding == "reflection":
            element = np.trunc(_reflected(element, low, high))
        exists = (element >= 0) & (element < length) if padding == "zeros" else np.ones(at.shape, np.bool_)
        taps.append((np.clip(element, 0, length - 1).astype(np.intp), exists, weight))
    return taps


def _reflected(at: Array, low: float, high: float) -> Array:
    """Positions outside ``[low, high]`` thrown back and forth between the two until they lie inside."""
    span = high - low
    if span <= 0:
        return np.full_like(at, low)
    beyond = np.where(at < low, low - at, at - high)
    turns = np.floor(beyond / span)
    rest = beyond - turns * span
    from_low = (turns % 2 == 0) == (at < low)
    return np.where((at >= low) & (at <= high), at, np.where(from_low, low + rest, high - rest))


def _combined(taps: Sequence[Tap], spatial: Sequence[int]) -> Tap:
    """One tap per axis as a single one into the flattened image."""
    index, inside, weight = taps[0]
    for (element, exists, factor), length in zip(taps[1:], spatial[1:]):
        index, inside, weight = index * length + element, inside & exists, weight * factor
    return index, inside, weight


@op("AffineGrid", since=20)
def affine_grid(theta: Array, size: Array, *, align_corners: int = 0) -> Array:
    """The points of an output image, moved by one affine map per sample."""
    name = "AffineGrid"
    batch, _, *spatial = (int(s) for s in size) if size.size in (4, 5) else (0, 0)
    rank = len(spatial)
    if theta.shape != (batch, rank, rank + 1) or rank == 0:
        raise ShapeMismatch(
            f"{name}: size [N, C, spatial of 2 or 3 axes] and theta [N, axes, axes + 1] do not fit: "
            f"{size.tolist()} and {list(theta.shape)}"
        )
    checked_shape((batch, *spatial, rank), theta.dtype, name)
    lines = [
        np.linspace(-1, 1, n) if align_corners and n > 1 else (2 * np.arange(n) + 1) / max(n, 1) - 1 for n in spatial
    ]
    # homogeneous coordinates, the last axis first
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(spatial)], axis=-1)
    moved = points.reshape(1, -1, rank + 1) @ theta.astype(np.float64).swapaxes(1, 2)
    return np.asarray(moved).reshape(batch, *spatial, rank).astype(theta.dtype)
