"""Products with weights that are floats of 8 bits (e4m3 or e5m2), tokens the same or wider floats.

Scales of weights are one number, one for each output, or one for each block of 128 x 128 (rows, columns); scales of
tokens are one for each token, or one for each 128 of its elements. Those that do not change along K wait for the end.
"""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import (
    activated,
    finish_rows,
    let_next_start,
    matrix_product,
    wait_for_inputs,
)
from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile, blocks, kernel, power_of_two

BLOCK = 128  # of scales that come in blocks
CHUNK = 16  # weights of 16 bytes
TILE = Tile(rows=4, depth=2048, warps=4)
MATRIX_TILE = MatrixTile(rows=128, columns=128, depth=128, warps=8, stages=3)


@kernel
def _gemv(
    x: tl.tensor,
    x_scale: tl.tensor,
    w: tl.tensor,
    w_scale: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_step: tl.tensor,
    w_step: tl.tensor,
    residual_step: tl.tensor,
    out_step: tl.tensor,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ONCE: tl.constexpr,
    X_SCALES: tl.constexpr,
    W_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row3 = row[:, None, None]
    row_mask = row3 < n
    at = tl.arange(0, CHUNKS)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    chunk = tl.arange(0, CHUNKS)[None, :, None] * 16
    pieces = tl.cdiv(k, 128)
    rows = w + row3.to(tl.int64) * w_step
    let_next_start(PDL)
    weight = tl.load(rows + at, mask=row_mask & (at < k), other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    total = tl.zeros((ROWS, CHUNKS, 16), tl.float32)
    for first in range(0, CHUNKS * 16 if ONCE else k, CHUNKS * 16):
        if not ONCE:
            ahead = first + CHUNKS * 16 + at
            following = tl.load(rows + ahead, mask=row_mask & (ahead < k), other=0.0, eviction_policy="evict_first")
        here = first + at
        value = tl.load(x + token * x_step + here, mask=here < k, other=0.0).to(tl.float32)
        if X_SCALES == "blocks":
            piece = (first + chunk) // 128
            value *= tl.load(x_scale + token * pieces + piece, mask=piece < pieces, other=0.0)
        product = weight.to(tl.float32) * value
        if W_SCALES == "blocks":
            place = (first + chunk) // 128
            scale = tl.load(w_scale + (row3 // 128) * pieces + place, mask=row_mask & (place < pieces), other=0.0)
            product *= scale.to(tl.float32)
        total += product
        if not ONCE:
            weight = following
    result = tl.sum(tl.sum(total, axis=2), axis=1)
    if X_SCALES == "tokens":
        result *= tl.load(x_scale + token)
    if W_SCALES == "rows":
        result *= tl.load(w_scale + row, mask=row < n, other=0.0).to(tl.float32)
    elif W_SCALES == "one":
        result *= tl.load(w_scale).to(tl.float32)
    finish_rows(result, bias, residual, out, token, row, n, residual_step, out_step, ACTIVATION)


@kernel
def _gemm(
    x: tl.tensor,
    x_scale: tl.tensor,
    w: tl.tensor,
    w_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_step: tl.tensor,
    w_step: tl.tensor,
    out_step: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    X_SCALES: tl.constexpr,
    W_SCALES: tl.constexpr,
    WIDEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    pieces = tl.cdiv(k, 128)
    tokens = x + token.to(tl.int64)[:, None] * x_step
    rows = w + row.to(tl.int64)[None, :] * w_step
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, k, DEPTH):
        here = first + at
        value = tl.load(tokens + here[None, :], mask=(token[:, None] < m) & (here[None, :] < k), other=0.0)
        weight = tl.load(rows + here[:, None], mask=(row[None, :] < n) & (here[:, None] < k), other=0.0)
        if WIDEN:
            weight = weight.to(value.dtype)
        if X_SCALES == "blocks" or W_SCALES == "blocks":
            product = matrix_product(value, weight, tl.zeros((ROWS, COLUMNS), tl.float32))
            if X_SCALES == "blocks":
                by_token = tl.load(x_scale + token * pieces + first // 128, mask=token < m, other=0.0)
                product *= by_token[:, None]
            if W_SCALES == "blocks":
                place = (row // 128) * pieces + first // 128
                product *= tl.load(w_scale + place, mask=row < n, other=0.0).to(tl.float32)[None, :]
            total += product
        else:
            total = matrix_product(value, weight, total)
    if X_SCALES == "tokens":
        total *= tl.load(x_scale + token, mask=token < m, other=0.0)[:, None]
    if W_SCALES == "rows":
        total *= tl.load(w_scale + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    elif W_SCALES == "one":
        total *= tl.load(w_scale).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    to = out + token.to(tl.int64)[:, None] * out_step + row[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(token[:, None] < m) & (row[None, :] < n))


def _weight_scales(scale: torch.Tensor, n: int, k: int) -> str:
    if scale.numel() == 1:
        return "one"
    if scale.shape == (n,):
        return "rows"
    if scale.shape == (blocks(n, BLOCK), blocks(k, BLOCK)):
        return "blocks"
    raise ValueError(f"scales of shape {tuple(scale.shape)} for weights [{n}, {k}]")


def _token_scales(scale: torch.Tensor | None) -> str:
    if scale is None:
        return ""
    return "tokens" if scale.ndim == 1 else "blocks"


def gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    tile: Tile = TILE,
    pdl: bool = False,
) -> torch.Tensor:
    """``activation(x @ w.T + bias) + residual`` of scaled x [M, K] and w [N, K]; tokens share weights by the cache."""
    m, k = x.shape
    n = w.shape[0]
    chunks = max(1, min(tile.depth, power_of_two(k)) // CHUNK)
    _gemv[(m, blocks(n, tile.rows))](
        x,
        x_scale,
        w,
        w_scale,
        bias,
        residual,
        out,
        n,
        k,
        x.stride(0),
        w.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        ROWS=tile.rows,
        CHUNKS=chunks,
        ONCE=k <= chunks * CHUNK,
        X_SCALES=_token_scales(x_scale),
        W_SCALES=_weight_scales(w_scale, n, k),
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=max(1, min(tile.warps, chunks // 32)),
        launch_pdl=pdl,
    )
    return out


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "",
    tile: MatrixTile = MATRIX_TILE,
) -> torch.Tensor:
    """The same for any number of tokens; ``tile.depth`` must divide 128 or equal it where scales come in blocks."""
    m, k = x.shape
    n = w.shape[0]
    _gemm[(blocks(m, tile.rows), blocks(n, tile.columns))](
        x,
        x_scale,
        w,
        w_scale,
        bias,
        out,
        m,
        n,
        k,
        x.stride(0),
        w.stride(0),
        out.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        X_SCALES=_token_scales(x_scale),
        W_SCALES=_weight_scales(w_scale, n, k),
        WIDEN=x.element_size() > 1,
        ACTIVATION=activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
