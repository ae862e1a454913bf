"""How kernels are declared and launched, and what a launch is tuned by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit`` with a type: neither package has one that a strict check accepts."""
    return triton.jit(function)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which knows no machine instructions."""
    return bool(triton.knobs.runtime.interpret)


def blocks(size: int, block: int) -> int:
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The least power of two that is not smaller: what a range in a kernel has to be."""
    return 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True)
class Tile:
    """What a program of a matrix-vector product reads at a time: ``rows`` of the matrix, ``depth`` elements of each.

    So much of it is asked for ``ahead`` times before it is used (1 or 2; products of float weights only).
    """

    rows: int
    depth: int
    warps: int
    ahead: int = 1


@dataclass(frozen=True)
class MatrixTile:
    """What one program of a matrix product computes: ``rows`` x ``columns`` results, ``depth`` of the sum at a time."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
