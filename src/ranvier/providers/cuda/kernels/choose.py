"""Which kernel for which product: rows of a table, the first that fits.

The library (cuBLAS through torch) stands in the table like a kernel of ours. bench/NOTES-gpu.md has what was
predicted and seen: with many tokens products are bound by the matrix unit, which it knows better; with few they are
bound by reading weights, and what counts is that everything around the product rides along in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile, power_of_two

LIBRARY = "library"
UNPACKED = "unpacked"  # weights to floats, then the library
GEMV = "gemv"
GEMM = "gemm"


@dataclass(frozen=True)
class Choice:
    kernel: str
    tile: Tile | MatrixTile | None = None


@dataclass(frozen=True)
class Row:
    """Holds for up to ``tokens`` of ``weights`` with up to ``k`` elements a row and ``n`` rows or more; 0 is any."""

    weights: str
    tokens: int
    k: int
    choice: Choice
    n: int = 0


_TABLE = (
    Row("float", 1, 2048, Choice(GEMV, Tile(4, 2048, 8))),
    Row("float", 1, 4096, Choice(GEMV, Tile(4, 512, 2)), n=32768),
    Row("float", 1, 0, Choice(GEMV, Tile(4, 1024, 4)), n=2560),
    Row("float", 1, 0, Choice(GEMV, Tile(2, 1024, 4))),
    Row("float", 4, 0, Choice(GEMV, Tile(2, 1024, 4))),
    Row("float", 0, 0, Choice(LIBRARY)),
    Row("gated", 1, 2048, Choice(GEMV, Tile(4, 2048, 8))),
    Row("gated", 1, 0, Choice(GEMV, Tile(8, 512, 2))),
    Row("gated", 4, 0, Choice(GEMV, Tile(1, 1024, 4))),
    Row("gated", 0, 0, Choice(LIBRARY)),
    Row("int4", 1, 2048, Choice(GEMV, Tile(4, 1024, 1))),
    Row("int4", 8, 0, Choice(GEMV, Tile(4, 2048, 2))),
    Row("int4", 0, 0, Choice(UNPACKED)),
    Row("int8", 4, 0, Choice(GEMV, Tile(1, 2048, 4))),
    Row("int8", 64, 0, Choice(GEMM, MatrixTile(rows=64, columns=64, depth=128, warps=4, stages=4))),
    Row("int8", 0, 0, Choice(GEMM, MatrixTile(rows=128, columns=128, depth=128, warps=8, stages=3))),
    Row("fp8", 4, 0, Choice(GEMV, Tile(1, 2048, 4))),
    Row("fp8", 64, 0, Choice(GEMM, MatrixTile(rows=64, columns=64, depth=128, warps=4, stages=4))),
    Row("fp8", 0, 0, Choice(GEMM, MatrixTile(rows=128, columns=128, depth=128, warps=8, stages=3))),
    Row("ternary", 4, 2048, Choice(GEMV, Tile(2, 2048, 1))),
    Row("ternary", 4, 0, Choice(GEMV, Tile(2, 4096, 2))),
    Row("ternary", 64, 0, Choice(GEMM, MatrixTile(rows=64, columns=64, depth=256, warps=4, stages=3))),
    Row("ternary", 0, 0, Choice(GEMM, MatrixTile(rows=128, columns=128, depth=256, warps=8, stages=2))),
)
WEIGHTS = tuple(dict.fromkeys(row.weights for row in _TABLE))


def product(weights: str, tokens: int, k: int, n: int = 0) -> Choice:
    """How ``tokens`` are multiplied with ``weights`` of n rows of k elements."""
    for row in _TABLE:
        if row.weights != weights or (row.tokens and tokens > row.tokens):
            continue
        if (not row.k or k <= row.k) and n >= row.n:
            return row.choice
    raise ValueError(f"no product with weights {weights!r}: one of {', '.join(WEIGHTS)}")


def gemv_tile(weights: str, k: int, tokens: int = 1, n: int = 0) -> Tile:
    """The tile of a product that has to be a matrix-vector product, whatever the table prefers."""
    choice = product(weights, tokens, k, n)
    tile = choice.tile if isinstance(choice.tile, Tile) else Tile(2, 1024, 4)
    return Tile(tile.rows, min(tile.depth, max(256, power_of_two(k))), tile.warps, tile.ahead)


def decode_splits(batch: int, kv_heads: int, context: int, processors: int, tokens: int = 64) -> int:
    """Enough programs for every multiprocessor, none with less than one tile of the context.

    A long context gets more of them than there are multiprocessors: eight tiles one after the other are enough to hide
    what starting and joining cost.
    """
    wanted = max(1, processors // max(1, batch * kv_heads))
    tiles = -(-context // tokens)
    return max(1, min(max(wanted, tiles // 8), tiles, 64))
