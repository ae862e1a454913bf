"""Mathematical functions that NumPy lacks."""

from __future__ import annotations

import functools
import math

import numpy as np

from ranvier.ops.accumulate import wide
from ranvier.ops.registry import Array

_ERF_BOUND = 4.0  # beyond it erf is 1 in float32
_ERF_DEGREE = 18  # error 4e-10 over the whole interval: below half an ulp of float32
_CHUNK = 1 << 14  # elements whose intermediates stay in the first two caches


def erf(x: Array) -> Array:
    """The error function in the dtype of ``x``; float64 and integers by the C library, narrower types by a fit."""
    if wide(x.dtype) == np.float32:
        return _erf_float32(x.astype(np.float32, copy=False)).astype(x.dtype, copy=False)
    exact = np.frompyfunc(math.erf, 1, 1)(x.astype(np.float64, copy=False))
    return np.asarray(exact, dtype=np.float64).astype(x.dtype)


def _erf_float32(x: Array) -> Array:
    result = np.empty(x.shape, np.float32)
    flat, source = result.reshape(-1), x.reshape(-1)
    coefficients = _erf_coefficients()
    for start in range(0, flat.size, _CHUNK):
        bounded = np.clip(source[start : start + _CHUNK].astype(np.float64), -_ERF_BOUND, _ERF_BOUND)
        position = bounded * bounded * (2 / _ERF_BOUND**2) - 1  # the fit's variable, in [-1, 1]
        total = np.full_like(position, coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            total *= position
            total += coefficient
        flat[start : start + _CHUNK] = total * bounded
    return result


@functools.cache
def _erf_coefficients() -> tuple[float, ...]:
    """Coefficients by rising power of erf(√u)/√u, a smooth function of u, fitted at Chebyshev points."""

    def ratio(u: float) -> float:
        root = math.sqrt(u)
        return math.erf(root) / root if root else 2 / math.sqrt(math.pi)

    from numpy.polynomial import chebyshev

    points = (chebyshev.chebpts1(_ERF_DEGREE + 1) + 1) * (_ERF_BOUND**2 / 2)
    fit = chebyshev.chebfit(chebyshev.chebpts1(_ERF_DEGREE + 1), [ratio(u) for u in points], _ERF_DEGREE)
    return tuple(float(c) for c in chebyshev.cheb2poly(fit))
