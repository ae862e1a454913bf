"""BitNet b1.58 as Hugging Face stores it: four rows of -1, 0 and 1 in a byte, and one scale."""

from __future__ import annotations

import numpy as np

from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.packing import unpack_ternary
from ranvier.weights.quantized.tensors import Config, Tensors, numbers, words

METHOD = "bitnet"


def read_bitnet(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """u8[N/4, K]; ``autobitlinear`` multiplies by the scale, ``bitlinear`` divides."""
    codes = unpack_ternary(words(tensors, f"{layer}.weight"))
    scale = numbers(tensors, f"{layer}.weight_scale").astype(np.float32).reshape(-1)
    kind = str(config.get("linear_class", "bitlinear")).lower()
    if scale.size != 1 or kind not in ("bitlinear", "autobitlinear"):
        raise WeightError(f"layer {layer!r}: unknown kind of BitNet layer {kind!r}, or {scale.size} scales")
    factor = scale if kind == "autobitlinear" else 1.0 / scale
    return Quantized("ternary", codes, factor.reshape(1, 1).astype(np.float32), codes.shape, 2, axis=1)
