"""Codes that are small floating-point numbers (float8), and the 16 levels of NF4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType
from ranvier.ops.contrib.levels import NF4_LEVELS
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import GRANULARITIES, Array, Granularity, block_of, expand, reduce
from ranvier.quantize.numbers import real_numbers
from ranvier.records import dataclass
from ranvier.rules import Checked, Choice, Flag, Rule, Whole

_FLOAT8 = {"e4m3": DType.float8_e4m3fn, "e5m2": DType.float8_e5m2}


@dataclass(frozen=True)
class Float8(Checked):
    """float8 with a scale for each tensor, channel, or block (``group`` is its side, or its two sides)."""

    kind: str = "e4m3"
    granularity: Granularity = "tensor"
    group: int | Sequence[int] = 128
    axis: int = -1

    RULES: ClassVar[Mapping[str, Rule]] = {"kind": Choice(tuple(_FLOAT8)), "granularity": Choice(GRANULARITIES)}

    @property
    def name(self) -> str:
        return f"fp8_{self.kind}"

    def quantize(self, array: Array) -> Quantized:
        values, dtype = real_numbers(array, np.float32)
        code = _FLOAT8[self.kind].numpy
        most = float(ml_dtypes.finfo(code).max)
        block = block_of(values.shape, self.granularity, self.axis, self.group)
        reach = reduce(np.abs(values), block, np.max)
        # a scale that is no normal number may be zero, and could not divide
        scales = np.where(reach > 0, np.maximum(reach / most, np.finfo(np.float32).tiny), 1.0).astype(np.float32)
        scaled = values / expand(scales, block, values.shape)
        codes = np.clip(scaled, -most, most).astype(code)  # a quotient may round to just above the largest
        return Quantized(self.name, codes, scales, block, 8, axis=self.axis, dtype=dtype)


@dataclass(frozen=True)
class Nf4(Checked):
    """The level nearest to each number over the largest of its block of ``group`` elements, counted through the whole
    tensor as bitsandbytes does. ``nested``: those largest numbers are themselves kept in 8 bits."""

    group: int = 64
    nested: bool = False
    nested_group: int = 256

    RULES: ClassVar[Mapping[str, Rule]] = {"group": Whole(1), "nested": Flag(), "nested_group": Whole(1)}
    name: ClassVar[str] = "nf4"

    def quantize(self, array: Array) -> Quantized:
        values, dtype = real_numbers(array, np.float32)
        flat = values.reshape(-1)
        reach = reduce(np.abs(flat), (self.group,), np.max) if flat.size else np.zeros(0, np.float32)
        scales = np.where(reach > 0, reach, 1.0).astype(np.float32)
        nested: Nested | None = None
        if self.nested:
            scales, nested = nested_scales(scales, self.nested_group)
        middles = (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2
        # scales as they read back: in 8 bits a small one among large ones may be none
        each = expand(np.where(scales == 0, np.float32(1.0), scales), (self.group,), flat.shape)
        found = np.searchsorted(middles, flat / each)
        codes = found.astype(np.uint8).reshape(values.shape)
        made = Quantized(self.name, codes, scales, (self.group,), 4, table=NF4_LEVELS, dtype=dtype, flat=True)
        return made if nested is None else replace(made, scale_bytes=nested.nbytes, extra={"nested": nested})


@dataclass(frozen=True)
class Nested:
    """Scales kept in 8 bits: ``table[codes] * absmax of their block + offset``."""

    codes: Array
    table: Array
    absmax: Array
    offset: float
    group: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.table.nbytes + self.absmax.nbytes + 4

    def numbers(self) -> Array:
        each = expand(self.absmax, (self.group,), self.codes.shape)
        return (self.table[self.codes] * each + np.float32(self.offset)).astype(np.float32)


def nested_scales(scales: Array, group: int) -> tuple[Array, Nested]:
    """Scales in 8 bits, as they read back, and what that takes. Levels are even: scales have no long tails."""
    offset = float(scales.mean(dtype=np.float64)) if scales.size else 0.0
    moved = scales - np.float32(offset)
    absmax = reduce(np.abs(moved), (group,), np.max) if scales.size else np.zeros(0, np.float32)
    # the largest scale reads back as offset + absmax, which may not be beyond the largest number
    most = np.nextafter(np.finfo(np.float32).max - np.float32(offset), np.float32(0))
    absmax = np.where(absmax > 0, np.minimum(absmax, most), 1.0).astype(np.float32)
    table = np.linspace(-1.0, 1.0, 256).astype(np.float32)
    part = moved / expand(absmax, (group,), moved.shape)
    codes = np.clip(np.rint((part + 1.0) * 127.5), 0, 255).astype(np.uint8)
    kept = Nested(codes, table, absmax, offset, group)
    return kept.numbers(), kept
