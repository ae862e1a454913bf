"""Products of int8 codes with a scale for each token and each output; sums are exact integers.

For one to four tokens four products at a time by the vector units, which then wait for memory; for more the matrix
unit.
"""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import activated, dot4, finish_rows, let_next_start, wait_for_inputs
from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile, blocks, kernel

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
    words: tl.tensor,
    x_step: tl.tensor,
    w_step: tl.tensor,
    residual_step: tl.tensor,
    out_step: tl.tensor,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, DEPTH)[None, :]
    rows = w + row.to(tl.int64)[:, None] * w_step
    row_mask = row[:, None] < n
    let_next_start(PDL)
    weight = tl.load(rows + at, mask=row_mask & (at < words), other=0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    total = tl.zeros((ROWS, DEPTH), tl.int32)
    for first in range(0, words, DEPTH):
        ahead = first + DEPTH + at
        following = tl.load(rows + ahead, mask=row_mask & (ahead < words), other=0, eviction_policy="evict_first")
        here = first + at
        value = tl.load(x + token * x_step + here, mask=here < words, other=0)
        value = tl.broadcast_to(value, (ROWS, DEPTH))
        total = dot4(weight, value, total)
        weight = following
    result = tl.sum(total, axis=1).to(tl.float32)
    result *= tl.load(x_scale + token) * tl.load(w_scale + row, mask=row < n, other=0.0).to(tl.float32)
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
    ACTIVATION: tl.constexpr,
) -> None:
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    tokens = x + token.to(tl.int64)[:, None] * x_step
    rows = w + row.to(tl.int64)[None, :] * w_step
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, k, DEPTH):
        here = first + at
        value = tl.load(tokens + here[None, :], mask=(token[:, None] < m) & (here[None, :] < k), other=0)
        weight = tl.load(rows + here[:, None], mask=(row[None, :] < n) & (here[:, None] < k), other=0)
        total = tl.dot(value, weight, total, out_dtype=tl.int32)
    by_token = tl.load(x_scale + token, mask=token < m, other=0.0)
    by_row = tl.load(w_scale + row, mask=row < n, other=0.0).to(tl.float32)
    result = total.to(tl.float32) * (by_token[:, None] * by_row[None, :])
    if bias is not None:
        result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    result = activated(result, ACTIVATION)
    to = out + token.to(tl.int64)[:, None] * out_step + row[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=(token[:, None] < m) & (row[None, :] < n))


def gemv(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    tile: Tile = TILE,
    pdl: bool = False,
) -> torch.Tensor:
    """``activation((x * x_scale) @ (w * w_scale).T + bias) + residual``: codes [M, K] and [N, K], K a multiple of 4.

    Tokens share weights by the cache. ``tile.depth`` counts codes.
    """
    m, k = x.shape
    if k % 4:
        raise ValueError(f"K = {k}: codes are read four at a time")
    x_words, w_words = x.view(torch.int32), w.view(torch.int32)
    _gemv[(m, blocks(w.shape[0], tile.rows))](
        x_words,
        x_scale,
        w_words,
        w_scale,
        bias,
        residual,
        out,
        w.shape[0],
        k // 4,
        x_words.stride(0),
        w_words.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        ROWS=tile.rows,
        DEPTH=tile.depth // 4,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
    return out


def gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "",
    tile: MatrixTile = MATRIX_TILE,
) -> torch.Tensor:
    """The same for any number of tokens; ``tile.rows`` are tokens, ``tile.columns`` outputs."""
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
        ACTIVATION=activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
