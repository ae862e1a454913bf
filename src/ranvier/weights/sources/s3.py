"""Objects of S3 and of what speaks like it, through ``obstore``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.errors import NotSupported, ResourceLimit, WeightError
from ranvier.records import dataclass
from ranvier.weights.access import Access, Unreachable
from ranvier.weights.blob import Blob, Bytes, MemoryBlob, Range, check_range
from ranvier.weights.cache import Download, Entry, free_bytes
from ranvier.weights.http import Missing
from ranvier.weights.sources.base import Context
from ranvier.weights.sources.kept import Version, cached, exists, fetched

_CHUNK = 8 << 20


def _package() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise NotSupported("objects of S3 need the package 'obstore': pip install 'ranvier[s3]'") from None
    return obstore


@dataclass(frozen=True)
class S3Source:
    """An object by bucket and key. Credentials come from the environment unless ``options`` has them, by the names
    that obstore's ``S3Store`` gives them (``access_key_id``, ``secret_access_key``, ``skip_signature`` …)."""

    bucket: str
    key: str
    region: str | None = None
    endpoint: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""
    format: str | None = None

    @property
    def address(self) -> str:
        where = f"{self.endpoint.rstrip('/')}/" if self.endpoint else ""
        return f"s3://{where}{self.bucket}/{self.key}"

    def open(self, context: Context) -> Blob:
        entry = self._cached(context)
        if entry is None and self.sha256:
            entry = self._fetched(context)
        if entry is not None:
            blob = MemoryBlob.of_file(entry.path)
            blob.name = self.key.rpartition("/")[2]
            return blob
        return _Object(self, context.access)

    def sibling(self, name: str) -> S3Source:
        folder = self.key.rpartition("/")[0]
        place = f"{folder}/{name}" if folder else name
        return S3Source(self.bucket, place, self.region, self.endpoint, self.options)

    def fetch(self, context: Context) -> Path | None:
        return (self._cached(context) or self._fetched(context)).path

    def exists(self, context: Context) -> bool:
        return exists(context, self.address, lambda: self._version(context))

    def _version(self, context: Context) -> Version:
        found = _Object(self, context.access)
        return found.etag, found.size

    def _cached(self, context: Context) -> Entry | None:
        return cached(context, self.address, self.sha256, lambda: self._version(context))

    def _fetched(self, context: Context) -> Entry:
        return fetched(context, self.address, self.sha256, self._download(context))

    def _download(self, context: Context) -> Download:
        def download(part: Path, etag: str, remember: Callable[[str], None]) -> tuple[str, str]:
            found = _Object(self, context.access)
            remember(found.etag)
            have = part.stat().st_size if part.exists() and etag == found.etag else 0
            if found.size - have > (room := free_bytes(part.parent)):
                raise WeightError(f"{self.address} needs {found.size - have} bytes on disk, there are {room}")
            progress = context.access.progress
            progress.begin(found.name, found.size, have)
            try:
                with part.open("r+b" if have else "wb") as target:
                    target.truncate(have)
                    target.seek(have)
                    for start in range(have, found.size, _CHUNK):
                        piece = found.read(start, min(start + _CHUNK, found.size))
                        target.write(piece.data)
                        progress.advance(found.name, len(piece))
            finally:
                progress.end(found.name)
            with part.open("rb") as whole:
                return found.etag, hashlib.file_digest(whole, "sha256").hexdigest()

        return download

    def store(self, access: Access) -> Any:
        options = dict(self.options)
        client = {"timeout": timedelta(seconds=access.timeout), **options.pop("client_options", {})}
        if self.endpoint:
            options["endpoint"] = self.endpoint
            if self.endpoint.startswith("http://"):
                client["allow_http"] = True
        if self.region:
            options["region"] = self.region
        patience = {
            "max_retries": access.retries,
            "backoff": {
                "init_backoff": timedelta(seconds=access.backoff),
                "max_backoff": timedelta(seconds=access.longest_wait),
                "base": 2,
            },
            "retry_timeout": timedelta(seconds=(access.retries + 1) * (access.timeout + access.longest_wait)),
        }
        try:
            return _package().store.S3Store(self.bucket, client_options=client, retry_config=patience, **options)
        except NotSupported:
            raise
        except Exception as error:
            raise WeightError(f"{self.address}: {error}") from error


class _Object:
    """An object that is read by ranges, always of the version that was there first."""

    near = False

    def __init__(self, source: S3Source, access: Access) -> None:
        self._source = source
        self._obstore, self._store = _package(), source.store(access)
        self.name = source.key.rpartition("/")[2]
        facts = self._asked(lambda: self._obstore.head(self._store, source.key))
        self._size, self.etag = int(facts["size"]), str(facts.get("e_tag") or "")
        if access.file_bytes is not None and self._size > access.file_bytes:
            raise ResourceLimit("file_bytes", access.file_bytes, self._size, source.address)

    @property
    def size(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> Bytes:
        return self.read_many([(start, stop)])[0]

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        for start, stop in ranges:
            check_range(self, start, stop)
        asked = [each for each in ranges if each[1] > each[0]]
        starts, stops = [a for a, _ in asked], [b for _, b in asked]
        came = iter(
            self._asked(lambda: self._obstore.get_ranges(self._store, self._source.key, starts=starts, ends=stops))
            if asked
            else []
        )
        found = []
        for start, stop in ranges:
            data = np.frombuffer(next(came), np.uint8) if stop > start else np.empty(0, np.uint8)
            if len(data) != stop - start:
                raise WeightError(f"{self._source.address}: {len(data)} of {stop - start} bytes came")
            found.append(data)
        return found

    def _asked(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except FileNotFoundError as error:
            raise Missing(f"{self._source.address}: there is no such object") from error
        except self._obstore.exceptions.BaseError as error:
            kind = type(error).__name__
            text = str(error).strip().splitlines()[0][:300] if str(error).strip() else kind
            if kind in ("PermissionDeniedError", "UnauthenticatedError"):
                raise Missing(f"{self._source.address}: access is refused ({text})") from error
            raise Unreachable(f"{self._source.address}: {kind}: {text}") from error
