"""Products of one to four tokens with matrices of float weights, bound by reading the weights.

A program owns a few rows of the matrix and walks along them; every thread holds 16 bytes of each row, and the next
piece of the weights is asked for before the last one is used. Three things ride along because a decoding step has no
time for more launches:

* the norm before the product: ``W (x g) / rms(x)`` needs the sum of squares only when the product is done, so every
  program adds it up beside the product instead of another launch writing the normed token;
* up to three matrices that read the same token (query, key, value) as one launch, results side by side;
* gate and up projections, whose results meet in registers.

Weights do not depend on the launch before. With ``pdl`` the first piece of them is asked for while that one still
runs.
"""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import activated, let_next_start, wait_for_inputs
from ranvier.providers.cuda.kernels.jit import Tile, blocks, kernel, power_of_two

MOST_TOKENS = 4
TILE = Tile(rows=4, depth=1024, warps=4)


@kernel
def _gemv(
    x: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    k: tl.tensor,
    x_step: tl.tensor,
    w0_step: tl.tensor,
    w1_step: tl.tensor,
    w2_step: tl.tensor,
    residual_step: tl.tensor,
    out_step: tl.tensor,
    eps: tl.tensor,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    MATRICES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    w = w0
    n = n0
    step = w0_step
    first = 0
    if MATRICES > 1:
        blocks0 = tl.cdiv(n0, ROWS)
        blocks1 = tl.cdiv(n1, ROWS)
        if block >= blocks0:
            block -= blocks0
            first = n0
            if block >= blocks1:
                block -= blocks1
                first += n1
                w = w2
                n = n2
                step = w2_step
            else:
                w = w1
                n = n1
                step = w1_step
    row = block * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, DEPTH)[None, None, :]
    rows = w + row.to(tl.int64)[None, :, None] * step
    row_mask = row[None, :, None] < n
    token = tl.arange(0, TOKENS)
    tokens = x + token[:, None, None] * x_step
    token_mask = token[:, None, None] < m
    let_next_start(PDL)
    weight = tl.load(rows + at, mask=row_mask & (at < k), other=0.0, eviction_policy="evict_first")
    if AHEAD > 1:
        second = DEPTH + at
        following = tl.load(rows + second, mask=row_mask & (second < k), other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    total = tl.zeros((TOKENS, ROWS, DEPTH), tl.float32)
    squares = tl.zeros((TOKENS, 1, DEPTH), tl.float32)
    for start in range(0, DEPTH if ONCE else k, DEPTH):
        if not ONCE:
            ahead = start + AHEAD * DEPTH + at
            newest = tl.load(rows + ahead, mask=row_mask & (ahead < k), other=0.0, eviction_policy="evict_first")
        here = start + at
        value = tl.load(tokens + here, mask=token_mask & (here < k), other=0.0).to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= tl.load(norm + here, mask=here < k, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * value
        if AHEAD > 1:
            weight = following
            following = newest
        elif not ONCE:
            weight = newest
    result = tl.sum(total, axis=2)
    if norm is not None:
        result *= tl.rsqrt(tl.sum(squares, axis=2) / k + eps)
    column = row + first
    if bias is not None:
        result += tl.load(bias + column, mask=row < n, other=0.0).to(tl.float32)[None, :]
    result = activated(result, ACTIVATION)
    mask = (token[:, None] < m) & (row[None, :] < n)
    if residual is not None:
        beside = residual + token[:, None] * residual_step + column[None, :]
        result += tl.load(beside, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * out_step + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@kernel
def _gated(
    x: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_step: tl.tensor,
    gate_step: tl.tensor,
    up_step: tl.tensor,
    out_step: tl.tensor,
    eps: tl.tensor,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, DEPTH)[None, None, :]
    gates = gate + row.to(tl.int64)[None, :, None] * gate_step
    ups = up + row.to(tl.int64)[None, :, None] * up_step
    row_mask = row[None, :, None] < n
    token = tl.arange(0, TOKENS)
    tokens = x + token[:, None, None] * x_step
    token_mask = token[:, None, None] < m
    let_next_start(PDL)
    gate_weight = tl.load(gates + at, mask=row_mask & (at < k), other=0.0, eviction_policy="evict_first")
    up_weight = tl.load(ups + at, mask=row_mask & (at < k), other=0.0, eviction_policy="evict_first")
    if AHEAD > 1:
        second = DEPTH + at
        second_mask = row_mask & (second < k)
        second_gate = tl.load(gates + second, mask=second_mask, other=0.0, eviction_policy="evict_first")
        second_up = tl.load(ups + second, mask=second_mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    gate_total = tl.zeros((TOKENS, ROWS, DEPTH), tl.float32)
    up_total = tl.zeros((TOKENS, ROWS, DEPTH), tl.float32)
    squares = tl.zeros((TOKENS, 1, DEPTH), tl.float32)
    for start in range(0, DEPTH if ONCE else k, DEPTH):
        if not ONCE:
            ahead = start + AHEAD * DEPTH + at
            ahead_mask = row_mask & (ahead < k)
            next_gate = tl.load(gates + ahead, mask=ahead_mask, other=0.0, eviction_policy="evict_first")
            next_up = tl.load(ups + ahead, mask=ahead_mask, other=0.0, eviction_policy="evict_first")
        here = start + at
        value = tl.load(tokens + here, mask=token_mask & (here < k), other=0.0).to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= tl.load(norm + here, mask=here < k, other=0.0).to(tl.float32)
        gate_total += gate_weight.to(tl.float32) * value
        up_total += up_weight.to(tl.float32) * value
        if AHEAD > 1:
            gate_weight = second_gate
            up_weight = second_up
            second_gate = next_gate
            second_up = next_up
        elif not ONCE:
            gate_weight = next_gate
            up_weight = next_up
    gate_result = tl.sum(gate_total, axis=2)
    up_result = tl.sum(up_total, axis=2)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(squares, axis=2) / k + eps)
        gate_result *= scale
        up_result *= scale
    result = activated(gate_result, ACTIVATION) * up_result
    mask = (token[:, None] < m) & (row[None, :] < n)
    tl.store(out + token[:, None] * out_step + row[None, :], result.to(out.dtype.element_ty), mask=mask)


def gemv(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "",
    tile: Tile = TILE,
    pdl: bool = False,
) -> torch.Tensor:
    """``activation(rms_norm(x) @ concat(weights).T + bias) + residual``; x [M, K], weights [N, K], out [M, all N]."""
    m, k = x.shape
    if not 1 <= len(weights) <= 3 or m > MOST_TOKENS:
        raise ValueError(f"gemv takes one to three matrices and up to {MOST_TOKENS} tokens")
    padded = weights + (weights[0],) * (3 - len(weights))
    sizes = [w.shape[0] for w in weights] + [0] * (3 - len(weights))
    grid = (sum(blocks(n, tile.rows) for n in sizes),)
    _gemv[grid](
        x,
        *padded,
        bias,
        residual,
        norm,
        out,
        m,
        *sizes,
        k,
        x.stride(0),
        *(w.stride(0) for w in padded),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        TOKENS=power_of_two(m),
        ROWS=tile.rows,
        DEPTH=tile.depth,
        AHEAD=1 if k <= tile.depth else tile.ahead,
        ONCE=k <= tile.depth,
        MATRICES=len(weights),
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
    return out


def gated_gemv(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "silu",
    tile: Tile = TILE,
    pdl: bool = False,
) -> torch.Tensor:
    """``activation(y @ gate.T) * (y @ up.T)`` of y = rms_norm(x), or of x itself without ``norm``."""
    m, k = x.shape
    if m > MOST_TOKENS or gate.shape != up.shape:
        raise ValueError(f"gated_gemv takes two matrices of one shape and up to {MOST_TOKENS} tokens")
    _gated[(blocks(gate.shape[0], tile.rows),)](
        x,
        gate,
        up,
        norm,
        out,
        m,
        gate.shape[0],
        k,
        x.stride(0),
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        eps,
        TOKENS=power_of_two(m),
        ROWS=tile.rows,
        DEPTH=tile.depth,
        AHEAD=1 if k <= tile.depth else tile.ahead,
        ONCE=k <= tile.depth,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
    return out
