"""Addresses as people write them, as sources.

model.safetensors               a file
https://host/model.safetensors  a URL
hf://owner/name/file@revision   a file of the Hugging Face Hub
s3://bucket/key                 an object of S3
"""

from __future__ import annotations

import os
import re
from typing import Any

from ranvier.errors import InvalidConfig, RanvierError, WeightError, nearest
from ranvier.plugged import plugged
from ranvier.weights.sources.base import Source
from ranvier.weights.sources.local import FileSource, MemorySource

ENTRY_POINTS = "ranvier.weight_sources"
SCHEMES = ("file", "hf", "http", "https", "s3")
_MEMBERS = ("address", "format", "open", "sibling", "fetch", "exists")  # of a source
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)", re.DOTALL)


def source_of(given: Any) -> Source:
    """The source that a path, an address, bytes, or a source itself stands for."""
    if isinstance(given, bytes | bytearray | memoryview):
        return MemorySource(given)
    if isinstance(given, os.PathLike):
        return FileSource(given)
    if not isinstance(given, str):
        if all(hasattr(given, name) for name in ("address", "open", "fetch")):
            found: Source = given
            return found
        raise WeightError(f"a source of weights is a path, an address or bytes, not {type(given).__name__}")
    match = _SCHEME.fullmatch(given)
    if match is None:
        return FileSource(given)
    return _of_scheme(match[1].lower(), match[2], given)


def _of_scheme(scheme: str, rest: str, address: str) -> Source:
    if scheme == "file":
        import urllib.parse

        # this machine's name may stand before the path; without a slash before it, the path is a relative one
        return FileSource(
            urllib.parse.unquote(rest.removeprefix("localhost") if rest.startswith("localhost/") else rest)
        )
    if scheme in ("http", "https"):
        from ranvier.weights.sources.web import UrlSource

        return UrlSource(address)
    if scheme == "hf":
        from ranvier.weights.sources.hub import HubSource

        place, _, revision = rest.partition("@")
        owner, _, inner = place.partition("/")
        name, _, file = inner.partition("/")
        if not owner or not name or not file:
            raise WeightError(f"{address!r} must be like hf://owner/name/file or hf://owner/name/file@revision")
        return HubSource(f"{owner}/{name}", file, revision or "main")
    if scheme == "s3":
        from ranvier.weights.sources.s3 import S3Source

        bucket, _, key = rest.partition("/")
        if not bucket or not key:
            raise WeightError(f"{address!r} must be like s3://bucket/key")
        return S3Source(bucket, key)
    others = plugged(ENTRY_POINTS)
    if scheme in others:
        try:
            make = others[scheme].load()
        except Exception as error:  # whatever a package of others does when it is imported
            raise InvalidConfig(f"sources {scheme}:// cannot be loaded: {type(error).__name__}: {error}") from error
        return _made(make, scheme, address)
    from ranvier.weights.http import without_secrets

    shown = without_secrets(address)
    raise WeightError(f"{shown!r}: unknown kind of source {scheme!r}{nearest(scheme, [*SCHEMES, *others])}")


def _made(make: Any, scheme: str, address: str) -> Source:
    """What a package of others makes of an address."""
    from ranvier.weights.http import without_secrets

    shown = without_secrets(address)
    try:
        made: Source = make(address)
    except RanvierError:
        raise
    except Exception as error:
        said = str(error).replace(address, shown)
        raise InvalidConfig(f"{shown!r}: no source {scheme}:// can be made: {type(error).__name__}: {said}") from error
    missing = [name for name in _MEMBERS if not hasattr(made, name)]
    if missing or isinstance(made, type):
        lacks = f", which has no {', '.join(missing)}" if missing else ""
        raise InvalidConfig(f"{shown!r}: what {scheme}:// is made by gives no source but {made!r:.200}{lacks}")
    return made
