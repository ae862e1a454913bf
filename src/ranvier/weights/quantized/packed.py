"""GPTQ and AWQ: ``qweight``, ``qzeros``, ``scales``, and ``g_idx`` where groups are not runs of neighbours."""

from __future__ import annotations

import numpy as np

from ranvier.dtypes import of
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.packing import unpack_awq, unpack_bits
from ranvier.weights.quantized.tensors import Config, Tensors, check, method_of, numbers, words

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
    scales = numbers(tensors, f"{layer}.scales")
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
    size = int(config.get("group_size", -1))
    size = -(-inputs // groups) if size <= 0 or config.get("dynamic") else size
    order = None
    if f"{layer}.g_idx" in tensors:
        order = numbers(tensors, f"{layer}.g_idx").astype(np.int64)
        if order.shape != (inputs,) or order.min(initial=0) < 0 or order.max(initial=0) >= groups:
            raise WeightError(f"layer {layer!r}: g_idx names groups that are not there")
        if np.array_equal(order, np.arange(inputs) // size):
            order = None
    if order is None:
        check(layer, (groups,), (-(-inputs // size),))
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
    scales = numbers(tensors, f"{layer}.scales")
    check(layer, zeros.shape, scales.shape)
    check(layer, codes.shape[1:], scales.shape[1:])
    size = -(-codes.shape[0] // max(1, scales.shape[0]))
    check(layer, scales.shape[:1], (-(-codes.shape[0] // max(1, size)),))
    return Quantized("awq", codes.T, scales.T, (1, size), 4, zeros.T, axis=1, dtype=of(scales))
