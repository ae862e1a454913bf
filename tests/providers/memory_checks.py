"""What must hold of a pool at any moment, told from its buffers' addresses and not from its own books."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ranvier.providers.memory import HostRegion, PoolAllocator

Array = np.ndarray[Any, Any]


def address(buffer: Array) -> int:
    return int(buffer.ctypes.data)


def check_buffers(buffers: Iterable[Array], alignment: int) -> None:
    """Every one begins where it should, and no two share a byte."""
    end = 0
    for buffer in sorted((b for b in buffers if b.nbytes), key=address):
        assert address(buffer) % alignment == 0
        assert address(buffer) >= end
        end = address(buffer) + buffer.nbytes


def check_books(pool: PoolAllocator, buffers: Iterable[Array]) -> None:
    """The figures against the buffers that are out."""
    stats = pool.stats()
    out = list(buffers)
    assert stats.active == sum(b.nbytes for b in out)
    assert stats.peak >= stats.active
    assert stats.reserved >= stats.active + stats.cached
    # what is neither free nor asked for is rounding: less than one unit for each buffer that has bytes
    assert stats.reserved - stats.active - stats.cached <= pool.config.alignment * len(out)
    if pool.limit is not None:
        assert stats.reserved <= pool.limit
    assert len(pool.in_use()) == len(out)


class FailingSource:
    """Private memory, of which there is none while ``failing``; ``most`` bounds one piece of it."""

    kind = "system"
    forks = True

    def __init__(self, most: int | None = None) -> None:
        self.failing = False
        self.most = most
        self.reserved: list[int] = []

    def reserve(self, nbytes: int, alignment: int) -> HostRegion:
        if self.failing or (self.most is not None and nbytes > self.most):
            raise MemoryError
        self.reserved.append(nbytes)
        return HostRegion(np.empty(nbytes + alignment, np.uint8), nbytes, alignment)
