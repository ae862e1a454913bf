"""Weights that were made ternary on the fly, by the content they were made from.

Sessions come and go, and several parts of a model may hold the same weights: what was made is kept as BitLinear has it,
in 2 bits, the least recently used going first, and sessions beside each other have it once.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from ranvier.passes.ternary import Layer, Weights

Array = np.ndarray[Any, Any]
LIMIT = 256 << 20  # bytes of codes


class TernaryCache:
    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[object, ...], Weights] = OrderedDict()
        self._nbytes = 0
        self.hits = self.misses = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def weights(self, layer: Layer) -> Weights | None:
        """The weights of a layer, None where they are not ternary."""
        key = (*layer.how, *((digest(x), x.dtype.str, x.shape) for x in layer.sources))
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)
                self.hits += 1
                return found
            self.misses += 1
        made = layer.weights()
        if made is None or made.nbytes > self._limit:
            return made
        with self._lock:
            found = self._made.setdefault(key, made)
            if found is not made:
                return found  # another thread was faster
            self._nbytes += made.nbytes
            while self._nbytes > self._limit:
                self._nbytes -= self._made.popitem(last=False)[1].nbytes
        return made

    def clear(self) -> None:
        with self._lock:
            self._made.clear()
            self._nbytes = 0


def digest(array: Array) -> bytes:
    """Of the content in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()
