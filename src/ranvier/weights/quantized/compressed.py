"""compressed-tensors: ``weight_packed`` of whole numbers of a few bits or of float4, and settings of layers."""

from __future__ import annotations

import numpy as np

from ranvier.dtypes import of
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.packing import unpack_bits
from ranvier.weights.quantized.float4 import float4
from ranvier.weights.quantized.patterns import matches
from ranvier.weights.quantized.tensors import Config, Tensors, check, numbers, powers_of_two, words

METHOD = "compressed-tensors"
_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision")
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
_ORDERS = (None, "weight", "static", "group", "dynamic")


def read_compressed(layer: str, tensors: Tensors, config: Config) -> Quantized:
    group = group_of(layer, config)
    _check_format(layer, group, config, _PACKED)
    if f"{layer}.weight_global_scale" in tensors:
        return _nvfp4(layer, tensors)
    if numbers(tensors, f"{layer}.weight_scale").dtype == np.uint8:
        return _mxfp4(layer, tensors)
    return _whole_numbers(layer, tensors, group.get("weights") or {})


def check_plain(layer: str, config: Config) -> None:
    """WeightError where weights that lie there one by one are of a format that is not known."""
    _check_format(layer, group_of(layer, config), config, (*_PLAIN, *_PACKED))


def _check_format(layer: str, group: Config, config: Config, known: tuple[str, ...]) -> None:
    form = str(group.get("format") or config.get("format") or known[0])
    if form not in known:
        raise WeightError(f"layer {layer!r}: unknown format of {METHOD} {form!r}")


def group_of(layer: str, config: Config) -> Config:
    """The settings of a layer: of the group that names it or a pattern of its name, else of the one for its class."""
    groups = [each for each in (config.get("config_groups") or {}).values() if isinstance(each, dict)]
    for group in groups:
        for target in group.get("targets") or ():
            if target == layer or (target.startswith("re:") and matches(target[3:], layer)):
                return group
    by_class = [g for g in groups if any(not t.startswith("re:") for t in g.get("targets") or ("Linear",))]
    return by_class[0] if by_class else {}


def _whole_numbers(layer: str, tensors: Tensors, settings: Config) -> Quantized:
    """weight_packed int32[N, ·] of codes raised by half their range, weight_scale, weight_shape."""
    bits = int(settings.get("num_bits", 4))
    if settings.get("actorder") not in _ORDERS or not 1 < bits <= 8 or settings.get("type", "int") != "int":
        raise WeightError(f"layer {layer!r}: unknown settings of {METHOD}: {dict(settings)}")
    packed, scales = words(tensors, f"{layer}.weight_packed"), numbers(tensors, f"{layer}.weight_scale")
    shape = numbers(tensors, f"{layer}.weight_shape").reshape(-1)
    if shape.size != 2:
        raise WeightError(f"layer {layer!r}: weights of {shape.size} axes in one tensor cannot be read")
    rows, columns = int(shape[0]), int(shape[1])
    check(layer, packed.shape, (rows, -(-columns * bits // (packed.itemsize * 8))))
    codes = (unpack_bits(packed, bits, columns).astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
    scales = scales.reshape(rows, -1) if scales.size > 1 else scales.reshape(1, 1)
    block = (1 if scales.shape[0] == rows else rows, -(-columns // scales.shape[1]))
    zeros = None
    if f"{layer}.weight_zero_point" in tensors:
        raised = unpack_bits(words(tensors, f"{layer}.weight_zero_point"), bits, scales.shape[0], axis=0)
        zeros = (raised.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
        check(layer, zeros.shape, scales.shape)
    order = None
    if f"{layer}.weight_g_idx" in tensors:
        order = numbers(tensors, f"{layer}.weight_g_idx").astype(np.int64)
        order = None if order.min(initial=0) < 0 else order  # -1 throughout: none
        if order is not None and (order.shape != (columns,) or order.max(initial=0) >= scales.shape[1]):
            raise WeightError(f"layer {layer!r}: weight_g_idx names groups that are not there")
    return Quantized(METHOD, codes, scales, block, bits, zeros, axis=1, order=order, dtype=of(scales))


def _nvfp4(layer: str, tensors: Tensors) -> Quantized:
    """weight_packed u8 [N, K/2] of E2M1 (low half first), a float8 scale for 16, a float scale for all, divided by."""
    scales = numbers(tensors, f"{layer}.weight_scale")
    overall = np.float32(numbers(tensors, f"{layer}.weight_global_scale").reshape(-1)[0])
    data = words(tensors, f"{layer}.weight_packed")
    return float4("nvfp4", layer, data, scales.astype(np.float32) / overall, scales.nbytes + 4)


def _mxfp4(layer: str, tensors: Tensors) -> Quantized:
    """weight_packed u8 [N, K/2] of E2M1, a power of two for 32: its exponent, raised by 127."""
    exponents = numbers(tensors, f"{layer}.weight_scale")
    data = words(tensors, f"{layer}.weight_packed")
    return float4("mxfp4", layer, data, powers_of_two(exponents), exponents.nbytes)
