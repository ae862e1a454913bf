"""The largest absolute value of a constant, looked for once: weights are read whole for it, and sessions are compiled
again and again while a sample is tried out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.definitions.lower.quantization import DERIVED

Array = np.ndarray[Any, Any]


def largest(array: Array) -> float:
    """Arrays that may change are looked at every time."""

    def look() -> Array:
        return np.asarray(max(array.max(initial=0.0), -array.min(initial=0.0)))

    return float(look() if array.flags.writeable else DERIVED.get([array], "largest", look))
