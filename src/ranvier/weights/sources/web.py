"""Files behind a URL: from the cache where they are there, else by ranges, or downloaded once."""

from __future__ import annotations

import hashlib
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from pathlib import Path

import numpy as np

from ranvier.errors import WeightError
from ranvier.records import dataclass
from ranvier.weights.blob import Blob, Bytes, MemoryBlob, Range, check_range
from ranvier.weights.cache import Download, Entry, free_bytes
from ranvier.weights.http import HttpFile
from ranvier.weights.sources.base import Context
from ranvier.weights.sources.kept import Version, cached, exists, fetched

_AT_ONCE = 4


@dataclass(frozen=True)
class UrlSource:
    """A file by its URL, with headers such as credentials; ``sha256`` is compared when it is downloaded."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    sha256: str = ""
    format: str | None = None

    @property
    def address(self) -> str:
        """Without what may be secret; a signature in the query is part of the file's identity only by its hash."""
        parts = urllib.parse.urlsplit(self.url)
        shown = f"{parts.scheme}://{(parts.netloc.rpartition('@')[2])}{parts.path}"
        return f"{shown}?{hashlib.sha256(parts.query.encode()).hexdigest()[:16]}" if parts.query else shown

    def open(self, context: Context) -> Blob:
        entry = self._cached(context)
        if entry is not None:
            return _mapped(entry, self.url)
        file = HttpFile(self.url, context.access, self.headers)
        remote = file.question()
        if self.sha256 or not remote.ranges or remote.size is None:
            # a checksum is one of the whole; and a server that knows no ranges can give only the whole
            return _mapped(self._fetched(context), self.url)
        return RangedFile(file, remote.size, remote.etag)

    def sibling(self, name: str) -> UrlSource:
        parts = urllib.parse.urlsplit(self.url)
        folder = parts.path.rpartition("/")[0]
        found = parts._replace(path=f"{folder}/{urllib.parse.quote(name)}")
        return UrlSource(urllib.parse.urlunsplit(found), self.headers)

    def fetch(self, context: Context) -> Path | None:
        return (self._cached(context) or self._fetched(context)).path

    def exists(self, context: Context) -> bool:
        return exists(context, self.address, lambda: self._version(context))

    def _version(self, context: Context) -> Version:
        remote = HttpFile(self.url, context.access, self.headers).question()
        return remote.etag, remote.size

    def _cached(self, context: Context) -> Entry | None:
        return cached(context, self.address, self.sha256, lambda: self._version(context))

    def _fetched(self, context: Context) -> Entry:
        file = HttpFile(self.url, context.access, self.headers)
        return fetched(context, self.address, self.sha256, _downloads(file, context))


def _mapped(entry: Entry, url: str) -> MemoryBlob:
    blob = MemoryBlob.of_file(entry.path)
    blob.name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2]) or blob.name
    return blob


def _downloads(file: HttpFile, context: Context) -> Download:
    access = context.access

    def download(part: Path, etag: str, remember: Callable[[str], None]) -> tuple[str, str]:
        known = etag
        begun = False

        def attempt() -> None:
            nonlocal known, begun
            have = part.stat().st_size if part.exists() else 0
            begin, size, found, pieces = file.stream(have if known else 0, known)
            if found != known:
                known = found
                if found:
                    remember(found)
            if not begun:
                access.progress.begin(file.name, size, begin)
                begun = True
            if size is not None and size - begin > (room := free_bytes(part.parent)):
                raise WeightError(f"{file.shown} needs {size - begin} bytes on disk, there are {room}")
            with part.open("r+b" if begin else "wb") as target:
                target.truncate(begin)
                target.seek(begin)
                for piece in pieces:
                    target.write(piece)
                    access.progress.advance(file.name, len(piece))

        try:
            access.attempts(file.shown, attempt)
        finally:
            if begun:
                access.progress.end(file.name)
        with part.open("rb") as whole:
            return known, hashlib.file_digest(whole, "sha256").hexdigest()

    return download


class RangedFile:
    """A file of which only what is looked at is fetched."""

    near = False

    def __init__(self, file: HttpFile, size: int, etag: str) -> None:
        self.name = file.name
        self._file, self._size, self._etag = file, size, etag

    @property
    def size(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> Bytes:
        check_range(self, start, stop)
        return np.frombuffer(self._file.range(start, stop, self._etag), np.uint8)

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        if len(ranges) < 2:
            return [self.read(*each) for each in ranges]
        with ThreadPoolExecutor(min(_AT_ONCE, len(ranges))) as pool:
            return list(pool.map(lambda each: self.read(*each), ranges))
