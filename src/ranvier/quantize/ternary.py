"""Weights of -1, 0 and 1 with one scale (BitNet b1.58), and the activations that go with them.

Weights: the mean of their absolute values is the scale, each is rounded to the nearest of the three (Ma et al., "The
Era of 1-bit LLMs", 2024). Activations: 8 bits with a scale for each token, from its largest absolute value. Products
of the two are exact in integers.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import DTypeMismatch
from ranvier.ops.own.bitlinear import LEAST, quantized_tokens
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import Array
from ranvier.quantize.numbers import real_numbers
from ranvier.records import dataclass


@dataclass(frozen=True)
class Ternary:
    name: ClassVar[str] = "ternary"

    def quantize(self, array: Array) -> Quantized:
        values, dtype = real_numbers(array, np.float32)
        scale = np.float32(max(float(np.abs(values).mean(dtype=np.float64)) if values.size else 0.0, LEAST))
        levels = np.divide(values, scale, out=values)  # in the copy that is there already: layers may be large
        codes = np.clip(np.rint(levels, out=levels), -1, 1, out=levels).astype(np.int8)
        block = tuple(max(1, d) for d in values.shape)
        scales = np.full((1,) * values.ndim, scale, np.float32)
        return Quantized(self.name, codes, scales, block, 2, dtype=dtype)


def token_codes(activations: Array) -> tuple[Array, Array]:
    """int8 codes of activations as BitLinear makes them, and the scale of each token: a number is ``code * scale``,
    which is NaN for all of a token that has a NaN or an infinity."""
    given = np.asarray(activations)
    kind = of(given)
    if kind.is_complex or kind is DType.string or not given.ndim:
        raise DTypeMismatch(f"a token is a row of real numbers, not {kind}{list(given.shape)}")
    with np.errstate(all="ignore"):
        codes, factor = quantized_tokens(given)
        return codes, np.float32(1.0) / factor
