"""What a Fourier transform is asked for, whichever way it is computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.records import dataclass

Array = np.ndarray[Any, Any]

BATCH_AXES = 4  # axes beside the signal's that kernels walk


@dataclass(frozen=True)
class Transform:
    """One transform: ``parts`` numbers per point come in, ``made`` go out (1: real, 2: complex)."""

    length: int
    bins: int
    parts: int
    made: int
    inverse: bool
    mirrored: bool  # the input is the first half of a spectrum whose other half is its mirror image

    @property
    def elements(self) -> int:
        """Of the matrix that does it all at once."""
        points = self.length // 2 + 1 if self.mirrored else self.length
        return points * self.parts * self.bins * self.made
