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
from ranvier.quantize.base import Quantized
from ranvier.quantize.fields import Field, spread
from ranvier.quantize.rows import Rows, Stored
from ranvier.weights.quantized.gguf_grids import GRIDS
from ranvier.weights.quantized.gguf_pieces import Layout, Read, half, joined, parts, signed, words
from ranvier.weights.quantized.tensors import Array, Config, Tensors, powers_of_two
from ranvier.weights.stored import TensorInfo, Weight
from ranvier.weights.ternary import decoded


def gguf_layer(tensor: Weight) -> Quantized:
    """Codes and scales of a tensor [N, K], or [experts, N, K], that a GGUF file has in blocks."""
    found = gguf_rows(tensor)
    return found.whole() if isinstance(found, Rows) else found


def gguf_rows(tensor: Weight) -> Rows | Quantized:
    """The same, rows of which are read when they are asked for; ternary ones are all read at once."""
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
        if kind in _TERNARY:
            return _of_experts(decoded(data, kind, (math.prod(shape[:-1]), shape[-1])), shape)
        return _rows(data, kind, shape)
    except WeightError as error:
        raise WeightError(f"tensor {name!r}: {error}") from None


def _of_experts(rows: Quantized, shape: tuple[int, ...]) -> Quantized:
    """Rows of all experts as those of each."""
    if len(shape) == 2:
        return rows
    groups = (*shape[:-1], rows.scales.shape[-1])
    codes, scales = rows.codes.reshape(shape), rows.scales.reshape(groups)
    return replace(rows, codes=codes, scales=scales, block=(1, *rows.block), axis=len(shape) - 1)


def read_blocks(layer: str, tensors: Tensors, config: Config) -> Rows | Quantized:
    """weight [N, K] or [experts, N, K], which has its scales in itself."""
    tensor: Any = tensors[f"{layer}.weight"]
    return gguf_rows(tensor)


def has_blocks(tensor: object) -> bool:
    """Whether it is a tensor that :func:`gguf_layer` has codes of."""
    info = getattr(tensor, "info", None)
    known = isinstance(info, TensorInfo) and info.encoding in KINDS and len(info.shape) in _AXES
    return known and getattr(tensor, "raw", None) is not None


def _rows(data: Array, kind: str, shape: tuple[int, ...]) -> Rows:
    """What blocks of bytes hold."""
    layout = _LAYOUTS[kind]
    n, k = math.prod(shape[:-1]), shape[-1]
    if k % layout.weights or data.size != n * (k // layout.weights) * layout.size:
        raise WeightError(f"{kind}: {n} x {k} weights do not fit in {data.size} bytes")
    blocks = data.reshape(n, k // layout.weights, layout.size)
    like = Quantized(kind.lower(), np.empty(0), np.empty(0), (1, layout.group), layout.bits, table=layout.table, axis=1)

    def read(first: int, last: int) -> Quantized:
        found = _Held(layout, blocks[first:last], (last - first, k // layout.group))
        return replace(like, codes=found.codes().reshape(last - first, k), scales=found.scales, zeros=found.zeros)

    def numbers(first: int, last: int) -> tuple[Array, Array | None, tuple[Array, ...] | None]:
        found = _Held(layout, blocks[first:last], (last - first, k // layout.group))
        return found.scales, found.zeros, found.level

    stored = None if layout.codes is None else Stored(blocks, layout.codes, numbers)
    return Rows(read(0, 0), shape, read, n * (k // layout.weights) * layout.scale_bytes, stored)


class _Held:
    """What some rows hold: scales and zeros [rows, groups], and the places of groups that have codes of zero whatever
    the file has, if any have."""

    def __init__(self, layout: Layout, blocks: Array, groups: tuple[int, int]) -> None:
        self._layout, self._blocks = layout, blocks
        self.zeros: Array | None = None
        self.level: tuple[Array, ...] | None = None
        with np.errstate(divide="ignore", invalid="ignore"):  # also of scales that are no numbers
            self._read = read = layout.read(blocks)
            self.scales = read.scales.reshape(groups)
            if read.minima is None:
                self.zeros = None if read.zeros is None else read.zeros.reshape(groups)
                return
            level = np.nonzero(self.scales == 0)  # all weights of these are the minimum
            if len(level[0]):
                self.level = level
                self.scales[level] = _any_scale(read, np.ravel_multi_index(level, groups))
            self.zeros = -read.minima.reshape(groups) / self.scales
            if self.level is not None:
                self.zeros[level] = np.where(self.scales[level] == 0, np.float32(0), self.zeros[level])

    def codes(self) -> Array:
        fields = self._layout.codes
        codes = self._read.codes if fields is None else fields.read(self._blocks)
        assert codes is not None
        if self.level is not None:
            codes.reshape(*self.scales.shape, self._layout.group)[self.level] = 0
        return codes


def _any_scale(read: Read, groups: Array) -> Array:
    """For groups without one: what other scales of the block are multiples of, so that all are; or what minima are."""
    assert read.steps is not None
    step, least = (each.reshape(-1)[groups * each.size // read.scales.size] for each in read.steps)
    found: Array = np.where(step == 0, least, step)
    return found


def _with_minima(scale: Array, minimum: Array, scales: Array | None = None, minima: Array | None = None) -> Read:
    """A block's scale and minimum, two bytes each; or what those of groups are times, minima below zero."""
    step, least = half(scale), half(minimum)
    if scales is None or minima is None:
        return Read(step, least, (step, least))
    return Read(step * scales, least * -minima.astype(np.float32), (step, least))


# -- blocks of 32 -----------------------------------------------------------------------------------------------------


def _scale_first(blocks: Array) -> Read:
    return Read(half(blocks[..., :2]))


def _minimum_second(blocks: Array) -> Read:
    return _with_minima(blocks[..., :2], blocks[..., 2:4])


def _exponent_first(blocks: Array) -> Read:
    return Read(powers_of_two(blocks[..., :1]))


# -- blocks of 256 ----------------------------------------------------------------------------------------------------


def _q2_k(blocks: Array) -> Read:
    both, _, scale, minimum = parts(blocks, 16, 64, 2)
    return _with_minima(scale, minimum, both & 0xF, both >> 4)


def _q3_k(blocks: Array) -> Read:
    _, first, second, scale = parts(blocks, 96, 8, 4)
    return Read(half(scale) * signed(joined(spread(first, 4, 8), spread(second, 2, 4), 4), 32))


def _six_bits(data: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima in 12 bytes: four scales, four minima, then halves of the others, whose two highest
    bits are above the first ones."""
    fours = words(data, 4)
    found = np.empty((2, *data.shape[:-1], 2), "<u4")
    low, six, high = (np.uint32(each) for each in (0x0F0F0F0F, 0x3F3F3F3F, 0x30303030))
    others = fours[..., 2]
    for which, (into, rest) in enumerate(zip(found, (others, others >> np.uint32(4)))):
        first = fours[..., which]
        into[..., 0], into[..., 1] = first & six, rest & low | first >> np.uint32(2) & high
    scales, minima = found.view(np.uint8)
    return scales, minima


def _six_bit_scales(blocks: Array) -> Read:
    """Of Q4_K and Q5_K."""
    scale, minimum, both, _ = parts(blocks, 2, 2, 12)
    return _with_minima(scale, minimum, *_six_bits(both))


def _q6_k(blocks: Array) -> Read:
    _, scales, scale = parts(blocks, 192, 16)
    return Read(half(scale) * scales.view(np.int8))


def _iq4_xs(blocks: Array) -> Read:
    scale, high, low, _ = parts(blocks, 2, 2, 4)
    return Read(half(scale) * signed(joined(spread(low, 4, 1), spread(high, 2, 1), 4), 32))


# fields: where they begin, their bits, their run, and the bits below them
_LAYOUTS = {
    "Q4_0": Layout(32, 18, 32, 4, _scale_first, (Field(2, 4, 16),), 8),
    "Q4_1": Layout(32, 20, 32, 4, _minimum_second, (Field(4, 4, 16),), zeros=True),
    "Q5_0": Layout(32, 22, 32, 5, _scale_first, (Field(6, 4, 16), Field(2, 1, 1, 4)), 16),
    "Q5_1": Layout(32, 24, 32, 5, _minimum_second, (Field(8, 4, 16), Field(4, 1, 1, 4)), zeros=True),
    "Q8_0": Layout(32, 34, 32, 8, _scale_first, (Field(2, 8, 32),), 0),
    "Q2_K": Layout(256, 84, 16, 2, _q2_k, (Field(16, 2, 32),), zeros=True),
    "Q3_K": Layout(256, 110, 16, 3, _q3_k, (Field(32, 2, 32), Field(0, 1, 32, 2)), 4),
    "Q4_K": Layout(256, 144, 32, 4, _six_bit_scales, (Field(16, 4, 32),), zeros=True),
    "Q5_K": Layout(256, 176, 32, 5, _six_bit_scales, (Field(48, 4, 32), Field(16, 1, 32, 4)), zeros=True),
    "Q6_K": Layout(256, 210, 16, 6, _q6_k, (Field(0, 4, 64), Field(128, 2, 32, 4)), 32),
    "IQ4_NL": Layout(32, 18, 32, 4, _scale_first, (Field(2, 4, 16),), table=IQ4_LEVELS),
    "IQ4_XS": Layout(256, 136, 32, 4, _iq4_xs, (Field(8, 4, 16),), table=IQ4_LEVELS),
    "MXFP4": Layout(32, 17, 32, 4, _exponent_first, (Field(1, 4, 16),), table=E2M1_LEVELS),
    **GRIDS,
}
_TERNARY = ("TQ1_0", "TQ2_0")
_AXES = (2, 3)  # of a matrix, and of one for each expert
KINDS = (*_LAYOUTS, *_TERNARY)
