"""4-bit weights in the order kernels read them.

A chunk is 16 bytes of one row, 32 consecutive weights: four 32-bit words, nibbles i and i + 4 of word j being weights
8 i + 2 j and 8 i + 2 j + 1. A thread reads one chunk at once, all of it under one scale (groups are multiples of 32).
One shift and one mask leave a pair of weights in the two halves of a word, and for every shift the four words of a
chunk meet eight neighbours of the token. Chunks of a row follow each other, rows follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 32  # weights
MIDDLE = 8  # the zero point of weights that have none of their own


@dataclass(frozen=True)
class Int4:
    """Weights ``[N, K]``: ``words`` [N, chunks, 4] int32, ``scales`` [N, groups], ``zeros`` as many bytes, or none."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    k: int
    group: int

    @property
    def n(self) -> int:
        return int(self.words.shape[0])

    @property
    def nbytes(self) -> int:
        parts = [self.words, self.scales, *([] if self.zeros is None else [self.zeros])]
        return sum(part.numel() * part.element_size() for part in parts)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The last axis of bytes as twice as many codes, the low one first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack(codes: torch.Tensor, scales: torch.Tensor, k: int, group: int, zeros: torch.Tensor | None = None) -> Int4:
    """From the layout of MatMulNBits: bytes [N, groups, group / 2], scales [N, groups], zero points two to a byte."""
    if group % CHUNK:
        raise ValueError(f"groups of {group}: a multiple of {CHUNK} is needed")
    n = codes.shape[0]
    chunks = -(-k // CHUNK)
    rows = _nibbles(codes.reshape(n, -1))
    padded = rows.new_full((n, chunks * CHUNK), MIDDLE)
    padded[:, :k] = rows[:, :k]
    words = torch.zeros((n, chunks, 4), dtype=torch.int32, device=codes.device)
    pairs = padded.reshape(n, chunks, 4, 4, 2).to(torch.int32)
    for i in range(4):
        words |= pairs[:, :, i, :, 0] << (4 * i) | pairs[:, :, i, :, 1] << (4 * i + 16)
    groups = -(-k // group)
    own = None if zeros is None else _nibbles(zeros.reshape(n, -1))[:, :groups].contiguous()
    return Int4(words, scales.reshape(n, groups).contiguous(), own, k, group)


def interleaved(gate: Int4, up: Int4) -> Int4:
    """Rows of two matrices in turn, so that one program has both halves of a gated result."""
    if (gate.zeros is None) != (up.zeros is None) or gate.group != up.group:
        raise ValueError("gate and up must be quantized alike")

    def rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a, b), dim=1).flatten(0, 1)

    zeros = None if gate.zeros is None or up.zeros is None else rows(gate.zeros, up.zeros)
    return Int4(rows(gate.words, up.words), rows(gate.scales, up.scales), zeros, gate.k, gate.group)


def stacked(*matrices: Int4) -> Int4:
    """Matrices that read the same token as one, results side by side."""
    first = matrices[0]
    zeros = [matrix.zeros for matrix in matrices if matrix.zeros is not None]
    if len(zeros) not in (0, len(matrices)) or any(matrix.group != first.group for matrix in matrices):
        raise ValueError("matrices must be quantized alike")
    words = torch.cat([matrix.words for matrix in matrices])
    scales = torch.cat([matrix.scales for matrix in matrices])
    return Int4(words, scales, torch.cat(zeros) if zeros else None, first.k, first.group)
