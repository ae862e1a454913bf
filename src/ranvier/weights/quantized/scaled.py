"""Weights of 8 bits as they are, float8 or whole numbers, with scales beside them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import Block, counts
from ranvier.weights.quantized.compressed import METHOD, MX_GROUP, check_plain, group_of
from ranvier.weights.quantized.tensors import (
    Array,
    Config,
    Tensors,
    check,
    factors,
    group_size,
    is_exponents,
    numbers,
    powers_of_two,
)


def read_scaled(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """weight [N, K], weight_scale (one, of rows, of groups, of blocks) or weight_scale_inv (of blocks; it is multiplied
    too), and weight_zero_point where codes have one."""
    if config.get("quant_method", METHOD) == METHOD:
        check_plain(layer, config)
    weight = numbers(tensors, f"{layer}.weight")
    dtype = of(weight)
    if not (dtype.is_float and dtype.bits == 8) and dtype is not DType.int8:
        raise WeightError(f"layer {layer!r}: weights of {dtype} with a scale are no known scheme")
    if weight.ndim != 2:
        raise WeightError(f"layer {layer!r}: weights of shape {list(weight.shape)} cannot be read")
    inverse = f"{layer}.weight_scale_inv" in tensors
    scales = _scales(tensors, f"{layer}.weight_scale_inv" if inverse else f"{layer}.weight_scale")
    settings = group_of(layer, config).get("weights") or {}
    told = settings.get("group_size") or (MX_GROUP if is_exponents(scales) else None)
    scales = powers_of_two(scales) if is_exponents(scales) else scales.astype(np.float32)
    sides = config.get("weight_block_size") or settings.get("block_structure") or ([128, 128] if inverse else None)
    block = _block(layer, weight, scales, sides, told, inverse)
    zeros = None
    if f"{layer}.weight_zero_point" in tensors:
        zeros = numbers(tensors, f"{layer}.weight_zero_point")
        check(layer, (zeros.size, *zeros.shape[:1]), (scales.size, *scales.shape[: zeros.ndim][:1]))
        zeros = zeros.reshape(counts(weight.shape, block))
    scales = scales.reshape(counts(weight.shape, block))
    return Quantized("int8" if dtype is DType.int8 else "fp8", weight, scales, block, 8, zeros, axis=1)


def _scales(tensors: Tensors, name: str) -> Array:
    found = numbers(tensors, name)
    return found if is_exponents(found) else factors(tensors, name)


def _block(layer: str, weight: Array, scales: Array, sides: Any, told: Any, inverse: bool) -> Block:
    """How weights share scales: all of them one, by ``sides`` of a rectangle, or in groups of a row."""
    rows, columns = weight.shape
    if scales.size == 1:
        return (max(1, rows), max(1, columns))
    if sides:
        block = (int(sides[0]), int(sides[1]))
        if scales.shape == counts(weight.shape, block):
            return block
    if inverse or not rows or scales.shape[0] != rows:
        raise WeightError(
            f"layer {layer!r}: {list(scales.shape)} scales of weights {list(weight.shape)} are neither of rows nor of "
            "blocks that the configuration has"
        )
    check(layer, (scales.size,), (rows * (scales.size // rows),))
    return (1, group_size(layer, columns, scales.size // rows, told))
