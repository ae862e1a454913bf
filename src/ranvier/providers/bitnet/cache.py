"""Weights that were made ternary on the fly, by the content they were made from.

Sessions come and go, and several parts of a model may hold the same weights: what was made is kept as BitLinear has it,
in 2 bits, the least recently used going first, and sessions beside each other have it once. Nobody can write to it, so
what kernels make of it is shared as well. That weights are not ternary is kept too: it takes as long to find out, and a
model is asked about whenever a session is made.
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
_NAME = 512  # bytes, about, of the key that is kept of weights that are none


class TernaryCache:
    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[object, ...], Weights | None] = OrderedDict()
        self._nbytes = 0
        self.hits = self.misses = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def weights(self, layer: Layer) -> Weights | None:
        """The weights of a layer, None where they are not ternary."""
        key = (*layer.how, *((digest(x), x.dtype.str, x.shape) for x in layer.sources))
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                self.hits += 1
                return self._made[key]
            self.misses += 1
        made = layer.weights()
        if made is not None:
            made.codes.flags.writeable = False  # as it is, not as a view of it, graphs take it for a constant
        if _size(made) > self._limit:
            return made
        with self._lock:
            if key in self._made:
                return self._made[key]  # another thread was faster
            self._made[key] = made
            self._nbytes += _size(made)
            while self._nbytes > self._limit:
                self._nbytes -= _size(self._made.popitem(last=False)[1])
        return made

    def clear(self) -> None:
        with self._lock:
            self._made.clear()
            self._nbytes = 0


def _size(made: Weights | None) -> int:
    return _NAME if made is None else made.nbytes


def digest(array: Array) -> bytes:
    """Of the content in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()
