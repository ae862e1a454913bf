"""Products of a few tokens on the matrix unit, with weights of 4 bits or of the tokens' own type (``few_tokens.h`` says
how). ``w4a16.gemv``, ``gemv.gemv`` and ``gemv.gated_gemv`` serve where these do not: on other machines, for other
types, and for tokens at odd places.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int, c_longlong
from dataclasses import dataclass
from typing import Any

import torch

from ranvier.providers.cuda.kernels import native
from ranvier.providers.cuda.kernels.int4 import CHUNK, Int4
from ranvier.providers.cuda.kernels.jit import blocks

FLOATS_USED = False  # Triton's are as fast with one token (bench/NOTES-gpu.md)
MOST_TOKENS = 8
MOST_MATRICES = 3
_ROWS = 16  # of a tile
_CODED_STEP, _STEP = 4 * CHUNK, 64  # elements
_PAD, _BESIDE_PAD = 32, 16  # bytes behind a row in the ring, and behind its scales and zero points, if rows are apart
_LINE = 128  # bytes of which stages are multiples
_BARRIERS = 256  # bytes
_MOST_SHARED = 220 << 10
_REGISTERS = 1 << 16  # of a multiprocessor
_OF_A_THREAD, _OF_A_STEP = 60, 18  # of them without tokens, and for those of a step
_HALVES = (torch.bfloat16, torch.float16)
_ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu")
_SINCE = (9, 0)  # what has the copy engine and starts kernels early


@dataclass(frozen=True)
class Cut:
    """``warps`` multiply; up to ``stages`` pieces are under way, tiles of 16 rows if they have at most ``most`` bytes
    and ``depth`` bytes of each of the rows else; ``resident`` blocks are on a multiprocessor at a time, each with as
    many tiles as it takes."""

    warps: int = 8
    stages: int = 3
    resident: int = 2
    most: int = 65 << 10
    depth: int = 2048


SHORT, LONG = Cut(8, 2, 2), Cut(16, 3, 1)  # for rows of up to so many bytes, and for longer ones
_SHORT_ROW = 2048


@dataclass(frozen=True)
class _Ring:
    """How weights go through shared memory: ``depth`` bytes of a row in a piece, ``stages`` of ``stage`` bytes."""

    together: bool
    depth: int
    stages: int
    stage: int

    @property
    def defines(self) -> dict[str, int]:
        return {"TOGETHER": self.together, "DEPTH": self.depth, "STAGES": self.stages}


@dataclass(frozen=True)
class Around:
    """What rides along: ``activation(rms_norm(x) @ W.T + bias) + residual``. ``gated``: ``activation(gate) * up``."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    eps: float = 1e-5
    gated: bool = False
    activation: str = ""
    pdl: bool = False

    @property
    def read(self) -> tuple[torch.Tensor | None, ...]:
        """What has to be of the tokens' type."""
        return self.bias, self.residual, self.norm


def suits_codes(x: torch.Tensor, weights: Int4, around: Around) -> bool:
    if weights.scales.dtype not in (x.dtype, torch.float32) or not _suits(x, around.read):
        return False
    cut = _cut_for(16 * weights.words.shape[1])
    ring = _coded_ring(weights, cut, x.device.index)
    # what the copy engine takes is whole multiples of 16 bytes
    pieces = [2 * ring.depth // weights.group] * (not ring.together)
    counts = [] if ring.together and weights.n % _ROWS == 0 else [weights.scales.shape[1], *pieces]
    whole = all(count * size % 16 == 0 for count in counts for size in _beside(weights))
    fits = _coded_room(x.shape[0], weights, ring, cut) <= _MOST_SHARED
    return whole and fits and _splits(weights.group // CHUNK)


def _beside(weights: Int4) -> list[int]:
    """Bytes of what stands beside every group."""
    return [weights.scales.element_size(), *([] if weights.zeros is None else [1])]


def _splits(of_group: int) -> bool:
    """Whether scales are for whole steps, or for parts of one and a step has whole ones."""
    return of_group % 4 == 0 or 4 % of_group == 0


def suits(x: torch.Tensor, matrices: Sequence[torch.Tensor], around: Around) -> bool:
    """The same for matrices that are there as floats: rows that begin at multiples of 16 bytes."""
    if not FLOATS_USED or not 0 < len(matrices) <= MOST_MATRICES or not _suits(x, (*matrices, *around.read)):
        return False
    whole = all(w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0 for w in matrices)
    cut = _cut_for(2 * x.shape[1])
    ring = _ring_of(matrices, around.gated, cut, x.device.index)
    return whole and _room(x.shape[0], x.shape[1], ring, cut) <= _MOST_SHARED


def _suits(x: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
    if not x.is_cuda or not 0 < x.shape[0] <= MOST_TOKENS or x.dtype not in _HALVES:
        return False
    if any(other is not None and other.dtype is not x.dtype for other in others):
        return False
    whole = x.shape[1] % 8 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return whole and not native.missing(x.device.index, _SINCE)


def _cut_for(row: int) -> Cut:
    return SHORT if row <= _SHORT_ROW else LONG


def coded(x: torch.Tensor, weights: Int4, out: torch.Tensor, around: Around, cut: Cut | None = None) -> torch.Tensor:
    """x [M, K], out [M, N]; weights of a gated pair are ``int4.interleaved``."""
    cut = cut or _cut_for(16 * weights.words.shape[1])
    m, of_group = x.shape[0], weights.group // CHUNK
    ring = _coded_ring(weights, cut, x.device.index)
    chunks, groups = weights.words.shape[1], weights.scales.shape[1]
    sets = 1 if of_group >= 4 else _held(m, of_group) // 2
    steps = blocks(blocks(2 * ring.depth, _CODED_STEP), cut.warps) * sets  # of a warp in a piece
    registers = _REGISTERS // (cut.resident * _threads(cut))
    defines = {
        "TOKENS": _held(m, of_group),
        "FLOAT_SCALES": weights.scales.dtype is torch.float32,
        "HAS_ZEROS": weights.zeros is not None,
        "OF_GROUP": of_group,
        "GROUPS": groups if ring.together else 2 * ring.depth // weights.group,
        "HELD": chunks * CHUNK <= 2 * ring.depth and _OF_A_THREAD + _OF_A_STEP * steps <= registers,
    }
    numbers = (m, weights.n, x.shape[1], chunks, groups)
    given = (weights.words, weights.scales, weights.zeros)
    room = _coded_room(m, weights, ring, cut)
    _launch("few_tokens_int4", x, given, out, around, cut, defines | ring.defines, numbers, (), room)
    return out


def floats(
    x: torch.Tensor, matrices: Sequence[torch.Tensor], out: torch.Tensor, around: Around, cut: Cut | None = None
) -> torch.Tensor:
    """x [M, K]; one to three matrices [N, K] with results side by side, or gate and up."""
    m, k = x.shape
    cut = cut or _cut_for(2 * k)
    padded = [*matrices, *[matrices[0]] * (MOST_MATRICES - len(matrices))]
    ends = [sum(matrix.shape[0] for matrix in matrices[:count]) for count in range(1, MOST_MATRICES + 1)]
    numbers = (m, ends[-1], ends[0], ends[1], k)
    steps = [matrix.stride(0) for matrix in padded]
    ring = _ring_of(matrices, around.gated, cut, x.device.index)
    defines = {"TOKENS": m, **ring.defines}
    _launch("few_tokens_float", x, padded, out, around, cut, defines, numbers, steps, _room(m, k, ring, cut))
    return out


def _launch(
    name: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    out: torch.Tensor,
    around: Around,
    cut: Cut,
    defines: dict[str, Any],
    numbers: Sequence[int],
    steps: Sequence[int],
    room: int,
) -> None:
    device, residual = x.device.index, around.residual
    defines = defines | {
        "HALF": x.dtype is torch.float16,
        "FLOAT_OUT": out.dtype is torch.float32,
        "GATED": around.gated,
        "ACTIVATION": _ACTIVATIONS.index(around.activation),
        "WARPS": cut.warps,
        "RESIDENT": cut.resident,
        "PDL": around.pdl,
    }
    tiles = blocks(numbers[1], _ROWS)
    each = _tiles_of_a_block(numbers[1], cut, device)
    strides = (x.stride(0), *steps, 0 if residual is None else residual.stride(0), out.stride(0))
    native.function(name, native.named(defines), device).launch(
        (blocks(tiles, each),),
        _threads(cut),
        room,
        (
            *(x, *weights, around.bias, residual, around.norm, out),
            *map(c_int, numbers),
            *map(c_longlong, strides),
            c_float(around.eps),
        ),
        pdl=around.pdl,
    )


def _held(tokens: int, of_group: int) -> int:
    """For how many tokens there is room: two in a right operand where each chunk of them has a column."""
    return tokens if of_group >= 4 else 2 if tokens <= 2 else 4 if tokens <= 4 else 8


def _threads(cut: Cut) -> int:
    return 32 * (cut.warps + 2)


def _tiles_of_a_block(rows: int, cut: Cut, device: int) -> int:
    return blocks(blocks(rows, _ROWS), native.facts(device)[1] * cut.resident)


def _coded_ring(weights: Int4, cut: Cut, device: int) -> _Ring:
    """Rows of codes follow each other, and so do their scales."""
    row = 16 * weights.words.shape[1]
    whole = _ROWS * (row + weights.scales.shape[1] * sum(_beside(weights)))
    if whole <= cut.most:
        return _Ring(True, row, min(cut.stages, _tiles_of_a_block(weights.n, cut, device)), _lines(whole))
    groups = 2 * cut.depth // weights.group
    row = cut.depth + _PAD + sum(groups * size + _BESIDE_PAD for size in _beside(weights))
    return _Ring(False, cut.depth, cut.stages, _lines(_ROWS * row))


def _ring_of(matrices: Sequence[torch.Tensor], gated: bool, cut: Cut, device: int) -> _Ring:
    """Together if a tile is of one matrix, or of as many rows of both, and these have nothing between them."""
    k, rows = matrices[0].shape[1], _ROWS // 2 if gated else _ROWS
    dense = all(matrix.stride(0) == k and matrix.shape[0] % rows == 0 for matrix in matrices)
    if dense and 2 * k * _ROWS <= cut.most:
        tiles = _tiles_of_a_block(sum(matrix.shape[0] for matrix in matrices), cut, device)
        return _Ring(True, 2 * k, min(cut.stages, tiles), _lines(2 * k * _ROWS))
    return _Ring(False, cut.depth, cut.stages, _lines(_ROWS * (cut.depth + _PAD)))


def _lines(size: int) -> int:
    return blocks(size, _LINE) * _LINE


def _coded_room(tokens: int, weights: Int4, ring: _Ring, cut: Cut) -> int:
    """Bytes of shared memory: barriers, the ring, tokens, their sums, and two tiles of partial sums."""
    of_group = weights.group // CHUNK
    held, steps = _held(tokens, of_group), blocks(weights.words.shape[1] * CHUNK, _CODED_STEP)
    sums = 4 * (held * steps * (1 if of_group >= 4 else 4) + 3)
    return _around_tokens(cut, ring, held) + held * (2 * steps * _CODED_STEP + 64) + sums


def _room(tokens: int, k: int, ring: _Ring, cut: Cut) -> int:
    return _around_tokens(cut, ring, tokens) + tokens * (2 * blocks(k, _STEP) * _STEP + 64)


def _around_tokens(cut: Cut, ring: _Ring, tokens: int) -> int:
    return _BARRIERS + ring.stages * ring.stage + 8 * cut.warps * tokens * _ROWS
