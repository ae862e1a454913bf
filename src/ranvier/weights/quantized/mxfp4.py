"""MXFP4 as gpt-oss has it: layers of experts in blocks of 32 weights with a power of two for each."""

from __future__ import annotations

import numpy as np

from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.weights.quantized.float4 import float4
from ranvier.weights.quantized.tensors import Config, Tensors, check, numbers, powers_of_two

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"  # behind the last part of a layer's name
_GROUP = 32


def read_mxfp4(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """_blocks u8[experts, N, K/32, 16], _scales u8[experts, N, K/32], exponents raised by 127; or of one matrix."""
    blocks, exponents = numbers(tensors, layer + BLOCKS), numbers(tensors, layer + SCALES)
    if exponents.dtype != np.uint8:
        raise WeightError(f"layer {layer!r}: its scales are exponents in bytes, not {exponents.dtype}")
    if blocks.ndim not in (3, 4):
        raise WeightError(f"layer {layer!r}: blocks {list(blocks.shape)} are neither of a matrix nor of experts")
    check(layer, blocks.shape, (*exponents.shape, _GROUP // 2))
    data = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
    return float4(METHOD, layer, data, powers_of_two(exponents), exponents.nbytes, _GROUP)
