"""Objects of S3 and of what speaks like it, through ``obstore``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ranvier.errors import NotSupported, ResourceLimit, WeightError
from ranvier.records import dataclass
from ranvier.rules import Checked, Rule
from ranvier.weights.access import Access, Unreachable
from ranvier.weights.blob import Blob, Bytes, Range, check_range
from ranvier.weights.cache import Download, Entry, check_room, digest
from ranvier.weights.given import TEXT, TEXT_OR_NONE, Named
from ranvier.weights.http import BEGINNING, Missing, check_no_page, parsed, shown
from ranvier.weights.sources.base import Context
from ranvier.weights.sources.kept import Version, cached, exists, fetched, mapped, mapped_of
from ranvier.weights.together import AT_ONCE, Stop, apart, together

_CHUNK = 8 << 20
_LONGEST_ANSWER = 600.0  # seconds for one chunk


def _package() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise NotSupported("objects of S3 need the package 'obstore': pip install 'ranvier[s3]'") from None
    return obstore


@dataclass(frozen=True)
class S3Source(Checked):
    """An object by bucket and key. Credentials come from the environment unless ``options`` has them, by the names
    that obstore's ``S3Store`` gives them (``access_key_id``, ``secret_access_key``, ``skip_signature`` …)."""

    bucket: str
    key: str
    region: str | None = None
    endpoint: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # with secrets
    sha256: str = ""
    format: str | None = None
    clients: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # shared with files beside it

    RULES: ClassVar[Mapping[str, Rule]] = {
        "bucket": TEXT,
        "key": TEXT,
        "region": TEXT_OR_NONE,
        "endpoint": TEXT_OR_NONE,
        "options": Named("a mapping from names of options to what they are"),
        "sha256": TEXT,
        "format": TEXT_OR_NONE,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = parsed(self.endpoint) if self.endpoint else None
        if parts is not None and parts.username is not None:  # it would be shown wherever the address is
            raise WeightError(f"the endpoint {shown(parts)!r} takes no name and password; options has credentials")

    @property
    def address(self) -> str:
        where = f"{self.endpoint.rstrip('/')}/" if self.endpoint else ""
        return f"s3://{where}{self.bucket}/{self.key}"

    def open(self, context: Context) -> Blob:
        entry, name = self._cached(context), self.key.rpartition("/")[2]
        if entry is not None and (blob := mapped(entry, name)) is not None:
            return blob
        if self.sha256:  # which is one of the whole
            return mapped_of(lambda: self._fetched(context), name)
        return _Object(self, context.access)

    def sibling(self, name: str) -> S3Source:
        folder = self.key.rpartition("/")[0]
        place = f"{folder}/{name}" if folder else name
        return replace(self, key=place, sha256="", format=None)

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
            have = part.stat().st_size if part.exists() and etag == found.etag else 0
            have = have if have <= found.size else 0
            if not have:  # before its version is told: whatever comes in between, old bytes are not taken for new ones
                part.unlink(missing_ok=True)
            remember(found.etag)
            check_room(self.address, part.parent, found.size - have)
            progress = context.access.progress
            progress.begin(self.address, found.size, have)
            try:
                with part.open("r+b" if have else "wb") as target:
                    target.truncate(have)
                    target.seek(have)
                    for start in range(have, found.size, _CHUNK):
                        context.access.go_on(self.address)
                        piece = found.read(start, min(start + _CHUNK, found.size))
                        if start == 0:
                            check_no_page(bytes(piece[:BEGINNING]), self.address, self.key, self.format)
                        target.write(piece.data)
                        progress.advance(self.address, len(piece))
            finally:
                progress.end(self.address)
            return found.etag, digest(part, lambda: context.access.go_on(self.address))

        return download

    def store(self, access: Access) -> Any:
        """A client for the bucket. Each has connections of its own, and a checkpoint may have a thousand files; so
        one is made for all of them, and another where credentials of the environment are others by now."""
        environment = tuple(sorted(each for each in os.environ.items() if each[0].startswith("AWS_")))
        asked = (access.timeout, access.retries, access.backoff, access.longest_wait, os.getpid(), environment)
        found = self.clients.get(asked)
        return self.clients.setdefault(asked, self._client(access)) if found is None else found

    def _client(self, access: Access) -> Any:
        options = dict(self.options)
        silence = timedelta(seconds=access.timeout)
        # ``timeout`` is one for the whole of an answer: a large part of a tensor may take its time
        whole = timedelta(seconds=access.timeout + _LONGEST_ANSWER)
        client = {
            "connect_timeout": silence,
            "read_timeout": silence,
            "timeout": whole,
            **(options.pop("client_options", None) or {}),
        }
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
            raise WeightError(f"{self.address}: {_first_line(error)}") from error


class _Object:
    """An object that is read by ranges, always of the version that was there first."""

    near = False

    def __init__(self, source: S3Source, access: Access) -> None:
        self._source, self._access = source, access
        self._obstore, self._store = _package(), source.store(access)
        self.name = source.key.rpartition("/")[2]
        facts = self._asked(lambda: self._obstore.head(self._store, source.key))
        self.size, self.etag = int(facts["size"]), str(facts.get("e_tag") or "")
        if access.file_bytes is not None and self.size > access.file_bytes:
            raise ResourceLimit("file_bytes", access.file_bytes, self.size, source.address)

    def read(self, start: int, stop: int) -> Bytes:
        return self.read_many([(start, stop)])[0]

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        for start, stop in ranges:
            check_range(self, start, stop)
        found = [np.empty(stop - start, np.uint8) for start, stop in ranges]

        def piece(job: tuple[int, int]) -> None:
            k, at = job
            start, stop = ranges[k]
            end = min(at + _CHUNK, stop)
            found[k][at - start : end - start] = self._piece((at, end))

        jobs = [(k, at) for k, (start, stop) in enumerate(ranges) for at in range(start, stop, _CHUNK)]
        together(piece, jobs, AT_ONCE, Stop(self._access.stop))
        return list(found)

    def _piece(self, each: Range) -> Bytes:
        self._access.go_on(self._source.address)
        # get_ranges would be shorter, but it takes what is there now for what was there first
        asked = {"range": each, **({"if_match": self.etag} if self.etag else {})}
        data: Bytes = self._asked(
            lambda: self._checked(self._obstore.get(self._store, self._source.key, options=asked), each)
        )
        return data

    def _checked(self, reply: Any, each: Range) -> Bytes:
        facts = reply.meta
        if int(facts["size"]) != self.size or str(facts.get("e_tag") or "") != self.etag:
            raise self._changed()
        data = np.frombuffer(reply.bytes(), np.uint8)
        if tuple(reply.range) != each or len(data) != each[1] - each[0]:
            raise WeightError(f"{self._source.address}: {len(data)} of {each[1] - each[0]} bytes came")
        return data

    def _changed(self) -> WeightError:
        return WeightError(f"{self._source.address} changed while it was read; open it again")

    def _asked(self, request: Callable[[], Any]) -> Any:
        try:
            return apart(request, lambda: self._access.go_on(self._source.address))
        except FileNotFoundError as error:
            raise Missing(f"{self._source.address}: there is no such object") from error
        except self._obstore.exceptions.BaseError as error:
            kind = type(error).__name__
            if kind == "PreconditionError":
                raise self._changed() from error
            text = _first_line(error)
            if kind in ("PermissionDeniedError", "UnauthenticatedError"):
                raise Missing(f"{self._source.address}: access is refused ({text})") from error
            raise Unreachable(f"{self._source.address}: {kind}: {text}") from error
        except ValueError as error:  # of a key with '..' or nothing between two slashes
            raise WeightError(f"{self._source.address} is no address of an object: {_first_line(error)}") from error
        except BaseException as error:
            # the library panics, which is no Exception, over settings that it believed: a key with the end of a line
            if type(error).__name__ != "PanicException":
                raise
            raise WeightError(f"{self._source.address} cannot be asked: check region and credentials") from None


def _first_line(error: BaseException) -> str:
    """What an error says, without what it tells those who mend the library."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
