"""Micro-kernel shapes as data: which tiles a register file can hold, and how well each one runs.

A tile is ``rows`` x ``vectors`` accumulators held in registers while the kernel walks along K. Every k step loads
``vectors`` vectors of B and broadcasts ``rows`` elements of A. Any smaller number of rows or vectors is a valid
kernel too: remainders get kernels of their own size, never padding.
"""

from __future__ import annotations

import functools

from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass


@dataclass(frozen=True)
class Tile:
    """The largest tile of a family: ``vectors`` fixes the panel width of packed B, ``rows`` is the most rows of A."""

    registers: int  # vector registers the instruction set must have
    rows: int
    vectors: int
    score: float  # share of the FMA peak a long K reaches (measured; relative order is what matters)
    strided: int = 0  # the most rows where rows lie one stride apart, if that is more: then they need fewer pointers

    @property
    def strided_rows(self) -> int:
        return self.strided or self.rows


# Of 32 registers, what is left to sums and B where each row of A keeps one whose lanes the products pick.
LANE_REGISTERS = 28
TILES: tuple[Tile, ...] = (
    Tile(32, 6, 4, 0.97),
    Tile(32, 8, 3, 0.97),
    Tile(32, 12, 2, 0.95),
    Tile(32, 12, 1, 0.85, strided=24),
    Tile(LANE_REGISTERS, 5, 4, 0.97),
    Tile(LANE_REGISTERS, 7, 3, 0.97),
    Tile(LANE_REGISTERS, 9, 2, 0.95),
    Tile(LANE_REGISTERS, 12, 1, 0.85),
    Tile(16, 4, 3, 0.95),
    Tile(16, 6, 2, 0.95),
    Tile(16, 12, 1, 0.80),
)
# Without fused multiply-add a product needs a register of its own before it is added.
PLAIN_TILES: tuple[Tile, ...] = (
    Tile(32, 6, 4, 0.93),
    Tile(32, 8, 3, 0.94),
    Tile(32, 12, 2, 0.96),
    Tile(32, 12, 1, 0.85),
    Tile(16, 6, 2, 0.95),
    Tile(16, 12, 1, 0.85),
)


@functools.cache
def tiles(isa: Isa) -> tuple[Tile, ...]:
    """Tiles of an instruction set, widest first."""
    table = TILES if isa.fma else PLAIN_TILES
    most = max(t.registers for t in table if t.registers <= isa.registers)
    return tuple(t for t in table if t.registers == most)


def rows_for(isa: Isa, vectors: int) -> int:
    """The most rows, one stride apart, of a micro-kernel on panels of this width."""
    return min((t.vectors, t.strided_rows) for t in tiles(isa) if t.vectors >= vectors)[1]


def tile_of(isa: Isa, vectors: int) -> Tile:
    """The tile whose panels are ``vectors`` wide."""
    return next(t for t in tiles(isa) if t.vectors == vectors)


def widest(isa: Isa) -> int:
    return max(t.vectors for t in tiles(isa))
