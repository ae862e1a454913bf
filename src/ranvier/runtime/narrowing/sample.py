"""The inputs that a session is calibrated on, run through whatever was compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.config import Limits
from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType, Type
from ranvier.runtime.compiled import Compiled
from ranvier.runtime.control import RunControl


def read(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Inputs by name."""
    if isinstance(given, Mapping):
        return given
    try:
        with np.load(given, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidConfig(f"calibration: {given!r} is no .npz file with inputs ({error})") from None


def results(compiled: Compiled, values: Sequence[Any], dims: Mapping[str, int], limits: Limits) -> list[Any]:
    """All outputs of one run on ``values``, in the order of the graph's inputs."""
    graph = compiled.graph
    types = [type_of(v, x) for v, x in zip(graph.inputs, values)]
    shapes = tuple((x.dtype, x.shape) if isinstance(x, np.ndarray) else None for x in values)
    plan = compiled.plan(shapes, types, dims, tuple(v.name for v in graph.outputs))
    return plan.run(values, RunControl(None, limits), None)


def type_of(value: Value, x: Any) -> Type | None:
    return TensorType(dtypes.of(x), x.shape) if isinstance(x, np.ndarray) else value.type


def largest_difference(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Of any result from what it should be, as a part of the largest value of that result."""
    return max((_difference(a, b) for a, b in zip(found, expected)), default=0.0)


def _difference(found: Any, expected: Any) -> float:
    """Infinite where the types differ; what is not a float must be the same."""
    if not isinstance(found, np.ndarray) or not isinstance(expected, np.ndarray) or expected.dtype.kind != "f":
        return 0.0
    if found.shape != expected.shape:
        return math.inf  # sizes that follow from data: another number of boxes
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(found)):
        return math.inf
    gap = np.abs(found[finite].astype(np.float64) - expected[finite]).max(initial=0.0)
    return float(gap / max(np.abs(expected[finite]).max(initial=0.0), 1e-30))
