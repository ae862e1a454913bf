"""A blob far away as bytes by position, for a walk that looks at few of them: fetched a window at a time.

How large a window should be depends on the line: bytes that come while one waits anyway cost nothing, and skipping them
costs another wait. So where the walk skips little, each window is four times as large as the one before as long as it
takes about as long as the shortest did, and half as large where it takes much longer. At a server nearby, where waiting
is short, they grow only where the walk goes on close behind one. A walk takes about twice as long at most as the better
of two ways, reading the whole file and asking for every place by itself; 3.6 times where waits are long and the whole
file takes a second or two.
"""

from __future__ import annotations

import time
from collections import deque
from typing import overload

from ranvier.errors import WeightError
from ranvier.weights.blob import HEAD, Blob, check_range

_LEAST = 1 << 16
_MOST_NEARBY = 1 << 20
_MOST = 1 << 24
_KEPT = 4  # windows that may be gone back to
_SKIP = 1 << 22  # bytes that are skipped whatever the line is like
_WAIT = 0.02  # seconds: a request that takes less does not wait for the line


class Windows:
    def __init__(self, blob: Blob, requests: int) -> None:
        self._blob, self._left = blob, requests
        self._size, self._end = HEAD // 2, 0  # of the window that was fetched last
        self._least = _LEAST  # of the next one, wherever it begins
        self._shortest = float("inf")  # seconds of a request
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
        skipped = start - self._end
        close = 0 <= skipped <= self._size
        self._size = max(self._least, min(2 * self._size, _MOST_NEARBY) if close else 0)
        self._end = min(max(stop, start + self._size), self._blob.size)
        began = time.monotonic()
        self._start, self._data = start, bytes(self._blob.read(start, self._end))
        self._learn(skipped, time.monotonic() - began)
        self._kept.append((self._start, self._data))

    def _learn(self, skipped: int, seconds: float) -> None:
        if len(self._data) < _LEAST:
            return  # the last of the file, or what somebody had fetched already
        self._shortest = min(self._shortest, seconds)
        if skipped > _SKIP:
            self._least = _LEAST
        elif _WAIT < seconds <= 1.5 * self._shortest:
            self._least = min(4 * self._size, _MOST)
        elif seconds > 3 * self._shortest:
            self._least = max(self._size // 2, _LEAST)
