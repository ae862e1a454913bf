"""Packings against a definition in plain Python, bit by bit."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.errors import WeightError
from ranvier.quantize.packing import (
    pack_awq,
    pack_bits,
    pack_nibbles,
    pack_ternary,
    unpack_awq,
    unpack_bits,
    unpack_nibbles,
    unpack_ternary,
)

SEEDS = st.integers(0, 2**32)


def codes_of(seed: int, shape: tuple[int, ...], bits: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape).astype(np.uint8)


@settings(max_examples=200, deadline=None)
@given(
    SEEDS, st.integers(1, 8), st.integers(1, 70), st.integers(1, 4), st.sampled_from([np.uint8, np.uint32, np.int32])
)
def test_bits(seed: int, bits: int, count: int, rows: int, word: Any) -> None:
    codes = codes_of(seed, (rows, count), bits)
    packed = pack_bits(codes, bits, word)
    width = np.dtype(word).itemsize * 8
    for r in range(rows):
        whole = sum(int(c) << (k * bits) for k, c in enumerate(codes[r]))
        words = [(whole >> (k * width)) & ((1 << width) - 1) for k in range(-(-count * bits // width))]
        assert [int(w) & ((1 << width) - 1) for w in packed[r]] == words
    np.testing.assert_array_equal(unpack_bits(packed, bits, count), codes)
    np.testing.assert_array_equal(unpack_bits(pack_bits(codes.T, bits, word, axis=0), bits, count, axis=0), codes.T)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 5))
def test_awq(seed: int, rows: int, words: int) -> None:
    codes = codes_of(seed, (rows, words * 8), 4)
    packed = pack_awq(codes)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for r in range(rows):
        for w in range(words):
            for i in range(8):
                assert (int(packed[r, w]) >> (4 * i)) & 15 == codes[r, 8 * w + order[i]]
    np.testing.assert_array_equal(unpack_awq(packed), codes)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 33))
def test_nibbles(seed: int, count: int) -> None:
    codes = codes_of(seed, (count,), 4)
    packed = pack_nibbles(codes)
    for k, code in enumerate(codes):
        assert (packed[k // 2] >> (4 if k % 2 == 0 else 0)) & 15 == code
    np.testing.assert_array_equal(unpack_nibbles(packed, count), codes)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 9))
def test_ternary(seed: int, quarter: int, columns: int) -> None:
    codes = np.random.default_rng(seed).integers(-1, 2, (4 * quarter, columns)).astype(np.int8)
    packed = pack_ternary(codes)
    for r in range(4 * quarter):
        shift = 2 * (r // quarter)
        np.testing.assert_array_equal((packed[r % quarter] >> shift) & 3, codes[r] + 1)
    np.testing.assert_array_equal(unpack_ternary(packed), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_codes_are_unpacked_without_a_byte_for_each_of_their_bits(bits: int) -> None:
    """Layers have millions of them."""
    words = np.random.default_rng(bits).integers(0, 1 << 32, (256, 128 * bits), np.uint32)
    count = words.shape[1] * 32 // bits
    tracemalloc.start()
    codes = unpack_bits(words, bits, count)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert codes.shape == (256, count) and codes.flags.c_contiguous
    assert most < 4 * codes.size


def test_mistakes() -> None:
    with pytest.raises(WeightError, match="do not fit"):
        unpack_bits(np.zeros((2, 1), np.uint32), 4, 9)
    with pytest.raises(WeightError, match="3 was found"):
        unpack_ternary(np.full((1, 1), 255, np.uint8))
    with pytest.raises(WeightError):
        pack_ternary(np.zeros((5, 2), np.int8))
    with pytest.raises(WeightError):
        pack_awq(np.zeros((2, 9), np.uint8))
