"""Weights that one thread walks back and forth: which, and in how many slices.

Weights somewhat larger than the second-level cache are never found there by code that runs again and again and begins
at the same end every time, because what a run reads first was pushed out by what it read last. Runs that go backwards
every second time find what the one before ended with. See :mod:`ranvier.codegen.llvm.driver`.
"""

from __future__ import annotations

import math

from ranvier.codegen.llvm.isa import Isa

LEAST_BYTES = 3 << 19  # what is smaller stays in the cache anyway
MOST_BYTES = 16 << 20  # of what is larger hardly anything does
BESIDE_BYTES = 3 << 18  # that may be read between two walks
SLICE_BYTES = 192 << 10


def slices(nbytes: float, isa: Isa) -> int:
    """Slices of so many bytes; 1 where they are walked in one direction only."""
    return math.ceil(nbytes / SLICE_BYTES) if isa.turns and LEAST_BYTES <= nbytes <= MOST_BYTES else 1
