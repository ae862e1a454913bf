"""Memory of large results, used again once nobody holds them.

A caller that drops its results gives megabytes back to the system, which hands them out again page by page in the next
run, cleared: for a model that returns its state (keys and values of a language model) that costs more than computing
them. So a large result lies in a block that comes back here when the last array over it has gone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from ranvier.codegen.storage import aligned_empty
from ranvier.memory import NOTHING, Promise, promised, promises

Array = np.ndarray[Any, Any]
_Shape = tuple[int, ...]
_BYTE = np.dtype(np.uint8)
FROM_BYTES = 256 << 10  # smaller ones are the allocator's business: it keeps those by itself
LIMIT_BYTES = 128 << 20  # of blocks that wait


class _Lease:
    """What the arrays over a block refer to, directly or through each other; its end is the end of them all."""

    __slots__ = ("__array_interface__", "_address", "_block", "_blocks")

    def __init__(
        self, block: Array, address: int, blocks: Blocks, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:  # fmt: skip
        self._block, self._blocks = block, blocks
        self._address = address  # kept: it takes NumPy long to tell, and at the end of the interpreter it cannot
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
        promises.on_pressure(self._yield)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """As NumPy's function of that name."""
        nbytes = _bytes(shape, dtype)
        if nbytes < FROM_BYTES or dtype.kind in "OV":
            return np.empty(shape, dtype)
        room = _room(nbytes)
        return self._leased(self._take(room), room, shape, dtype)

    def several(self, wanted: Sequence[tuple[_Shape, np.dtype[Any]]], part: str) -> tuple[list[Array], Promise]:
        """As ``empty`` for each, where there is room for all that do not lie here already: none of them is touched
        before all are made. The promise is to be ended once they are written."""
        sizes = [_room(_bytes(shape, dtype)) for shape, dtype in wanted]
        leased = [n >= FROM_BYTES and dtype.kind not in "OV" for n, (_, dtype) in zip(sizes, wanted)]
        found = [self._take(n) if lease else None for n, lease in zip(sizes, leased)]
        made: list[Array] = []
        promise = NOTHING
        try:
            promise = promised(sum(n for n, block in zip(sizes, found) if block is None), part)
            for k, (shape, dtype) in enumerate(wanted):
                block, found[k] = found[k], None
                made.append(self._leased(block, sizes[k], shape, dtype) if leased[k] else np.empty(shape, dtype))
        except BaseException:
            for block in found:
                if block is not None:
                    self.give(*block)
            promise.done()
            raise
        return made, promise

    def _leased(
        self, found: tuple[Array, int] | None, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array:  # fmt: skip
        if found is None:
            made = aligned_empty((nbytes,), _BYTE)
            found = made, made.ctypes.data
        return np.asarray(_Lease(*found, self, shape, dtype))

    def _take(self, nbytes: int) -> tuple[Array, int] | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            known = self._sizes.get(nbytes)
            if not known:
                return None
            address = known.pop()
            self.nbytes -= nbytes
            return self._waiting.pop(address), address
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
            self._empty_out()

    def _yield(self) -> None:
        """The machine is short of memory: what waits goes, unless somebody is in here."""
        if self._lock.acquire(blocking=False):
            try:
                self._empty_out()
            finally:
                self._lock.release()

    def _empty_out(self) -> None:
        self._waiting.clear()
        self._sizes.clear()
        self.nbytes = 0


def _room(nbytes: int) -> int:
    """Bytes of the block for a large result: a little more than it needs, so that a result which is somewhat larger in
    every run (a cache that grows) finds the blocks of those before it. Pages that nobody touches cost nothing."""
    if nbytes < FROM_BYTES:
        return nbytes
    step = 1 << (nbytes.bit_length() - 5)
    return -(-nbytes // step) * step


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


blocks = Blocks()  # of this process


def writable(array: Array) -> Array | None:
    """An array that nobody else refers to, ready to be written to: itself, or another over the same block, as NumPy
    does not let one over a block be written to again. None where its memory belongs to others."""
    base: Any = array.base
    if base is None:
        array.flags.writeable = True
        return array
    if isinstance(base, _Lease) and getrefcount(base) <= 3:  # the array's, the name and the call's
        return np.asarray(base)
    return None
