"""The largest value of a constant is looked for once, and forgotten with the constant."""

from __future__ import annotations

import gc

import numpy as np

from ranvier.codegen.definitions.lower.quantization import DERIVED
from ranvier.providers.cpu.narrow import extremes


def test_known_for_as_long_as_the_array_is_there() -> None:
    array = np.array([[1.0, -7.0], [3.0, 2.0]], np.float32)
    array.flags.writeable = False
    before = len(DERIVED._made)
    assert extremes.largest(array) == extremes.largest(array) == 7.0
    assert len(DERIVED._made) == before + 1
    key = ((id(array),), "largest")
    DERIVED._made[key] = np.asarray(9.0)
    assert extremes.largest(array) == 9.0  # it was not looked for again
    del array
    gc.collect()
    assert key not in DERIVED._made


def test_arrays_that_may_change_are_looked_at_again() -> None:
    array = np.array([1.0, 2.0], np.float32)
    assert extremes.largest(array) == 2.0
    array[0] = -5.0
    assert extremes.largest(array) == 5.0
    assert extremes.largest(np.zeros((0, 3), np.float32)) == 0.0
