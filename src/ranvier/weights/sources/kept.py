"""What sources behind a network share: when the copy in the cache is the file that was asked for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from ranvier.errors import CannotWrite, WeightError, printable
from ranvier.logs import warn_once
from ranvier.weights.access import NotCached, Unreachable
from ranvier.weights.blob import MemoryBlob
from ranvier.weights.cache import Download, Entry
from ranvier.weights.http import Missing
from ranvier.weights.sources.base import Context

Version = tuple[str, int | None]  # etag and size, as the other side tells them
_TRIES = 100
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def cached(context: Context, address: str, sha256: str, current: Callable[[], Version]) -> Entry | None:
    """The file in the cache, if the other side has no newer one; one with a known checksum cannot be outdated."""
    if sha256 and _SHA256.fullmatch(sha256) is None:  # told before all of the file is fetched for nothing
        raise WeightError(f"{address}: {printable(sha256[:80])!r} is no sha256, which has 64 hexadecimal digits")
    entry = context.cache.find(address, verify=context.verify)
    if entry is not None and sha256.lower() not in ("", entry.sha256):
        entry = None
    if context.access.offline and entry is None:
        raise NotCached(f"{address} is not in the cache, and the network is not to be used")
    if entry is None or sha256 or context.access.offline:
        return entry
    try:
        etag, size = current()
    except Unreachable as error:
        warn_once(f"weights {address}", f"{error}; the copy in the cache is used")
        return entry
    if etag == entry.etag and size in (None, entry.size):
        return entry
    with contextlib.suppress(CannotWrite):  # a cache that we may only read
        context.cache.drop(entry)
    return None


def fetched(context: Context, address: str, sha256: str, download: Download) -> Entry:
    """The file, downloaded now unless somebody else has done so in the meantime."""
    access = context.access
    return context.cache.get(address, download, sha256=sha256.lower(), verify=context.verify, stop=access.stop)


def mapped(entry: Entry, name: str) -> MemoryBlob | None:
    """The bytes of a file in the cache under their own name; None where another process has removed it by now."""
    try:
        blob = MemoryBlob.of_file(entry.path)
    except WeightError:
        if entry.path.exists():
            raise
        return None
    blob.name = name
    return blob


def mapped_of(fetch: Callable[[], Entry], name: str) -> MemoryBlob:
    """The bytes of a file that is fetched, and fetched again where another process removes it in between."""
    for _ in range(_TRIES):
        blob = mapped(fetch(), name)
        if blob is not None:
            return blob
    raise WeightError(f"{name!r} is removed from the cache before it can be opened; is the cache too small?")


def exists(context: Context, address: str, current: Callable[[], Version]) -> bool:
    if context.access.offline:
        return context.cache.find(address) is not None
    try:
        current()
    except Missing:
        return False
    return True
