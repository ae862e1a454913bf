"""One tensor of a checkpoint: what it is, and its data on demand, whole or in part.

A :class:`Stored` tensor knows where its bytes lie. A part of it is read by its byte ranges alone, so a slice of a
tensor behind a web server costs the slice. :class:`Weight` is the same seen from outside, where transformations may
stand between the bytes and the reader (``transforms.py``).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import ResourceLimit, WeightError
from ranvier.records import dataclass
from ranvier.weights.blob import GAP, Blob, read_gathered

Array = np.ndarray[Any, Any]
Selection = tuple[slice, ...]  # one per axis, with whole numbers and a positive step
MOST_AXES = 64  # of a NumPy array
_MOST_RANGES = 4096  # beyond, what lies between is read too and cut in memory


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is, told without touching its data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int  # as stored
    encoding: str = ""  # of blocks that are decoded when read, e.g. "Q4_K"
    source: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Weight(Protocol):
    """A tensor that can be read, whole or in part."""

    @property
    def info(self) -> TensorInfo: ...

    def read(self, part: Selection | None = None) -> Array:
        """The data; ``part`` has one slice for each axis."""
        ...


def checked_size(name: str, shape: Sequence[int], bits: int, limit: int | None = None) -> int:
    """Bytes of so many elements packed without gaps, or an error where the numbers make no sense."""
    if len(shape) > MOST_AXES:
        raise WeightError(f"tensor {name!r} has {len(shape)} dimensions; at most {MOST_AXES} are possible")
    if any(not isinstance(d, int) or isinstance(d, bool) or d < 0 for d in shape):
        raise WeightError(f"tensor {name!r} has an impossible shape {list(shape)}")
    nbytes = (math.prod(shape) * bits + 7) // 8
    if limit is not None and nbytes > limit:
        raise ResourceLimit("tensor_bytes", limit, nbytes, f"tensor {name!r}")
    if math.prod(d for d in shape if d) * max(bits, 8) >= 1 << 63:  # NumPy wants room for the others of an empty one
        raise WeightError(f"tensor {name!r} has an impossible shape {list(shape)}")
    return nbytes


def full(shape: Sequence[int]) -> Selection:
    return tuple(slice(0, d, 1) for d in shape)


def normalised(part: Any, shape: Sequence[int], name: str) -> Selection:
    """What a caller writes (slices, an Ellipsis, fewer than all axes) as one plain slice for each axis."""
    entries = list(part) if isinstance(part, tuple) else [part]
    dots = [k for k, entry in enumerate(entries) if entry is Ellipsis]
    if dots:
        at = dots[0]
        entries[at : at + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    entries += [slice(None)] * (len(shape) - len(entries))
    if len(entries) != len(shape) or not all(isinstance(e, slice) for e in entries):
        raise WeightError(
            f"tensor {name!r} of shape {list(shape)} cannot be cut by {part!r}: give a slice for each axis"
        )
    found = []
    for each, extent in zip(entries, shape):
        try:
            start, stop, step = each.indices(extent)
        except (TypeError, ValueError) as error:
            raise WeightError(f"tensor {name!r} cannot be cut by {each!r}: {error}") from None
        if step < 0:
            raise WeightError(f"tensor {name!r}: a slice must have a positive step, got {step}")
        found.append(slice(start, max(start, stop), min(step, max(1, extent))))  # as far as numbers of bytes go
    return tuple(found)


def extent(part: slice) -> int:
    return len(range(part.start, part.stop, part.step))


def cut(array: Array, part: Selection) -> Array:
    """A part of an array, which is one also where it has no axes."""
    where: tuple[Any, ...] = (*part, ...)
    found: Array = array[where]
    return found


def combined(outer: Selection, inner: Selection) -> Selection:
    """The slice of a slice."""
    found = []
    for a, b in zip(outer, inner):
        start = a.start + b.start * a.step
        found.append(slice(start, start + max(0, extent(b) - 1) * a.step * b.step + bool(extent(b)), a.step * b.step))
    return tuple(found)


@dataclass(frozen=True)
class Stored:
    """A tensor whose elements lie in a blob, from byte ``start`` on, by strides in elements (row-major by default)."""

    info: TensorInfo
    blob: Blob
    start: int
    strides: tuple[int, ...] = ()
    big_endian: bool = False
    packed: bool = True  # elements of less than a byte lie close together; NumPy gives each a byte of its own

    @property
    def dense(self) -> bool:
        return not self.strides or self.strides == row_major(self.info.shape)

    def read(self, part: Selection | None = None) -> Array:
        shape, dtype = self.info.shape, self.info.dtype
        chosen = full(shape) if part is None else part
        target = tuple(map(extent, chosen))
        if 0 in target:
            return np.empty(target, dtype.numpy)
        if dtype.is_packed and self.packed:
            return self._unpacked(chosen)
        return self._covered(chosen) if self.blob.near else self._by_ranges(chosen, target)

    def _span(self, chosen: Selection) -> tuple[tuple[int, ...], int, int]:
        """Strides of the elements, and the first and the last one of the part."""
        strides = self.strides or row_major(self.info.shape)
        first = sum(s.start * step for s, step in zip(chosen, strides))
        last = sum((s.start + (extent(s) - 1) * s.step) * step for s, step in zip(chosen, strides))
        return strides, first, last

    def _covered(self, chosen: Selection) -> Array:
        """One range of bytes that holds the part, and the part as a view of it."""
        dtype = self.info.dtype.numpy
        strides, first, last = self._span(chosen)
        data = self.blob.read(self.start + first * dtype.itemsize, self.start + (last + 1) * dtype.itemsize)
        return self._native(_view(data, dtype, chosen, strides))

    def _unpacked(self, chosen: Selection) -> Array:
        """Elements of less than a byte, each in a byte of its own; of every row those from the first to the last."""
        shape, bits = self.info.shape, self.info.dtype.bits
        if shape and shape[-1] * bits % 8 == 0:
            return self._unpacked_rows(shape, chosen)
        strides, first, last = self._span(chosen)  # rows begin inside of bytes: all are one
        flat = self._unpacked_rows((self.info.size,), (slice(first, last + 1, 1),))
        return _view(flat, self.info.dtype.numpy, chosen, strides)

    def _unpacked_rows(self, shape: tuple[int, ...], chosen: Selection) -> Array:
        from onnx import TensorProto  # not for everybody: with all operators it takes longer than most files to open

        from ranvier.ops.proto import tensor_array

        dtype, (*outer, inner) = self.info.dtype, chosen
        together = math.lcm(dtype.bits, 8) // dtype.bits  # elements that fill whole bytes
        row = (shape[-1] * dtype.bits + 7) // 8
        begin = inner.start // together * together
        last = inner.start + (extent(inner) - 1) * inner.step
        end = min(row, (last // together + 1) * together * dtype.bits // 8)
        info = TensorInfo(self.info.name, DType.uint8, (*shape[:-1], row), math.prod(shape[:-1]) * row)
        data = Stored(info, self.blob, self.start).read((*outer, slice(begin * dtype.bits // 8, end, 1)))
        count = data.size * 8 // dtype.bits
        flat = tensor_array(TensorProto(data_type=dtype.onnx, dims=[count], raw_data=data.tobytes()))
        rows = flat.reshape(*map(extent, outer), -1)
        return rows[..., inner.start - begin : last - begin + 1 : inner.step]

    def _by_ranges(self, chosen: Selection, target: tuple[int, ...]) -> Array:
        """The part of a blob far away, by runs of bytes that are equally long. Axes, the innermost first, lie inside a
        run as long as what is between two of their elements costs less than another request."""
        dtype = self.info.dtype.numpy
        strides, first, _ = self._span(chosen)
        steps = [step * s.step * dtype.itemsize if d > 1 else 0 for s, step, d in zip(chosen, strides, target)]
        outside = sorted(range(len(steps)), key=steps.__getitem__, reverse=True)
        length, runs = dtype.itemsize, math.prod(target)
        while outside and (steps[outside[-1]] - length <= GAP or runs > _MOST_RANGES):
            axis = outside.pop()
            length += (target[axis] - 1) * steps[axis]
            runs //= target[axis]
        begin = self.start + first * dtype.itemsize
        places = itertools.product(*(range(0, target[axis] * steps[axis], steps[axis]) for axis in outside))
        pieces = read_gathered(self.blob, [(begin + sum(place), begin + sum(place) + length) for place in places])
        data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        step = length  # one run lies behind another now
        for axis in reversed(outside):
            steps[axis], step = step, step * target[axis]
        array: Array = np.ndarray(target, dtype, data, 0, steps)
        return self._native(array.copy() if data.nbytes > array.nbytes else array)

    def _native(self, array: Array) -> Array:
        """Numbers as this machine has them. Of a byte that is neither true nor false NumPy makes anything, down to
        masks that reach out of an array: what is not zero is true."""
        if self.info.dtype is DType.bool and (codes := array.view(np.uint8)).max() > 1:
            return np.asarray(codes != 0)
        if self.big_endian != (sys.byteorder == "big") and self.info.dtype.numpy.itemsize > 1:
            return array.byteswap()
        return array


def _view(data: Array, dtype: np.dtype[Any], chosen: Selection, strides: Sequence[int]) -> Array:
    """The part whose first element is the first of the data. as_strided does not know every type of ml_dtypes."""
    steps = [step * s.step * dtype.itemsize for s, step in zip(chosen, strides)]
    return np.ndarray(tuple(map(extent, chosen)), dtype, data, 0, steps)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for d in reversed(shape):
        steps.append(step)
        step *= d
    return tuple(reversed(steps))


@dataclass(frozen=True)
class Decoded:
    """A tensor that is made of stored bytes by a function, whole or not at all: compressed members, initializers …"""

    info: TensorInfo
    make: Callable[[], Array]

    def read(self, part: Selection | None = None) -> Array:
        array = self.make()
        if array.shape != self.info.shape:
            raise WeightError(f"tensor {self.info.name!r}: {list(self.info.shape)} expected, {list(array.shape)} found")
        return array if part is None else cut(array, part)
