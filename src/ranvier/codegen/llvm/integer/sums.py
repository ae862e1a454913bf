"""Sums of constant codes."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_SHORT = 256  # codes whose sum 16 bits hold


def column_sums(codes: Array) -> Array:
    """int32 sums [..., K, N] over K; of bytes some at a time, whose sums 16 bits hold, because that is quicker."""
    if codes.itemsize > 1:
        return np.asarray(codes.sum(axis=-2, dtype=np.int32))
    total = np.zeros((*codes.shape[:-2], codes.shape[-1]), np.int32)
    short = {"int8": np.int16, "uint8": np.uint16}[codes.dtype.name]
    for start in range(0, codes.shape[-2], _SHORT):
        total += np.add.reduce(codes[..., start : start + _SHORT, :], axis=-2, dtype=short)
    return total
