"""Weights of 8 bits as they are, float8 or whole numbers, with scales beside them."""

from __future__ import annotations

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import Block, counts
from ranvier.weights.quantized.compressed import METHOD, check_plain, group_of
from ranvier.weights.quantized.tensors import Array, Config, Tensors, check, numbers, powers_of_two


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
    scales = numbers(tensors, f"{layer}.weight_scale_inv" if inverse else f"{layer}.weight_scale")
    scales = powers_of_two(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)
    block = _block(layer, weight, scales, config, inverse)
    scales = scales.reshape(counts(weight.shape, block))
    zeros = None
    if f"{layer}.weight_zero_point" in tensors:
        zeros = numbers(tensors, f"{layer}.weight_zero_point")
        check(layer, (zeros.size,), (scales.size,))
        zeros = zeros.reshape(scales.shape)
    return Quantized("int8" if dtype is DType.int8 else "fp8", weight, scales, block, 8, zeros, axis=1)


def _block(layer: str, weight: Array, scales: Array, config: Config, inverse: bool) -> Block:
    """How weights share scales."""
    rows, columns = weight.shape
    if scales.size == 1:
        return (max(1, rows), max(1, columns))
    settings = group_of(layer, config).get("weights") or {}
    sides = config.get("weight_block_size") or settings.get("block_structure") or ([128, 128] if inverse else None)
    if sides:
        block = (int(sides[0]), int(sides[1]))
        if scales.shape == counts(weight.shape, block):
            return block
    if inverse or not rows or scales.shape[0] != rows:
        raise WeightError(
            f"layer {layer!r}: {list(scales.shape)} scales of weights {list(weight.shape)} are neither of rows nor of "
            "blocks that the configuration has"
        )
    groups = scales.size // rows
    block = (1, -(-columns // groups))
    check(layer, (rows, groups), counts(weight.shape, block))
    return block
