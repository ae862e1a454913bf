"""Products of a few tokens on the matrix unit, with weights of 4 bits (``few_tokens.h`` says how). ``w4a16.gemv``
serves where these do not: on other machines, for other types, and for tokens at odd places.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_longlong
from dataclasses import dataclass

import torch

from ranvier.providers.cuda.kernels import native
from ranvier.providers.cuda.kernels.int4 import CHUNK, Int4
from ranvier.providers.cuda.kernels.jit import blocks

MOST_TOKENS = 8
_ROWS = 16  # of a tile
_STEP = 4 * CHUNK  # elements
_PAD, _BESIDE_PAD = 32, 16  # bytes behind a row in the ring, and behind its scales and zero points, if rows are apart
_LINE = 128  # bytes of which stages are multiples
_BARRIERS = 256  # bytes
_MOST_SHARED, _MOST_RING = 220 << 10, 150 << 10
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


SHORT, LONG = Cut(8, 8, 1), Cut(16, 3, 1)  # for rows of up to so many bytes, and for longer ones
_SHORT_ROW = 2048


@dataclass(frozen=True)
class _Ring:
    """How weights go through shared memory: ``depth`` bytes of a row in a piece, ``stages`` of ``stage`` bytes."""

    together: bool
    depth: int
    stages: int
    stage: int


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


def suits(x: torch.Tensor, weights: Int4, around: Around) -> bool:
    """Tokens [M, K] at multiples of 16 bytes, everything of their type."""
    if not x.is_cuda or not 0 < x.shape[0] <= MOST_TOKENS or x.dtype not in _HALVES:
        return False
    if any(each is not None and each.dtype is not x.dtype for each in (around.bias, around.residual, around.norm)):
        return False
    if x.shape[1] % 8 or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return False
    if weights.scales.dtype not in (x.dtype, torch.float32) or native.missing(x.device.index, _SINCE):
        return False
    cut = _cut_for(16 * weights.words.shape[1])
    ring = _ring_for(weights, cut, x.device.index)
    # what the copy engine takes is whole multiples of 16 bytes
    pieces = [2 * ring.depth // weights.group] * (not ring.together)
    counts = [] if ring.together and weights.n % _ROWS == 0 else [weights.scales.shape[1], *pieces]
    whole = all(count * size % 16 == 0 for count in counts for size in _beside(weights))
    fits = _room(x.shape[0], weights, ring, cut) <= _MOST_SHARED
    return whole and fits and _splits(weights.group // CHUNK)


def _beside(weights: Int4) -> list[int]:
    """Bytes of what stands beside every group."""
    return [weights.scales.element_size(), *([] if weights.zeros is None else [1])]


def _splits(of_group: int) -> bool:
    """Whether scales are for whole steps, or for parts of one and a step has whole ones."""
    return of_group % 4 == 0 or 4 % of_group == 0


def _cut_for(row: int) -> Cut:
    return SHORT if row <= _SHORT_ROW else LONG


def coded(x: torch.Tensor, weights: Int4, out: torch.Tensor, around: Around, cut: Cut | None = None) -> torch.Tensor:
    """x [M, K], out [M, N]; weights of a gated pair are ``int4.interleaved``."""
    cut = cut or _cut_for(16 * weights.words.shape[1])
    m, of_group, device = x.shape[0], weights.group // CHUNK, x.device.index
    ring = _ring_for(weights, cut, device)
    chunks, groups = weights.words.shape[1], weights.scales.shape[1]
    sets = 1 if of_group >= 4 else _held(m, of_group) // 2
    steps = blocks(blocks(2 * ring.depth, _STEP), cut.warps) * sets  # of a warp in a piece
    registers = _REGISTERS // (cut.resident * _threads(cut))
    defines = {
        "HALF": x.dtype is torch.float16,
        "FLOAT_OUT": out.dtype is torch.float32,
        "GATED": around.gated,
        "ACTIVATION": _ACTIVATIONS.index(around.activation),
        "WARPS": cut.warps,
        "RESIDENT": cut.resident,
        "PDL": around.pdl,
        "TOGETHER": ring.together,
        "DEPTH": ring.depth,
        "STAGES": ring.stages,
        "TOKENS": _held(m, of_group),
        "FLOAT_SCALES": weights.scales.dtype is torch.float32,
        "HAS_ZEROS": weights.zeros is not None,
        "OF_GROUP": of_group,
        "GROUPS": groups if ring.together else 2 * ring.depth // weights.group,
        "HELD": chunks * CHUNK <= 2 * ring.depth and _OF_A_THREAD + _OF_A_STEP * steps <= registers,
    }
    tiles, residual = blocks(weights.n, _ROWS), around.residual
    numbers = (m, weights.n, x.shape[1], chunks, groups)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0))
    native.function("few_tokens_int4", native.named(defines), device).launch(
        blocks(tiles, _tiles_of_a_block(weights.n, cut, device)),
        _threads(cut),
        _room(m, weights, ring, cut),
        (
            *(x, weights.words, weights.scales, weights.zeros, around.bias, residual, around.norm, out),
            *map(c_int, numbers),
            *map(c_longlong, strides),
            c_float(around.eps),
        ),
        pdl=around.pdl,
    )
    return out


def _held(tokens: int, of_group: int) -> int:
    """For how many tokens there is room: two in a right operand where each chunk of them has a column."""
    return tokens if of_group >= 4 else 2 if tokens <= 2 else 4 if tokens <= 4 else 8


def _threads(cut: Cut) -> int:
    return 32 * (cut.warps + 2)


def _tiles_of_a_block(rows: int, cut: Cut, device: int) -> int:
    return blocks(blocks(rows, _ROWS), native.facts(device)[1] * cut.resident)


def _ring_for(weights: Int4, cut: Cut, device: int) -> _Ring:
    """Rows of codes follow each other, and so do their scales."""
    row = 16 * weights.words.shape[1]
    whole = _ROWS * (row + weights.scales.shape[1] * sum(_beside(weights)))
    if whole <= cut.most:
        stage = _lines(whole)
        stages = min(cut.stages, _tiles_of_a_block(weights.n, cut, device), max(1, _MOST_RING // stage))
        return _Ring(True, row, stages, stage)
    groups = 2 * cut.depth // weights.group
    row = cut.depth + _PAD + sum(groups * size + _BESIDE_PAD for size in _beside(weights))
    return _Ring(False, cut.depth, cut.stages, _lines(_ROWS * row))


def _lines(size: int) -> int:
    return blocks(size, _LINE) * _LINE


def _room(tokens: int, weights: Int4, ring: _Ring, cut: Cut) -> int:
    """Bytes of shared memory: barriers, the ring, tokens, their sums, and two tiles of partial sums."""
    of_group = weights.group // CHUNK
    held, steps = _held(tokens, of_group), blocks(weights.words.shape[1] * CHUNK, _STEP)
    sums = 4 * (held * steps * (1 if of_group >= 4 else 4) + 3)
    return _BARRIERS + ring.stages * ring.stage + held * (2 * steps * _STEP + 64) + sums + 8 * cut.warps * held * _ROWS
