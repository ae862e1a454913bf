"""Products of a few tokens on the matrix unit, with weights of 4 bits (``few_tokens.h`` says how). ``w4a16.gemv``
serves where these do not: on other machines, for other types, and for tokens at odd places.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_longlong
from dataclasses import dataclass

import torch

from ranvier.providers.cuda.kernels import native
from ranvier.providers.cuda.kernels.int4 import CHUNK, ROWS, STEP, STEP_BYTES, Int4
from ranvier.providers.cuda.kernels.jit import blocks

MOST_TOKENS = 8
_LINE = 128  # bytes of which stages are multiples
_BARRIER = 8  # bytes
_MOST_SHARED, _MOST_RING = 220 << 10, 160 << 10
_REGISTERS, _FOUR_WARPS = 1 << 16, 128  # of a multiprocessor; threads
_OF_A_THREAD, _OF_A_STEP = 64, 11  # of them without tokens, and for those of a step
_TOKEN_STEP = 256  # bytes of a step of a token; what is beside it takes 16 for all, or for every chunk
_HALVES = (torch.bfloat16, torch.float16)
_ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu")
_SINCE = (9, 0)  # what has the copy engine and starts kernels early


@dataclass(frozen=True)
class Cut:
    """``warps`` multiply; up to ``stages`` pieces of ``steps`` of a tile are under way; ``resident`` blocks are on a
    multiprocessor at a time, each with as many tiles as it takes."""

    warps: int = 8
    stages: int = 8
    resident: int = 1
    steps: int = 16


SHORT, LONG = Cut(8, 16, 1, 8), Cut(16, 8)  # for rows of up to so many steps, and for longer ones
_SHORT_ROW = 32


@dataclass(frozen=True)
class _Ring:
    """How weights go through shared memory: ``steps`` of a tile in a piece, with scales of ``groups`` of each row, and
    room for ``stages`` of them, of ``stage`` bytes each."""

    steps: int
    groups: int
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
    cut = _cut_for(weights)
    ring = _ring_for(weights, cut, x.device.index)
    return _whole_groups(weights, ring.steps) and _room(x.shape[0], weights, ring, cut) <= _MOST_SHARED


def _whole_groups(weights: Int4, steps: int) -> bool:
    """Whether a piece of so many steps has scales of its own: all of them, or one that goes on."""
    chunks, of_group = 4 * steps, weights.group // CHUNK
    return steps == weights.steps or chunks % of_group == 0 or of_group % chunks == 0


def _cut_for(weights: Int4) -> Cut:
    return SHORT if weights.steps <= _SHORT_ROW else LONG


def coded(x: torch.Tensor, weights: Int4, out: torch.Tensor, around: Around, cut: Cut | None = None) -> torch.Tensor:
    """x [M, K], out [M, N]; weights of a gated pair are ``int4.interleaved``."""
    cut = cut or _cut_for(weights)
    m, device = x.shape[0], x.device.index
    ring = _ring_for(weights, cut, device)
    pieces = blocks(weights.steps, ring.steps)
    steps = pieces * blocks(ring.steps, cut.warps) * _sets(m, weights)  # of a warp, with each right operand
    defines = {
        "HALF": x.dtype is torch.float16,
        "FLOAT_OUT": out.dtype is torch.float32,
        "TOKENS": m,
        "GATED": around.gated,
        "ACTIVATION": _ACTIVATIONS.index(around.activation),
        "WARPS": cut.warps,
        "STAGES": ring.stages,
        "PIECES": pieces,
        "RESIDENT": cut.resident,
        "PDL": around.pdl,
        "ROW_STEPS": weights.steps,
        "STEPS": ring.steps,
        "FLOAT_SCALES": weights.scales.dtype is torch.float32,
        "HAS_ZEROS": weights.zeros is not None,
        "OF_GROUP": weights.group // CHUNK,
        "GROUPS": ring.groups,
        "HELD": _OF_A_THREAD + _OF_A_STEP * steps <= _registers(cut),
    }
    tiles, residual = blocks(weights.n, ROWS), around.residual
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0))
    native.function("few_tokens_int4", native.named(defines), device).launch(
        blocks(tiles, _tiles_of_a_block(weights.n, cut, device)),
        _threads(cut),
        _room(m, weights, ring, cut),
        (
            *(x, weights.words, weights.scales, weights.zeros, around.bias, residual, around.norm, out),
            *map(c_int, (weights.n, x.shape[1], weights.groups)),
            *map(c_longlong, strides),
            c_float(around.eps),
        ),
        pdl=around.pdl,
    )
    return out


def _whole(weights: Int4) -> bool:
    """Whether scales are for whole steps: then four tokens are one right operand."""
    return weights.group % STEP == 0


def _sets(tokens: int, weights: Int4) -> int:
    return blocks(tokens, 4) if _whole(weights) else tokens


def _registers(cut: Cut) -> int:
    """Of a thread: warps get theirs by fours, one for each scheduler."""
    return _REGISTERS // (cut.resident * blocks(_threads(cut), _FOUR_WARPS) * _FOUR_WARPS)


def _threads(cut: Cut) -> int:
    return 32 * (cut.warps + 2)


def _tiles_of_a_block(rows: int, cut: Cut, device: int) -> int:
    return blocks(blocks(rows, ROWS), native.facts(device)[1] * cut.resident)


def _ring_for(weights: Int4, cut: Cut, device: int) -> _Ring:
    """All steps of a row, or some of them at a time."""
    steps = min(weights.steps, cut.steps)
    groups = weights.groups if steps == weights.steps else max(1, 4 * steps * CHUNK // weights.group)
    beside = weights.scales.element_size() + (weights.zeros is not None)
    stage = blocks(steps * STEP_BYTES + groups * ROWS * beside, _LINE) * _LINE
    pieces = _tiles_of_a_block(weights.n, cut, device) * blocks(weights.steps, steps)
    return _Ring(steps, groups, min(cut.stages, pieces, max(1, _MOST_RING // stage)), stage)


def _room(tokens: int, weights: Int4, ring: _Ring, cut: Cut) -> int:
    """Bytes of shared memory: barriers, the ring, tokens and what is beside them, and two tiles of partial sums."""
    shares = 1 if _whole(weights) else 4
    sums = 4 * cut.warps * tokens * (2 * shares * ROWS + 1)
    barriers = blocks(_BARRIER * (2 * ring.stages + 4), _LINE) * _LINE
    return barriers + ring.stages * ring.stage + tokens * weights.steps * (_TOKEN_STEP + 16 * shares) + sums
