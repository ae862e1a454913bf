"""JSON that comes from anywhere, as the headers and indexes of checkpoints are: nothing in it is read in two ways."""

from __future__ import annotations

import json
from typing import Any


def read_json(data: bytes) -> Any:
    """What a document says; ValueError where it is none, where a name occurs twice in an object, of which JSON's
    readers keep either, or where a text is none: half of a pair of characters cannot be written anywhere."""
    try:
        found = json.loads(data.decode(), object_pairs_hook=_unique)
        if b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("objects in objects too deep") from None
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
