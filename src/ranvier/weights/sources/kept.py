"""What sources behind a network share: when the copy in the cache is the file that was asked for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from ranvier.errors import CannotWrite, IntegrityError, WeightError, printable
from ranvier.logs import warn_once
from ranvier.weights.access import NotCached, Unreachable
from ranvier.weights.blob import MemoryBlob
from ranvier.weights.cache import Download, Entry, digest_once
from ranvier.weights.http import Missing, Page
from ranvier.weights.sources.base import Context

Version = tuple[str, int | None]  # etag and size, as the other side tells them
_TRIES = 100
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def cached(context: Context, address: str, sha256: str, current: Callable[[], Version]) -> Entry | None:
    """The file in the cache, if the other side has no newer one; one with a known checksum cannot be outdated.
    IntegrityError where its bytes are not those it had, and the network is not to be used."""
    if sha256 and _SHA256.fullmatch(sha256) is None:  # told before all of the file is fetched for nothing
        raise WeightError(f"{address}: {printable(sha256[:80])!r} is no sha256, which has 64 hexadecimal digits")
    entry = _sound(context, address, sha256.lower())
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


def _sound(context: Context, address: str, sha256: str) -> Entry | None:
    """The file in the cache. Where somebody cares for its checksum its bytes are looked at, too; a damaged one goes."""
    for _ in range(_TRIES):
        entry = context.cache.find(address)
        if entry is None or sha256 not in ("", entry.sha256):
            return None
        if not sha256 and not context.verify:
            return entry
        try:
            actual = digest_once(entry.path, lambda: context.access.go_on(address))
        except FileNotFoundError:  # another process has removed it by now
            continue
        except OSError:
            return None
        if actual == entry.sha256:
            return entry
        if context.cache.find(address) == entry:  # else another process has put a new one in its place meanwhile
            break
    else:
        return None
    damage = f"{address}: the copy in the cache is damaged: its checksum is {actual}, {entry.sha256} was expected"
    if context.access.offline:
        raise IntegrityError(f"{damage}; preload it once more with the network to have it again")
    warn_once(f"weights {address} {entry.path} damaged", f"{damage}; it is fetched again")
    with contextlib.suppress(CannotWrite):  # a cache that we may only read
        context.cache.drop(entry)
    return None


def fetched(context: Context, address: str, sha256: str, download: Download) -> Entry:
    """The file, downloaded now unless somebody else has done so in the meantime."""
    verify = context.verify or bool(sha256)
    return context.cache.get(address, download, sha256=sha256.lower(), verify=verify, stop=context.access.stop)


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
    except (Missing, Page):
        return False
    return True
