"""Attention of tokens to those before them and to themselves, with a number for each key that is added to its scores.

Libraries take the causal mask by itself or any mask as a tensor; with padding beside it there is only the latter, and
half of the scores are computed to be thrown away. Here keys behind the tokens of a program are not read at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.storage import Storage
from ranvier.codegen.triton.library import Call
from ranvier.codegen.triton.printer import HEADER, Pointer, Source
from ranvier.records import dataclass

LOWEST = -65504.0  # for what is added: a score this low has no weight, and sums of it stay finite
_BODY = """\
@triton.jit
def causal_attention(q, k, v, row, out, n, heads, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, row_b,
                     M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    at = start + tl.arange(0, M)
    depth = tl.arange(0, D)
    inside = at[:, None] < n
    query = tl.load(q + batch * q_b + head * q_h + at[:, None] * q_t + depth[None, :], mask=inside, other=0)
    keys = tl.arange(0, N)
    k_at = k + batch * k_b + head * k_h + keys[None, :] * k_t + depth[:, None]
    v_at = v + batch * v_b + head * v_h + keys[:, None] * v_t + depth[None, :]
    row_at = row + batch * row_b + keys
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for first in range(0, start, N):
        key = tl.load(k_at + first * k_t)
        added = tl.maximum(tl.load(row_at + first).to(tl.float32), {lowest}) * {log2e}
        scores = {product}(query, key, tl.zeros((M, N), tl.float32)) * {scale} + added[None, :]
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        less = tl.exp2(top - higher)
        total = total * less + tl.sum(weights, 1)
        value = tl.load(v_at + first * v_t)
        acc = {product}({narrow}, value, acc * less[:, None])
        top = higher
    for first in range(start, tl.minimum(start + M, n), N):
        there = first + keys < n
        key = tl.load(k_at + first * k_t, mask=there[None, :], other=0)
        added = tl.maximum(tl.load(row_at + first, mask=there, other=0).to(tl.float32), {lowest}) * {log2e}
        scores = {product}(query, key, tl.zeros((M, N), tl.float32)) * {scale} + added[None, :]
        scores = tl.where(first + keys[None, :] <= at[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        less = tl.exp2(top - higher)
        total = total * less + tl.sum(weights, 1)
        value = tl.load(v_at + first * v_t, mask=there[:, None], other=0)
        acc = {product}({narrow}, value, acc * less[:, None])
        top = higher
    made = acc / total[:, None]
    o_at = out + ((batch * n + at[:, None]) * heads + head) * D + depth[None, :]
    tl.store(o_at, {result}, mask=inside)
"""
_HALVES = {
    "float16": ("tl.dot", "weights.to(tl.float16)", "made.to(tl.float16)"),
    "bfloat16": ("lib.dot_bfloat16", "lib.as_bfloat16(weights)", "lib.as_bfloat16(made)"),
}
# queries of a program and keys at a time, of which the former are a multiple; warps, stages
TILES = ((64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2))


@dataclass(frozen=True)
class Causal:
    """Sizes of queries, keys and values, [batch, heads, n, depth], and their strides in elements along the first three
    axes; the last one is dense. ``row``: from one sequence's numbers for the keys to the next one's."""

    dtype: str  # torch's name
    sizes: tuple[int, int, int, int]
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    row: int
    scale: float

    @staticmethod
    def takes(dtype: str, depth: int) -> bool:
        return dtype in _HALVES and depth in (16, 32, 64, 128)


class CausalCall:
    """The kernel with one tile. The result lies as [batch, n, heads, depth]."""

    def __init__(self, what: Causal, tile: tuple[int, int, int, int]) -> None:
        batch, heads, n, depth = what.sizes
        rows, columns, warps, stages = tile
        assert rows % columns == 0, "else keys behind a program's tokens would count"
        product, narrow, result = _HALVES[what.dtype]
        log2e = math.log2(math.e)
        body = _BODY.format(
            product=product,
            narrow=narrow,
            result=result,
            lowest=LOWEST,
            log2e=log2e,
            scale=what.scale * log2e,
        )
        self._storages = [Storage("temp", 0, name=name) for name in ("q", "k", "v", "row", "out")]
        pointers = tuple(Pointer(s, 0, what.dtype, s.name == "out") for s in self._storages)
        numbers = (n, heads, *what.q, *what.k, *what.v, what.row)
        sizes = (("M", rows), ("N", columns), ("D", depth))
        grid = (-(-n // rows), batch * heads, 1)
        source = Source(HEADER + body, "causal_attention", pointers, numbers, sizes, grid, warps, stages)
        self.call = Call(source)

    def launch(self, tensors: Sequence[object]) -> None:
        """On tensors for queries, keys, values, what is added and the result."""
        self.call.launch(dict(zip(self._storages, tensors)))
