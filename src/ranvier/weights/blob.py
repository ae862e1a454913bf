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
from ranvier.formats.onnx.weights import FileMap

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Range = tuple[int, int]  # start, stop


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
        view = memoryview(data)
        self._data = np.frombuffer(view.cast("B") if view.c_contiguous else view.tobytes(), np.uint8)
        self._data.flags.writeable = False

    @classmethod
    def of_file(cls, path: Path) -> MemoryBlob:
        """The bytes of a file, mapped: pages are read when they are looked at."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                return cls(path.name, FileMap(file) if status.st_size else b"")
        except (OSError, ValueError) as error:
            raise WeightError(f"cannot open {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> Bytes:
        check_range(self, start, stop)
        return self._data[start:stop]

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        return [self.read(*each) for each in ranges]


def check_range(blob: Blob, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= blob.size:
        raise WeightError(f"{blob.name!r}: bytes {start} to {stop} were asked for, it has {blob.size}")


_GAP = 1 << 16  # bytes between two ranges that cost less to read along than another request


def gathered(ranges: Sequence[Range], gap: int = _GAP) -> list[tuple[Range, list[int]]]:
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


class BlobFile(io.RawIOBase):
    """A blob as a file that is open for reading, for libraries that want one."""

    def __init__(self, blob: Blob) -> None:
        super().__init__()
        self._blob, self._at = blob, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blob.size}[whence]
        if base + offset < 0:
            raise OSError(f"{self._blob.name!r}: a position before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        start = min(self._at, self._blob.size)
        stop = min(start + len(target), self._blob.size)
        target[: stop - start] = self._blob.read(start, stop).data
        self._at = stop
        return stop - start
