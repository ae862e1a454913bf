"""Products with 4-bit weights and float tokens: for few tokens bound by reading weights, for many by the matrix unit.

**GEMV.** A thread has 16 bytes of a few rows. At 4 bits the memory hands over 40 weights a cycle to a multiprocessor
with 128 lanes, so three instructions a weight are all there is. A shift and a mask put two nibbles into the mantissas
of two bfloat16 of 128.0; each half is a float32 by a shift, or as it stands. What the constants add depends on the
token only, and so does what the lower half adds to the upper one: both are taken off once for all rows. Scales
are applied once for every 32 weights.

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
PAIR = tl.constexpr(0x43004300)  # 128.0 twice, as bfloat16
BELOW = tl.constexpr(2.0**-16)  # what the lower half of a pair counts in the upper one, read as float32
EXTRA = tl.constexpr(0x4300 * 2.0**-16)  # of which this much is the lower half's 128.0
MOST_TOGETHER = 4  # tokens that share what was unpacked


@kernel
def _row_at(row: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """Where the words of a row begin, in tiles of 16 rows of which every step has 256."""
    return (row // 16).to(tl.int64) * (steps * 256) + row % 16 * 16


@kernel
def _chunk_at(chunk: tl.tensor) -> tl.tensor:
    """How far from there a chunk is."""
    return chunk // 4 * 256 + chunk % 4 * 4


@kernel
def _word_at(word: tl.tensor) -> tl.tensor:
    return word // 16 * 256 + word % 16


@kernel
def _beside_at(row: tl.tensor, groups: tl.tensor) -> tl.tensor:
    """Where scales of a row begin; those of its next group are 16 further."""
    return row // 16 * (groups * 16) + row % 16


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
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    chunks: tl.tensor,
    steps: tl.tensor,
    groups: tl.tensor,
    x_step: tl.tensor,
    residual_step: tl.tensor,
    out_step: tl.tensor,
    eps: tl.tensor,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ONCE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(row, n - 1)  # rows past the end are read as the last one, so loads need no mask
    chunk = tl.arange(0, CHUNKS)
    four = tl.arange(0, 4)[None, None, :]
    from_words = words + _row_at(read, steps)[:, None, None] + _chunk_at(chunk)[None, :, None] + four
    from_scales = _beside_at(read, groups)[:, None]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    from_x = x + tl.minimum(token, m - 1).to(tl.int64)[:, None, None, None] * x_step
    eight = tl.arange(0, 8)[None, None, None, :]
    let_next_start(PDL)
    there = chunk[None, :] < chunks
    word = tl.load(from_words, mask=there[:, :, None], other=0, eviction_policy="evict_first")
    scale = tl.load(scales + from_scales + (chunk // OF_GROUP)[None, :] * 16, mask=there, other=0.0)
    wait_for_inputs(PDL)
    total = tl.zeros((TOKENS, ROWS, CHUNKS), tl.float32)
    squares = tl.zeros((TOKENS, 1, CHUNKS, 8), tl.float32)
    for first in range(0, CHUNKS if ONCE else chunks, CHUNKS):
        place = (first + chunk)[None, :]
        if not ONCE:
            ahead = place + CHUNKS
            more = ahead < chunks
            next_word = tl.load(
                from_words + (first + CHUNKS) * 64, mask=more[:, :, None], other=0, eviction_policy="evict_first"
            )
            next_scale = tl.load(scales + from_scales + ahead // OF_GROUP * 16, mask=more, other=0.0)
        piece = tl.zeros((TOKENS, ROWS, CHUNKS, 4), tl.float32)
        excess = tl.zeros((TOKENS, 1, CHUNKS, 4), tl.float32)
        plain = tl.zeros((TOKENS, 1, CHUNKS, 4), tl.float32)
        for i in tl.static_range(4):
            at = place[:, None, :, None] * 32 + 8 * i + eight
            if EVEN:
                value = tl.load(from_x + at).to(tl.float32)
            else:
                value = tl.load(from_x + at, mask=at < k, other=0.0).to(tl.float32)
            if norm is not None:
                squares += value * value
                if EVEN:
                    value *= tl.load(norm + at).to(tl.float32)
                else:
                    value *= tl.load(norm + at, mask=at < k, other=0.0).to(tl.float32)
            low, high = tl.split(tl.reshape(value, (TOKENS, 1, CHUNKS, 4, 2)))
            if zeros is not None:
                plain += low + high
                low -= high * BELOW
                excess += 128.0 * low
                excess += (128.0 + EXTRA) * high
            else:
                low -= high * BELOW
                excess += 136.0 * low
                excess += (136.0 + EXTRA + 8.0 * BELOW) * high
            both = ((word >> (4 * i)) & 0x000F000F) | PAIR
            piece += (both << 16).to(tl.float32, bitcast=True)[None] * low
            piece += both.to(tl.float32, bitcast=True)[None] * high
        if zeros is not None:
            zero = tl.load(zeros + from_scales + place // OF_GROUP * 16, mask=place < chunks, other=0).to(tl.float32)
            beside = tl.sum(excess, axis=3) + zero[None] * tl.sum(plain, axis=3)
        else:
            beside = tl.sum(excess, axis=3)
        total += (tl.sum(piece, axis=3) - beside) * scale.to(tl.float32)[None]
        if not ONCE:
            word = next_word
            scale = next_scale
    result = tl.sum(total, axis=2)
    if norm is not None:
        result *= tl.rsqrt(tl.sum(tl.sum(squares, axis=3), axis=2) / k + eps)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (TOKENS, ROWS // 2, 2)))
        result = activated(gate, ACTIVATION) * up
        row = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        n = n // 2
    mask = (token[:, None] < m) & (row[None, :] < n)
    if not GATED:
        if bias is not None:
            result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
        result = activated(result, ACTIVATION)
        if residual is not None:
            added = residual + token[:, None] * residual_step + row[None, :]
            result += tl.load(added, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * out_step + row[None, :], result.to(out.dtype.element_ty), mask=mask)


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
    from_words = words + _row_at(row, tl.cdiv(k, 128))[:, None]
    from_x = x + token.to(tl.int64)[None, :] * x_step
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width, WORDS):
        word_at = first + at
        mask = (row[:, None] < n) & (word_at[None, :] < width)
        word = tl.load(from_words + _word_at(word_at)[None, :], mask=mask, other=0)
        place = _beside_at(row, groups)[:, None] + (word_at[None, :] // 4) * 32 // GROUP * 16
        scale = tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
        else:
            zero = 8.0
        for i in tl.static_range(8):
            here = (word_at // 4) * 32 + 8 * (i % 4) + 2 * (word_at % 4) + i // 4
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
    row = tl.program_id(0)
    width = tl.cdiv(k, 32) * 4
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = at < width
    word = tl.load(words + _row_at(row, tl.cdiv(k, 128)) + _word_at(at), mask=mask, other=0)
    place = _beside_at(row, groups) + (at // 4) * 32 // GROUP * 16
    scale = tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
    if zeros is not None:
        zero = tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
    else:
        zero = 8.0
    for i in tl.static_range(8):
        here = (at // 4) * 32 + 8 * (i % 4) + 2 * (at % 4) + i // 4
        weight = (((word >> (4 * i)) & 15).to(tl.float32) - zero) * scale
        tl.store(out + row.to(tl.int64) * out_step + here, weight.to(out.dtype.element_ty), mask=here < k)


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
    chunks = blocks(k, CHUNK)
    at_once = max(1, min(tile.depth, power_of_two(k)) // CHUNK)
    tokens = min(MOST_TOGETHER, power_of_two(m))
    _gemv[(blocks(m, tokens), blocks(weights.n, tile.rows))](
        x,
        weights.words,
        weights.scales,
        weights.zeros,
        bias,
        residual,
        norm,
        out,
        m,
        weights.n,
        k,
        chunks,
        weights.steps,
        weights.groups,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        TOKENS=tokens,
        ROWS=tile.rows,
        CHUNKS=at_once,
        OF_GROUP=weights.group // CHUNK,
        EVEN=k % (at_once * CHUNK) == 0,
        ONCE=chunks <= at_once,
        GATED=gated,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=max(1, min(tile.warps, at_once // 32)),  # a thread for each chunk of a row
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
        weights.groups,
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
    width = blocks(weights.k, CHUNK) * 4
    step = min(512, power_of_two(width))
    _unpack[(weights.n, blocks(width, step))](
        weights.words,
        weights.scales,
        weights.zeros,
        out,
        weights.k,
        weights.groups,
        out.stride(0),
        WORDS=step,
        GROUP=weights.group,
        num_warps=4,
    )
    return out
