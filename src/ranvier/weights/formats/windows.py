"""A blob far away as bytes by position, for a walk that looks at few of them: fetched a window at a time.

Where the walk goes on close behind a window the next one is larger; where it skips much the next one is small again.
"""

from __future__ import annotations

from collections import deque
from typing import overload

from ranvier.errors import WeightError
from ranvier.weights.blob import Blob, check_range

_FIRST = 1 << 14  # of most blobs these are there already: somebody looked at what kind of file it is
_LEAST = 1 << 16
_MOST = 1 << 20
_KEPT = 4  # windows that may be gone back to


class Windows:
    def __init__(self, blob: Blob, requests: int) -> None:
        self._blob, self._left = blob, requests
        self._size, self._end = _FIRST // 2, 0  # of the window that was fetched last
        self._start, self._data = 0, b""
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes: ...
    def __getitem__(self, at: int | slice, /) -> int | bytes:
        if isinstance(at, slice):
            self._reach(at.start, at.stop)
            return self._data[at.start - self._start : at.stop - self._start]
        if not self._start <= at < self._start + len(self._data):
            self._reach(at, at + 1)
        return self._data[at - self._start]

    def _reach(self, start: int, stop: int) -> None:
        """Go to a window that holds these bytes."""
        check_range(self._blob, start, stop)
        for first, data in self._kept:
            if first <= start and stop <= first + len(data):
                self._start, self._data = first, data
                return
        if not self._left:
            raise WeightError(f"{self._blob.name!r} has what is looked for in too many places")
        self._left -= 1
        close = 0 <= start - self._end <= self._size
        self._size = min(2 * self._size, _MOST) if close else _LEAST
        self._end = min(max(stop, start + self._size), self._blob.size)
        self._start, self._data = start, bytes(self._blob.read(start, self._end))
        self._kept.append((self._start, self._data))
