"""Quantized layers of real checkpoints: which tensors belong together, and what they mean.

    layers = quantized_layers(loader.open("model.safetensors"), config["quantization_config"])
    layers["model.layers.0.mlp.up_proj"]().dequantize()     # [out, in]

Layers are found by the names of their tensors. The configuration (``config.json``) decides what names leave open; a
method or packing that is not known is refused by name, because a wrong guess would be wrong numbers.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import WeightError
from ranvier.ops.contrib.weight_only import NF4_LEVELS
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import counts
from ranvier.quantize.floats import Nested
from ranvier.quantize.packing import unpack_awq, unpack_bits, unpack_nibbles, unpack_ternary

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]
Layer = Callable[[], Quantized]


class _Readable(Protocol):
    def read(self) -> Array: ...


Tensors = Mapping[str, _Readable]


def quantized_layers(tensors: Tensors, config: Config | None = None) -> dict[str, Layer]:
    """The quantized layers of a checkpoint by name, each read when called."""
    settings = config or {}
    method = str(settings.get("quant_method", "")).lower()
    found: dict[str, Layer] = {}
    for name in tensors:
        for ending, (wanted, read) in _ENDINGS.items():
            if name.endswith(ending):
                layer = name.removesuffix(ending)
                kind = wanted(layer, tensors, method)
                if kind:
                    found[layer] = functools.partial(read, layer, tensors, settings)
                break
    return found


def _numbers(tensors: Tensors, name: str) -> Array:
    if name not in tensors:
        raise WeightError(f"a quantized layer lacks its tensor {name!r}")
    return np.asarray(tensors[name].read())


# -- GPTQ and AWQ ---------------------------------------------------------------------------------------------------


def _is_packed(layer: str, tensors: Tensors, method: str) -> bool:
    return f"{layer}.qzeros" in tensors and f"{layer}.scales" in tensors


def _packed(layer: str, tensors: Tensors, config: Config) -> Quantized:
    method = str(config.get("quant_method", "gptq" if f"{layer}.g_idx" in tensors else "awq")).lower()
    if method == "gptq":
        return _gptq(layer, tensors, config)
    if method == "awq":
        return _awq(layer, tensors, config)
    raise WeightError(f"layer {layer!r}: unknown quantization method {method!r}")


def _gptq(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """qweight int32[K·b/32, N] along K, qzeros int32[G, N·b/32] along N, scales [G, N], g_idx int32[K]."""
    bits, form = int(config.get("bits", 4)), str(config.get("checkpoint_format", "gptq"))
    if form not in ("gptq", "gptq_v2") or bits not in (2, 3, 4, 8):
        raise WeightError(f"layer {layer!r}: unknown packing {form!r} of {bits} bits")
    words, packed_zeros = _numbers(tensors, f"{layer}.qweight"), _numbers(tensors, f"{layer}.qzeros")
    scales = _numbers(tensors, f"{layer}.scales")
    inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
    groups = scales.shape[0]
    _check(layer, scales.shape, (groups, outputs))
    codes = unpack_bits(words.view(np.uint32), bits, inputs, axis=0)
    zeros = unpack_bits(packed_zeros.view(np.uint32), bits, outputs)
    if form == "gptq":  # stores one less, in as many bits
        zeros = ((zeros.astype(np.int16) + 1) & ((1 << bits) - 1)).astype(np.uint8)
    _check(layer, zeros.shape, (groups, outputs))
    size = int(config.get("group_size", -1))
    size = -(-inputs // groups) if size <= 0 else size
    order = None
    if f"{layer}.g_idx" in tensors:
        order = _numbers(tensors, f"{layer}.g_idx").astype(np.int64)
        if order.shape != (inputs,) or order.min(initial=0) < 0 or order.max(initial=0) >= groups:
            raise WeightError(f"layer {layer!r}: g_idx names groups that are not there")
        if np.array_equal(order, np.arange(inputs) // size):
            order = None
    return Quantized(*("gptq", codes.T, scales.T, (1, size), bits, zeros.T), axis=1, order=order, dtype=of(scales))


def _awq(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """qweight int32[K, N/8], qzeros int32[G, N/8], scales [G, N]; columns of a word are interleaved."""
    version, bits = str(config.get("version", "gemm")).lower(), int(config.get("bits", config.get("w_bit", 4)))
    if version != "gemm" or bits != 4:
        raise WeightError(f"layer {layer!r}: unknown packing {version!r} of {bits} bits")
    codes = unpack_awq(_numbers(tensors, f"{layer}.qweight"))
    zeros = unpack_awq(_numbers(tensors, f"{layer}.qzeros"))
    scales = _numbers(tensors, f"{layer}.scales")
    _check(layer, zeros.shape, scales.shape)
    _check(layer, codes.shape[1:], scales.shape[1:])
    size = -(-codes.shape[0] // scales.shape[0])
    return Quantized("awq", codes.T, scales.T, (1, size), 4, zeros.T, axis=1, dtype=of(scales))


# -- compressed-tensors -----------------------------------------------------------------------------------------------


def _is_compressed(layer: str, tensors: Tensors, method: str) -> bool:
    return f"{layer}.weight_scale" in tensors


def _compressed(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """weight_packed int32[N, ·] of codes raised by half their range, weight_scale, weight_shape."""
    if f"{layer}.weight_global_scale" in tensors:
        return _nvfp4(layer, tensors)
    settings = _weight_settings(config)
    bits = int(settings.get("num_bits", 4))
    words, scales = _numbers(tensors, f"{layer}.weight_packed"), _numbers(tensors, f"{layer}.weight_scale")
    rows, columns = (int(x) for x in _numbers(tensors, f"{layer}.weight_shape").reshape(-1)[:2])
    if settings.get("actorder") not in (None, "weight", "static", "group", "dynamic") or not 1 < bits <= 8:
        raise WeightError(f"layer {layer!r}: unknown settings of compressed-tensors: {dict(settings)}")
    codes = unpack_bits(words.view(np.uint32), bits, columns).astype(np.int16) - (1 << (bits - 1))
    _check(layer, codes.shape, (rows, columns))
    scales = scales.reshape(rows, -1) if scales.size > 1 else scales.reshape(1, 1)
    block = (1 if scales.shape[0] == rows else rows, -(-columns // scales.shape[1]))
    zeros = None
    if f"{layer}.weight_zero_point" in tensors:
        packed = _numbers(tensors, f"{layer}.weight_zero_point")
        raised = unpack_bits(packed.view(np.uint32), bits, scales.shape[0], axis=0)
        zeros = (raised.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
        _check(layer, zeros.shape, scales.shape)
    order = None
    if f"{layer}.weight_g_idx" in tensors:
        order = _numbers(tensors, f"{layer}.weight_g_idx").astype(np.int64)
        order = None if order.min(initial=0) < 0 else order  # -1 throughout: none
    codes8 = codes.astype(np.int8)
    return Quantized("compressed-tensors", codes8, scales, block, bits, zeros, axis=1, order=order, dtype=of(scales))


def _weight_settings(config: Config) -> Config:
    groups = config.get("config_groups") or {}
    for group in groups.values():
        if isinstance(group, Mapping) and group.get("weights"):
            found: Config = group["weights"]
            return found
    return {}


_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _nvfp4(layer: str, tensors: Tensors) -> Quantized:
    """weight_packed u8 [N, K/2] of E2M1 (low half first), a float8 scale for 16, a float scale for all, divided by."""
    data = _numbers(tensors, f"{layer}.weight_packed")
    codes = np.stack([data & 0xF, data >> 4], axis=-1).reshape(data.shape[0], data.shape[1] * 2)
    scales = _numbers(tensors, f"{layer}.weight_scale").astype(np.float32)
    overall = np.float32(_numbers(tensors, f"{layer}.weight_global_scale").reshape(-1)[0])
    block = (1, codes.shape[1] // max(1, scales.shape[1]))
    _check(layer, scales.shape, counts(codes.shape, block))
    return Quantized("nvfp4", codes, scales / overall, block, 4, table=_FLOAT4, axis=1)


# -- weights that carry their scale: float8, BitNet, NF4 --------------------------------------------------------------


def _has_scale(layer: str, tensors: Tensors, method: str) -> bool:
    if f"{layer}.weight.absmax" in tensors:
        return True
    return any(f"{layer}.{each}" in tensors for each in ("weight_scale", "weight_scale_inv"))


def _scaled(layer: str, tensors: Tensors, config: Config) -> Quantized:
    if f"{layer}.weight.absmax" in tensors:
        return _nf4(layer, tensors)
    weight = _numbers(tensors, f"{layer}.weight")
    if weight.dtype == np.uint8:
        return _bitnet(layer, tensors, weight, config)
    inverse = f"{layer}.weight_scale_inv" in tensors
    scales = _numbers(tensors, f"{layer}.weight_scale_inv" if inverse else f"{layer}.weight_scale").astype(np.float32)
    dtype = of(weight)
    if not (dtype.is_float and dtype.bits == 8) and dtype is not DType.int8:
        raise WeightError(f"layer {layer!r}: weights of {dtype} with a scale are no known scheme")
    if scales.size == 1:
        scales, block = scales.reshape(1, 1), tuple(weight.shape)
    elif inverse:
        sides = config.get("weight_block_size") or [128, 128]
        block = (int(sides[0]), int(sides[1]))
    else:
        scales = scales.reshape(weight.shape[0], -1)
        block = (1, -(-weight.shape[1] // scales.shape[1]))
    _check(layer, scales.shape, counts(weight.shape, block))
    return Quantized("int8" if dtype is DType.int8 else "fp8", weight, scales, block, 8, axis=1)


def _bitnet(layer: str, tensors: Tensors, data: Array, config: Config) -> Quantized:
    """u8[N/4, K]; ``autobitlinear`` multiplies by the scale, ``bitlinear`` divides."""
    codes = unpack_ternary(data)
    scale = _numbers(tensors, f"{layer}.weight_scale").astype(np.float32).reshape(-1)
    kind = str(config.get("linear_class", "bitlinear")).lower()
    if scale.size != 1 or kind not in ("bitlinear", "autobitlinear"):
        raise WeightError(f"layer {layer!r}: unknown kind of BitNet layer {kind!r}, or {scale.size} scales")
    factor = scale if kind == "autobitlinear" else 1.0 / scale
    return Quantized("ternary", codes, factor.reshape(1, 1).astype(np.float32), codes.shape, 2, axis=1)


def _nf4(layer: str, tensors: Tensors) -> Quantized:
    """weight u8[numel/2, 1], absmax, quant_map, and the state as JSON in bytes; absmax may be in 8 bits itself."""
    prefix = f"{layer}.weight"
    states = [name for name in tensors if name.startswith(f"{prefix}.quant_state.bitsandbytes__")]
    if not states:
        raise WeightError(f"layer {layer!r} lacks its quant_state")
    try:
        state = json.loads(bytes(_numbers(tensors, states[0]).astype(np.uint8)))
        shape = tuple(int(d) for d in state["shape"])
        size, kind = int(state["blocksize"]), str(state["quant_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"layer {layer!r}: its quant_state cannot be read: {error!r}") from None
    if kind not in ("nf4", "fp4") or size < 1:
        raise WeightError(f"layer {layer!r}: unknown quantization {kind!r}")
    table = (
        _numbers(tensors, f"{prefix}.quant_map").astype(np.float32) if f"{prefix}.quant_map" in tensors else NF4_LEVELS
    )
    count = math.prod(shape)
    codes = unpack_nibbles(_numbers(tensors, prefix), count).reshape(shape)
    scales = _numbers(tensors, f"{prefix}.absmax")
    if f"{prefix}.nested_absmax" in tensors:
        nested = Nested(
            scales.reshape(-1),
            _numbers(tensors, f"{prefix}.nested_quant_map").astype(np.float32),
            _numbers(tensors, f"{prefix}.nested_absmax").astype(np.float32),
            float(state.get("nested_offset", 0.0)),
            int(state.get("nested_blocksize", 256)),
        )
        scales = nested.numbers()
    _check(layer, scales.shape, (-(-count // size),))
    return Quantized(kind, codes, scales.astype(np.float32), (size,), 4, table=table, flat=True)


def _check(layer: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(got) != tuple(expected):
        raise WeightError(f"layer {layer!r}: its tensors do not fit: {list(got)} where {list(expected)} was expected")


_Wanted = Callable[[str, Tensors, str], bool]
_Read = Callable[[str, Tensors, Config], Quantized]
_ENDINGS: dict[str, tuple[_Wanted, _Read]] = {
    ".qweight": (_is_packed, _packed),
    ".weight_packed": (_is_compressed, _compressed),
    ".weight": (_has_scale, _scaled),
}
