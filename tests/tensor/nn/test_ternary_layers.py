"""Ternary layers of modules, with inputs of fewer bits than their scale."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranvier as rv
from ranvier import nn
from ranvier.quantize import Ternary

RNG = np.random.default_rng(31)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1e-3, 1e5])
def test_the_scale_is_that_of_the_weights(dtype: Any, size: float) -> None:
    """Sums are scaled in float32, whatever the tokens are: a scale in their type would be another, or none at all."""
    weight = (RNG.standard_normal((20, 48)) * size).astype(np.float32)
    x = (RNG.standard_normal((5, 48)) / size).astype(dtype)
    scale = np.float32(np.abs(weight).mean(dtype=np.float64))
    codes = np.clip(np.rint(weight / scale), -1, 1).astype(np.int64)
    tokens = x.astype(np.float32)
    by = np.float32(127) / np.maximum(np.abs(tokens).max(axis=1, keepdims=True), np.float32(1e-5))
    wanted = (np.rint(tokens * by).astype(np.int64) @ codes.T).astype(np.float32) * (scale / by)
    layer = nn.QuantizedLinear(Ternary().quantize(weight))
    for run in (layer, rv.jit(lambda x: layer(x))):
        found = run(rv.Tensor(x)).numpy()
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, wanted.astype(dtype))
