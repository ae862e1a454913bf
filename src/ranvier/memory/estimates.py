"""What something will take, before it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import InvalidValue
from ranvier.records import dataclass

_LINE = 64  # buffers begin on multiples of this
_TILE = 64 * 64  # scores one thread of a fused attention kernel keeps at a time


def estimate_tensor(shape: Iterable[int], dtype: DType | str, *, aligned: bool = False, packed: bool = False) -> int:
    """Bytes of a tensor's elements in memory; ``aligned``: rounded up as a buffer of it is; ``packed``: as files and
    quantized kernels hold it, with several elements of less than a byte in one."""
    sizes = tuple(shape)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidValue(f"estimate_tensor: sizes must be whole numbers of 0 or more, got {list(sizes)}")
    found = dtypes.of(dtype)
    count = math.prod(sizes)
    nbytes = -(-count * found.bits // 8) if packed and found.is_packed else found.nbytes(count)
    return -(-nbytes // _LINE) * _LINE if aligned else nbytes


@dataclass(frozen=True)
class AttentionEstimate:
    """Bytes of one attention: what goes in, what comes out, and what is between them."""

    query: int
    key: int
    value: int
    output: int
    scores: int  # the matrix of every query against every key, or the tiles that stand for it

    @property
    def cache(self) -> int:
        """Keys and values: what a decoder keeps from token to token."""
        return self.key + self.value

    @property
    def total(self) -> int:
        return self.query + self.key + self.value + self.output + self.scores


def estimate_attention(
    batch: int,
    heads: int,
    q: int,
    kv: int,
    head_dim: int,
    dtype: DType | str = "float32",
    *,
    flash: bool = False,
    kv_heads: int | None = None,
    threads: int = 1,
) -> AttentionEstimate:
    """``q`` queries over ``kv`` keys in each of ``heads`` heads; ``kv_heads``: fewer of them share keys and values.

    Written out, the scores are a matrix of ``q`` by ``kv`` for every head, kept twice (before and after the softmax);
    ``flash`` keeps one tile of them for each thread, in float32 whatever the type, with a row's maximum and sum.
    """
    shared = heads if kv_heads is None else kv_heads
    if shared <= 0 or heads % shared:
        raise InvalidValue(f"estimate_attention: {heads} heads cannot share {shared} heads of keys and values")
    query = estimate_tensor((batch, heads, q, head_dim), dtype)
    keys = estimate_tensor((batch, shared, kv, head_dim), dtype)
    if flash:
        tile = min(_TILE, max(1, q) * max(1, kv)) + 2 * min(64, max(1, q)) + min(64, max(1, q)) * head_dim
        scores = threads * estimate_tensor((tile,), DType.float32, aligned=True)
    else:
        scores = 2 * estimate_tensor((batch, heads, q, kv), dtype)
    return AttentionEstimate(query, keys, keys, query, scores)
