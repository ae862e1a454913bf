"""How a product is cut up: panels of B, blocks of rows, and which micro-kernel fits a shape best."""

from __future__ import annotations

import functools
import math

from ranvier.codegen.llvm.gemm.tiles import Tile, tiles
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass
from ranvier.varying import largest, smallest, varies


@dataclass(frozen=True)
class Cut:
    """``total`` things in ``count`` pieces as even as can be: the first ``large`` have ``size``, the others one less.

    Even pieces because a small remainder would run on a kernel that cannot keep the FMA units busy.
    """

    total: int
    count: int

    @classmethod
    def of(cls, total: int, most: int) -> Cut:
        """Pieces of at most ``most``."""
        return cls(total, -(-total // most))

    @property
    def size(self) -> int:
        return -(-self.total // self.count) if self.count else 1

    @property
    def large(self) -> int:
        return self.count - (self.size * self.count - self.total)

    @property
    def small(self) -> int:
        """The size of the others."""
        return self.size - 1

    def start(self, k: int) -> int:
        return k * self.size - max(0, k - self.large) * (self.size - self.small)


@dataclass(frozen=True)
class Blocks(Cut):
    """``total`` things in pieces of ``most`` and one of the rest: for units that take whole blocks in any case."""

    most: int

    @classmethod
    def of(cls, total: int, most: int) -> Blocks:
        return cls(total, -(-total // most), most)

    @property
    def size(self) -> int:
        return max(1, min(self.total, self.most))

    @property
    def large(self) -> int:
        return self.total // self.size

    @property
    def small(self) -> int:
        return self.total - self.large * self.size or self.size


@dataclass(frozen=True)
class Panels:
    """The columns of B in panels of whole vectors; packed, each panel is K x width elements, one after the other."""

    n: int
    lanes: int
    cut: Cut  # of vectors

    @classmethod
    def of(cls, n: int, lanes: int, vectors: int) -> Panels:
        return cls(n, lanes, Cut.of(-(-n // lanes), vectors))

    @property
    def last_lanes(self) -> int:
        """Columns that exist in the last vector."""
        return self.n - (-(-self.n // self.lanes) - 1) * self.lanes

    def packed_elements(self, k: int) -> int:
        return self.cut.total * self.lanes * k


# Cycles a call of a micro-kernel costs besides its FMAs: its prologue, the stores, and the driver around it.
_CALL = 70.0


def cycles(rows: int, vectors: int, tile: Tile, k: int) -> float:
    """Predicted cycles of one micro-kernel call."""
    chains = rows * vectors
    steps = max(chains / 2, (rows + vectors) / 2, 2.0 if chains >= 4 else 1.5) / tile.score
    return k * steps + _CALL


def best_tile(m: int, n: int, k: int, isa: Isa, element_bytes: int) -> Tile:
    """The tile for an M x N x K product."""
    found = _best_tile.__wrapped__ if varies(m) or varies(n) or varies(k) else _best_tile
    return found(m, n, k, isa, element_bytes)


@functools.lru_cache(4096)
def _best_tile(m: int, n: int, k: int, isa: Isa, element_bytes: int) -> Tile:
    vectors = -(-n // isa.lanes(element_bytes))
    found: list[tuple[float, int, Tile]] = []
    for tile in tiles(isa):
        panels = Cut.of(vectors, tile.vectors)
        if panels.size != tile.vectors and any(t.vectors == panels.size for t in tiles(isa)):
            continue  # what it would be cut into is another tile of the table
        rows = Cut.of(m, tile.strided_rows)
        cost = 0.0
        for r, count in ((rows.size, rows.large), (rows.size - 1, rows.count - rows.large)):
            for v, times in ((panels.size, panels.large), (panels.size - 1, panels.count - panels.large)):
                if count and times:
                    cost += count * times * cycles(r, v, tile, k)
        found.append((cost, -tile.vectors, tile))
    return min(found, key=lambda f: f[:2])[2]


TILE_US = 12.0  # work that is worth handing out by itself
_GFLOPS, _GBPS = 100.0, 10.0  # rough speed of one core


def microseconds(flops: float, nbytes: float) -> float:
    """Roughly how long work takes, to size tiles by."""
    return flops / _GFLOPS / 1e3 + nbytes / _GBPS / 1e3


def grain(tiles: int, work: float, threads: int) -> int:
    """How many tiles to hand out at a time: enough work for a turn, and some turns for everybody."""
    found: int = largest(1, smallest(tiles // (4 * threads), math.floor(tiles * TILE_US / largest(work, 1e-3))))
    return found
