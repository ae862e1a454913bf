"""Numbers of groups as integers times steps: to the last bit, or not at all."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.codegen.llvm.coded.numbers import Columns, Layout, factored, scales_of, subtracted_of
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]
F32 = np.float32


def halves(rng: np.random.Generator, *shape: int) -> Array:
    return rng.uniform(1e-4, 1e-2, shape).astype(np.float16).astype(F32)


def times(integers: Array, steps: Array) -> Array:
    return integers.astype(F32) * np.repeat(steps, integers.shape[1] // steps.shape[1], axis=1)


@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.sampled_from([16, 32, 64]),
    bounds=st.sampled_from([(0, 64), (0, 16), (-32, 32), (-128, 128), (0, 2), (-128, -127), (60, 62), (-127, 128)]),
)
def test_integers_times_steps_are_found(seed: int, group: int, bounds: tuple[int, int]) -> None:
    rng, run = np.random.default_rng(seed), 256 // group
    integers, steps = rng.integers(*bounds, (5, 3 * run)), halves(rng, 5, 3) * rng.choice([-1, 0, 1], (5, 3))
    numbers = times(integers, steps.astype(F32))
    found = factored(numbers, group)
    assert found is not None
    np.testing.assert_array_equal(times(*found), numbers)


@given(seed=st.integers(0, 2**32 - 1), middle=st.sampled_from([2, 8, 16, 32]))
def test_offsets_are_found_behind_zero_points(seed: int, middle: int) -> None:
    """As they were before somebody divided by scales, in float32."""
    rng = np.random.default_rng(seed)
    scales = times(rng.integers(1, 64, (6, 16)), halves(rng, 6, 2))
    offsets = times(rng.integers(0, 64, (6, 16)), halves(rng, 6, 2))
    zeros = (offsets / scales).astype(np.float64) - middle
    found = factored(zeros, 32, scales, middle)
    assert found is not None
    assert (np.abs(times(*found) - offsets) <= offsets * 2.0**-22).all()


def test_what_is_no_such_number_is_left() -> None:
    rng = np.random.default_rng(0)
    numbers = times(rng.integers(1, 64, (300, 16)), halves(rng, 300, 2))
    assert factored(numbers, 32) is not None
    for wrong in (np.nextafter(numbers[217, 5], F32(1)), np.nan, np.inf, F32(1.0)):
        other = numbers.copy()
        other[217, 5] = wrong
        assert factored(other, 32) is None
    assert factored(rng.uniform(size=(40, 16)).astype(F32), 32) is None
    assert factored(times(np.tile([129, 1], (2, 8)), halves(rng, 2, 2)), 32) is None  # no byte
    assert factored(times(np.tile([128, -128], (2, 8)), np.full((2, 2), 0.5, F32)), 32) is not None  # 1 and -1 are
    assert factored(numbers[:, :12], 32) is None  # a run that is not whole
    for group in (0, 24, 128, 256):
        assert (factored(numbers, group) is None) == (group != 128)


@pytest.mark.parametrize("scale", [3e38, 1e-45, np.inf, np.nan, 0.0, -1.0])
@pytest.mark.parametrize("zero", [2.5, 3e38, -3e38, np.inf, np.nan, 1e-45])
def test_any_numbers_may_come(scale: float, zero: float) -> None:
    """Without a word, and as they are."""
    rng = np.random.default_rng(3)
    scales, zeros = halves(rng, 4, 16), rng.uniform(size=(4, 16)).astype(F32)
    scales[2, 3], zeros[2, 3] = scale, zero
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers, found = scales_of(scales, 32, Columns(4)), subtracted_of(zeros, scales, 32, Columns(4), 8)
    assert numbers.storage.array is not None and found is not None and found.numbers.storage.array is not None
    held = numbers.storage.array.swapaxes(1, 2).reshape(4, 16)
    np.testing.assert_array_equal(held.astype(F32), scales)
    if found.middle is None:
        np.testing.assert_array_equal(found.numbers.storage.array.swapaxes(1, 2).reshape(4, 16), zeros)


@pytest.mark.parametrize("columns", [4, 16])
def test_runs_have_their_steps_in_front(columns: int) -> None:
    rng = np.random.default_rng(1)
    integers, steps = rng.integers(1, 64, (20, 16)), halves(rng, 20, 2)
    integers[:, ::8] = 63
    numbers = scales_of(times(integers, steps), 32, Columns(columns))
    assert numbers.layout == Layout(DType.int8, 8) and numbers.storage.array is not None
    held = numbers.storage.array.reshape(-1, 2, columns * 12)  # panels, runs
    units = held[..., : 4 * columns].copy().view(F32).swapaxes(1, 2).reshape(-1, 2)
    each = held[..., 4 * columns :].reshape(len(held), 16, columns).swapaxes(1, 2).reshape(-1, 16)
    np.testing.assert_array_equal(units[:20], steps)
    np.testing.assert_array_equal(each[:20], integers)
    assert not units[20:].any() and not each[20:].any()
    assert numbers.storage.nbytes == len(units) * numbers.layout.column(16)


def test_what_is_subtracted() -> None:
    """Nothing, bytes, offsets in runs or as halves, and numbers that are none of these."""
    rng = np.random.default_rng(2)
    scales, minima = halves(rng, 8, 16), halves(rng, 8, 16)
    assert subtracted_of(np.zeros((8, 16), F32), scales, 32, Columns(4), 8) is None
    cases: list[tuple[Array, int | None, Layout, int | None]] = [
        (rng.integers(-8, 8, (8, 16)).astype(F32), 8, Layout(DType.int8), None),
        (times(rng.integers(1, 64, (8, 16)), halves(rng, 8, 2)) / scales - F32(8), 8, Layout(DType.int8, 8), 8),
        (minima / scales - F32(8), 8, Layout(DType.float16), 8),
        (minima / scales - F32(8), None, Layout(DType.float32), None),
        (rng.uniform(size=(8, 16)).astype(F32), 8, Layout(DType.float32), None),
    ]
    for zeros, middle, layout, found_middle in cases:
        found = subtracted_of(zeros, scales, 32, Columns(4), middle)
        assert found is not None and (found.numbers.layout, found.middle) == (layout, found_middle)
