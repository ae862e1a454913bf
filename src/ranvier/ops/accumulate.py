"""The arithmetic sums are kept in: wider than the operands where they are narrow, exact where they are integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.ops.registry import Array

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype to sum floats of ``dtype`` in: float32 for everything below it, and the dtype itself otherwise."""
    if dtype in (_FLOAT32, _FLOAT64) or dtype.kind in "iubc":
        return dtype
    return _FLOAT32


def widened(x: Array) -> Array:
    """``x`` in the dtype its sums are kept in; no copy where it already is."""
    return x.astype(wide(x.dtype), copy=False)


def wide_matmul(a: Array, b: Array) -> Array:
    """``a @ b`` in the operands' dtype: floats summed wide and rounded once, integers exact modulo their width."""
    dtype = a.dtype
    if dtype.kind in "iub":
        carrier = exact_carrier(a, b, a.shape[-1])
        return from_carrier(np.asarray(np.matmul(a.astype(carrier), b.astype(carrier))), dtype)
    return np.asarray(np.matmul(widened(a), widened(b))).astype(dtype, copy=False)


def exact_carrier(a: Array, b: Array, terms: int) -> np.dtype[Any]:
    """A dtype in which sums of ``terms`` products of two integer arrays are exact; float where it can be.

    Only floating-point matrix products reach BLAS, and 8-bit operands stay far inside float64's 53 bits.
    """
    bound = _magnitude(a) * _magnitude(b) * max(terms, 1)
    if bound < 1 << 24:
        return _FLOAT32
    if bound < 1 << 53:
        return _FLOAT64
    # wraps instead of being exact, which comes to the same once cut to any integer width
    return np.dtype(np.uint64 if a.dtype.kind == "u" and b.dtype.kind == "u" else np.int64)


def from_carrier(y: Array, dtype: np.dtype[Any]) -> Array:
    """Sums from their carrier to ``dtype``; integers wrap as they would have while being added."""
    if y.dtype == dtype:
        return y
    if y.dtype.kind == "f" and dtype.kind in "iu":
        return y.astype(np.int64).astype(dtype)
    return y.astype(dtype)


def _magnitude(a: Array) -> int:
    if a.size == 0:
        return 0
    if a.dtype.itemsize == 1:  # the bound is cheaper than a look, and never decides
        return 255
    return max(abs(int(a.max())), abs(int(a.min())))
