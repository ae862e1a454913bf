"""The kinds of GGUF blocks that keep positions in a grid: IQ1, IQ2 and IQ3.

An entry of a grid is what four or eight weights are, so a file has no code of a single one. But a weight is always one
of a few levels times the scale of its group, and the level has a code:

* IQ2: 8, 25 and 43 with a sign, positions in a table of eight.
* IQ3_XXS: 4, 12, 20, 28, 36, 44, 52 and 62 with a sign, which are integers of 6 bits times two.
* IQ3_S: the odd numbers up to 15 with a sign, which are twice the codes of 4 bits less 7.5.
* IQ1_S: -1, 0 and 1, all of a group with an eighth added or taken off: codes of 2 bits, and a zero between them.
* IQ1_M: the same, but eight weights share what is added and sixteen the scale. An eighth of -9, -7, -1, 1, 7 or 9 is a
  quarter of codes of 4 bits less 7.5.

So codes take more bits here than in the file, and far fewer than numbers. Those are what the package ``gguf`` makes of
the blocks to the last bit: a float16, an odd number of at most 5 bits and a level of at most 6 are multiplied in any
order without a rounding of float32. The grids are the package's own.

Codes of eight weights are one word, and so are eight signs: what is done to one is done to all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ranvier.errors import NotSupported
from ranvier.ops.contrib.levels import IQ2_LEVELS
from ranvier.quantize.fields import spread
from ranvier.weights.quantized.gguf_pieces import Layout, Read, half, parts, words
from ranvier.weights.quantized.tensors import Array

_SIGNS_AT = np.array([0, 7, 14, 21], np.uint32)
_HIGH_AT = np.array([0, 3, 6, 9], np.uint16)
_FLIPPED = 0x07  # bits of a position there that change with the sign
_MIDDLE = np.float32(7.5)  # of codes of 4 bits, all bits of which do
_TURNED = 0x0F


# -- grids and signs --------------------------------------------------------------------------------------------------


def _grid(kind: str) -> Array:
    """Levels by position, [entries, weights]."""
    try:
        import gguf

        found: Any = getattr(gguf.quants, kind)
        found.init_grid()
        return np.asarray(found.grid).reshape(found.grid_shape)
    except (ImportError, AttributeError):
        raise NotSupported(f"the grid of {kind} is in the package 'gguf', 0.10 and later: pip install gguf") from None


def _entries(codes: Array) -> Array:
    """Codes of an entry as one word."""
    count = codes.shape[1]
    entries: Array = np.ascontiguousarray(codes.astype(np.int8)).view(f"u{count}")[:, 0]
    return entries


@functools.cache
def _positions(kind: str) -> Array:
    """Entries of IQ2 as positions in its table."""
    return _entries(np.searchsorted(IQ2_LEVELS[4:7], _grid(kind)) + 4)


@functools.cache
def _halves() -> Array:
    """Entries of IQ3_XXS as half the levels."""
    return _entries(_grid("IQ3_XXS") / 2)


@functools.cache
def _odd() -> Array:
    """Entries of IQ3_S as codes whose middle is 7.5."""
    return _entries((_grid("IQ3_S") + 15) / 2)


@functools.cache
def _ternary() -> Array:
    """Entries of IQ1_S as 0, 1 and 2."""
    return _entries(_grid("IQ1_S") + 1)


@functools.cache
def _shifted() -> Array:
    """Entries of IQ1_M as codes whose middle is 7.5: first with an eighth added, then all again with one taken off."""
    eighths = 8 * _grid("IQ1_M")
    return _entries((np.concatenate([eighths + 1, eighths - 1]) + 15) / 2)


@functools.cache
def _signs(negative: int) -> Array:
    """Eight signs by the byte that has a bit for each, as a word with ``negative`` where there is one."""
    bits = spread(np.arange(256, dtype=np.uint8)[:, None], 1, 1)
    return (bits * np.uint8(negative)).view(np.uint64)[:, 0]


@functools.cache
def _seven_signs(negative: int) -> Array:
    """The same by seven bits: the eighth is such that the number of signs is even."""
    seven = np.arange(128, dtype=np.uint8)
    odd = spread(seven[:, None], 1, 1).sum(axis=1, dtype=np.uint8) & 1
    signs: Array = _signs(negative)[seven | odd << 7]
    return signs


def _signs_and_odd(data: Array, negative: int) -> tuple[Array, Array]:
    """A word for each group of 32 weights: four times seven signs, then what its scale is times."""
    found = words(data, 4)
    at = (found[..., None] >> _SIGNS_AT) & np.uint32(0x7F)
    return _seven_signs(negative)[at.reshape(*data.shape[:-1], data.shape[-1])], 2 * (found >> np.uint32(28)) + 1


def _above(low: Array, high: Array) -> Array:
    """Positions whose bits above the first eight lie somewhere else."""
    positions: Array = low | (high.astype(np.uint16) << np.uint16(8))
    return positions


def _scales(step: Array, odd: Array, unit: float) -> Array:
    """Of groups: an odd number times that of their block, and a power of two. No product is rounded."""
    return step * np.float32(unit) * odd.astype(np.float32)


# -- blocks -----------------------------------------------------------------------------------------------------------


def _iq2_xxs(blocks: Array) -> Read:
    scale, rest = parts(blocks, 2)
    both = rest.reshape(*rest.shape[:-1], 8, 8)  # of each group
    positions, others = (each.reshape(*rest.shape[:-1], 32) for each in parts(both, 4))
    signs, odd = _signs_and_odd(others, _FLIPPED)
    codes = (_positions("IQ2_XXS")[positions] ^ signs).view(np.uint8)
    return Read(_scales(half(scale), odd, 0.125), codes=codes)


def _iq2_xs(blocks: Array) -> Read:
    scale, both, scales = parts(blocks, 2, 64)
    found = words(both, 2)
    codes = _positions("IQ2_XS")[found & np.uint16(511)] ^ _seven_signs(_FLIPPED)[found >> np.uint16(9)]
    return Read(_scales(half(scale), 2 * spread(scales, 4, 1) + 1, 0.125), codes=codes.view(np.uint8))


def _iq2_s(blocks: Array) -> Read:
    scale, low, signs, high, scales = parts(blocks, 2, 32, 32, 8)
    codes = _positions("IQ2_S")[_above(low, spread(high, 2, 1))] ^ _signs(_FLIPPED)[signs]
    return Read(_scales(half(scale), 2 * spread(scales, 4, 1) + 1, 0.125), codes=codes.view(np.uint8))


def _iq3_xxs(blocks: Array) -> Read:
    scale, positions, rest = parts(blocks, 2, 64)
    negative, odd = _signs_and_odd(rest, 0xFF)
    flipped = (_halves()[positions].view(np.uint64) ^ negative).view(np.int8)
    return Read(_scales(half(scale), odd, 0.5), codes=flipped - negative.view(np.int8))


def _iq3_s(blocks: Array) -> Read:
    scale, low, high, signs, scales = parts(blocks, 2, 64, 8, 32)
    codes = _odd()[_above(low, spread(high, 1, 1))].view(np.uint64) ^ _signs(_TURNED)[signs]
    of_groups = _scales(half(scale), 2 * spread(scales, 4, 1) + 1, 2)
    return Read(of_groups, zeros=np.full_like(of_groups, _MIDDLE), codes=codes.view(np.uint8))


def _iq1_s(blocks: Array) -> Read:
    scale, low, rest = parts(blocks, 2, 32)
    found = words(rest, 2)
    high = (found[..., None] >> _HIGH_AT) & np.uint16(7)
    codes = _ternary()[_above(low, high.reshape(low.shape))].view(np.uint8)
    zeros = np.where(found >> np.uint16(15), np.float32(1.125), np.float32(0.875))
    odd = 2 * (found >> np.uint16(12) & np.uint16(7)) + 1
    return Read(_scales(half(scale), odd, 1), zeros=zeros, codes=codes)


def _iq1_m(blocks: Array) -> Read:
    low, high, rest = parts(blocks, 32, 16)
    found = words(rest, 2)
    quarters = found >> np.uint16(12)  # of the float16
    scale = np.bitwise_or.reduce(quarters << np.array([0, 4, 8, 12], np.uint16), axis=-1, keepdims=True).astype("<u2")
    odd = 2 * ((found[..., None] >> _HIGH_AT) & np.uint16(7)) + 1
    codes = _shifted()[_above(low, spread(high, 4, 1))].view(np.uint8)
    of_groups = _scales(half(scale), odd.reshape(*rest.shape[:-1], 16), 0.25)
    return Read(of_groups, zeros=np.full_like(of_groups, _MIDDLE), codes=codes)


GRIDS = {
    "IQ1_S": Layout(256, 50, 32, 2, _iq1_s, zeros=True, scales=6),
    "IQ1_M": Layout(256, 56, 16, 4, _iq1_m, zeros=True, scales=8),
    "IQ2_XXS": Layout(256, 66, 32, 3, _iq2_xxs, table=IQ2_LEVELS, scales=6),
    "IQ2_XS": Layout(256, 74, 16, 3, _iq2_xs, table=IQ2_LEVELS, scales=10),
    "IQ2_S": Layout(256, 82, 16, 3, _iq2_s, table=IQ2_LEVELS, scales=10),
    "IQ3_XXS": Layout(256, 98, 32, 6, _iq3_xxs, scales=6),
    "IQ3_S": Layout(256, 110, 32, 4, _iq3_s, zeros=True, scales=6),
}
