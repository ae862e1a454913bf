"""Tensors of GGUF files as codes: the blocks that llama.cpp keeps weights in, without making numbers of them.

A block has 32 or 256 weights of a row. Those of 256 have a float16 for all of them, and a scale of a few bits for every
16 or 32; the product of both is the scale of a group. Kinds with a minimum have ``code * scale + minimum``: that is
``(code - zero) * scale`` with a zero between the codes, which gives the same numbers but for roundings of float32.

Of IQ1, IQ2 and IQ3 a file has no codes of single weights: ``gguf_grids`` makes them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.errors import WeightError
from ranvier.ops.contrib.levels import E2M1_LEVELS, IQ4_LEVELS
from ranvier.parts import in_parts
from ranvier.quantize.base import Quantized
from ranvier.weights.quantized.gguf_grids import GRIDS
from ranvier.weights.quantized.gguf_pieces import Layout, Read, half, joined, parts, signed, spread
from ranvier.weights.quantized.tensors import Array, Config, Tensors, powers_of_two
from ranvier.weights.stored import TensorInfo, Weight
from ranvier.weights.ternary import decoded

_AT_A_TIME = 1 << 21  # weights


def gguf_layer(tensor: Weight) -> Quantized:
    """Codes and scales of a tensor [N, K], or [experts, N, K], that a GGUF file has in blocks."""
    name, kind, shape = tensor.info.name, tensor.info.encoding, tensor.info.shape
    if kind and kind not in KINDS:
        raise WeightError(
            f"tensor {name!r} is of {kind}, of which no codes are known here; read() gives its numbers, as far as the "
            "package 'gguf' decodes that kind"
        )
    raw = getattr(tensor, "raw", None)
    if not kind or raw is None or len(shape) not in _AXES:
        told = f"({kind or tensor.info.dtype}, {list(shape)})"
        raise WeightError(f"tensor {name!r} {told} is no matrix of blocks, nor one for each of some experts")
    data = np.ascontiguousarray(raw.read(), np.uint8)
    try:
        rows = (decoded if kind in _TERNARY else _coded)(data, kind, (math.prod(shape[:-1]), shape[-1]))
    except WeightError as error:
        raise WeightError(f"tensor {name!r}: {error}") from None
    return rows if len(shape) == 2 else _of_experts(rows, shape)


def _of_experts(rows: Quantized, shape: tuple[int, ...]) -> Quantized:
    """Rows of all experts as those of each."""
    groups = (*shape[:-1], rows.scales.shape[-1])
    zeros = None if rows.zeros is None else rows.zeros.reshape(groups)
    codes, scales = rows.codes.reshape(shape), rows.scales.reshape(groups)
    return replace(rows, codes=codes, scales=scales, zeros=zeros, block=(1, *rows.block), axis=len(shape) - 1)


def read_blocks(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """weight [N, K] or [experts, N, K], which has its scales in itself."""
    tensor: Any = tensors[f"{layer}.weight"]
    return gguf_layer(tensor)


def has_blocks(tensor: object) -> bool:
    """Whether it is a tensor that :func:`gguf_layer` has codes of."""
    info = getattr(tensor, "info", None)
    known = isinstance(info, TensorInfo) and info.encoding in KINDS and len(info.shape) in _AXES
    return known and getattr(tensor, "raw", None) is not None


def _coded(data: Array, kind: str, shape: tuple[int, int]) -> Quantized:
    """What blocks of bytes hold."""
    layout = _LAYOUTS[kind]
    n, k = shape
    if k % layout.weights or data.size != n * (k // layout.weights) * layout.size:
        raise WeightError(f"{kind}: {n} x {k} weights do not fit in {data.size} bytes")
    rows, groups = data.reshape(n, k // layout.weights, layout.size), (n, k // layout.group)
    codes, scales, zeros = np.empty((n, k), layout.codes), np.empty(groups, np.float32), None
    if layout.zeros:
        zeros = np.empty(groups, np.float32)

    def fill(first: int, last: int) -> None:
        made = _part(layout, rows[first:last], (last - first, k))
        codes[first:last], scales[first:last] = made[:2]
        if zeros is not None:
            zeros[first:last] = made[2]

    in_parts(fill, n, max(1, _AT_A_TIME // max(1, k)), data.nbytes)
    return Quantized(
        kind.lower(),
        codes,
        scales,
        (1, layout.group),
        layout.bits,
        zeros,
        layout.table,
        axis=1,
        scale_bytes=n * (k // layout.weights) * layout.scale_bytes,
    )


def _part(layout: Layout, rows: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array | None]:
    """Codes, scales and zeros of some rows."""
    n, k = shape
    groups = n, k // layout.group
    with np.errstate(divide="ignore", invalid="ignore"):  # also of scales that are no numbers
        read = layout.read(rows)
        codes, scales = read.codes.reshape(shape), read.scales.reshape(groups)
        if read.minima is None:
            return codes, scales, None if read.zeros is None else read.zeros.reshape(groups)
        level = scales == 0  # all weights are the minimum
        if level.any():
            scales = np.where(level, _any_scale(read).reshape(groups), scales)
            codes.reshape(*groups, layout.group)[level] = 0
        return codes, scales, np.where(scales == 0, np.float32(0), -read.minima.reshape(groups) / scales)


def _any_scale(read: Read) -> Array:
    """For groups without one: what other scales of the block are multiples of, so that all are; or what minima are."""
    assert read.steps is not None
    step, least = read.steps
    return np.broadcast_to(np.where(step == 0, least, step), read.scales.shape)


def _with_minima(
    codes: Array, scale: Array, minimum: Array, scales: Array | None = None, minima: Array | None = None
) -> Read:  # fmt: skip
    """A block's scale and minimum, two bytes each; or what those of groups are times, minima below zero."""
    step, least = half(scale), half(minimum)
    if scales is None or minima is None:
        return Read(codes, step, least, (step, least))
    return Read(codes, step * scales, least * -minima.astype(np.float32), (step, least))


# -- blocks of 32 -----------------------------------------------------------------------------------------------------


def _q4_0(blocks: Array) -> Read:
    scale, low = parts(blocks, 2)
    return Read(signed(spread(low, 4, 16), 8), half(scale))


def _q4_1(blocks: Array) -> Read:
    scale, minimum, low = parts(blocks, 2, 2)
    return _with_minima(spread(low, 4, 16), scale, minimum)


def _q5_0(blocks: Array) -> Read:
    scale, high, low = parts(blocks, 2, 4)
    return Read(signed(joined(spread(low, 4, 16), spread(high, 1, 1), 4), 16), half(scale))


def _q5_1(blocks: Array) -> Read:
    scale, minimum, high, low = parts(blocks, 2, 2, 4)
    return _with_minima(joined(spread(low, 4, 16), spread(high, 1, 1), 4), scale, minimum)


def _q8_0(blocks: Array) -> Read:
    scale, codes = parts(blocks, 2)
    return Read(codes.view(np.int8), half(scale))


def _iq4_nl(blocks: Array) -> Read:
    scale, low = parts(blocks, 2)
    return Read(spread(low, 4, 16), half(scale))


def _mxfp4(blocks: Array) -> Read:
    exponent, low = parts(blocks, 1)
    return Read(spread(low, 4, 16), powers_of_two(exponent))


# -- blocks of 256 ----------------------------------------------------------------------------------------------------


def _q2_k(blocks: Array) -> Read:
    both, low, scale, minimum = parts(blocks, 16, 64, 2)
    return _with_minima(spread(low, 2, 32), scale, minimum, both & 0xF, both >> 4)


def _q3_k(blocks: Array) -> Read:
    high, low, first, second, scale = parts(blocks, 32, 64, 8, 4)
    codes = signed(joined(spread(low, 2, 32), spread(high, 1, 32), 2), 4)
    return Read(codes, half(scale) * signed(joined(spread(first, 4, 8), spread(second, 2, 4), 4), 32))


def _six_bits(data: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima in 12 bytes: four scales, four minima, then halves of the others, whose two highest
    bits are above the first ones."""
    scales, minima, others = parts(data, 4, 4)
    low, high = others & 0xF, others >> 4
    return (
        np.concatenate([scales & 0x3F, joined(low, scales >> 6, 4)], axis=-1),
        np.concatenate([minima & 0x3F, joined(high, minima >> 6, 4)], axis=-1),
    )


def _q4_k(blocks: Array) -> Read:
    scale, minimum, both, low = parts(blocks, 2, 2, 12)
    return _with_minima(spread(low, 4, 32), scale, minimum, *_six_bits(both))


def _q5_k(blocks: Array) -> Read:
    scale, minimum, both, high, low = parts(blocks, 2, 2, 12, 32)
    codes = joined(spread(low, 4, 32), spread(high, 1, 32), 4)
    return _with_minima(codes, scale, minimum, *_six_bits(both))


def _q6_k(blocks: Array) -> Read:
    low, high, scales, scale = parts(blocks, 128, 64, 16)
    codes = signed(joined(spread(low, 4, 64), spread(high, 2, 32), 4), 32)
    return Read(codes, half(scale) * scales.view(np.int8))


def _iq4_xs(blocks: Array) -> Read:
    scale, high, low, codes = parts(blocks, 2, 2, 4)
    scales = signed(joined(spread(low, 4, 1), spread(high, 2, 1), 4), 32)
    return Read(spread(codes, 4, 16), half(scale) * scales)


_LAYOUTS = {
    "Q4_0": Layout(32, 18, 32, 4, _q4_0),
    "Q4_1": Layout(32, 20, 32, 4, _q4_1, np.uint8, zeros=True),
    "Q5_0": Layout(32, 22, 32, 5, _q5_0),
    "Q5_1": Layout(32, 24, 32, 5, _q5_1, np.uint8, zeros=True),
    "Q8_0": Layout(32, 34, 32, 8, _q8_0),
    "Q2_K": Layout(256, 84, 16, 2, _q2_k, np.uint8, zeros=True),
    "Q3_K": Layout(256, 110, 16, 3, _q3_k),
    "Q4_K": Layout(256, 144, 32, 4, _q4_k, np.uint8, zeros=True),
    "Q5_K": Layout(256, 176, 32, 5, _q5_k, np.uint8, zeros=True),
    "Q6_K": Layout(256, 210, 16, 6, _q6_k),
    "IQ4_NL": Layout(32, 18, 32, 4, _iq4_nl, np.uint8, table=IQ4_LEVELS),
    "IQ4_XS": Layout(256, 136, 32, 4, _iq4_xs, np.uint8, table=IQ4_LEVELS),
    "MXFP4": Layout(32, 17, 32, 4, _mxfp4, np.uint8, table=E2M1_LEVELS),
    **GRIDS,
}
_TERNARY = ("TQ1_0", "TQ2_0")
_AXES = (2, 3)  # of a matrix, and of one for each expert
KINDS = (*_LAYOUTS, *_TERNARY)
