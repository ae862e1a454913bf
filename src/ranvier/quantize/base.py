"""What quantization makes, and what a scheme is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType
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

    def each(self, numbers: Array) -> Array:
        """One number for each element."""
        if self.flat:
            return expand(numbers, self.block, (self.codes.size,)).reshape(self.shape)
        if self.order is None:
            return expand(numbers, self.block, self.shape)
        return np.take(numbers, self.order, self.axis)


@runtime_checkable
class Quantize(Protocol):
    """Numbers into codes. New schemes come by the entry points ``ranvier.quantization``."""

    @property
    def name(self) -> str: ...

    def quantize(self, array: Array) -> Quantized: ...


@runtime_checkable
class Dequantize(Protocol):
    """Codes into numbers."""

    def dequantize(self) -> Array: ...
