"""TopK, with the order that ONNX Runtime's unsorted results have.

The standard leaves the order open when ``sorted`` is 0, but graphs exist whose results depend on it (detectors that
gather by the indices). ONNX Runtime keeps the best k in a binary heap, the worst on top, and hands the heap out as
it stands; results here agree with that for the sizes where it does so, and are sorted otherwise.
"""

from __future__ import annotations

import math

import numpy as np

from ranvier.errors import InvalidValue
from ranvier.ops.accumulate import widened
from ranvier.ops.operands import normal_axis, whole_number
from ranvier.ops.registry import Array, op

_HEAP_UP_TO = 0.725  # of log k / log n: beyond that ONNX Runtime selects by partial sorting


def _top_k(x: Array, k: int, axis: int, largest: int, in_order: bool = True) -> tuple[Array, Array]:
    """The k extreme values along an axis, and their indices. NaN counts as the largest value of all."""
    axis = normal_axis("TopK", axis, x.ndim)
    size = x.shape[axis]
    if not 0 <= k <= size:
        raise InvalidValue(f"TopK: k is {k}, and axis {axis} has {size} elements", op="TopK")
    keys = widened(x)
    if largest:
        # A stable rising sort of the reversed axis, read backwards: falling, with equal values by rising index.
        order = size - 1 - np.flip(np.argsort(np.flip(keys, axis), axis=axis, kind="stable"), axis)
    else:
        order = np.argsort(keys, axis=axis, kind="stable")
    chosen = np.ascontiguousarray(np.take(order, np.arange(k), axis=axis), np.int64)
    if not in_order and in_heap_order(k, size):
        ranks = np.argsort(order, axis=axis, kind="stable")  # 0 is the best: comparing ranks settles ties too
        chosen = np.apply_along_axis(_heap_order, axis, ranks, k)
    return np.take_along_axis(x, chosen, axis), chosen


def in_heap_order(k: int, size: int) -> bool:
    """Is a result that need not be sorted in the order of a heap?"""
    return 1 < k < size and (k < 4 or math.log(k) / math.log(size) < _HEAP_UP_TO)


def _heap_order(ranks: Array, k: int) -> Array:
    """Indices of the k best in the order of a heap that was filled from the back and then fed the rest."""
    rank: list[int] = ranks.tolist()
    heap = [0] * k
    for index in range(k):
        heap[k - 1 - index] = index
        _sift_down(heap, k - 1 - index, rank)
    for index in range(k, len(rank)):
        if rank[index] < rank[heap[0]]:
            heap[0] = index
            _sift_down(heap, 0, rank)
    return np.array(heap, np.int64)


def _sift_down(heap: list[int], at: int, rank: list[int]) -> None:
    """Let an entry sink below every child that is worse than it; of two children the worse one rises."""
    count = len(heap)
    while True:
        left = 2 * at + 1
        right = left + 1
        if left >= count:
            return
        worse = right if right < count and rank[heap[right]] > rank[heap[left]] else left
        if rank[heap[at]] >= rank[heap[worse]]:
            return
        heap[at], heap[worse] = heap[worse], heap[at]
        at = worse


@op("TopK", since=11)
def top_k(x: Array, k: Array, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Array, Array]:
    return _top_k(x, whole_number("TopK", "K", k), axis, largest, bool(sorted))


@op("TopK", since=10)
def top_k_10(x: Array, k: Array, *, axis: int = -1) -> tuple[Array, Array]:
    return _top_k(x, whole_number("TopK", "K", k), axis, largest=1)


@op("TopK", since=1)
def top_k_1(x: Array, *, k: int, axis: int = -1) -> tuple[Array, Array]:
    return _top_k(x, k, axis, largest=1)
