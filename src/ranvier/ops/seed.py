"""The seed of random operators that have none of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

_AHEAD = 64  # runs that numbers are drawn for at once
_lock = threading.Lock()
_shared: np.random.SeedSequence | None = None
_unseeded: np.random.Generator | None = None  # any number it draws is fresh: making a generator costs more than a draw


def set_seed(seed: int | None) -> None:
    """Make operators without a seed draw a repeatable series of numbers; None makes them fresh again."""
    global _shared
    with _lock:
        _shared = None if seed is None else np.random.SeedSequence(seed)


def fresh_generator() -> np.random.Generator:
    """A generator for one call of an operator without a seed; it may serve other calls, in any thread, too."""
    global _unseeded
    with _lock:
        if _shared is not None:
            return np.random.default_rng(_shared.spawn(1)[0])
        if _unseeded is None:
            _unseeded = np.random.default_rng()
        return _unseeded


class Ahead:
    """Numbers in [0, 1) of one shape, again and again, for operators without a seed: a call of NumPy takes longer than
    many runs of a small model, so it is asked for those of many runs at a time."""

    __slots__ = ("_from", "_rows", "_shape")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = (_AHEAD, *shape)
        self._from: np.random.Generator | None = None
        self._rows: Iterator[np.ndarray[Any, Any]] = iter(())

    def __call__(self) -> np.ndarray[Any, Any]:
        if _shared is None and self._from is _unseeded:  # a child of this process has another one
            try:
                return next(self._rows)
            except StopIteration:
                pass
        generator = fresh_generator()
        if generator is not _unseeded:
            return np.asarray(generator.random(self._shape[1:]))
        rows: Iterator[np.ndarray[Any, Any]] = iter(generator.random(self._shape))
        first = next(rows)
        self._from, self._rows = generator, rows
        return first


def _forget() -> None:
    """A child of this process must not draw what its parent draws."""
    global _unseeded
    _unseeded = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
