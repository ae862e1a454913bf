"""What a call takes and gives by name, and where a program has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.records import dataclass


@dataclass(frozen=True)
class Tensor:
    """``place``: among the inputs, or the outputs, of whoever runs; None for an input that is not read."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    place: int | None


@dataclass(frozen=True)
class Constant:
    """An output that is always the same; callers get copies. The array is contiguous."""

    name: str
    array: np.ndarray[Any, Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = self.array.dtype
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)
