"""Constant codes put into panels, some rows at a time, so that what is put together is still near when it is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ranvier.codegen.llvm.gemm.blocks import Panels
from ranvier.codegen.llvm.integer.dots import Dot

Array = np.ndarray[Any, Any]
_NEAR = 256 << 10  # bytes of groups that are put together at a time


def put_into_panels(codes: Array, panels: Panels, dot: Dot, packed: Array) -> None:
    """Signed codes [..., K, N] as groups of K, panel after panel in the last axis of ``packed``; zeros where a
    group or a panel has room for more."""
    *batch, k, n = codes.shape
    deep, filled = dot.groups(k), -(-k // dot.group)
    if deep * dot.group != k or panels.cut.total * panels.lanes != n:
        packed[...] = 0
    step = max(1, _NEAR // max(1, dot.unit * n * math.prod(batch)))
    for start in range(0, filled, step):
        end = min(start + step, filled)
        words = _words(codes[..., start * dot.group : end * dot.group, :], dot)
        for first, count, width, columns in _runs(panels):
            room = packed[..., first * deep : (first + count * width) * deep].reshape(*batch, count, deep, width)
            beside = words[..., first : first + count * columns].reshape(*batch, end - start, count, columns)
            room[..., start:end, :columns] = beside.swapaxes(-2, -3)


def _words(codes: Array, dot: Dot) -> Array:
    """Codes [..., K, N] as groups [..., K / group, N], an integer each, zeros behind the last."""
    *batch, k, n = codes.shape
    across = (*codes.strides[:-2], codes.strides[-1])
    beside = codes.dtype == dot.right.numpy and codes.strides[-2] == codes.itemsize
    if beside and not (k % dot.group or any(apart % dot.unit for apart in across)):
        lying: Array = codes.swapaxes(-1, -2).view(dot.packed.numpy).swapaxes(-1, -2)
        return lying
    made = (np.zeros if k % dot.group else np.empty)((*batch, -(-k // dot.group), n, dot.group), dot.right.numpy)
    for place in range(dot.group):
        rows = codes[..., place :: dot.group, :]
        made[..., : rows.shape[-2], :, place] = rows
    words: Array = made.view(dot.packed.numpy)[..., 0]
    return words


def _runs(panels: Panels) -> Iterator[tuple[int, int, int, int]]:
    """Panels that follow each other and are alike: the first column, how many, how wide, and columns that exist."""
    cut, lanes = panels.cut, panels.lanes
    for k, count in ((0, cut.large), (cut.large, cut.count - cut.large)):
        first, width = cut.start(k) * lanes, (cut.start(k + 1) - cut.start(k)) * lanes
        whole = min(count, (panels.n - first) // width) if count else 0
        if whole:
            yield first, whole, width, width
        if whole < count:
            yield first + whole * width, 1, width, panels.n - first - whole * width
