"""The seed of random operators that have none of their own."""

from __future__ import annotations

import threading

import numpy as np

_lock = threading.Lock()
_shared: np.random.SeedSequence | None = None


def set_seed(seed: int | None) -> None:
    """Make operators without a seed draw a repeatable series of numbers; None makes them fresh again."""
    global _shared
    with _lock:
        _shared = None if seed is None else np.random.SeedSequence(seed)


def fresh_generator() -> np.random.Generator:
    """The generator of one call of an operator without a seed."""
    with _lock:
        return np.random.default_rng(None if _shared is None else _shared.spawn(1)[0])
