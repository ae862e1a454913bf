"""Products of a few tokens with 4-bit weights on the matrix unit (``few_tokens_int4.cu`` says how).

Takes what ``w4a16.gemv`` takes, which serves where this does not: other machines and types, and tokens at odd places.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int, c_longlong
from dataclasses import dataclass

import torch

from ranvier.providers.cuda.kernels import native
from ranvier.providers.cuda.kernels.int4 import CHUNK, Int4
from ranvier.providers.cuda.kernels.jit import blocks

MOST_TOKENS = 8
_ROWS, _STEP = 16, 4  # rows of a tile, chunks of a step
_MOST_SHARED = 200 << 10
_ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu")
_SINCE, _EARLY_SINCE = (8, 0), (9, 0)  # what has the instructions, and what starts kernels early


@dataclass(frozen=True)
class Cut:
    """``warps`` share the sum over K, ``ahead`` steps of 128 elements are under way in each; so many blocks are on a
    multiprocessor at a time, each with as many tiles of rows as it takes."""

    warps: int = 8
    ahead: int = 2
    resident: int = 3


CUT = Cut()


def suits(x: torch.Tensor, weights: Int4, *others: torch.Tensor | None) -> bool:
    """``others``: what else is read in the type of the tokens: a bias, a residual, the weights of a norm."""
    if not x.is_cuda or not 0 < x.shape[0] <= MOST_TOKENS or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if weights.scales.dtype not in (x.dtype, torch.float32) or any(
        o is not None and o.dtype != x.dtype for o in others
    ):
        return False
    whole = x.shape[1] % 8 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return whole and _room(x.shape[0], weights, CUT) <= _MOST_SHARED and not _reason(x.device.index)


def gemv(
    x: torch.Tensor,
    weights: Int4,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-5,
    gated: bool = False,
    activation: str = "",
    pdl: bool = False,
    cut: Cut = CUT,
) -> torch.Tensor:
    """``activation(rms_norm(x) @ W.T + bias) + residual``, x [M, K], out [M, N]; ``gated`` as in ``w4a16.gemv``."""
    m, k = x.shape
    n, chunks = weights.n, weights.words.shape[1]
    device = x.device.index
    defines = {
        "HALF": x.dtype is torch.float16,
        "FLOAT_SCALES": weights.scales.dtype is torch.float32,
        "FLOAT_OUT": out.dtype is torch.float32,
        "OF_GROUP": weights.group // CHUNK,
        "PAIRS": _pairs(m),
        "GATED": gated,
        "ACTIVATION": _ACTIVATIONS.index(activation),
        "WARPS": cut.warps,
        "AHEAD": cut.ahead,
        "PDL": pdl and _facts(device)[0] >= _EARLY_SINCE,
    }
    tiles = blocks(n, _ROWS)
    each = blocks(tiles, _facts(device)[1] * cut.resident)
    numbers = (m, n, k, chunks, weights.scales.shape[1])
    steps = (x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0))
    native.function("few_tokens_int4", native.named(defines), device).launch(
        blocks(tiles, each),
        32 * cut.warps,
        _room(m, weights, cut),
        (
            *(x, weights.words, weights.scales, weights.zeros, bias, residual, norm, out),
            *map(c_int, numbers),
            *map(c_longlong, steps),
            c_float(eps),
        ),
        pdl=bool(defines["PDL"]),
    )
    return out


def _pairs(tokens: int) -> int:
    """Of tokens that share what was unpacked: 1, 2 or 4."""
    return 1 if tokens <= 2 else 2 if tokens <= 4 else 4


def _room(tokens: int, weights: Int4, cut: Cut) -> int:
    """Bytes of shared memory: tokens, zeros, sums of chunks, and two tiles of partial sums."""
    held, steps = 2 * _pairs(tokens), blocks(weights.words.shape[1], _STEP)
    return held * (steps * 256 + 64) + 64 + 4 * held * steps * _STEP + 8 * cut.warps * held * _ROWS


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
