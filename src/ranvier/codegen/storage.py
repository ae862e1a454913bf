"""Memory as generated code sees it: storages that will be placed somewhere, and strided views of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ranvier.dtypes import DType
from ranvier.records import dataclass

ALIGNMENT = 64  # bytes: where temporaries and packed constants start
Kind = Literal["input", "output", "temp", "const"]


class Storage:
    """A block of bytes: an input or output of the partition, a temporary, or a constant. Compared by identity.

    ``stands_for``: the type its elements have in expressions, where they are stored in a narrower one (see
    docs/precision.md). It belongs to the memory, so that every view of it, however it was made, says the same.
    """

    __slots__ = ("array", "index", "kind", "name", "nbytes", "stands_for")

    def __init__(
        self,
        kind: Kind,
        nbytes: int,
        *,
        index: int = 0,
        array: np.ndarray[Any, Any] | None = None,
        name: str = "",
        stands_for: DType | None = None,
    ) -> None:
        self.stands_for = stands_for
        self.kind = kind
        self.nbytes = nbytes
        self.index = index  # position among the inputs or outputs
        self.array = array  # the data of a constant
        self.name = name

    @classmethod
    def constant(cls, array: np.ndarray[Any, Any], name: str = "") -> Storage:
        return cls("const", array.nbytes, array=array, name=name)

    @classmethod
    def packed(cls, array: np.ndarray[Any, Any], name: str = "") -> Storage:
        """A constant that starts at a cache line, as kernels that load whole vectors want it."""
        return cls.constant(aligned_copy(array) if array.ctypes.data % ALIGNMENT else array, name)

    @classmethod
    def temporary(cls, nbytes: int, name: str = "") -> Storage:
        return cls("temp", nbytes, name=name)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name or self.index} {self.nbytes}>"


@dataclass(slots=True, unsafe_hash=True)  # never changed; frozen, it would take three times as long to make one
class View:
    """A tensor in memory: element type, shape, strides and offset in elements (strides may be 0 or negative)."""

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def dense(cls, storage: Storage, dtype: DType, shape: tuple[int, ...], offset: int = 0) -> View:
        return cls(storage, dtype, shape, dense_strides(shape), offset)

    @classmethod
    def constant(cls, array: np.ndarray[Any, Any], dtype: DType, name: str = "") -> View:
        return cls.dense(Storage.constant(row_major(array), name), dtype, array.shape)

    @classmethod
    def temporary(cls, dtype: DType, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> View:
        """A new temporary; ``order`` lists the axes from outermost to innermost in memory."""
        strides = dense_strides(shape) if order is None else ordered_strides(shape, order)
        size = math.prod(shape)
        return cls(Storage.temporary(size * dtype.numpy.itemsize), dtype, shape, strides)

    @classmethod
    def narrowed(cls, dtype: DType, stored: DType, shape: tuple[int, ...], order: tuple[int, ...] | None) -> View:
        """A new temporary of ``dtype`` whose elements are kept as ``stored``: stores round, loads widen."""
        made = cls.temporary(stored, shape, order)
        made.storage.stands_for = dtype
        return made

    @property
    def element(self) -> DType:
        """The type of the elements once they are loaded; ``dtype`` is the one they have in memory."""
        found = self.storage.stands_for
        return self.dtype if found is None or not self.dtype.is_float else found

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        count = 1
        for d in self.shape:
            count *= d
        return count

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.numpy.itemsize

    @property
    def is_dense(self) -> bool:
        """Row-major without gaps."""
        return same_strides(self.shape, self.strides, dense_strides(self.shape))

    def transposed(self, perm: tuple[int, ...]) -> View:
        shape = tuple(self.shape[p] for p in perm)
        return View(self.storage, self.dtype, shape, tuple(self.strides[p] for p in perm), self.offset)

    def reshaped(self, shape: tuple[int, ...]) -> View | None:
        """The same memory under another shape, or None where strides cannot express it."""
        strides = reshaped_strides(self.shape, self.strides, shape)
        return None if strides is None else View(self.storage, self.dtype, shape, strides, self.offset)

    def expanded(self, shape: tuple[int, ...]) -> View:
        """Broadcast to ``shape`` by NumPy's rule: stride 0 along new and stretched axes."""
        lead = len(shape) - self.rank
        if lead < 0 or any(have not in (1, want) for have, want in zip(self.shape, shape[lead:])):
            raise ValueError(f"a tensor of shape {self.shape} does not broadcast to {shape}")
        strides = (0,) * lead + tuple(
            0 if have == 1 and want != 1 else s for have, want, s in zip(self.shape, shape[lead:], self.strides)
        )
        return View(self.storage, self.dtype, shape, strides, self.offset)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * max(1, shape[k + 1])
    return tuple(strides)


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Axes from outermost to innermost in memory; axes of size 1 stay beside their left neighbour."""
    rank = len(shape)
    sized = [a for a in range(rank) if shape[a] != 1]
    sized.sort(key=lambda a: -abs(strides[a]))
    order: list[int] = []
    ones = [a for a in range(rank) if shape[a] == 1]
    for axis in sized:
        while ones and ones[0] < axis:
            order.append(ones.pop(0))
        order.append(axis)
    return tuple(order + ones)


def ordered_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor whose axes lie in memory in ``order``, outermost first."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


def same_strides(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Equal where it matters: axes of size 1 have no stride to speak of."""
    return 0 in shape or all(d == 1 or x == y for d, x, y in zip(shape, a, b))


def reshaped_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides that show the same elements, in row-major order, as ``target``; None where a copy is needed."""
    if 0 in shape or 0 in target:
        return dense_strides(target)
    # merge the source's axes into runs that are contiguous with each other, then cut the runs as the target wants
    runs: list[tuple[int, int]] = []  # (size, stride of the innermost element)
    for d, s in zip(shape, strides):
        if d == 1:
            continue
        if runs and runs[-1][1] == d * s:
            runs[-1] = (runs[-1][0] * d, s)
        else:
            runs.append((d, s))
    found: list[int] = []
    position = len(runs) - 1
    left, step = runs[position] if runs else (1, 1)
    for d in reversed(target):
        if d == 1:
            found.append(step)
            continue
        while left == 1 and position > 0:
            position -= 1
            left, step = runs[position]
        if left % d:
            return None
        found.append(step)
        left //= d
        step *= d
    return tuple(reversed(found))


def row_major(x: Any, *, aligned: bool = False) -> np.ndarray[Any, Any]:
    """Without gaps and with the last axis innermost: the array itself where it lies so, also where it is read-only.

    Unlike with NumPy's function for it, a scalar keeps its rank. ``aligned``: elements start at multiples of their
    size too, as generated code expects them; weights in a file may not, and most are packed before code reads them.
    """
    array = np.asarray(x)
    if not array.flags.c_contiguous:
        return np.ascontiguousarray(array)
    return array.copy() if aligned and not array.flags.aligned else array


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Uninitialised memory that starts at a cache line."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def aligned_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    made = aligned_empty(array.shape, array.dtype)
    made[...] = array
    return made
