"""Tokens as 8-bit codes, and ternary weights made in the memory there is."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.errors import DTypeMismatch
from ranvier.quantize import Ternary, token_codes

RNG = np.random.default_rng(9)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32])
def test_codes_of_tokens(dtype: Any) -> None:
    x = (RNG.standard_normal((4, 3, 50)) * 100).astype(dtype)
    codes, scale = token_codes(x)
    assert codes.dtype == np.int8 and scale.shape == (4, 3, 1)
    reach = np.abs(x.astype(np.float32)).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(scale, reach / 127, rtol=1e-6)
    np.testing.assert_allclose(codes * scale, x.astype(np.float32), atol=reach.max() / 127 * 0.51)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_what_is_no_number_shows_without_a_warning(bad: float) -> None:
    x = RNG.standard_normal((3, 8))
    x[1, 5] = bad
    codes, scale = token_codes(x)
    with np.errstate(invalid="ignore"):
        numbers = codes * scale
    assert np.isnan(numbers[1]).all() and np.isfinite(numbers[[0, 2]]).all()


@pytest.mark.parametrize("given", [np.array(["a"]), np.ones((2, 2), complex), np.float32(3)])
def test_what_are_no_tokens(given: Any) -> None:
    with pytest.raises(DTypeMismatch, match="real numbers"):
        token_codes(given)


def test_weights_are_left_as_they_are_and_take_little_memory() -> None:
    weights = RNG.standard_normal((512, 512)).astype(np.float32)
    before = weights.copy()
    Ternary().quantize(weights)
    tracemalloc.start()
    found = Ternary().quantize(weights)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(weights, before)
    scale = np.float32(np.abs(weights).mean(dtype=np.float64))
    np.testing.assert_array_equal(found.codes, np.clip(np.rint(weights / scale), -1, 1))
    assert most < 10 * weights.size
