"""Weights of -1, 0 and 1 in 2 bits times int8 tokens: ``ranvier::BitLinear`` on a GPU, exact sums included.

A chunk is 16 bytes of one row, 64 consecutive weights as ``w + 1``: four 32-bit words, and bits 2 i and 2 i + 1 of
byte b of word c are the code of weight 16 i + 4 c + b. A shift and a mask leave four neighbours in the bytes of a
word, which one instruction multiplies by four codes of the token; for every shift the four words of a chunk meet 16
neighbours. What ``w + 1`` adds is the sum of the token's codes, taken off once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import ONES, activated, dot4, finish_rows, let_next_start, wait_for_inputs
from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile, blocks, kernel, power_of_two

CHUNK = 64  # weights
TILE = Tile(rows=4, depth=2048, warps=1)
MATRIX_TILE = MatrixTile(rows=64, columns=64, depth=256, warps=4, stages=3)
MASK = tl.constexpr(0x03030303)


@dataclass(frozen=True)
class Ternary:
    """Weights ``[N, K]`` as ``words`` [N, chunks, 4] int32; float32 ``scale`` [1] or [N]."""

    words: torch.Tensor
    scale: torch.Tensor
    k: int

    @property
    def n(self) -> int:
        return int(self.words.shape[0])


def pack(codes: torch.Tensor, scale: torch.Tensor, k: int) -> Ternary:
    """From the operator's bytes [N, ceil(K / 4)]: the code of k in byte k // 4 at bit 2 (k mod 4)."""
    n = codes.shape[0]
    chunks = -(-k // CHUNK)
    spread = torch.stack([(codes >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).reshape(n, -1)
    padded = spread.new_ones((n, chunks * CHUNK))  # a weight of 0
    padded[:, :k] = spread[:, :k]
    planes = padded.reshape(n, chunks, 4, 16)
    packed = planes[:, :, 0] | planes[:, :, 1] << 2 | planes[:, :, 2] << 4 | planes[:, :, 3] << 6
    return Ternary(packed.contiguous().view(torch.int32), scale.reshape(-1).to(torch.float32), k)


@kernel
def _gemv(
    x: tl.tensor,
    by: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    x_words: tl.tensor,
    chunks: tl.tensor,
    x_step: tl.tensor,
    residual_step: tl.tensor,
    out_step: tl.tensor,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ONCE: tl.constexpr,
    SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row3 = row[:, None, None]
    row_mask = row3 < n
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    four = tl.arange(0, 4)[None, None, :]
    from_words = words + row3.to(tl.int64) * (chunks * 4) + chunk * 4 + four
    let_next_start(PDL)
    word = tl.load(from_words, mask=row_mask & (chunk < chunks), other=0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    total = tl.zeros((ROWS, CHUNKS, 4), tl.int32)
    added = tl.zeros((1, CHUNKS, 4), tl.int32)
    for first in range(0, CHUNKS if ONCE else chunks, CHUNKS):
        if not ONCE:
            ahead = first + CHUNKS
            following = tl.load(
                from_words + ahead * 4, mask=row_mask & (ahead + chunk < chunks), other=0, eviction_policy="evict_first"
            )
        for i in tl.static_range(4):
            at = (first + chunk) * 16 + 4 * i + four
            value = tl.load(x + token * x_step + at, mask=at < x_words, other=0)
            added = dot4(value, tl.full((1, CHUNKS, 4), ONES, tl.int32), added)
            total = dot4((word >> (2 * i)) & MASK, tl.broadcast_to(value, (ROWS, CHUNKS, 4)), total)
        if not ONCE:
            word = following
    whole = tl.sum(tl.sum(total, axis=2), axis=1) - tl.sum(added)
    factor = tl.load(by + token)
    if SCALES:
        step = tl.load(scale + row, mask=row < n, other=0.0)
    else:
        step = tl.load(scale) + tl.zeros((ROWS,), tl.float32)
    result = whole.to(tl.float32) * tl.div_rn(step, factor + tl.zeros((ROWS,), tl.float32))
    finish_rows(result, bias, residual, out, token, row, n, residual_step, out_step, ACTIVATION)


@kernel
def _gemm(
    x: tl.tensor,
    by: tl.tensor,
    packed: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_step: tl.tensor,
    out_step: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    token = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    width = tl.cdiv(k, 64) * 16
    at = tl.arange(0, BYTES)
    rows = packed + row.to(tl.int64)[:, None] * width
    tokens = x + token.to(tl.int64)[None, :] * x_step
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, width, BYTES):
        byte_at = first + at
        byte = tl.load(rows + byte_at[None, :], mask=(row[:, None] < n) & (byte_at[None, :] < width), other=0x55)
        for i in tl.static_range(4):
            here = (byte_at // 16) * 64 + 16 * i + byte_at % 16
            value = tl.load(tokens + here[:, None], mask=(token[None, :] < m) & (here[:, None] < k), other=0)
            weight = ((byte >> (2 * i)) & 3).to(tl.int8) - 1
            total = tl.dot(weight.to(tl.int8), value, total, out_dtype=tl.int32)
    factor = tl.load(by + token, mask=token < m, other=1.0)
    if SCALES:
        step = tl.load(scale + row, mask=row < n, other=0.0)
    else:
        step = tl.load(scale) + tl.zeros((ROWS,), tl.float32)
    nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
    result = total.to(tl.float32) * tl.div_rn(step[:, None] + nothing, factor[None, :] + nothing)
    if bias is not None:
        result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    result = activated(result, ACTIVATION)
    to = out + token.to(tl.int64)[None, :] * out_step + row[:, None]
    tl.store(to, result.to(out.dtype.element_ty), mask=(row[:, None] < n) & (token[None, :] < m))


def gemv(
    x: torch.Tensor,
    by: torch.Tensor,
    weights: Ternary,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    tile: Tile = TILE,
    pdl: bool = False,
) -> torch.Tensor:
    """Int8 codes x [M, K] that tokens times ``by`` [M] were rounded to (``Codes(inverse=True)``); K a multiple of 4."""
    m, k = x.shape
    if k % 4:
        raise ValueError(f"K = {k}: codes are read four at a time")
    chunks = max(1, min(tile.depth, power_of_two(k)) // CHUNK)
    x_words = x.view(torch.int32)
    _gemv[(m, blocks(weights.n, tile.rows))](
        x_words,
        by,
        weights.words,
        weights.scale,
        bias,
        residual,
        out,
        weights.n,
        k // 4,
        weights.words.shape[1],
        x_words.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        ROWS=tile.rows,
        CHUNKS=chunks,
        ONCE=weights.words.shape[1] <= chunks,
        SCALES=weights.scale.numel() > 1,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=max(1, min(tile.warps, chunks // 32)),  # a thread for each chunk of a row
        launch_pdl=pdl,
    )
    return out


def gemm(
    x: torch.Tensor,
    by: torch.Tensor,
    weights: Ternary,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "",
    tile: MatrixTile = MATRIX_TILE,
) -> torch.Tensor:
    """The same for any number of tokens; ``tile.rows`` are outputs, ``tile.columns`` tokens, ``tile.depth`` weights."""
    m, k = x.shape
    _gemm[(blocks(m, tile.columns), blocks(weights.n, tile.rows))](
        x,
        by,
        weights.words.view(torch.uint8),
        weights.scale,
        bias,
        out,
        m,
        weights.n,
        k,
        x.stride(0),
        out.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BYTES=tile.depth // 4,
        SCALES=weights.scale.numel() > 1,
        ACTIVATION=activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
