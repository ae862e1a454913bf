"""What quantization makes, and what a scheme is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig
from ranvier.quantize.blocks import Array, Block, expand
from ranvier.records import dataclass

_CODES = 65536.0  # no code is larger, also of float8


@dataclass(frozen=True)
class Quantized:
    """Codes with what it takes to make numbers of them again.

    ``codes`` holds one code for each element, not packed: integers, float8, or positions in ``table``. The number is
    ``(code - zero) * scale``, or ``table[code] * scale``, of the block the element is in; ``order`` gives for each
    position along ``axis`` the block it belongs to where blocks are not runs of neighbours. With ``flat`` blocks are
    counted through the whole tensor, row after row.
    """

    scheme: str
    codes: Array
    scales: Array
    block: Block
    bits: int
    zeros: Array | None = None
    table: Array | None = None
    axis: int = -1
    order: Array | None = None
    flat: bool = False
    dtype: DType = DType.float32  # of the numbers they stand for
    scale_bytes: int | None = None  # of scales and zeros that are kept in fewer bits than here
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.codes.shape
        return shape

    @property
    def nbytes(self) -> int:
        """Bytes when packed."""
        scales = self.scale_bytes
        if scales is None:
            zeros = 0 if self.zeros is None else (self.zeros.size * min(self.bits, 8) + 7) // 8
            scales = self.scales.nbytes + zeros
        order = 0 if self.order is None else self.order.nbytes
        return (self.codes.size * self.bits + 7) // 8 + scales + order

    def dequantize(self) -> Array:
        wide = np.float64 if self.dtype is DType.float64 else np.float32
        if self.table is not None:
            values = self.table.astype(wide)[self.codes]
        else:
            values = self.codes.astype(wide)
            if self.zeros is not None:
                values = values - self.each(self.zeros).astype(wide)
        with np.errstate(over="ignore"):
            product = values * self.each(self.scales).astype(wide)
        reach = float(np.abs(self.scales.astype(np.float64)).max(initial=0))
        if self._most / _CODES < reach < np.inf:  # half a step beyond the largest number of a type is that number
            product = np.clip(product, -self._most, self._most)
        numbers: Array = product.astype(self.dtype.numpy)
        return numbers

    @property
    def _most(self) -> float:
        """The largest number of their type."""
        return float(ml_dtypes.finfo(self.dtype.numpy).max)

    def part(self, chosen: Sequence[slice]) -> Quantized:
        """The codes of a part with their scales; ``chosen`` has one slice for each axis, from 0 up and with a positive
        step. Blocks lie in a part as they lie in the whole, or there is an error: it may begin where a block does, or
        be inside of one, and end anywhere."""
        if self.order is not None or self.extra:
            raise InvalidConfig(f"codes of {self.scheme} that have more than blocks of neighbours have no parts")
        spans = [range(d)[s] for d, s in zip(self.shape, chosen)]
        codes = np.ascontiguousarray(self.codes[tuple(chosen)])
        if self.flat:
            kept: tuple[slice, ...] = (self._flat_blocks(spans, codes.size),)
            block = self.block
        else:
            kept = tuple(self._blocks(axis, span) for axis, span in enumerate(spans))
            block = tuple(min(side, max(1, len(span))) for side, span in zip(self.block, spans))
        scales = _some(self.scales, kept)
        zeros = None if self.zeros is None else _some(self.zeros, kept)
        stored = self.scale_bytes
        if stored is not None:  # as many for each of them
            stored = -(-stored * scales.size // max(1, self.scales.size))
        return replace(self, codes=codes, scales=scales, zeros=zeros, block=block, scale_bytes=stored)

    def _blocks(self, axis: int, span: range) -> slice:
        """Those along an axis that a part of it is in."""
        side = self.block[axis]
        if side == 1:
            return slice(span.start, max(span.start, span.stop), span.step)
        if not span:
            return slice(0, 0)
        return self._whole(span[0], span[-1], side, len(span) == span[-1] - span[0] + 1)

    def _flat_blocks(self, spans: Sequence[range], count: int) -> slice:
        """Those that a part is in where they are counted through the tensor."""
        if not count:
            return slice(0, 0)
        first, last = (int(np.ravel_multi_index([span[at] for span in spans], self.shape)) for at in (0, -1))
        return self._whole(first, last, self.block[0], last - first + 1 == count)

    def _whole(self, first: int, last: int, side: int, dense: bool) -> slice:
        begin, end = first // side, last // side + 1
        if end - begin > 1 and (first % side or not dense):
            raise InvalidConfig(f"codes of {self.scheme} share scales in blocks of {side}, which the part would cut")
        return slice(begin, end)

    def each(self, numbers: Array) -> Array:
        """One number for each element."""
        if self.flat:
            return expand(numbers, self.block, (self.codes.size,)).reshape(self.shape)
        if self.order is None:
            return expand(numbers, self.block, self.shape)
        return np.take(numbers, self.order, self.axis)


def _some(numbers: Array, kept: Sequence[slice]) -> Array:
    """Numbers of these blocks; one along an axis is that of all."""
    chosen = (slice(None) if numbers.shape[axis] == 1 else some for axis, some in enumerate(kept))
    return np.ascontiguousarray(numbers[tuple(chosen)])


@runtime_checkable
class Quantize(Protocol):
    """Numbers into codes. New schemes come by the entry points ``ranvier.quantization``. ``isinstance`` looks at names
    alone: ``Gptq`` and ``Awq`` have them too, but their ``quantize`` takes samples beside the array."""

    @property
    def name(self) -> str: ...

    def quantize(self, array: Array) -> Quantized: ...


@runtime_checkable
class Dequantize(Protocol):
    """Codes into numbers."""

    def dequantize(self) -> Array: ...
