"""GPTQ and AWQ: ``qweight``, ``qzeros``, ``scales``, and ``g_idx`` where groups are not runs of neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import of
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.packing import unpack_awq, unpack_bits
from ranvier.weights.quantized.patterns import matches
from ranvier.weights.quantized.tensors import (
    Config,
    Tensors,
    check,
    factors,
    group_size,
    method_of,
    positions,
    words,
)

_GPTQ_BITS = (2, 3, 4, 8)
_GPTQ_FORMS = ("gptq", "gptq_v2")  # the first stores zero points less one


def read_packed(layer: str, tensors: Tensors, config: Config) -> Quantized:
    method = method_of(config) or ("gptq" if f"{layer}.g_idx" in tensors else "awq")
    if method == "gptq":
        return read_gptq(layer, tensors, config)
    if method == "awq":
        return read_awq(layer, tensors, config)
    raise WeightError(f"layer {layer!r}: unknown quantization method {method!r}")


def read_gptq(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """qweight int32[K·b/32, N] along K, qzeros int32[G, N·b/32] along N, scales [G, N], g_idx int32[K].

    Single layers may have other bits than the configuration says (``dynamic``): tensors show how many.
    """
    form = str(config.get("format") or config.get("checkpoint_format") or "gptq").lower()
    if form not in _GPTQ_FORMS:
        raise WeightError(f"layer {layer!r}: unknown packing {form!r}")
    code_words, zero_words = words(tensors, f"{layer}.qweight"), words(tensors, f"{layer}.qzeros")
    scales = factors(tensors, f"{layer}.scales")
    width, outputs = code_words.itemsize * 8, code_words.shape[1]
    groups = scales.shape[0]
    check(layer, scales.shape, (groups, outputs))
    check(layer, zero_words.shape[:1], (groups,))
    bits = _bits(layer, zero_words.shape[1], outputs, zero_words.itemsize * 8, config)
    inputs = code_words.shape[0] * width // bits
    codes = unpack_bits(code_words, bits, inputs, axis=0)
    zeros = unpack_bits(zero_words, bits, outputs)
    if form == "gptq":  # stores one less, in as many bits
        zeros = ((zeros.astype(np.int16) + 1) & ((1 << bits) - 1)).astype(np.uint8)
    order = None
    if f"{layer}.g_idx" in tensors:
        order = positions(layer, tensors, "g_idx", inputs, groups)
        size = int(np.bincount(order).max(initial=1))
        if np.array_equal(order, np.arange(inputs) // size):
            check(layer, (groups,), (-(-inputs // size),))
            order = None
    elif config.get("desc_act") and groups > 1:
        raise WeightError(f"layer {layer!r} lacks its g_idx: groups are not runs of neighbours (desc_act)")
    else:
        size = _group(layer, inputs, groups, config)
    return Quantized("gptq", codes.T, scales.T, (1, size), bits, zeros.T, axis=1, order=order, dtype=of(scales))


def _bits(layer: str, row: int, outputs: int, width: int, config: Config) -> int:
    """Of a code, where this many zero points take a row of so many words."""
    fitting = [bits for bits in _GPTQ_BITS if -(-outputs * bits // width) == row]
    said = config.get("bits")
    if said in fitting:
        return int(said)
    if len(fitting) != 1 or (said is not None and not config.get("dynamic")):
        raise WeightError(
            f"layer {layer!r}: unknown packing of {said} bits: {outputs} zero points in {row} words of {width}"
        )
    return fitting[0]


def _group(layer: str, inputs: int, groups: int, config: Config) -> int:
    """How many inputs share a scale; as a pattern of ``dynamic`` tells, where one does for this layer."""
    told, named = config.get("group_size"), config.get("dynamic") or {}
    if not named:
        return _told(layer, inputs, groups, told)
    if any("group_size" in (settings or ()) for settings in named.values()):
        for pattern, settings in named.items():
            if settings and not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), layer):
                told = settings.get("group_size", told)
                break
    return group_size(layer, inputs, groups, told)


def _told(layer: str, inputs: int, groups: int, told: Any) -> int:
    """How many inputs share a scale, where settings are those of all layers."""
    size = int(told or 0)
    if size > 0:
        check(layer, (groups,), (-(-inputs // size),))
    return group_size(layer, inputs, groups, size)


def read_awq(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """qweight int32[K, N/8], qzeros int32[G, N/8], scales [G, N]; columns of a word are interleaved."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    bits = int(config.get("bits", config.get("w_bit", 4)))
    if version != "gemm" or bits != 4:
        raise WeightError(f"layer {layer!r}: unknown packing {version!r} of {bits} bits")
    code_words, zero_words = words(tensors, f"{layer}.qweight"), words(tensors, f"{layer}.qzeros")
    if code_words.itemsize != 4 or zero_words.itemsize != 4:
        raise WeightError(f"layer {layer!r}: AWQ packs words of 32 bits, got {code_words.dtype}")
    codes, zeros = unpack_awq(code_words), unpack_awq(zero_words)
    scales = factors(tensors, f"{layer}.scales")
    check(layer, zeros.shape, scales.shape)
    check(layer, codes.shape[1:], scales.shape[1:])
    size = _told(layer, codes.shape[0], scales.shape[0], config.get("group_size", config.get("q_group_size")))
    return Quantized("awq", codes.T, scales.T, (1, size), 4, zeros.T, axis=1, dtype=of(scales))
