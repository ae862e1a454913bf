"""Bytes by position: a file that is mapped, bytes in memory, or an object elsewhere that is read by ranges.

A reader of a format asks for ranges and never for "the file", so the same code reads the header of ten gigabytes on a
disk and of ten gigabytes behind a web server.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ranvier.errors import WeightError
from ranvier.memory.mapping import give_back, mapped
from ranvier.memory.opened import Opened

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Range = tuple[int, int]  # start, stop
_AHEAD = 1 << 16  # bytes that a library's small reads are gathered to
HEAD = 1 << 14  # bytes that hold the header of most files: of one far away they are fetched once, for all
GAP = 1 << 16  # bytes between two ranges that cost less to read along than another request


class Blob(Protocol):
    """Some bytes that have a name."""

    name: str
    near: bool  # reading is taking an address: ranges need not be gathered, and nothing is copied

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> Bytes:
        """The bytes from start to stop, read-only; WeightError where they are not there."""
        ...

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        """Several ranges at once, in as few requests as makes sense."""
        ...


class MemoryBlob:
    """Bytes that are in memory, or mapped there."""

    near = True

    def __init__(self, name: str, data: Any) -> None:
        self.name = name
        self.path: Path | None = None  # of the file it is, for readers that follow references in it
        self._opened: Opened | None = None  # of the file it is a mapping of
        try:
            view = memoryview(data)
        except TypeError as error:
            raise WeightError(f"{name!r}: {error}") from None
        self._bytes = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        self._data = np.frombuffer(self._bytes, np.uint8)
        self._data.flags.writeable = False

    @classmethod
    def of_file(cls, path: Path) -> MemoryBlob:
        """The bytes of a file, mapped: pages are read when they are looked at."""
        try:
            if not path.is_file() and path.exists():  # opening a pipe waits for somebody who writes
                raise WeightError(f"cannot open {str(path)!r}: it is no file")
            found = cls(path.name, mapped(path))
            found._opened = Opened(path, found.size)
            return found
        except (OSError, ValueError) as error:
            raise WeightError(f"cannot open {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error

    @property
    def size(self) -> int:
        return len(self._data)

    @property
    def is_file(self) -> bool:
        """Whether its memory is that of a file, which the system may take back."""
        return self._opened is not None

    def give_back(self, start: int, stop: int) -> None:
        """Nobody is expected to look at these bytes soon: pages of a file need not be in memory."""
        if self._opened is not None:
            give_back(self._bytes[start:stop])

    def read(self, start: int, stop: int) -> Bytes:
        check_range(self, start, stop)
        self.check()
        return self._data[start:stop]

    def check(self) -> None:
        """FileChanged where its memory is that of a file which somebody wrote to since it was opened."""
        if self._opened is not None:
            self._opened.check()

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        return [self.read(*each) for each in ranges]


class Ahead:
    """A blob far away, of which the first bytes are fetched once: readers begin there, a few bytes at a time."""

    near = False

    def __init__(self, blob: Blob) -> None:
        self.name, self.size = blob.name, blob.size
        self._blob = blob
        self._head: Bytes | None = None

    def read(self, start: int, stop: int) -> Bytes:
        check_range(self, start, stop)
        end = min(HEAD, self.size)
        if stop > end:
            return self._blob.read(start, stop)
        if self._head is None:
            self._head = self._blob.read(0, end)
        return self._head[start:stop]

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        return self._blob.read_many(ranges)


def check_range(blob: Blob, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= blob.size:
        raise WeightError(f"{blob.name!r}: bytes {start} to {stop} were asked for, it has {blob.size}")


def gathered(ranges: Sequence[Range], gap: int = GAP) -> list[tuple[Range, list[int]]]:
    """Ranges that lie near each other as one, with the positions of those each covers."""
    order = sorted(range(len(ranges)), key=lambda k: ranges[k])
    found: list[tuple[Range, list[int]]] = []
    for k in order:
        start, stop = ranges[k]
        if found and start - found[-1][0][1] <= gap:
            (first, last), members = found[-1]
            found[-1] = ((first, max(last, stop)), [*members, k])
        else:
            found.append(((start, stop), [k]))
    return found


def read_gathered(blob: Blob, ranges: Sequence[Range]) -> list[Bytes]:
    """The bytes of each range; of a blob far away those near each other are read as one."""
    if blob.near or len(ranges) == 1:
        return [blob.read(*each) for each in ranges]
    wholes = gathered(ranges)
    found: dict[int, Bytes] = {}
    for ((first, _), members), data in zip(wholes, blob.read_many([whole for whole, _ in wholes])):
        for k in members:
            start, stop = ranges[k]
            found[k] = data[start - first : stop - first]
    return [found[k] for k in range(len(ranges))]


class BlobReader(io.BufferedReader):
    """A blob, or its first bytes, as a file that is open for reading, for libraries that want one."""

    def __init__(self, blob: Blob, limit: int | None = None) -> None:
        self._size = blob.size if limit is None else min(limit, blob.size)
        super().__init__(_Unbuffered(blob, self._size), _AHEAD)

    def read(self, count: int | None = -1, /) -> bytes:
        # room is made for as many as are asked for, and a file may ask for any number
        left = max(0, self._size - self.tell())
        return super().read(left if count is None or count < 0 else min(count, left))


class _Unbuffered(io.RawIOBase):
    def __init__(self, blob: Blob, size: int) -> None:
        super().__init__()
        self._blob, self._size, self._at = blob, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"{self._blob.name!r}: a position before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        start = min(self._at, self._size)
        stop = min(start + len(target), self._size)
        target[: stop - start] = self._blob.read(start, stop).data
        self._at = stop
        return stop - start
