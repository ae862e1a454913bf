"""Products with 4-bit weights and float tokens: for few tokens bound by reading weights, for many by the matrix unit.

**GEMV.** A thread has 16 bytes of a few rows. At 4 bits the memory hands over 40 weights a cycle to a multiprocessor
with 128 lanes, so three instructions a weight are all there is. A nibble becomes a float without a conversion: put
into the mantissa of 128.0 or 2048.0 it is that plus its value. What the constants add depends on the token only, and
is taken off once for all rows; scales are applied once for every eight weights.

**GEMM.** Nibbles of equal number make a plane, eight products of planes a step. Weights are the left operand, which
the matrix unit takes from registers, so what was unpacked never goes through shared memory: results are computed
transposed. For many tokens unpacking for every block of them costs more than unpacking once (``unpack``, then the
library's product).
"""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import activated, let_next_start, matrix_product, wait_for_inputs
from ranvier.providers.cuda.kernels.int4 import CHUNK, Int4
from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile, blocks, kernel, power_of_two

TILE = Tile(rows=4, depth=2048, warps=2)
MATRIX_TILE = MatrixTile(rows=64, columns=16, depth=256, warps=4, stages=2)
HIGH = tl.constexpr(0x43000000)  # 128.0: a nibble at bit 16 counts in ones
LOW = tl.constexpr(0x45000000)  # 2048.0: the same for bit 12


@kernel
def _raised(word: tl.tensor, I: tl.constexpr) -> tl.tensor:
    """Nibble I of words as a float, with 128 or 2048 on top."""
    if I == 0:
        bits = ((word << 16) & 0x000F0000) | HIGH
    elif I == 1:
        bits = ((word << 8) & 0x0000F000) | LOW
    elif I == 2:
        bits = ((word << 8) & 0x000F0000) | HIGH
    elif I == 3:
        bits = (word & 0x0000F000) | LOW
    elif I == 4:
        bits = (word & 0x000F0000) | HIGH
    elif I == 5:
        bits = ((word >> 8) & 0x0000F000) | LOW
    elif I == 6:
        bits = ((word >> 8) & 0x000F0000) | HIGH
    else:
        bits = ((word >> 16) & 0x0000F000) | LOW
    return bits.to(tl.float32, bitcast=True)


@kernel
def _gemv(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    groups: tl.tensor,
    x_step: tl.tensor,
    residual_step: tl.tensor,
    out_step: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row3 = row[:, None, None]
    row_mask = row3 < n
    chunks = tl.cdiv(k, 32)
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    four = tl.arange(0, 4)[None, None, :]
    from_words = words + row3.to(tl.int64) * (chunks * 4) + chunk * 4 + four
    from_scales = row3 * groups
    let_next_start(PDL)
    word = tl.load(from_words, mask=row_mask & (chunk < chunks), other=0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    total = tl.zeros((ROWS, CHUNKS, 4), tl.float32)
    squares = tl.zeros((1, CHUNKS, 4), tl.float32)
    for first in range(0, chunks, CHUNKS):
        here = first + chunk
        there = row_mask & (here < chunks)
        scale = tl.load(scales + from_scales + here * 32 // GROUP, mask=there, other=0.0).to(tl.float32)
        ahead = first + CHUNKS
        following = tl.load(
            from_words + ahead * 4, mask=row_mask & (ahead + chunk < chunks), other=0, eviction_policy="evict_first"
        )
        piece = tl.zeros((ROWS, CHUNKS, 4), tl.float32)
        excess = tl.zeros((1, CHUNKS, 4), tl.float32)
        values = tl.zeros((1, CHUNKS, 4), tl.float32)
        for i in tl.static_range(8):
            at = here * 32 + 4 * i + four
            value = tl.load(x + token * x_step + at, mask=at < k, other=0.0).to(tl.float32)
            if norm is not None:
                squares += value * value
                value *= tl.load(norm + at, mask=at < k, other=0.0).to(tl.float32)
            piece += _raised(word, i) * value
            on_top = 128.0 if i % 2 == 0 else 2048.0
            if zeros is not None:
                excess += on_top * value
                values += value
            else:
                excess += (on_top + 8.0) * value
        if zeros is not None:
            zero = tl.load(zeros + from_scales + here * 32 // GROUP, mask=there, other=0).to(tl.float32)
            total += (piece - excess - zero * values) * scale
        else:
            total += (piece - excess) * scale
        word = following
    result = tl.sum(tl.sum(total, axis=2), axis=1)
    if norm is not None:
        result *= tl.rsqrt(tl.sum(squares) / k + eps)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (ROWS // 2, 2)))
        result = activated(gate, ACTIVATION) * up
        row = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        n = n // 2
    else:
        if bias is not None:
            result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)
        result = activated(result, ACTIVATION)
        if residual is not None:
            result += tl.load(residual + token * residual_step + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out + token * out_step + row, result.to(out.dtype.element_ty), mask=row < n)


@kernel
def _gemm(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    groups: tl.tensor,
    x_step: tl.tensor,
    out_step: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    token = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    width = tl.cdiv(k, 32) * 4
    at = tl.arange(0, WORDS)
    from_words = words + row.to(tl.int64)[:, None] * width
    from_x = x + token.to(tl.int64)[None, :] * x_step
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width, WORDS):
        word_at = first + at
        mask = (row[:, None] < n) & (word_at[None, :] < width)
        word = tl.load(from_words + word_at[None, :], mask=mask, other=0)
        place = row[:, None] * groups + (word_at[None, :] // 4) * 32 // GROUP
        scale = tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
        else:
            zero = 8.0
        for i in tl.static_range(8):
            here = (word_at // 4) * 32 + 4 * i + word_at % 4
            value = tl.load(from_x + here[:, None], mask=(token[None, :] < m) & (here[:, None] < k), other=0.0)
            weight = ((((word >> (4 * i)) & 15).to(tl.float32) - zero) * scale).to(value.dtype)
            total = matrix_product(weight, value, total)
    if bias is not None:
        total += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    total = activated(total, ACTIVATION)
    to = out + token.to(tl.int64)[None, :] * out_step + row[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row[:, None] < n) & (token[None, :] < m))


@kernel
def _unpack(
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    k: tl.tensor,
    groups: tl.tensor,
    out_step: tl.tensor,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    width = tl.cdiv(k, 32) * 4
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = at < width
    word = tl.load(words + row * width + at, mask=mask, other=0)
    place = row * groups + (at // 4) * 32 // GROUP
    scale = tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
    if zeros is not None:
        zero = tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
    else:
        zero = 8.0
    for i in tl.static_range(8):
        here = (at // 4) * 32 + 4 * i + at % 4
        weight = (((word >> (4 * i)) & 15).to(tl.float32) - zero) * scale
        tl.store(out + row * out_step + here, weight.to(out.dtype.element_ty), mask=here < k)


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
    tile: Tile = TILE,
    pdl: bool = False,
) -> torch.Tensor:
    """``activation(rms_norm(x) @ W.T + bias) + residual``, x [M, K], out [M, N]. Tokens share weights by the cache.

    ``gated`` weights are ``int4.interleaved``: out [M, N / 2] is ``activation(gate) * up``.
    """
    m, k = x.shape
    chunks = max(1, min(tile.depth, power_of_two(k)) // CHUNK)
    _gemv[(m, blocks(weights.n, tile.rows))](
        x,
        weights.words,
        weights.scales,
        weights.zeros,
        bias,
        residual,
        norm,
        out,
        weights.n,
        k,
        weights.scales.shape[1],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        ROWS=tile.rows,
        CHUNKS=chunks,
        GROUP=weights.group,
        GATED=gated,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=max(1, min(tile.warps, chunks // 32)),  # a thread for each chunk of a row
        launch_pdl=pdl,
    )
    return out


def gemm(
    x: torch.Tensor,
    weights: Int4,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "",
    tile: MatrixTile = MATRIX_TILE,
) -> torch.Tensor:
    """``activation(x @ W.T + bias)``; ``tile.rows`` are outputs, ``tile.columns`` tokens, ``tile.depth`` weights."""
    m, k = x.shape
    _gemm[(blocks(m, tile.columns), blocks(weights.n, tile.rows))](
        x,
        weights.words,
        weights.scales,
        weights.zeros,
        bias,
        out,
        m,
        weights.n,
        k,
        weights.scales.shape[1],
        x.stride(0),
        out.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WORDS=tile.depth // 8,
        GROUP=weights.group,
        ACTIVATION=activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def unpack(weights: Int4, out: torch.Tensor) -> torch.Tensor:
    """The weights as floats, [N, K]."""
    width = weights.words.shape[1] * 4
    step = min(512, power_of_two(width))
    _unpack[(weights.n, blocks(width, step))](
        weights.words,
        weights.scales,
        weights.zeros,
        out,
        weights.k,
        weights.scales.shape[1],
        out.stride(0),
        WORDS=step,
        GROUP=weights.group,
        num_warps=4,
    )
    return out
