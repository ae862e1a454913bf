"""Codes that are read some rows at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.quantize import rows
from ranvier.quantize.base import Quantized
from ranvier.quantize.fields import Codes, Field, spread
from ranvier.quantize.rows import rows_of

Array = np.ndarray[Any, Any]


def coded(shape: tuple[int, ...], group: int = 4, zeros: bool = True, seed: int = 0) -> Quantized:
    rng = np.random.default_rng(seed)
    groups = (*shape[:-1], -(-shape[-1] // group))
    codes, scales = rng.integers(0, 16, shape, np.uint8), rng.normal(size=groups).astype(np.float32)
    points = rng.integers(0, 16, groups, np.uint8) if zeros else None
    return Quantized("any", codes, scales, (*(1,) * (len(shape) - 1), group), 4, points)


def same(one: Quantized, other: Quantized) -> None:
    assert one.shape == other.shape and one.block == other.block
    np.testing.assert_array_equal(one.codes, other.codes)
    np.testing.assert_array_equal(one.dequantize(), other.dequantize())


@pytest.mark.parametrize("shape", [(5, 12), (0, 8), (1, 4), (3, 10), (2, 3, 8), (4, 1, 4)])
@pytest.mark.parametrize("zeros", [False, True])
def test_all_rows_are_the_whole(shape: tuple[int, ...], zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "AT_A_TIME", 20)
    given = coded(shape, zeros=zeros)
    found = rows_of(given)
    assert found is not None and found.count == math.prod(shape[:-1])
    same(found.whole(), given)


def test_experts_one_after_the_other() -> None:
    given = [coded((3, 8), seed=k) for k in range(4)]
    found = rows_of(given)
    assert found is not None and found.shape == (4, 3, 8)
    numbers = np.concatenate([each.dequantize() for each in given])
    for first in range(12):
        for last in range(first, 13):
            np.testing.assert_array_equal(found.read(first, last).dequantize(), numbers[first:last])


def test_what_has_no_rows() -> None:
    plain = coded((4, 8))
    by_columns = replace(plain, block=(4, 8), scales=np.ones((1, 1), np.float32), zeros=None)
    shared = replace(plain, scales=np.ones((1, 2), np.float32))
    assert rows_of(replace(plain, order=np.zeros(8, np.int64))) is None
    assert rows_of(replace(plain, flat=True, block=(4,))) is None
    assert rows_of(by_columns) is None and rows_of(shared) is None
    assert rows_of([plain, coded((4, 8), group=8)]) is None and rows_of([plain, coded((5, 8))]) is None
    assert rows_of([]) is None and rows_of([plain, by_columns]) is None


@given(st.data())
def test_fields_are_where_they_say(data: st.DataObject) -> None:
    """Against one bit after the other."""
    bits = data.draw(st.sampled_from([1, 2, 4, 8]))
    run = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    weights = 8 // bits * run * data.draw(st.integers(1, 3))
    at, above = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 8 - bits))
    field = Field(at, bits, run, above)
    size = at + weights * bits // 8
    blocks = np.random.default_rng(weights).integers(0, 256, (2, 3, size), np.uint8)
    expected = np.zeros((2, 3, weights), np.uint8)
    for k in range(weights):
        byte, shift = field.place(k)
        expected[..., k] = ((blocks[..., byte] >> shift) & ((1 << bits) - 1)) << above
    np.testing.assert_array_equal(Codes(weights, size, (field,)).read(blocks), expected)


def test_codes_share_bytes() -> None:
    assert spread(np.array([[0x21, 0x43]], np.uint8), 4, 2).tolist() == [[1, 3, 2, 4]]
    assert spread(np.array([[0x21, 0x43]], np.uint8), 4, 1).tolist() == [[1, 2, 3, 4]]
    assert Codes(2, 2, (Field(0, 8, 2),), raised=0).read(np.array([[0xFF, 1]], np.uint8)).tolist() == [[-1, 1]]
    assert Codes(2, 1, (Field(0, 4, 1),), raised=8).read(np.array([[0x2F]], np.uint8)).tolist() == [[7, -6]]
