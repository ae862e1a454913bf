"""Products of a few tokens on the matrix unit, with weights of 4 bits or of the tokens' own type (``few_tokens.h`` says
how). ``w4a16.gemv``, ``gemv.gemv`` and ``gemv.gated_gemv`` serve where these do not: on other machines, for other
types, and for tokens at odd places.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_longlong
from dataclasses import dataclass
from typing import Any

import torch

from ranvier.providers.cuda.kernels import native
from ranvier.providers.cuda.kernels.int4 import CHUNK, Int4
from ranvier.providers.cuda.kernels.jit import blocks

USED = False  # nobody but who asks for them by name, until they have been measured (bench/gpu_llama_step.py does)
MOST_TOKENS = 8
MOST_MATRICES = 3
_ROWS = 16  # of a tile
_CODED_STEP, _STEP = 4 * CHUNK, 64  # elements
_MOST_SHARED = 200 << 10
_HALVES = (torch.bfloat16, torch.float16)
_ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu")
_SINCE, _EARLY_SINCE = (8, 0), (9, 0)  # what has the instructions, and what starts kernels early


@dataclass(frozen=True)
class Cut:
    """``warps`` share the sum over K, ``ahead`` steps are under way in each; ``resident`` blocks are on a
    multiprocessor at a time, each with as many tiles of rows as it takes."""

    warps: int = 8
    ahead: int = 2
    resident: int = 3


CODED_CUT, CUT = Cut(8, 2, 3), Cut(8, 4, 2)


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
    typed = weights.scales.dtype in (x.dtype, torch.float32)
    return typed and _suits(x, around.read) and _coded_room(x.shape[0], weights, CODED_CUT) <= _MOST_SHARED


def suits(x: torch.Tensor, matrices: Sequence[torch.Tensor], around: Around) -> bool:
    """The same for matrices that are there as floats: rows that begin at multiples of 16 bytes."""
    if not 0 < len(matrices) <= MOST_MATRICES or not _suits(x, (*matrices, *around.read)):
        return False
    whole = all(w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0 for w in matrices)
    return whole and _room(x.shape[0], x.shape[1], CUT) <= _MOST_SHARED


def _suits(x: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
    if not USED or not x.is_cuda or not 0 < x.shape[0] <= MOST_TOKENS or x.dtype not in _HALVES:
        return False
    if any(other is not None and other.dtype is not x.dtype for other in others):
        return False
    whole = x.shape[1] % 8 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return whole and not _reason(x.device.index)


def coded(x: torch.Tensor, weights: Int4, out: torch.Tensor, around: Around, cut: Cut = CODED_CUT) -> torch.Tensor:
    """x [M, K], out [M, N]; weights of a gated pair are ``int4.interleaved``."""
    defines = {
        "FLOAT_SCALES": weights.scales.dtype is torch.float32,
        "OF_GROUP": weights.group // CHUNK,
        "PAIRS": _pairs(x.shape[0]),
    }
    numbers = (x.shape[0], weights.n, x.shape[1], weights.words.shape[1], weights.scales.shape[1])
    given = (weights.words, weights.scales, weights.zeros)
    room = _coded_room(x.shape[0], weights, cut)
    _launch("few_tokens_int4", x, given, out, around, cut, defines, numbers, (), room)
    return out


def floats(
    x: torch.Tensor, matrices: Sequence[torch.Tensor], out: torch.Tensor, around: Around, cut: Cut = CUT
) -> torch.Tensor:
    """x [M, K]; one to three matrices [N, K] with results side by side, or gate and up."""
    m, k = x.shape
    padded = [*matrices, *[matrices[0]] * (MOST_MATRICES - len(matrices))]
    ends = [sum(matrix.shape[0] for matrix in matrices[:count]) for count in range(1, MOST_MATRICES + 1)]
    numbers = (m, ends[-1], ends[0], ends[1], k)
    steps = [matrix.stride(0) for matrix in padded]
    _launch("few_tokens_float", x, padded, out, around, cut, {"TOKENS": m}, numbers, steps, _room(m, k, cut))
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
    capability, processors = _facts(device)
    pdl = around.pdl and capability >= _EARLY_SINCE
    defines = defines | {
        "HALF": x.dtype is torch.float16,
        "FLOAT_OUT": out.dtype is torch.float32,
        "GATED": around.gated,
        "ACTIVATION": _ACTIVATIONS.index(around.activation),
        "WARPS": cut.warps,
        "AHEAD": cut.ahead,
        "RESIDENT": cut.resident,
        "PDL": pdl,
    }
    tiles = blocks(numbers[1], _ROWS)
    each = blocks(tiles, processors * cut.resident)
    strides = (x.stride(0), *steps, 0 if residual is None else residual.stride(0), out.stride(0))
    native.function(name, native.named(defines), device).launch(
        blocks(tiles, each),
        32 * cut.warps,
        room,
        (
            *(x, *weights, around.bias, residual, around.norm, out),
            *map(c_int, numbers),
            *map(c_longlong, strides),
            c_float(around.eps),
        ),
        pdl=pdl,
    )


def _pairs(tokens: int) -> int:
    """Of tokens that share what was unpacked: 1, 2 or 4."""
    return 1 if tokens <= 2 else 2 if tokens <= 4 else 4


def _coded_room(tokens: int, weights: Int4, cut: Cut) -> int:
    """Bytes of shared memory: tokens, zeros, sums of chunks, and two tiles of partial sums."""
    held, steps = 2 * _pairs(tokens), blocks(weights.words.shape[1] * CHUNK, _CODED_STEP)
    sums = 4 * held * steps * (_CODED_STEP // CHUNK)
    return held * (2 * steps * _CODED_STEP + 64) + 64 + sums + 8 * cut.warps * held * _ROWS


def _room(tokens: int, k: int, cut: Cut) -> int:
    return tokens * (2 * blocks(k, _STEP) * _STEP + 64) + 8 * cut.warps * tokens * _ROWS


@functools.cache
def _facts(device: int) -> tuple[tuple[int, int], int]:
    """The capability of a device, and how many multiprocessors it has."""
    facts = torch.cuda.get_device_properties(device)
    return (facts.major, facts.minor), facts.multi_processor_count


@functools.cache
def _reason(device: int) -> str:
    """Why a device cannot run this."""
    if _facts(device)[0] < _SINCE or torch.version.hip:
        return "no such matrix unit"
    return native.missing()
