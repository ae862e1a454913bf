"""Float4 (E2M1) in bytes, two codes in each, the first in the low half, with a scale for every run of a row."""

from __future__ import annotations

import numpy as np

from ranvier.errors import WeightError
from ranvier.ops.contrib.levels import E2M1_LEVELS
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import counts
from ranvier.quantize.packing import unpack_bits
from ranvier.weights.quantized.tensors import Array, check


def float4(scheme: str, layer: str, data: Array, scales: Array, scale_bytes: int, group: int) -> Quantized:
    """Of bytes [..., K/2] and scales [..., K/group]."""
    if data.dtype != np.uint8:
        raise WeightError(f"layer {layer!r}: two codes of float4 share a byte, not {data.dtype}")
    codes = unpack_bits(data, 4, 2 * data.shape[-1])
    block = (*(1 for _ in codes.shape[:-1]), max(1, group))
    check(layer, scales.shape, counts(codes.shape, block))
    return Quantized(scheme, codes, scales, block, 4, table=E2M1_LEVELS, axis=codes.ndim - 1, scale_bytes=scale_bytes)
