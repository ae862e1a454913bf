"""Operands that operations of the loop IR are tried on, whoever prints them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.loops.ir import Load, Op
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]


def op(name: str, *dtype: DType, result: DType | None = None) -> Op:
    return Op(name, tuple(Load(k, d) for k, d in enumerate(dtype)), result or dtype[0])


def samples(dtype: DType, seed: int) -> Array:
    """64 values, the awkward ones among them."""
    rng = np.random.default_rng(seed)
    if dtype is DType.bool:
        return rng.integers(0, 2, 64).astype(bool)
    if dtype.is_float:
        found = np.concatenate([rng.normal(size=40) * 4, rng.normal(size=24) * 100]).astype(np.float32)
        found[:8] = [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5]
        return rng.permutation(found).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    found = rng.integers(info.min, info.max, 64, dtype=dtype.numpy, endpoint=True)
    small = rng.integers(0 if info.min == 0 else -9, 10, 64).astype(dtype.numpy)
    found = np.where(rng.random(64) < 0.5, found, small)
    found[:5] = [info.min, info.max, 0, 1, 2]
    if info.min < 0:
        found[5] = -1
    return rng.permutation(found)


def divided(a: Array, b: Array) -> tuple[Array, Array]:
    """Quotients toward zero and remainders, by Python's own integers; 0 where the divisor is."""
    info = np.iinfo(a.dtype)
    pairs = list(zip(a.tolist(), b.tolist()))
    quotient = [0 if y == 0 else (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in pairs]
    rest = [0 if y == 0 else x - q * y for (x, y), q in zip(pairs, quotient)]
    return np.array([info.min if q > info.max else q for q in quotient], a.dtype), np.array(rest, a.dtype)
