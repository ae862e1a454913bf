"""Zip archives whose members are read in place: those of NumPy and of PyTorch store them without compression."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence

from ranvier.errors import WeightError
from ranvier.weights.blob import Blob, BlobReader, Bytes, Range, check_range

_LOCAL = 30  # bytes of a member's own header before its name
_MAGIC = b"PK\x03\x04"


class _Reader(BlobReader):
    """An archive as a file, of which no more than ``most`` bytes are read at once: its directory is."""

    most: int | None = None

    def read(self, count: int | None = -1, /) -> bytes:
        if self.most is not None and count is not None and count > self.most:
            raise ValueError(f"a directory of {count} bytes")
        return super().read(count)


def open_zip(blob: Blob, limit: int) -> zipfile.ZipFile:
    """The directory of an archive, of so many bytes at most, checked against the bytes that are there."""
    reader = _Reader(blob)
    try:
        reader.most = limit
        archive = zipfile.ZipFile(reader)
        reader.most = None  # members may be larger
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise WeightError(f"{blob.name!r} is no sound zip archive: {error}") from None
    for member in archive.infolist():
        if member.flag_bits & 1:
            raise WeightError(f"{blob.name!r}: member {member.filename!r} is encrypted")
        if member.header_offset + member.compress_size > blob.size:
            raise WeightError(f"{blob.name!r}: member {member.filename!r} lies outside the file")
    return archive


class Member:
    """The bytes of a stored member, in place. Where they begin stands in the member's own header, whose length the
    directory does not tell; it is looked at now where that costs nothing, and else when the bytes are wanted: an
    archive of a thousand members behind a web server would cost a thousand requests to list."""

    def __init__(self, blob: Blob, member: zipfile.ZipInfo) -> None:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise WeightError(f"{blob.name!r}: member {member.filename!r} is compressed")
        self.name, self.near, self.size = blob.name, blob.near, member.file_size
        self._blob, self._member = blob, member
        self._start: int | None = None
        if self.near:
            self._place()

    def _place(self) -> int:
        if self._start is None:
            first = self._member.header_offset
            head = bytes(self._blob.read(first, min(first + _LOCAL, self._blob.size)))
            if len(head) < _LOCAL or not head.startswith(_MAGIC):
                raise WeightError(f"{self.name!r}: member {self._member.filename!r} has no header")
            name, extra = struct.unpack("<HH", head[26:30])
            begin = first + _LOCAL + int(name) + int(extra)
            if begin + self.size > self._blob.size:
                raise WeightError(f"{self.name!r}: member {self._member.filename!r} lies outside the file")
            self._start = begin
        return self._start

    def read(self, start: int, stop: int) -> Bytes:
        check_range(self, start, stop)
        begin = self._place()
        return self._blob.read(begin + start, begin + stop)

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        for start, stop in ranges:
            check_range(self, start, stop)
        begin = self._place()
        return self._blob.read_many([(begin + start, begin + stop) for start, stop in ranges])
