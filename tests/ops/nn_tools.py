"""What the tests of neural-network operators share."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from ranvier.ops import registry

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def evaluate(name: str, *inputs: Any, **attrs: Any) -> Any:
    """One operator by its reference, under the floating-point settings the runtime has."""
    with np.errstate(all="ignore"):
        return registry.evaluate(name, *inputs, **attrs)


def floats(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def close(a: Any, b: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))
