"""Which experts tokens visit, and visits in the order of experts: what layers of experts do before they multiply."""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.jit import kernel, power_of_two

_LARGEST_TABLE = 8192  # elements of what visits are sorted by at a time
_NO_KEY = tl.constexpr(-(2**31))


@kernel
def _route(
    router: tl.tensor,
    weigher: tl.tensor,
    x: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    laid: tl.tensor,
    experts: tl.tensor,
    features: tl.tensor,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    there = lane < experts
    likes = tl.load(router + token * experts + lane, mask=there, other=0.0).to(tl.float32) + 0.0  # -0 is 0
    if weigher is not None:
        weights = tl.load(weigher + token * experts + lane, mask=there, other=0.0).to(tl.float32)
    else:
        top = tl.max(tl.where(there, likes, -3.4028234663852886e38), axis=0)
        weights = tl.where(there, tl.exp(likes - top), 0.0)
        total = tl.sum(weights, axis=0)
        weights = weights / tl.where(total == 0.0, 1.0, total)
    bits = likes.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # whole numbers in the same order; what is no number comes last
    key = tl.where(likes == likes, key, _NO_KEY + 1)
    key = tl.where(there, key, _NO_KEY)
    slot = tl.arange(0, SLOTS)
    places = tl.zeros((SLOTS,), tl.int32)
    picked = tl.zeros((SLOTS,), tl.float32)
    for i in range(K):
        best = tl.min(tl.where(key == tl.max(key, axis=0), lane, EXPERTS), axis=0)  # the first of equals
        places = tl.where(slot == i, best, places)
        picked = tl.where(slot == i, tl.sum(tl.where(lane == best, weights, 0.0), axis=0), picked)
        key = tl.where(lane == best, _NO_KEY, key)
    if NORMALIZE:
        picked = picked / tl.sum(picked, axis=0)
    tl.store(chosen + token * K + slot, places, mask=slot < K)
    tl.store(shares + token * K + slot, picked, mask=slot < K)
    if laid is not None:
        for first in range(0, features, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(x + token * features + at, mask=at < features, other=0.0)
            to = at % PLANES * (features // PLANES) + at // PLANES
            tl.store(laid + token * features + to, value, mask=at < features)


@kernel
def _sort(
    chosen: tl.tensor,
    order: tl.tensor,
    owners: tl.tensor,
    count: tl.tensor,
    owned: tl.tensor,
    VISITS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    lane = tl.arange(0, EXPERTS)
    totals = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        expert = tl.load(chosen + at, mask=at < count, other=-1)
        totals += tl.sum((expert[:, None] == lane[None, :]).to(tl.int32), axis=0)
    aligned = (totals + (VISITS - 1)) // VISITS * VISITS
    ends = tl.cumsum(aligned, axis=0)
    starts = ends - aligned
    all_of_them = tl.sum(aligned, axis=0)
    for first in range(0, owned, CHUNK):
        at = first + tl.arange(0, CHUNK)
        owner = tl.sum((ends[None, :] <= at[:, None] * VISITS).to(tl.int32), axis=1)
        tl.store(owners + at, tl.where(at * VISITS < all_of_them, owner, -1), mask=at < owned)
    gap = (starts + totals)[:, None] + tl.arange(0, VISITS)[None, :]
    tl.store(order + gap, tl.zeros((EXPERTS, VISITS), tl.int32) - 1, mask=gap < ends[:, None])
    for first in range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        expert = tl.load(chosen + at, mask=at < count, other=-1)
        hits = (expert[:, None] == lane[None, :]).to(tl.int32)
        place = tl.sum(hits * (starts[None, :] + tl.cumsum(hits, axis=0) - 1), axis=1)
        tl.store(order + place, at, mask=at < count)
        starts += tl.sum(hits, axis=0)


def route(
    router: torch.Tensor,
    weigher: torch.Tensor | None,
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    *,
    normalize: bool,
    laid: torch.Tensor | None = None,
    planes: int = 1,
) -> None:
    """The best experts of each token, ``chosen`` [T, K] of int32, and how much of each it takes, ``shares`` of float32;
    of equals the first is better. ``laid`` gets tokens in planes."""
    tokens, experts = router.shape
    k = chosen.shape[1]
    features = x.shape[1]
    _route[(tokens,)](
        router,
        weigher,
        x,
        chosen,
        shares,
        laid,
        experts,
        features,
        EXPERTS=power_of_two(experts),
        K=k,
        SLOTS=power_of_two(k),
        NORMALIZE=normalize,
        PLANES=planes,
        BLOCK=min(2048, power_of_two(features)),
        num_warps=8 if laid is not None and features > 1024 else 1,
    )


def most_blocks(visits: int, experts: int, block: int) -> int:
    """There are no more blocks of one expert, however tokens choose."""
    return (visits + min(visits, experts) * (block - 1)) // block


def sort(chosen: torch.Tensor, order: torch.Tensor, owners: torch.Tensor, experts: int, block: int) -> None:
    """``owners`` [most_blocks] are the experts of blocks, -1 where there is none, ``order`` the visits of each, -1 in
    gaps; all of int32."""
    wide = power_of_two(experts)
    chunk = max(16, min(256, _LARGEST_TABLE // wide, power_of_two(chosen.numel())))
    _sort[(1,)](
        chosen,
        order,
        owners,
        chosen.numel(),
        owners.numel(),
        VISITS=block,
        CHUNK=chunk,
        EXPERTS=wide,
        num_warps=4,
    )
