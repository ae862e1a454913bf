"""bitsandbytes: 16 levels (NF4, FP4), or whole numbers of 8 bits with the largest of each row (LLM.int8)."""

from __future__ import annotations

import json
import math

import numpy as np

from ranvier.errors import WeightError
from ranvier.ops.contrib.levels import FP4_LEVELS, NF4_LEVELS
from ranvier.quantize.base import Quantized
from ranvier.quantize.floats import Nested
from ranvier.quantize.packing import unpack_nibbles
from ranvier.weights.quantized.tensors import Config, Tensors, check, factors, numbers

_LEVELS = {"nf4": NF4_LEVELS, "fp4": FP4_LEVELS}


def read_levels(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """weight u8[numel/2, 1], absmax, quant_map, and the state as JSON in bytes; absmax may be in 8 bits itself."""
    prefix = f"{layer}.weight"
    states = [name for kind in _LEVELS if (name := f"{prefix}.quant_state.bitsandbytes__{kind}") in tensors]
    if not states:
        raise WeightError(f"layer {layer!r} lacks its quant_state of {' or '.join(_LEVELS)}")
    try:
        state = json.loads(numbers(tensors, states[0]).tobytes())
        shape = tuple(int(d) for d in state["shape"])
        size, kind = int(state["blocksize"]), str(state["quant_type"])
        offset, inner = float(state.get("nested_offset", 0.0)), int(state.get("nested_blocksize", 256))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"layer {layer!r}: its quant_state cannot be read: {error!r}") from None
    if kind not in _LEVELS or min(size, inner) < 1 or min(shape, default=0) < 0:
        raise WeightError(f"layer {layer!r}: unknown quantization {kind!r}, in blocks of {size} and {inner}")
    table = _LEVELS[kind]
    if f"{prefix}.quant_map" in tensors:
        table = factors(tensors, f"{prefix}.quant_map").astype(np.float32)
        check(layer, table.shape, (16,))
    count = math.prod(shape)
    stored = np.ascontiguousarray(numbers(tensors, prefix)).reshape(-1)
    check(layer, stored.shape, (-(-count // (2 * stored.itemsize)),))
    codes = unpack_nibbles(stored.view(np.uint8), count).reshape(shape)  # bytes of any type (bnb_4bit_quant_storage)
    nested_too, scale_bytes = f"{prefix}.nested_absmax" in tensors, None
    scales = (numbers if nested_too else factors)(tensors, f"{prefix}.absmax")
    if nested_too:
        levels = factors(tensors, f"{prefix}.nested_quant_map").astype(np.float32)
        largest = factors(tensors, f"{prefix}.nested_absmax").astype(np.float32)
        check(layer, levels.shape, (256,))
        check(layer, largest.shape, (-(-scales.size // inner),))
        nested = Nested(scales.reshape(-1), levels, largest, offset, inner)
        scales, scale_bytes = nested.numbers(), nested.nbytes
    check(layer, scales.shape, (-(-count // size),))
    wide = scales.astype(np.float32)
    return Quantized(kind, codes, wide, (size,), 4, table=table, flat=True, scale_bytes=scale_bytes)


def read_rows(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """weight int8[N, K], SCB [N]: what the code 127 stands for in a row."""
    weight, largest = numbers(tensors, f"{layer}.weight"), factors(tensors, f"{layer}.SCB").astype(np.float32)
    if f"{layer}.weight_format" in tensors and (kind := numbers(tensors, f"{layer}.weight_format")).any():
        raise WeightError(f"layer {layer!r}: weights in tiles cannot be read (weight_format {kind.reshape(-1)})")
    if weight.dtype != np.int8 or weight.ndim != 2:
        raise WeightError(f"layer {layer!r}: weights with SCB are int8[N, K], got {weight.dtype}{list(weight.shape)}")
    check(layer, largest.shape, (weight.shape[0],))
    return Quantized("int8", weight, largest[:, None] / np.float32(127), (1, max(1, weight.shape[1])), 8, axis=1)
