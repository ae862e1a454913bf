"""Rows of coded tables on the CPU provider against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.ops.contrib.weight_only import packed
from tests.providers.cpu.compare import Array, check

CLOSE = {"domain": "com.microsoft", "rtol": 1e-6, "atol": 1e-6}


def steps(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(2).uniform(0.01, 0.1, shape).astype(dtype)


def places(size: int, *shape: int, dtype: Any = np.int64) -> Array:
    return np.random.default_rng(3).integers(-size, size, shape).astype(dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("rows", [places(20, 3, 4), places(20, 5, dtype=np.int32), np.array(7), np.array([3, 20, -21])])
def test_codes_that_share_bytes(bits: int, rows: Array) -> None:
    """Indices outside the table give zeros."""
    rng = np.random.default_rng(1)
    table = rng.integers(0, 256, (20, 72 * bits // 8)).astype(np.uint8)
    attrs = {"bits": bits, "block_size": 16, "quantize_axis": 1, "gather_axis": 0}
    zeros = packed(rng.integers(0, 1 << bits, (20, 5)), bits)
    check("GatherBlockQuantized", [table, rows, steps(20, 5)], attrs, **CLOSE)
    check("GatherBlockQuantized", [table, rows, steps(20, 5), zeros], attrs, constant=[0, 2, 3], **CLOSE)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize(("gather", "block"), [(0, 1), (1, 0), (1, 1), (-1, 2), (0, -1), (2, 0)])
def test_codes_with_a_byte_each(dtype: Any, gather: int, block: int) -> None:
    rng, limits = np.random.default_rng(4), ml_dtypes.iinfo(dtype)
    table = rng.integers(limits.min, limits.max + 1, (20, 24, 28)).astype(dtype)
    shape = [*table.shape]
    shape[block] = -(-shape[block] // 16)
    zeros = rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    attrs = {"block_size": 16, "gather_axis": gather, "quantize_axis": block}
    rows = places(table.shape[gather], 2, 3)
    check("GatherBlockQuantized", [table, rows, steps(*shape)], attrs, **CLOSE)
    check("GatherBlockQuantized", [table, rows, steps(*shape), zeros], attrs, **CLOSE)


def test_scales_that_rows_share_and_halves() -> None:
    table = np.random.default_rng(5).integers(0, 256, (20, 32)).astype(np.uint8)
    attrs = {"bits": 4, "block_size": 32}
    check("GatherBlockQuantized", [table, places(20, 6), steps(1, 2)], attrs, **CLOSE)
    half = {"domain": "com.microsoft", "rtol": 1e-3, "atol": 1e-3}
    check("GatherBlockQuantized", [table, places(20, 6), steps(20, 2, dtype=np.float16)], attrs, **half)
