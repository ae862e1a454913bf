"""BitNet b1.58 as Hugging Face stores it: four rows of -1, 0 and 1 in a byte, and one scale."""

from __future__ import annotations

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.packing import unpack_ternary
from ranvier.weights.quantized.tensors import Array, Config, Tensors, numbers

METHOD = "bitnet"
_MULTIPLIES, _DIVIDES = "autobitlinear", "bitlinear"


def check_bitnet(config: Config) -> None:
    """Refuse settings that change what layers compute, and that none of their tensors shows."""
    mode = str(config.get("quantization_mode") or "offline").lower()
    if mode != "offline":
        raise WeightError(
            f"BitNet, quantization_mode {mode!r}: weights are numbers that become ternary in every call; read them "
            "without these settings, and let nn.quantize_(module, 'ternary') make codes of them"
        )
    if config.get("use_rms_norm"):
        raise WeightError("BitNet, use_rms_norm: layers that normalise what they read are not known here")


def read_bitnet(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """u8[N/4, K]; ``autobitlinear`` multiplies by the scale, ``bitlinear`` divides."""
    kind = str(config.get("linear_class", _DIVIDES)).lower()
    if kind not in (_DIVIDES, _MULTIPLIES):
        raise WeightError(f"layer {layer!r}: unknown kind of BitNet layer {kind!r}")
    if f"{layer}.rms_norm.weight" in tensors:
        raise WeightError(f"layer {layer!r} normalises what it reads, which is not known here of BitNet layers")
    codes = _codes(f"{layer}.weight", tensors)
    factor = _factor(f"{layer}.weight_scale", tensors, divides=kind == _DIVIDES)
    return Quantized("ternary", codes, factor, codes.shape, 2, axis=1)


def lacks_scale(name: str, tensors: Tensors) -> bool:
    """Whether a tensor without a scale beside it holds bytes in place of weights, where that costs nothing to know."""
    if not name.endswith(".weight") or f"{name}_scale" in tensors or not getattr(tensors, "at_hand", True):
        return False
    info = getattr(tensors[name], "info", None)
    return info is not None and info.dtype is DType.uint8


def _codes(name: str, tensors: Tensors) -> Array:
    stored = numbers(tensors, name)
    if stored.dtype != np.uint8 or stored.ndim != 2:
        raise WeightError(f"{name!r} holds no matrix of bytes with four codes each: {stored.dtype}{list(stored.shape)}")
    try:
        return unpack_ternary(stored)
    except WeightError as error:
        raise WeightError(f"{name!r}: {error}") from None


def _factor(name: str, tensors: Tensors, *, divides: bool) -> Array:
    """What sums are multiplied by."""
    stored = numbers(tensors, name).reshape(-1)
    if stored.size != 1:
        raise WeightError(f"{name!r}: a BitNet layer has one scale, not {stored.size}")
    with np.errstate(divide="ignore", over="ignore"):
        scale = stored.astype(np.float32)
        factor = 1.0 / scale if divides else scale
    if not np.isfinite([*scale, *factor]).all():
        raise WeightError(f"{name!r}: sums cannot be {'divided' if divides else 'multiplied'} by {scale[0]}")
    return factor.reshape(1, 1).astype(np.float32)
