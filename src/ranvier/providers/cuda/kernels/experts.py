"""Layers of experts: each visit, one of the k choices of a token, is multiplied by the weights of its expert.

**Few visits** are bound by reading weights. A program has one visit (or all of a token, whose results it adds up) and a
few columns; sums are plain ones, and visits of one expert find its weights in the cache. **Many visits** are sorted by
expert first (``visits.py``), in blocks that belong to one expert each, and multiplied by the matrix unit, weights on
the left. Which visits a block has is read from device memory, so a captured run takes any choices.

Weights lie as QMoE stores them, low bits first, read as words of 32 bits. Codes of equal place in their words make a
plane, whose inputs are as far from each other as words have codes: tokens come with their elements in that order, the
inputs of a plane side by side, and what one product makes is stored in the order that the next one wants. A shift and a
mask leave two codes in the halves of a word: planes go by twos, half of all planes apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import activated, matrix_product
from ranvier.providers.cuda.kernels.expert_weights import Experts
from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile, blocks, interpreted, kernel, power_of_two

FEW_VISITS = 32
TILE = Tile(rows=4, depth=32, warps=1)  # columns, and pieces of 16 bytes of each
_PAIR = tl.constexpr(0x43004300)  # 128.0 twice, as bfloat16
_BELOW = tl.constexpr(2.0**-16)  # what the lower half of a pair counts in the upper one, read as float32
_EXTRA = tl.constexpr(0x4300 * 2.0**-16)  # of which this much is the lower half's 128.0
_HALF_PAIR = tl.constexpr(0x64006400)  # 1024.0 twice, as float16
_LARGE = tl.constexpr(0x4B000000)  # 2**23 as float32


@dataclass(frozen=True)
class Opening:
    """What becomes of sums: an activation; for swiglu of columns in ``pairs`` (1) or halves (2), or with another
    layer's (0). Results lie in ``planes`` for the next layer."""

    activation: str = ""  # "", "relu", "gelu_tanh", "silu" or "swiglu"
    pairs: int = 0
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = float("inf")
    planes: int = 1


PLAIN = Opening()


# -- codes ------------------------------------------------------------------------------------------------------------


@kernel
def _pair(word: tl.tensor, PLANE: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Codes of a plane in the lower halves, of the one half of all planes further in the upper ones."""
    return (word >> (BITS * PLANE)) & (((1 << BITS) - 1) * 0x00010001)


@kernel
def _whole(word: tl.tensor, PLANE: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Codes of a plane as float32."""
    return (((word >> (BITS * PLANE)) & ((1 << BITS) - 1)) | _LARGE).to(tl.float32, bitcast=True) - 8388608.0


@kernel
def _small_floats(pair: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Two floats of 4 or 8 bits as two of float16, which has the same fields with more room: only the offset of
    exponents differs, by 14 or 8."""
    SIGN: tl.constexpr = 0x00010001 << (BITS - 1)
    return ((pair & (SIGN - 0x00010001)) << (9 if BITS == 4 else 7)) | ((pair & SIGN) << (16 - BITS))


@kernel
def _number(half: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The lower one of them as float32."""
    value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if BITS == 4:
        value *= 16384.0
    else:
        value = tl.where((half & 0x7FFF) == 0x3F80, float("nan"), value * 256.0)
    return value


@kernel
def _opened(
    result: tl.tensor, line: tl.tensor, ACTIVATION: tl.constexpr, alpha: tl.tensor, beta: tl.tensor, limit: tl.tensor
) -> tl.tensor:
    """An activation of sums, with what another layer made of the same visit. What is no number stays none."""
    if ACTIVATION == "swiglu":
        result = tl.where(result > limit, limit, result)
        line = tl.where(line > limit, limit, tl.where(line < -limit, -limit, line))
        result = result * tl.sigmoid(result * alpha) * (line + beta)
    else:
        result = activated(result, ACTIVATION)
        if line is not None:
            result *= line
    return result


@kernel
def _column(at: tl.tensor, n: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """Where columns are that are computed side by side: the two halves are taken in turn."""
    if PAIRS == 2:
        at = at // 2 + at % 2 * (n // 2)
    return at


# -- few visits -------------------------------------------------------------------------------------------------------


@kernel
def _few(
    x: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    whole: tl.tensor,
    bias: tl.tensor,
    beside: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    chunks: tl.tensor,
    groups: tl.tensor,
    scale_rows: tl.tensor,
    zero_expert: tl.tensor,
    zero_row: tl.tensor,
    zero_group: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    limit: tl.tensor,
    SHARED: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANE: tl.constexpr,
    OF_GROUP: tl.constexpr,
    SQUARE: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    MIDDLE: tl.constexpr,
    ONCE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr,
    OUT_PLANES: tl.constexpr,
) -> None:
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.minimum(_column(at, n, PAIRS), n - 1)  # those past the end are read as the last one
    chunk = tl.arange(0, CHUNKS)
    lane = tl.arange(0, LANE)
    width = chunks * LANE
    within = chunk[None, :, None] * LANE + lane[None, None, :]
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(CHOICES):
        visit = tl.program_id(0) * CHOICES + choice
        expert = tl.load(chosen + visit).to(tl.int64)
        from_weights = weights + expert * n * width + column[:, None, None] * width + within
        from_x = x + (visit // SHARED).to(tl.int64) * width * PLANES + within
        if scales is not None:
            from_scales = scales + expert * scale_rows * groups + (column // SQUARE * groups)[:, None]
        if zeros is not None:
            from_zeros = zeros + expert * zero_expert + (column * zero_row)[:, None]
        there = chunk[None, :] < chunks
        word = tl.load(from_weights, mask=there[:, :, None], other=0, eviction_policy="evict_first")
        if OF_GROUP:
            scale = tl.load(from_scales + (chunk // OF_GROUP)[None, :], mask=there, other=0.0)
        sums = tl.zeros((COLUMNS, CHUNKS), tl.float32)
        for first in range(0, CHUNKS if ONCE else chunks, CHUNKS):
            place = (first + chunk)[None, :]
            there = place < chunks
            if not ONCE:
                ahead = place + CHUNKS
                more = ahead < chunks
                next_word = tl.load(
                    from_weights + (first + CHUNKS) * LANE,
                    mask=more[:, :, None],
                    other=0,
                    eviction_policy="evict_first",
                )
                if OF_GROUP:
                    next_scale = tl.load(from_scales + ahead // OF_GROUP, mask=more, other=0.0)
            if BITS == 0:
                value = tl.load(from_x + first * LANE, mask=there[:, :, None], other=0.0).to(tl.float32)
                found = tl.sum(word.to(tl.float32) * value, axis=2)
            else:
                piece = tl.zeros((COLUMNS, CHUNKS, LANE), tl.float32)
                excess = tl.zeros((1, CHUNKS, LANE), tl.float32)
                plain = tl.zeros((1, CHUNKS, LANE), tl.float32)
                for i in tl.static_range(PLANES // 2):
                    here = from_x + first * LANE + i * width
                    low = tl.load(here, mask=there[:, :, None], other=0.0).to(tl.float32)
                    high = tl.load(here + PLANES // 2 * width, mask=there[:, :, None], other=0.0).to(tl.float32)
                    if MIDDLE:
                        plain += low + high
                    if MIDDLE and BITS <= 4:
                        low -= high * _BELOW
                        excess += 128.0 * low
                        excess += (128.0 + _EXTRA) * high
                        both = _pair(word, i, BITS) | _PAIR
                        piece += (both << 16).to(tl.float32, bitcast=True) * low
                        piece += both.to(tl.float32, bitcast=True) * high
                    elif MIDDLE:
                        piece += _whole(word, i, BITS) * low
                        piece += _whole(word, i + PLANES // 2, BITS) * high
                    else:
                        both = _small_floats(_pair(word, i, BITS), BITS)
                        piece += _number(both, BITS) * low
                        piece += _number(both >> 16, BITS) * high
                found = tl.sum(piece, axis=2)
                if MIDDLE:
                    off = tl.sum(excess, axis=2)
                    if zeros is not None:
                        group = place // OF_GROUP if OF_GROUP else place * 0
                        zero = tl.load(from_zeros + group * zero_group, mask=there, other=0).to(tl.float32)
                        found -= off + zero * tl.sum(plain, axis=2)
                    else:
                        found -= off + MIDDLE * tl.sum(plain, axis=2)
            if OF_GROUP:
                sums += found * scale.to(tl.float32)
            else:
                sums += found
            if not ONCE:
                word = next_word
                if OF_GROUP:
                    scale = next_scale
        result = tl.sum(sums, axis=1)
        if scales is not None and OF_GROUP == 0:
            result *= tl.load(scales + expert * scale_rows * groups + column // SQUARE).to(tl.float32)
        if whole is not None:
            result *= tl.load(whole + expert).to(tl.float32)
        if bias is not None:
            result += tl.load(bias + expert * n + column).to(tl.float32)
        if shares is not None:
            result *= tl.load(shares + visit)
        total += result
    row = tl.program_id(0)
    if PAIRS:
        gate, line = tl.split(tl.reshape(total, (COLUMNS // 2, 2)))
        total = _opened(gate, line, ACTIVATION, alpha, beta, limit)
        at = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        n = n // 2
    else:
        line = None
        if beside is not None:
            line = tl.load(beside + row.to(tl.int64) * n + at, mask=at < n, other=0.0).to(tl.float32)
        total = _opened(total, line, ACTIVATION, alpha, beta, limit)
    to = at % OUT_PLANES * (n // OUT_PLANES) + at // OUT_PLANES
    tl.store(out + row.to(tl.int64) * n + to, total.to(out.dtype.element_ty), mask=at < n)


def few(
    x: torch.Tensor,
    layer: Experts,
    chosen: torch.Tensor,
    out: torch.Tensor,
    *,
    shared: int = 1,
    opening: Opening = PLAIN,
    beside: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    tile: Tile = TILE,
) -> torch.Tensor:
    """Visits by the layers of their experts; ``shared`` of them in a row have one row of x, [.., k] in planes. With
    ``shares`` the visits of a token, as many as rows of ``chosen`` have, are added up, as much of each."""
    choices = chosen.shape[1] if shares is not None else 1
    chunks = layer.width // layer.lane
    at_once = min(tile.depth, power_of_two(chunks))
    _few[(chosen.numel() // choices, blocks(layer.n, tile.rows))](
        x,
        layer.words,
        layer.scales,
        layer.zeros,
        layer.whole,
        layer.bias,
        beside,
        chosen,
        shares,
        out,
        layer.n,
        chunks,
        layer.groups,
        blocks(layer.n, layer.square),
        *_steps(layer.zeros),
        opening.alpha,
        opening.beta,
        opening.limit,
        SHARED=shared,
        CHOICES=choices,
        COLUMNS=tile.rows,
        CHUNKS=at_once,
        LANE=layer.lane,
        OF_GROUP=layer.words_of_group(layer.lane),
        SQUARE=layer.square,
        BITS=layer.bits,
        PLANES=layer.planes,
        MIDDLE=layer.middle,
        ONCE=chunks <= at_once,
        ACTIVATION=opening.activation,
        PAIRS=opening.pairs,
        OUT_PLANES=opening.planes,
        num_warps=max(1, min(tile.warps, at_once // 32)),  # a thread for each piece of a column
    )
    return out


def _steps(zeros: torch.Tensor | None) -> tuple[int, int, int]:
    """How far experts, rows and groups are apart; what they share has no step."""
    if zeros is None:
        return 0, 0, 0
    return zeros.stride(0), zeros.stride(1), zeros.stride(2) if zeros.shape[2] > 1 else 0


# -- many visits ------------------------------------------------------------------------------------------------------


def matrix_tile(visits: int, experts: int, planes: int, dtype: torch.dtype) -> MatrixTile:
    """Columns, visits and words of a step, by how many visits an expert has if tokens choose evenly."""
    if dtype == torch.float32:  # products of all its bits are no business of the matrix unit
        return MatrixTile(rows=32, columns=16, depth=16, warps=4, stages=1)
    depth = 16 if planes > 8 else 32  # a step has tokens for all planes
    if visits > 48 * experts:
        return MatrixTile(rows=128, columns=64, depth=depth, warps=8, stages=3)
    return MatrixTile(rows=128, columns=16, depth=depth, warps=4, stages=3)


@kernel
def _many(
    x: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    whole: tl.tensor,
    bias: tl.tensor,
    beside: tl.tensor,
    order: tl.tensor,
    owners: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    chunks: tl.tensor,
    groups: tl.tensor,
    scale_rows: tl.tensor,
    zero_expert: tl.tensor,
    zero_row: tl.tensor,
    zero_group: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    limit: tl.tensor,
    SHARED: tl.constexpr,
    VISITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANE: tl.constexpr,
    OF_GROUP: tl.constexpr,
    SQUARE: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    MIDDLE: tl.constexpr,
    HALVES: tl.constexpr,
    BETWEEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr,
    OUT_PLANES: tl.constexpr,
) -> None:
    expert = tl.load(owners + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    visit = tl.load(order + tl.program_id(0) * VISITS + tl.arange(0, VISITS))
    real = visit >= 0
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.minimum(_column(at, n, PAIRS), n - 1)
    depth = tl.arange(0, DEPTH)
    width = chunks * LANE
    from_weights = weights + expert * n * width + column[:, None] * width
    from_x = x + (tl.maximum(visit, 0) // SHARED).to(tl.int64)[None, :] * width * PLANES
    if scales is not None:
        from_scales = scales + expert * scale_rows * groups + (column // SQUARE * groups)[:, None]
    if zeros is not None:
        from_zeros = zeros + expert * zero_expert + (column * zero_row)[:, None]
    TYPE: tl.constexpr = x.dtype.element_ty
    total = tl.zeros((COLUMNS, VISITS), tl.float32)
    if OF_GROUP:
        scale = tl.load(from_scales + (depth // OF_GROUP)[None, :], mask=depth[None, :] < width, other=0.0)
        if zeros is not None:
            at_zeros = from_zeros + (depth // OF_GROUP * zero_group)[None, :]
            own = tl.load(at_zeros, mask=depth[None, :] < width, other=0)
    elif zeros is not None:
        own = tl.load(from_zeros)
    for first in range(0, width, DEPTH):
        place = first + depth
        inside = place < width
        word = tl.load(from_weights + place[None, :], mask=inside[None, :], other=0)
        if OF_GROUP:
            ahead = place + DEPTH
            next_scale = tl.load(from_scales + (ahead // OF_GROUP)[None, :], mask=ahead[None, :] < width, other=0.0)
            if zeros is not None:
                at_zeros = from_zeros + (ahead // OF_GROUP * zero_group)[None, :]
                next_own = tl.load(at_zeros, mask=ahead[None, :] < width, other=0)
        if BITS == 0:
            value = tl.load(from_x + place[:, None], mask=inside[:, None] & real[None, :], other=0.0)
            total = matrix_product(word.to(TYPE), value, total)
        else:
            if zeros is not None:
                zero = own.to(tl.float32)
            else:
                zero = tl.zeros((1, DEPTH), tl.float32) + MIDDLE
            if BETWEEN:  # the type has no room for these next to what codes are put into
                factor = scale.to(tl.float32) if OF_GROUP else 1.0
                less = zero * factor
                zero = tl.zeros((1, DEPTH), tl.float32)
            taken = (zero + (1024.0 if tl.float16 == TYPE else 128.0)).to(TYPE)
            for i in tl.static_range(PLANES // 2):
                here = from_x + (place + i * width)[:, None]
                low = tl.load(here, mask=inside[:, None] & real[None, :], other=0.0)
                high = tl.load(here + PLANES // 2 * width, mask=inside[:, None] & real[None, :], other=0.0)
                if HALVES:
                    both = _pair(word, i, BITS) | (_HALF_PAIR if tl.float16 == TYPE else _PAIR)
                    left = both.to(tl.int16).to(TYPE, bitcast=True) - taken
                    right = (both >> 16).to(tl.int16).to(TYPE, bitcast=True) - taken
                    if BETWEEN:
                        left = left.to(tl.float32) * factor - less
                        right = right.to(tl.float32) * factor - less
                elif MIDDLE:
                    left = _whole(word, i, BITS) - zero
                    right = _whole(word, i + PLANES // 2, BITS) - zero
                else:
                    both = _small_floats(_pair(word, i, BITS), BITS)
                    left = _number(both, BITS)
                    right = _number(both >> 16, BITS)
                if OF_GROUP and not BETWEEN:
                    left = left * scale
                    right = right * scale
                total = matrix_product(left.to(TYPE), low, total)
                total = matrix_product(right.to(TYPE), high, total)
        if OF_GROUP:
            scale = next_scale
            if zeros is not None:
                own = next_own
    if scales is not None and OF_GROUP == 0:
        total *= tl.load(scales + expert * scale_rows * groups + column // SQUARE).to(tl.float32)[:, None]
    if whole is not None:
        total *= tl.load(whole + expert).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + expert * n + column).to(tl.float32)[:, None]
    made = tl.trans(total)
    row = tl.maximum(visit, 0).to(tl.int64)[:, None]
    if PAIRS:
        gate, line = tl.split(tl.reshape(made, (VISITS, COLUMNS // 2, 2)))
        made = _opened(gate, line, ACTIVATION, alpha, beta, limit)
        at = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        n = n // 2
    mask = real[:, None] & (at < n)[None, :]
    if PAIRS == 0:
        line = None
        if beside is not None:
            line = tl.load(beside + row * n + at[None, :], mask=mask, other=0.0).to(tl.float32)
        made = _opened(made, line, ACTIVATION, alpha, beta, limit)
    to = at % OUT_PLANES * (n // OUT_PLANES) + at // OUT_PLANES
    tl.store(out + row * n + to[None, :], made.to(out.dtype.element_ty), mask=mask)


@kernel
def _added(
    made: tl.tensor, shares: tl.tensor, out: tl.tensor, n: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(K):
        visit = token * K + choice
        total += tl.load(shares + visit) * tl.load(made + visit * n + at, mask=at < n, other=0.0)
    tl.store(out + token * n + at, total.to(out.dtype.element_ty), mask=at < n)


def many(
    x: torch.Tensor,
    layer: Experts,
    order: torch.Tensor,
    owners: torch.Tensor,
    out: torch.Tensor,
    *,
    shared: int = 1,
    opening: Opening = PLAIN,
    beside: torch.Tensor | None = None,
    tile: MatrixTile,
) -> torch.Tensor:
    """As ``few``, of visits that were sorted in blocks of ``tile.columns``; rows of ``out`` are visits as they were."""
    exact = 8 if x.dtype == torch.float16 else 4 if x.dtype == torch.bfloat16 and not interpreted() else 0
    halves = layer.middle > 0 and layer.bits <= exact  # such codes and the number they are put into fit the type
    _many[(owners.numel(), blocks(layer.n, tile.rows))](
        x,
        layer.words,
        layer.scales,
        layer.zeros,
        layer.whole,
        layer.bias,
        beside,
        order,
        owners,
        out,
        layer.n,
        layer.width // layer.lane,
        layer.groups,
        blocks(layer.n, layer.square),
        *_steps(layer.zeros),
        opening.alpha,
        opening.beta,
        opening.limit,
        SHARED=shared,
        VISITS=tile.columns,
        COLUMNS=tile.rows,
        DEPTH=tile.depth,
        LANE=layer.lane,
        OF_GROUP=layer.words_of_group(1),
        SQUARE=layer.square,
        BITS=layer.bits,
        PLANES=layer.planes,
        MIDDLE=layer.middle,
        HALVES=halves,
        BETWEEN=halves and layer.zeros is not None and layer.zeros.is_floating_point(),
        ACTIVATION=opening.activation,
        PAIRS=opening.pairs,
        OUT_PLANES=opening.planes,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def added(made: torch.Tensor, shares: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Of each token its visits, as much of each as its share: ``made`` [T k, n] of float32, ``out`` [T, n]."""
    tokens, n = out.shape
    step = min(1024, power_of_two(n))
    _added[(tokens, blocks(n, step))](made, shares, out, n, K=shares.shape[1], BLOCK=step, num_warps=4)
    return out
