"""compressed-tensors: ``weight_packed`` of whole numbers of a few bits or of float4, and settings of layers."""

from __future__ import annotations

import math

import numpy as np

from ranvier.dtypes import of
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.packing import unpack_bits
from ranvier.weights.quantized.float4 import float4
from ranvier.weights.quantized.patterns import matches
from ranvier.weights.quantized.tensors import (
    Array,
    Config,
    Tensors,
    check,
    factors,
    group_size,
    is_exponents,
    numbers,
    one_factor,
    positions,
    powers_of_two,
    words,
)

METHOD = "compressed-tensors"
_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision")
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
_NVFP4_GROUP, MX_GROUP = 16, 32  # weights that share a scale
_ORDERS = (None, "weight", "static", "group", "dynamic")


def read_compressed(layer: str, tensors: Tensors, config: Config) -> Quantized:
    group = group_of(layer, config)
    _check_format(layer, group, config, _PACKED)
    if f"{layer}.weight_global_scale" in tensors:
        return _nvfp4(layer, tensors)
    if is_exponents(numbers(tensors, f"{layer}.weight_scale")):
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
    for known in ("Linear", None):  # one of another class or name is not for it, unless there is no other
        for group in groups:
            classes = [target for target in group.get("targets") or ("Linear",) if not target.startswith("re:")]
            if known in classes or (known is None and classes):
                return group
    return {}


def _whole_numbers(layer: str, tensors: Tensors, settings: Config) -> Quantized:
    """weight_packed int32[N, ·] of codes raised by half their range, weight_scale, weight_shape."""
    bits = int(settings.get("num_bits", 4))
    if settings.get("actorder") not in _ORDERS or not 1 < bits <= 8 or settings.get("type", "int") != "int":
        raise WeightError(f"layer {layer!r}: unknown settings of {METHOD}: {dict(settings)}")
    packed, scales = words(tensors, f"{layer}.weight_packed"), factors(tensors, f"{layer}.weight_scale")
    shape = numbers(tensors, f"{layer}.weight_shape").reshape(-1)
    if shape.size != 2 or shape.dtype.kind not in "iu":
        raise WeightError(f"layer {layer!r}: weights of the shape {shape} in one tensor cannot be read")
    rows, columns = int(shape[0]), int(shape[1])
    check(layer, packed.shape[:1], (rows,))
    loose = _is_loose(packed, bits, columns)
    codes = _signed(layer, packed, bits, columns, loose)
    if scales.size > 1:
        check(layer, scales.shape[:1], (rows,))
    scales = scales.reshape(rows, -1) if scales.size > 1 else scales.reshape(1, 1)
    groups = scales.shape[1]
    order = _order(layer, tensors, columns, groups)
    told = settings.get("group_size") if order is None else int(np.bincount(order).max(initial=1))
    block = (1 if scales.shape[0] == rows else rows, group_size(layer, columns, groups, told))
    zeros = None
    if f"{layer}.weight_zero_point" in tensors or settings.get("symmetric") is False:
        zeros = _zeros(layer, tensors, bits, scales.shape, loose)
    return Quantized(METHOD, codes, scales, block, bits, zeros, axis=1, order=order, dtype=of(scales))


def _order(layer: str, tensors: Tensors, columns: int, groups: int) -> Array | None:
    """The group of each column, where groups are no runs of neighbours; -1 throughout: they are."""
    if f"{layer}.weight_g_idx" not in tensors or (numbers(tensors, f"{layer}.weight_g_idx") == -1).all():
        return None
    return positions(layer, tensors, "weight_g_idx", columns, groups)


def _zeros(layer: str, tensors: Tensors, bits: int, shape: tuple[int, ...], loose: bool) -> Array:
    """Packed along the rows as codes are; or bytes as they are: of a whole tensor, and in files of earlier releases."""
    name = f"{layer}.weight_zero_point"
    found = numbers(tensors, name)
    if found.dtype == np.int8:
        check(layer, (found.size, *found.shape[:1]), (math.prod(shape), shape[0]))
        return found.reshape(shape)
    packed = words(tensors, name)
    check(layer, packed.shape[1:], shape[1:])
    return _signed(layer, packed.T, bits, shape[0], loose).T


def _is_loose(packed: Array, bits: int, count: int) -> bool:
    """Whether words hold whole codes alone, as in files of earlier releases: where bits do not divide a word, that
    takes more of them than codes that go on in the next one."""
    width = packed.itemsize * 8
    found: int = packed.shape[1]
    return found == -(-count // (width // bits)) > -(-count * bits // width)


def _signed(layer: str, packed: Array, bits: int, count: int, loose: bool) -> Array:
    """Codes in words [rows, words], which are raised by half their range."""
    width = packed.itemsize * 8
    in_word = width // bits
    check(layer, packed.shape[1:], (-(-count // in_word) if loose else -(-count * bits // width),))
    if loose:
        codes = unpack_bits(np.ascontiguousarray(packed)[..., None], bits, in_word)
        codes = codes.reshape(len(packed), packed.shape[1] * in_word)[:, :count]
    else:
        codes = unpack_bits(packed, bits, count)
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def _nvfp4(layer: str, tensors: Tensors) -> Quantized:
    """weight_packed u8 [N, K/2] of E2M1 (low half first), a float8 scale for 16, a float scale for all, divided by."""
    data, scales = words(tensors, f"{layer}.weight_packed"), factors(tensors, f"{layer}.weight_scale")
    overall = one_factor(layer, tensors, "weight_global_scale")
    if not overall:
        raise WeightError(f"layer {layer!r}: scales cannot be divided by a weight_global_scale of zero")
    return float4("nvfp4", layer, data, scales.astype(np.float32) / overall, scales.nbytes + 4, _NVFP4_GROUP)


def _mxfp4(layer: str, tensors: Tensors) -> Quantized:
    """weight_packed u8 [N, K/2] of E2M1, a power of two for 32: its exponent, raised by 127."""
    data, exponents = words(tensors, f"{layer}.weight_packed"), numbers(tensors, f"{layer}.weight_scale")
    return float4("mxfp4", layer, data, powers_of_two(exponents), exponents.nbytes, MX_GROUP)
