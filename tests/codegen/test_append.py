"""Rows put behind those of a cache: copied anywhere else, in place where the cache is its own result."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.codegen.llvm.attention import append
from ranvier.codegen.llvm.isa import Isa
from tests.codegen.harness import ISAS, run, view_of

each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


@each_isa
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(
    ("past_rows", "rows", "time", "width"), [(5, 6, 1, 64), (7, 7, 2, 33), (0, 3, 3, 5), (9, 12, 1, 1)]
)
@pytest.mark.parametrize("split", [1, 3])
def test_rows_are_put_behind(
    isa: Isa, dtype: type, past_rows: int, rows: int, time: int, width: int, split: int
) -> None:
    rng = np.random.default_rng(0)
    batch, heads = 2, 3
    past = rng.standard_normal((batch, heads, past_rows, width)).astype(dtype)
    # as projections leave them: time before heads
    new = rng.standard_normal((batch, time, heads, width)).astype(dtype).transpose(0, 2, 1, 3)
    most = min(past_rows, rows - time)
    first = np.array([most, most // 2], np.int64)
    out = np.full((batch, heads, rows, width), np.nan, dtype)
    views = [view_of(past), view_of(new, index=1), view_of(first, index=2), view_of(out, "output")]
    arrays = (past, new, first, out)
    run(append(*views), isa, {v.storage: a for v, a in zip(views, arrays)}, split=split)
    wanted = np.zeros_like(out)
    for b, start in enumerate(first):
        wanted[b, :, :start] = past[b, :, :start]
        wanted[b, :, start : start + time] = new[b]
    np.testing.assert_array_equal(out, wanted)


@each_isa
def test_in_its_own_memory_only_the_new_rows_are_written(isa: Isa) -> None:
    rng = np.random.default_rng(1)
    cache = rng.standard_normal((2, 3, 8, 20)).astype(np.float32)
    new = rng.standard_normal((2, 3, 2, 20)).astype(np.float32)
    first = np.array([1, 6], np.int64)
    wanted = cache.copy()
    for b, start in enumerate(first):
        wanted[b, :, start : start + 2] = new[b]
    views = [view_of(cache), view_of(new, index=1), view_of(first, index=2), view_of(cache, "output")]
    run(append(*views), isa, {v.storage: a for v, a in zip(views, (cache, new, first, cache))})
    np.testing.assert_array_equal(cache, wanted)
