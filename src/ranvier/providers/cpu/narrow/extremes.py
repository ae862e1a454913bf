"""The largest absolute value of a constant, looked for once: weights are read whole for it, and sessions are compiled
again and again while a sample is tried out."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

_KNOWN: dict[int, tuple[weakref.ref[Any], float]] = {}  # by identity, for as long as the array is there


def largest(array: np.ndarray[Any, Any]) -> float:
    """Arrays that may change are looked at every time."""
    key = id(array)
    known = _KNOWN.get(key)
    if known is not None and known[0]() is array:
        return known[1]
    found = float(max(array.max(initial=0.0), -array.min(initial=0.0)))
    if not array.flags.writeable:
        _KNOWN[key] = weakref.ref(array, lambda gone: _forget(key, gone)), found
    return found


def _forget(key: int, gone: weakref.ref[Any]) -> None:
    known = _KNOWN.get(key)
    if known is not None and known[0] is gone:  # another array may stand there by now
        del _KNOWN[key]
