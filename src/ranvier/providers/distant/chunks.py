"""Messages over anything that carries pieces of bytes in order, such as the two streams of a remote call.

A message may be larger than what one piece may hold, so it is cut; what arrives is one long row of bytes again.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

CHUNK = 1 << 20
_WAITING = 64  # pieces on their way out before a writer has to wait


class ChunkReader:
    """The reading half, like an unbuffered binary file, over an iterator of pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readinto(self, target: memoryview) -> int:
        """Fill as much of ``target`` as there is at once; 0 at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._rest = memoryview(b"")


class ChunkWriter:
    """The writing half; whoever sends takes the pieces by iterating over it."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._closed = False

    def write(self, data: Any) -> int:
        if self._closed:
            raise BrokenPipeError("the connection is closed")
        piece = bytes(memoryview(data)[:CHUNK])
        while True:
            try:
                self._queue.put(piece, timeout=0.5)
                return len(piece)
            except queue.Full:
                if self._closed:
                    raise BrokenPipeError("the connection is closed") from None

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                piece = self._queue.get(timeout=0.5)
            except queue.Empty:
                if self._closed:
                    return
                continue
            if piece is None:
                return
            yield piece

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(queue.Full):  # then the reader notices by itself
                self._queue.put_nowait(None)
