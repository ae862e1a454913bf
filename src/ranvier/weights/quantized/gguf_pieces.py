"""What kinds of GGUF blocks are told by: how a block lies in bytes, and the pieces that it is read with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ranvier.quantize.fields import Codes, Field
from ranvier.records import dataclass
from ranvier.weights.quantized.tensors import Array


@dataclass(frozen=True)
class Read:
    """What blocks hold: a scale of each group; a zero too, or a minimum. Where they have minima, ``steps`` are what
    scales and minima of a block are multiples of. ``codes`` are in the order of the weights, where no fields hold
    them."""

    scales: Array
    minima: Array | None = None
    steps: tuple[Array, Array] | None = None
    zeros: Array | None = None
    codes: Array | None = None


@dataclass(frozen=True)
class Layout:
    """How a block lies in bytes. ``read`` is given [..., size]; ``fields`` are where codes have their bits, if a file
    has codes of single weights."""

    weights: int
    size: int  # bytes
    group: int  # weights that share a scale
    bits: int
    read: Callable[[Array], Read]
    fields: tuple[Field, ...] = ()
    raised: int | None = None  # signed codes, by which none is below zero
    zeros: bool = False  # whether it has any, or minima that become such
    table: Array | None = None
    scales: int | None = None  # bytes of them, where codes do not take all others

    @property
    def codes(self) -> Codes | None:
        return Codes(self.weights, self.size, self.fields, self.raised) if self.fields else None

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block that hold scales, zeros and minima."""
        return self.size - self.weights * self.bits // 8 if self.scales is None else self.scales


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
