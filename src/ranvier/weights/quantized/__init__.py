"""Quantized layers of real checkpoints: which tensors belong together, and what they mean.

    layers = quantized_layers(loader.open("model.safetensors"), config["quantization_config"])
    layers["model.layers.0.mlp.up_proj"]().dequantize()     # [out, in]
    quantized_layers(loader.open("model.gguf"))["blk.0.ffn_up"]()

Layers are found by the names of their tensors, those of a GGUF file by the kind of their blocks. The configuration
(``config.json``) decides what names leave open; a method or packing that is not known is refused by name, because a
wrong guess would be wrong numbers. Layers of experts have codes [experts, out, in] where one tensor holds them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import numpy as np

from ranvier.errors import RanvierError, WeightError, nearest
from ranvier.quantize.base import Quantized
from ranvier.quantize.rows import Rows
from ranvier.weights.quantized.auto_round import METHOD as AUTO_ROUND
from ranvier.weights.quantized.auto_round import read_auto_round
from ranvier.weights.quantized.bitnet import METHOD as BITNET
from ranvier.weights.quantized.bitnet import check_bitnet, lacks_scale, read_bitnet
from ranvier.weights.quantized.bitsandbytes import read_levels, read_rows
from ranvier.weights.quantized.compressed import METHOD as COMPRESSED
from ranvier.weights.quantized.compressed import read_compressed
from ranvier.weights.quantized.gguf_blocks import has_blocks, read_blocks
from ranvier.weights.quantized.modelopt import METHOD as MODELOPT
from ranvier.weights.quantized.modelopt import modelopt_settings, read_modelopt
from ranvier.weights.quantized.mxfp4 import BLOCKS, SCALES, read_mxfp4
from ranvier.weights.quantized.mxfp4 import METHOD as MXFP4
from ranvier.weights.quantized.packed import read_packed
from ranvier.weights.quantized.scaled import read_scaled
from ranvier.weights.quantized.tensors import Config, Layer, Tensors, method_of, numbers, settings_in

METHODS = ("gptq", "awq", AUTO_ROUND, COMPRESSED, MODELOPT, "fp8", "fbgemm_fp8", MXFP4, "bitsandbytes", BITNET)
_Read = Callable[[str, Tensors, Config], Quantized | Rows]
_OWN: dict[str, _Read] = {AUTO_ROUND: read_auto_round, MODELOPT: read_modelopt}  # others name tensors as they do


def quantized_layers(tensors: Tensors, config: Config | None = None) -> dict[str, Layer]:
    """The quantized layers of a checkpoint by name, each read when called."""
    settings = modelopt_settings(settings_in(config or {}))
    method = method_of(settings)
    if method and method not in METHODS:
        raise WeightError(f"unknown quantization method {method!r}{nearest(method, METHODS)}")
    if method == BITNET:
        check_bitnet(settings)
    found: dict[str, Layer] = {}
    for name in tensors:
        layer, _, part = name.rpartition(".")
        read = _reader(layer, part, tensors)
        if method == MXFP4 and name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in tensors:
            layer, read = name.removesuffix(BLOCKS), read_mxfp4
        if read is None and method == BITNET and lacks_scale(name, tensors):
            read = read_bitnet  # and says so when it is called
        if read is not None:
            read = _OWN.get(method, read)
            found[layer] = Layer(functools.partial(_read, read, layer, tensors, settings), tensors, name)
    return found


def layer_of(name: str, layers: Collection[str]) -> str | None:
    """Which of these layers a tensor belongs to, if any; a bias is a number for each output as ever."""
    for ending in (BLOCKS, SCALES):
        if name.removesuffix(ending) in layers:
            return name.removesuffix(ending)
    parts = name.split(".")
    if parts[-1] == "bias":
        return None
    above = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((layer for layer in above if layer in layers), None)


def _read(read: _Read, layer: str, tensors: Tensors, config: Config) -> Quantized | Rows:
    """A layer; where its tensors or settings lack what its layout takes for granted, an error that says so."""
    try:
        return read(layer, tensors, config)
    except RanvierError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise WeightError(f"layer {layer!r}: its tensors and its settings do not fit: {error!r}") from error


def _reader(layer: str, part: str, tensors: Tensors) -> _Read | None:
    """What reads the layer whose codes this tensor holds; None where it holds none."""

    def has(*others: str) -> bool:
        return all(f"{layer}.{other}" in tensors for other in others)

    if part == "qweight":
        return read_packed
    if part == "weight_packed":
        return read_compressed
    if part != "weight":
        return None
    if has("weight.absmax"):
        return read_levels
    if has("SCB"):
        return read_rows
    if has("weight_scale", "weight_scale_2"):
        return read_modelopt
    if has("weight_scale") or has("weight_scale_inv"):
        return _read_weight
    if getattr(tensors, "at_hand", True) and has("weight") and has_blocks(tensors[f"{layer}.weight"]):
        return read_blocks  # no file of an index has codes and scales in one tensor
    return None


def _read_weight(layer: str, tensors: Tensors, config: Config) -> Quantized:
    method = method_of(config)
    is_ternary = method == BITNET or (not method and numbers(tensors, f"{layer}.weight").dtype == np.uint8)
    return (read_bitnet if is_ternary else read_scaled)(layer, tensors, config)


__all__ = ["METHODS", "layer_of", "quantized_layers"]
