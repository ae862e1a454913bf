"""Rounding one term of a sum after the other, each error spread over those still to come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ranvier.errors import InvalidConfig
from ranvier.quantize.blocks import Array


def feed_back(left: Array, factors: Array, nearest: Callable[[int], Array], block: int = 128) -> Array:
    """Round terms [..., outputs, terms] one after the other, each error spread over those still to come by the upper
    factors [..., terms, terms]: ``left`` is written over on the way. ``nearest(k)`` gives what its term k becomes.
    Terms beyond a block get the errors of all of it at once."""
    terms = left.shape[-1]
    made = np.empty_like(left)
    for start in range(0, terms, block):
        stop = min(start + block, terms)
        errors = np.zeros((*left.shape[:-1], stop - start))
        for k in range(start, stop):
            made[..., k] = nearest(k)
            error = (left[..., k] - made[..., k]) / factors[..., k, k, None]
            left[..., k:stop] -= error[..., None] * factors[..., None, k, k:stop]
            errors[..., k - start] = error
        left[..., stop:] -= errors @ factors[..., start:stop, stop:]
    return made


def upper_factor(second: Array) -> Array:
    """The upper Cholesky factor of the inverse; a matrix that is nearly singular gets more on its diagonal."""
    extra = 0.0
    mean = float(np.mean(np.diag(second))) or 1.0
    for _ in range(8):
        try:
            damped = second + extra * np.eye(len(second))
            return np.linalg.cholesky(np.linalg.inv(damped)).T
        except np.linalg.LinAlgError:
            extra = max(10 * extra, 1e-3 * mean)
    raise InvalidConfig("the samples' second moments cannot be inverted; give more samples or more damping")
