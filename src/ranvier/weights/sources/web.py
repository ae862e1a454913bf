"""Files behind a URL: from the cache where they are there, else by ranges, or downloaded once."""

from __future__ import annotations

import hashlib
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import ClassVar

from ranvier.errors import WeightError
from ranvier.records import dataclass
from ranvier.rules import Checked, Rule
from ranvier.weights.access import GOOD_PIECE, Transient
from ranvier.weights.blob import Blob, Bytes, Range, check_range
from ranvier.weights.cache import Download, Entry, check_room, digest
from ranvier.weights.given import TEXT, TEXT_OR_NONE, Named
from ranvier.weights.http import BEGINNING, Contradiction, HttpFile, Page, Remote, parsed, shown, strong
from ranvier.weights.sources.base import Context
from ranvier.weights.sources.kept import Version, cached, exists, fetched, mapped, mapped_of
from ranvier.weights.together import AT_ONCE, Stop, together


@dataclass(frozen=True)
class UrlSource(Checked):
    """A file by its URL, with headers such as credentials; ``sha256`` is compared with its bytes, those
    in the cache too."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    sha256: str = ""
    format: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "url": TEXT,
        "headers": Named("a mapping from names to texts", (str, bytes, int)),  # of which all are sent
        "sha256": TEXT,
        "format": TEXT_OR_NONE,
    }

    def __repr__(self) -> str:
        try:
            return f"UrlSource({self.address!r})"
        except WeightError:  # of what is no URL nobody knows where a password ends
            return "UrlSource(...)"

    @property
    def address(self) -> str:
        """Without what may be secret; a signature in the query is part of the file's identity only by its hash."""
        parts = parsed(self.url)
        plain = shown(parts)
        return f"{plain}?{hashlib.sha256(parts.query.encode()).hexdigest()[:16]}" if parts.query else plain

    def open(self, context: Context) -> Blob:
        entry = self._cached(context)
        file = self._file(context)
        if entry is not None and (blob := mapped(entry, file.name)) is not None:
            return blob
        # a checksum is one of the whole; and a server that knows no ranges can give only the whole
        if self.sha256 or not (remote := file.question()).ranges:
            return mapped_of(lambda: self._fetched(context), file.name)
        return RangedFile(file, remote)

    def sibling(self, name: str) -> UrlSource:
        parts = parsed(self.url)
        folder = parts.path.rpartition("/")[0]
        found = parts._replace(path=f"{folder}/{urllib.parse.quote(name)}")
        return UrlSource(urllib.parse.urlunsplit(found), self.headers)

    def fetch(self, context: Context) -> Path | None:
        return (self._cached(context) or self._fetched(context)).path

    def exists(self, context: Context) -> bool:
        return exists(context, self.address, lambda: _version(self._file(context).look()))

    def _file(self, context: Context) -> HttpFile:
        return HttpFile(self.url, context.access, self.headers, self.format)

    def _cached(self, context: Context) -> Entry | None:
        return cached(context, self.address, self.sha256, lambda: _version(self._file(context).question()))

    def _fetched(self, context: Context) -> Entry:
        return fetched(
            context, self.address, self.sha256, _downloads(self._file(context), context, proven=bool(self.sha256))
        )


def _version(remote: Remote) -> Version:
    return remote.etag, remote.size


def _downloads(file: HttpFile, context: Context, *, proven: bool) -> Download:
    """``proven``: a checksum will tell whether it is whole."""
    access = context.access

    def download(part: Path, etag: str, remember: Callable[[str], None]) -> tuple[str, str]:
        known = etag
        told: int | None = None  # how far the progress has been told
        whole = False  # whether it came in one answer, which need not say of how many bytes it is a part

        def attempt() -> None:
            nonlocal known, told, whole
            have = part.stat().st_size if part.exists() and strong(known) else 0
            have = have if have >= BEGINNING else 0  # by which nobody could tell whether it is a page
            begin, size, found, pieces = file.stream(have, known)
            whole = not begin
            if not begin:  # before its version is told: whatever comes in between, old bytes are not taken for new ones
                part.unlink(missing_ok=True)
            if found != known:
                known = found
                remember(found)
            if told is None:
                access.progress.begin(file.shown, size, begin)
            else:
                access.progress.advance(file.shown, begin - told)
            told = begin
            if size is not None:
                check_room(file.shown, part.parent, size - begin)
            try:
                with part.open("r+b" if begin else "wb") as target:
                    target.truncate(begin)
                    target.seek(begin)
                    for piece in pieces:
                        target.write(piece)
                        told += len(piece)
                        access.progress.advance(file.shown, len(piece))
            except Transient as error:
                error.advanced = strong(known) and told - begin >= GOOD_PIECE
                raise

        try:
            access.attempts(file.shown, attempt)
            if whole and not proven:
                file.confirm(part.stat().st_size, known)
        except BaseException as error:
            # nobody could go on with it, and where the disk is full it takes the last of it
            if not strong(known) or isinstance(error, Page | Contradiction):
                part.unlink(missing_ok=True)
            raise
        finally:
            if told is not None:
                access.progress.end(file.shown)
        return known, digest(part, lambda: access.go_on(file.shown))

    return download


class RangedFile:
    """A file of which only what is looked at is fetched."""

    near = False

    def __init__(self, file: HttpFile, remote: Remote) -> None:
        self.name = file.name
        self.size: int = remote.size or 0
        self._file, self._remote = file, remote

    def read(self, start: int, stop: int) -> Bytes:
        check_range(self, start, stop)
        return self._file.range(start, stop, self._remote)

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        return together(lambda each: self.read(*each), ranges, AT_ONCE, Stop(self._file.access.stop))
