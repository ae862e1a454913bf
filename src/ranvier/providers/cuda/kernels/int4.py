"""4-bit weights in the order kernels read them.

A chunk is 16 bytes of one row, 32 consecutive weights: four 32-bit words, nibbles i and i + 4 of word j being weights
8 i + 2 j and 8 i + 2 j + 1. A thread reads one chunk at once, all of it under one scale (groups are multiples of 32).
One shift and one mask leave a pair of weights in the two halves of a word, and for every shift the four words of a
chunk meet eight neighbours of the token.

Sixteen rows are a tile. A step is four neighbouring chunks of each of its rows, a kilobyte: what the lanes of a warp
read together stands together, so no two of them want the same bank of shared memory, and any number of steps of a tile
are one piece of memory. Steps of a tile follow each other, tiles follow each other, and so do the scales of a group in
the 16 rows of a tile. Where rows or chunks end before the last tile or step do, scales are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CHUNK = 32  # weights
ROWS = 16  # of a tile
STEP = 4 * CHUNK  # weights of a row
STEP_BYTES = ROWS * STEP // 2
MIDDLE = 8  # the zero point of weights that have none of their own


@dataclass(frozen=True)
class Int4:
    """Weights ``[n, k]``: ``words`` [tiles, steps, 16, 4, 4] int32, ``scales`` [tiles, groups, 16], ``zeros`` as many
    bytes, or none."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    n: int
    k: int
    group: int

    @property
    def steps(self) -> int:
        return int(self.words.shape[1])

    @property
    def groups(self) -> int:
        return int(self.scales.shape[1])

    @property
    def nbytes(self) -> int:
        parts = [self.words, self.scales, *([] if self.zeros is None else [self.zeros])]
        return sum(part.numel() * part.element_size() for part in parts)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The last axis of bytes as twice as many codes, the low one first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def pack(codes: torch.Tensor, scales: torch.Tensor, k: int, group: int, zeros: torch.Tensor | None = None) -> Int4:
    """From the layout of MatMulNBits: bytes [N, groups, group / 2], scales [N, groups], zero points two to a byte."""
    if group % CHUNK:
        raise ValueError(f"groups of {group}: a multiple of {CHUNK} is needed")
    n = codes.shape[0]
    chunks = _up(k, STEP) // CHUNK
    rows = _nibbles(codes.reshape(n, -1))
    padded = rows.new_full((n, chunks * CHUNK), MIDDLE)
    padded[:, :k] = rows[:, :k]
    words = torch.zeros((n, chunks, 4), dtype=torch.int32, device=codes.device)
    pairs = padded.reshape(n, chunks, 4, 4, 2).to(torch.int32)
    for i in range(4):
        words |= pairs[:, :, i, :, 0] << (4 * i) | pairs[:, :, i, :, 1] << (4 * i + 16)
    given = -(-k // group)
    groups = -(-chunks * CHUNK // group)

    def beside(values: torch.Tensor) -> torch.Tensor:
        """One for each group, of which the last are for weights that were added."""
        made = values.new_zeros((n, groups))
        made[:, :given] = values[:, :given]
        return made

    own = None if zeros is None else beside(_nibbles(zeros.reshape(n, -1)))
    return _tiled(words, beside(scales.reshape(n, given)), own, k, group)


def _tiled(words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, k: int, group: int) -> Int4:
    """Rows of words [N, chunks, 4] and of what stands beside them [N, groups], in the order of tiles."""
    n = words.shape[0]
    tiles = -(-n // ROWS)

    def whole(rows: torch.Tensor) -> torch.Tensor:
        made = rows.new_zeros((tiles * ROWS, *rows.shape[1:]))
        made[:n] = rows
        return made

    def beside(rows: torch.Tensor) -> torch.Tensor:
        return whole(rows).view(tiles, ROWS, -1).transpose(1, 2).contiguous()

    steps = whole(words).view(tiles, ROWS, -1, 4, 4).transpose(1, 2).contiguous()
    return Int4(steps, beside(scales), None if zeros is None else beside(zeros), n, k, group)


def _rows(matrix: Int4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Words [N, chunks, 4], scales and zero points [N, groups], row by row."""

    def beside(tiles: torch.Tensor) -> torch.Tensor:
        return tiles.transpose(1, 2).flatten(0, 1)[: matrix.n]

    words = matrix.words.transpose(1, 2).flatten(0, 1).flatten(1, 2)[: matrix.n]
    return words, beside(matrix.scales), None if matrix.zeros is None else beside(matrix.zeros)


def chosen(matrix: Int4, rows: slice) -> Int4:
    """Some rows as a matrix of their own."""
    words, scales, zeros = _rows(matrix)
    return _tiled(words[rows], scales[rows], None if zeros is None else zeros[rows], matrix.k, matrix.group)


def interleaved(gate: Int4, up: Int4) -> Int4:
    """Rows of two matrices in turn, so that one program has both halves of a gated result."""

    def in_turn(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tuple(parts), dim=1).flatten(0, 1)

    return _together((gate, up), in_turn)


def stacked(*matrices: Int4) -> Int4:
    """Matrices that read the same token as one, results side by side."""
    return _together(matrices, lambda parts: torch.cat(tuple(parts)))


def _together(matrices: Sequence[Int4], joined: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Int4:
    first = matrices[0]
    if len({(each.group, each.k, each.zeros is None) for each in matrices}) > 1:
        raise ValueError("matrices must be quantized alike")
    words, scales, zeros = zip(*map(_rows, matrices))
    own = None if first.zeros is None else joined([each for each in zeros if each is not None])
    return _tiled(joined(words), joined(scales), own, first.k, first.group)
