"""Attention of a new token over a cache in one launch, the splits of a head being joined by a cluster of blocks
(``cluster_attention.cu`` says how). ``decode_attention`` serves where this does not: on other machines, for pages, for
caps and windows, and for caches so long that more blocks have to read them.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_longlong
from dataclasses import dataclass

import torch

from ranvier.providers.cuda.kernels import native
from ranvier.providers.cuda.kernels.decode_attention import NewToken

_DIMS = (64, 128)
_MOST_GROUP = 8  # query heads of a key head
_MOST_POSITIONS = 8192  # of a cache: longer ones are read by more blocks than a cluster has
_TILE = 32  # tokens of a warp at a time
_KEY_PAD = 8  # elements
_LINE = 128  # bytes at whose multiples the warps' memory begins
_HALVES = (torch.bfloat16, torch.float16)
_SINCE = (9, 0)


@dataclass(frozen=True)
class Cut:
    """Blocks of ``warps``, and so many of them for a key head."""

    warps: int = 4
    cluster: int = 16


def suits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: NewToken) -> bool:
    """q ``[B, heads, D]``, caches ``[B, positions, kv heads, D]`` by their strides, rows at multiples of 16 bytes."""
    dim, group = q.shape[2], q.shape[1] // k_cache.shape[2]
    if not q.is_cuda or dim not in _DIMS or group > _MOST_GROUP or k_cache.shape[1] > _MOST_POSITIONS:
        return False
    caches = (k_cache, v_cache)
    if q.dtype not in _HALVES or any(x.dtype is not q.dtype or x.stride(-1) != 1 for x in (q, *caches, new.k, new.v)):
        return False
    whole = all(c.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in c.stride()[:3]) for c in caches)
    angles = new.cos.dtype is new.sin.dtype and new.cos.dtype in (q.dtype, torch.float32)
    dense = new.cos.is_contiguous() and new.sin.is_contiguous()
    return whole and angles and dense and not native.missing(q.device.index, _SINCE)


def cluster_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    new: NewToken,
    *,
    scale: float | None = None,
    pdl: bool = False,
    early: bool = False,
    cut: Cut | None = None,
) -> torch.Tensor:
    """As ``decode_attention`` with a new token has it. ``early``: see there."""
    cut = cut or Cut()
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    defines = {
        "HALF": q.dtype is torch.float16,
        "DIM": dim,
        "GROUP": group,
        "WARPS": cut.warps,
        "CLUSTER": cut.cluster,
        "ROTARY": 2 * new.cos.shape[1],
        "INTERLEAVED": new.interleaved,
        "FLOAT_ANGLES": new.cos.dtype is torch.float32,
        "EARLY": early,
        "PDL": pdl,
    }
    steps = [step for cache in (k_cache, v_cache) for step in cache.stride()[:3]]
    strides = (*q.stride()[:2], *steps, *new.k.stride()[:2], *new.v.stride()[:2], *out.stride()[:2])
    native.function("cluster_attention", native.named(defines), q.device.index).launch(
        (cut.cluster, kv_heads, batch),
        32 * cut.warps,
        _room(dim, group, cut.warps),
        (
            *(q, k_cache, v_cache, lengths, new.k, new.v, new.cos, new.sin, out),
            c_float(1.0 / math.sqrt(dim) if scale is None else scale),
            *map(c_longlong, strides),
        ),
        pdl=pdl,
        cluster=cut.cluster,
    )
    return out


def _room(dim: int, group: int, warps: int) -> int:
    """Bytes of shared memory: queries, the new token, what warps found, and the keys and values of each."""
    common = 4 * (group * dim + 2 * dim + (warps + 1) * group * (dim + 2))
    return common + _LINE + warps * (4 * _TILE * (2 * dim + _KEY_PAD) + 4 * _TILE * group)
