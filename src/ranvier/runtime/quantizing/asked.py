"""How near results have to be, with the room that samples must leave: they are not all there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.runtime.quantizing.report import Difference, chord

Array = np.ndarray[Any, Any]
_ROOM = 0.85  # part of an error that samples may show by which a model is chosen
_HELD = 0.95  # ... and those that nothing was chosen by
_AGREEMENT, _PLACES = 0.99, 500  # of largest entries, and of how many that says something …
_ALIKE = 0.99  # … about results whose cosine is this at least: in features the largest entry is one of many that count


class Asked:
    """``max_error`` of results or a ``cosine`` in place of it; ``expected``: results that others are compared with."""

    def __init__(self, max_error: float | None, cosine: float | None, expected: Sequence[Sequence[Array]]) -> None:
        self._plain = max_error is not None  # what was asked is all there is to keep
        self.bound = math.inf if max_error is None and cosine is None else max_error or chord(cosine or 0.0)
        every = [array for arrays in expected for array in arrays]
        places = sum(array.size for array in every)
        self._whole = not self._plain and places >= _PLACES and all(array.dtype.kind in "iub" for array in every)
        self._surely = _surely(max(1, places))

    @property
    def anything(self) -> bool:
        """Whether anything was asked for at all."""
        return math.isfinite(self.bound)

    @property
    def limit(self) -> float:
        """The error that samples may show by which a model is chosen."""
        if self._plain:
            return self.bound
        return chord(self._surely) if self._whole else self.bound * _ROOM

    def shown(self, found: Difference) -> float:
        """The error, or as much of it as the limit has room for where samples differ."""
        return found.error if self._plain else max(found.turn, found.most_turn * _ROOM)

    def judged(self, found: Difference) -> float:
        """The error by which nodes are compared, on few samples."""
        return found.error if self._plain else max(found.turn, found.even_turn)

    def near(self, found: Difference) -> bool:
        """Whether a model may be chosen that does this to the samples of the choice."""
        return self.shown(found) <= self.limit or self._agrees(found, _surely(max(1, found.places)))

    def holds(self, found: Difference, chosen: Difference) -> bool:
        """Whether a model that was chosen is as near on samples that had no part in it."""
        if self._plain:
            return found.error <= self.bound
        if self.shown(found) <= self.bound * (1.0 if self._whole else _HELD):
            return True
        return self._agrees(chosen, _surely(max(1, chosen.places))) and self._agrees(found, _AGREEMENT, few=True)

    def _agrees(self, found: Difference, least: float, *, few: bool = False) -> bool:
        enough = not self._plain and (few or found.places >= _PLACES) and found.cosine >= _ALIKE
        return enough and found.agreement is not None and found.agreement >= least


def _surely(places: int) -> float:
    """How often largest entries must be the same in this many places for two deviations of chance to be room enough."""
    return min(1.0, _AGREEMENT + 2 * math.sqrt(_AGREEMENT * (1 - _AGREEMENT) / places))
