"""Finding many values in a fixed list of keys: one binary search for numbers, a dict for strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array


class KeyTable:
    """Where values stand in a list of keys. A key that comes twice counts where it comes last; NaN equals NaN."""

    def __init__(self, keys: Array) -> None:
        self.dtype = keys.dtype
        self._positions: dict[str, int] = {}
        if keys.dtype == object:
            self._positions = {key: k for k, key in enumerate(keys)}
        else:
            self._sorted, from_the_end = np.unique(keys[::-1], return_index=True)
            self._position = len(keys) - 1 - from_the_end

    def find(self, values: Array) -> Array:
        """The position of each value among the keys, -1 where it is no key."""
        if self.dtype == object:
            found = (self._positions.get(value, -1) for value in values.flat)
            return np.fromiter(found, np.int64, values.size).reshape(values.shape)
        if not len(self._sorted):
            return np.full(values.shape, -1)
        at = np.minimum(np.searchsorted(self._sorted, values), len(self._sorted) - 1)
        candidate = self._sorted[at]
        same = candidate == values
        if self.dtype.kind == "f":
            same |= np.isnan(candidate) & np.isnan(values)
        return np.where(same, self._position[at], -1)


@prepared
def key_table(keys: Sequence[Any] | Array | None, dtype: type) -> KeyTable:
    """The table of an attribute's keys."""
    return KeyTable(np.asarray([] if keys is None else keys, dtype).ravel())
