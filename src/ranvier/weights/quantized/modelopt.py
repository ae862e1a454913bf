"""NVIDIA ModelOpt: ``weight`` and ``weight_scale`` of float8, or of float4 with a scale of scales beside them.

What else ModelOpt writes is refused by the name it has there: most of that scales a layer's inputs too, which weights
alone do not tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.weights.quantized.float4 import float4
from ranvier.weights.quantized.scaled import read_scaled
from ranvier.weights.quantized.tensors import Config, Tensors, check, method_of, numbers, one_factor, words

METHOD = "modelopt"
_ROWS = "FP8_PER_CHANNEL_PER_TOKEN"
_GROUP = 16  # weights that share a scale, where settings do not tell


def modelopt_settings(config: Config) -> Config:
    """Settings as they are in ``config.json``, where they are given as ``hf_quant_config.json`` has them."""
    inner = config.get("quantization")
    if method_of(config) or not isinstance(inner, Mapping) or "quant_algo" not in inner:
        return config
    return {**inner, "quant_method": METHOD}


def read_modelopt(layer: str, tensors: Tensors, config: Config) -> Quantized:
    method, settings = method_of(config), config
    if method not in ("", METHOD):
        raise WeightError(f"layer {layer!r} has the tensors of {METHOD}, and its settings are of {method!r}")
    if settings.get("quant_algo") == "MIXED_PRECISION":
        settings = (config.get("quantized_layers") or {}).get(layer) or {}
    algorithm = settings.get("quant_algo") if method else "NVFP4"
    if f"{layer}.pre_quant_scale" in tensors:
        raise WeightError(f"layer {layer!r} ({algorithm}): its inputs have scales of their own (pre_quant_scale)")
    if algorithm == "NVFP4":
        return _nvfp4(layer, tensors, int(settings.get("group_size") or _GROUP))
    if algorithm in ("FP8", _ROWS):
        return _float8(layer, tensors, config, algorithm == _ROWS)
    raise WeightError(f"layer {layer!r}: unknown quant_algo of {METHOD} {algorithm!r}")


def _nvfp4(layer: str, tensors: Tensors, group: int) -> Quantized:
    """weight u8[N, K/2] of E2M1, weight_scale float8[N, K/16], weight_scale_2: one float, multiplied."""
    data, scales = words(tensors, f"{layer}.weight"), numbers(tensors, f"{layer}.weight_scale")
    if of(scales) is not DType.float8_e4m3fn:
        raise WeightError(f"layer {layer!r}: NVFP4 has scales of E4M3, not of {of(scales)}")
    wide = scales.astype(np.float32) * one_factor(layer, tensors, "weight_scale_2")
    return float4("nvfp4", layer, data, wide, scales.nbytes + 4, group)


def _float8(layer: str, tensors: Tensors, config: Config, by_rows: bool) -> Quantized:
    """weight E4M3 [N, K], weight_scale: one, or one for each row."""
    weight, scales = numbers(tensors, f"{layer}.weight"), numbers(tensors, f"{layer}.weight_scale")
    if of(weight) is not DType.float8_e4m3fn or weight.ndim != 2 or not of(scales).is_float:
        raise WeightError(
            f"layer {layer!r}: FP8 is a matrix of E4M3 with scales that are floats, not {of(weight)}"
            f"{list(weight.shape)} with {of(scales)}"
        )
    if by_rows or scales.size != 1:
        check(layer, scales.shape, (weight.shape[0], *(1 for _ in scales.shape[1:])))
    return read_scaled(layer, tensors, config)
