"""What kinds of GGUF blocks are told by: how a block lies in bytes, and the pieces that it is read with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.records import dataclass
from ranvier.weights.quantized.tensors import Array


@dataclass(frozen=True)
class Read:
    """What blocks hold: codes in the order of the weights, and a scale of each group; a zero too, or a minimum. Where
    they have minima, ``steps`` are what scales and minima of a block are multiples of."""

    codes: Array
    scales: Array
    minima: Array | None = None
    steps: tuple[Array, Array] | None = None
    zeros: Array | None = None


@dataclass(frozen=True)
class Layout:
    """How a block lies in bytes. ``read`` is given [..., size]."""

    weights: int
    size: int  # bytes
    group: int  # weights that share a scale
    bits: int
    read: Callable[[Array], Read]
    codes: type[np.integer[Any]] = np.int8
    zeros: bool = False  # whether it has any, or minima that become such
    table: Array | None = None
    scales: int | None = None  # bytes of them, where codes do not take all others

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block that hold scales, zeros and minima."""
        return self.size - self.weights * self.bits // 8 if self.scales is None else self.scales


def spread(data: Array, bits: int, run: int) -> Array:
    """Codes that share bytes. Of a run of bytes come the lowest bits first, of one byte after another, then those
    above them."""
    runs = data.reshape(*data.shape[:-1], data.shape[-1] // run, run)
    codes = np.empty((*runs.shape[:-1], 8 // bits, run), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for k in range(8 // bits):
        codes[..., k, :] = (runs >> np.uint8(k * bits)) & mask
    return codes.reshape(*data.shape[:-1], data.shape[-1] * 8 // bits)


def joined(low: Array, high: Array, bits: int) -> Array:
    """Codes whose bits above the first ones lie somewhere else."""
    codes: Array = low | (high << np.uint8(bits))
    return codes


def signed(codes: Array, middle: int) -> Array:
    """Codes that are counted from the least one."""
    lowered: Array = codes.view(np.int8) - np.int8(middle)
    return lowered


def half(data: Array) -> Array:
    """The float16 in two bytes, as [..., 1]."""
    return words(data, 2).view("<f2").astype(np.float32)


def words(data: Array, size: int) -> Array:
    """Runs of so many bytes as whole numbers, of which the lowest byte comes first."""
    return np.ascontiguousarray(data).view(f"<u{size}")


def parts(blocks: Array, *sizes: int) -> list[Array]:
    """A block cut into runs of bytes of these sizes, and the rest."""
    return np.split(blocks, np.cumsum(sizes), axis=-1)
