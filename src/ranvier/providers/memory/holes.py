"""Free ranges inside chunks of memory: numbers only, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort


class Holes:
    """The free ranges of any number of chunks. Neighbours are joined as soon as both are free, and a request takes
    the smallest range that holds it, from its beginning."""

    __slots__ = ("_by_size", "_ends", "_starts", "total")

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # (size, chunk, start), sorted
        self._starts: dict[tuple[int, int], int] = {}  # size by (chunk, start)
        self._ends: dict[tuple[int, int], int] = {}  # start by (chunk, end)
        self.total = 0  # bytes

    def take(self, size: int) -> tuple[int, int] | None:
        """(chunk, start) of ``size`` bytes that are no longer free, or None."""
        at = bisect_left(self._by_size, (size,))
        if at == len(self._by_size):
            return None
        found, chunk, start = self._by_size[at]
        self._drop(found, chunk, start)
        if found > size:
            self._put(found - size, chunk, start + size)
        return chunk, start

    def add(self, chunk: int, start: int, size: int) -> int:
        """Make a range free; returns the size of the whole free range it is now part of."""
        before = self._ends.get((chunk, start))
        if before is not None:
            self._drop(start - before, chunk, before)
            start, size = before, size + start - before
        after = self._starts.get((chunk, start + size))
        if after is not None:
            self._drop(after, chunk, start + size)
            size += after
        self._put(size, chunk, start)
        return size

    def remove(self, chunk: int, size: int) -> None:
        """Forget a chunk that is free from end to end."""
        self._drop(size, chunk, 0)

    def largest(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def ranges(self) -> list[tuple[int, int, int]]:
        """(chunk, start, size) of every free range, in order."""
        return sorted((chunk, start, size) for size, chunk, start in self._by_size)

    def _put(self, size: int, chunk: int, start: int) -> None:
        insort(self._by_size, (size, chunk, start))
        self._starts[chunk, start] = size
        self._ends[chunk, start + size] = start
        self.total += size

    def _drop(self, size: int, chunk: int, start: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, chunk, start))]
        del self._starts[chunk, start]
        del self._ends[chunk, start + size]
        self.total -= size
