"""Memory of large results, used again once nobody holds them.

A caller that drops its results gives megabytes back to the system, which hands them out again page by page in the next
run, cleared: for a model that returns its state (keys and values of a language model) that costs more than computing
them. So a large result lies in a block that comes back here when the last array over it has gone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from ranvier.memory import check_room

Array = np.ndarray[Any, Any]
FROM_BYTES = 256 << 10  # smaller ones are the allocator's business: it keeps those by itself
LIMIT_BYTES = 128 << 20  # of blocks that wait


class _Lease:
    """What the arrays over a block refer to, directly or through each other; its end is the end of them all."""

    __slots__ = ("__array_interface__", "_address", "_block", "_blocks")

    def __init__(self, block: Array, blocks: Blocks, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._block, self._blocks = block, blocks
        self._address = block.ctypes.data  # asked for now: at the end of the interpreter NumPy can no longer tell
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (self._address, False),
        }

    def __del__(self) -> None:
        self._blocks.give(self._block, self._address)


class Blocks:
    """Blocks of bytes that wait to be used again, the longest waiting first."""

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._waiting: OrderedDict[int, Array] = OrderedDict()  # by address
        self._sizes: dict[int, list[int]] = {}
        self.nbytes = 0
        # Nobody waits for it: whoever finds it taken does without. A lease may end anywhere, also where this very
        # thread holds it (an allocation can start the collector), and a fork may leave it taken for ever.
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """As NumPy's function of that name."""
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.itemsize
        if nbytes < FROM_BYTES or dtype.kind in "OV":
            return np.empty(shape, dtype)
        block = self._take(nbytes)
        if block is None:
            check_room(nbytes, f"an output of {nbytes:,} bytes")
        return np.asarray(_Lease(np.empty(nbytes, np.uint8) if block is None else block, self, shape, dtype))

    def _take(self, nbytes: int) -> Array | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            known = self._sizes.get(nbytes)
            if not known:
                return None
            block = self._waiting.pop(known.pop())
            self.nbytes -= nbytes
            return block
        finally:
            self._lock.release()

    def give(self, block: Array, address: int) -> None:
        size = block.nbytes
        if size > self._limit or not self._lock.acquire(blocking=False):
            return
        try:
            self._waiting[address] = block
            self._sizes.setdefault(size, []).append(address)
            self.nbytes += size
            while self.nbytes > self._limit:
                oldest, gone = self._waiting.popitem(last=False)
                self.nbytes -= gone.nbytes
                self._sizes[gone.nbytes].remove(oldest)
            for empty in [size for size, places in self._sizes.items() if not places]:
                del self._sizes[empty]
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Give what waits back to the system."""
        with self._lock:
            self._waiting.clear()
            self._sizes.clear()
            self.nbytes = 0


blocks = Blocks()  # of this process
