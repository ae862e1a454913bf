"""Integers of 2 to 8 bits: symmetric or with a zero point, with a scale for the tensor, a channel, a token, a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import GRANULARITIES, Array, Block, Granularity, apart, block_of, expand, real, reduce
from ranvier.quantize.numbers import real_numbers
from ranvier.records import dataclass
from ranvier.rules import Checked, Choice, Flag, Rule, Whole

_SHRINKS = np.linspace(1.0, 0.5, 41)  # of the range, tried for the least squared error
FITS = ("minmax", "mse")


class _FloatType(Rule):
    def check(self, value: Any) -> DType:
        if not isinstance(value, DType) or not value.is_float:
            raise ValueError(f"must be a DType of floating-point numbers, got {value!r}")
        return value


@dataclass(frozen=True)
class Integers(Checked):
    """``fit``: "minmax" covers every number; "mse" cuts the range of a block where that lessens its squared error.

    ``scale_dtype`` is the type scales are kept in; codes are made with scales as they will be read.
    """

    bits: int = 8
    symmetric: bool = True
    granularity: Granularity = "channel"
    group: int = 128
    axis: int = -1
    signed: bool = True
    fit: str = "minmax"
    scale_dtype: DType = DType.float32

    RULES: ClassVar[Mapping[str, Rule]] = {
        "bits": Whole(2, 8),
        "symmetric": Flag(),
        "granularity": Choice(GRANULARITIES),
        "group": Whole(1),
        "signed": Flag(),
        "fit": Choice(FITS),
        "scale_dtype": _FloatType(),
    }

    @property
    def name(self) -> str:
        kind = "int" if self.signed else "uint"
        return f"{kind}{self.bits}"

    @property
    def limits(self) -> tuple[int, int]:
        low = -(1 << (self.bits - 1)) if self.signed else 0
        return low, low + (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code that stands for zero where there is no zero point of its own."""
        return 0 if self.signed else 1 << (self.bits - 1)

    def quantize(self, array: Array) -> Quantized:
        values, dtype = real_numbers(array)
        block = block_of(values.shape, self.granularity, self.axis, self.group)
        low = np.minimum(reduce(values, block, np.min), 0)
        high = np.maximum(reduce(values, block, np.max), 0)
        if self.fit == "mse":
            low, high = self._shrunk(values, block, low, high)
        scales, zeros = self.parameters(low, high)
        codes = self.codes(values, expand(scales, block, values.shape), expand(zeros, block, values.shape))
        kept = None if self.symmetric and self.signed else zeros
        return Quantized(self.name, codes, scales, block, self.bits, kept, axis=self.axis, dtype=dtype)

    def parameters(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Scale and zero point for ranges, which hold zero."""
        least, most = self.limits
        if self.symmetric:
            reach = np.maximum(np.abs(low), np.abs(high))
            scales = reach / ((1 << (self.bits - 1)) - 1)
            zeros = np.full(scales.shape, self.middle)
        else:
            scales = (high - low) / (most - least)
        scales = np.where(scales > 0, scales, 1.0)
        kept = ml_dtypes.finfo(self.scale_dtype.numpy)
        if float(scales.max(initial=0.0)) > float(kept.max):
            raise InvalidConfig(f"scales of {scales.max():.3g} are beyond the range of {self.scale_dtype}")
        # one that were zero could not divide, and kernels may take what is no normal number of float32 for zero
        least_scale = max(float(kept.smallest_subnormal), float(np.finfo(np.float32).tiny))
        scales = np.maximum(scales, least_scale).astype(self.scale_dtype.numpy)
        if not self.symmetric:
            points = np.clip(np.rint(least - low / scales.astype(np.float64)), least, most)
            # nothing but zeros: a zero point in the middle, as if it were symmetric, so that kernels add nothing either
            zeros = np.where(high > low, points, self.middle)
        return scales, zeros.astype(self._code_type)

    def codes(self, values: Array, scales: Array, zeros: Array) -> Array:
        """The nearest codes, halves to even, as ONNX's QuantizeLinear has it."""
        rounded = np.rint(values / scales.astype(np.float64)) + zeros
        codes: Array = np.clip(rounded, self._least, self.limits[1]).astype(self._code_type)
        return codes

    @property
    def _least(self) -> int:
        """The lowest code that is given; symmetric ones are as many below zero as above."""
        return self.middle - ((1 << (self.bits - 1)) - 1) if self.symmetric else self.limits[0]

    @property
    def _code_type(self) -> type[np.int8] | type[np.uint8]:
        return np.int8 if self.signed else np.uint8

    def _shrunk(self, values: Array, block: Block, low: Array, high: Array) -> tuple[Array, Array]:
        if not values.size:
            return low, high
        split, own = apart(values, block), real(values.shape, block)
        inside = tuple(range(1, split.ndim, 2))
        best = np.full(low.shape, np.inf)
        kept_low, kept_high = low, high
        for factor in _SHRINKS:
            scales, zeros = self.parameters(low * factor, high * factor)
            scale, zero = (np.expand_dims(each.astype(np.float64), inside) for each in (scales, zeros))
            # at once what codes read back as, less the numbers: it is all the time there is
            lost = np.asarray(np.rint(split / scale))  # of one number NumPy makes no array
            np.clip(lost, self._least - zero, self.limits[1] - zero, out=lost)
            lost *= scale
            lost -= split
            if own is not None:  # what fills a block has no error
                lost *= own
            error = np.square(lost, out=lost).sum(axis=inside)
            better = error < best
            best = np.where(better, error, best)
            kept_low, kept_high = np.where(better, low * factor, kept_low), np.where(better, high * factor, kept_high)
        return kept_low, kept_high
