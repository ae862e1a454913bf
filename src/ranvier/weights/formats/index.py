"""A checkpoint in several files, with an index in JSON that says which tensor is in which.

Written by Hugging Face's libraries beside safetensors and PyTorch files alike: ``model.safetensors.index.json``,
``pytorch_model.bin.index.json``.
"""

from __future__ import annotations

from typing import Any

from ranvier.errors import WeightError
from ranvier.weights.blob import Blob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.documents import read_json
from ranvier.weights.formats.registry import open_checkpoint
from ranvier.weights.together import AT_ONCE, Stop, together

SUFFIX = ".index.json"


class Index:
    name = "index"
    suffixes = (SUFFIX,)
    options = ()

    def matches(self, head: bytes, name: str) -> bool:
        return name.endswith(self.suffixes)

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        places, notes = index_of(blob, opening.header_bytes)
        files = list(dict.fromkeys(places.values()))

        def shard(file: str) -> Checkpoint:
            if file.endswith(self.suffixes):
                raise WeightError(f"{blob.name!r} refers to {file!r}, which is an index again")
            return open_checkpoint(opening.beside(file, blob.name), opening)

        # far away, every header is some requests
        opened = list(map(shard, files)) if blob.near else together(shard, files, AT_ONCE, Stop())
        shards = dict(zip(files, opened))
        weights = {name: shards[file][name] for name, file in places.items()}
        return Checkpoint(weights, notes, repr(blob.name))


def index_of(blob: Blob, limit: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Which tensor is in which file beside the index, and notes."""
    if blob.size > limit:
        raise WeightError(f"{blob.name!r} has {blob.size} bytes, more than an index may have")
    try:
        index = read_json(bytes(blob.read(0, blob.size)))
        places, notes = index["weight_map"], index.get("metadata") or {}
        if not isinstance(places, dict) or not isinstance(notes, dict):
            raise ValueError("weight_map and metadata must be mappings")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{blob.name!r} is no index of a checkpoint: {error!r}") from None
    for file in places.values():
        # checked here, before anybody fetches or opens one
        if not isinstance(file, str) or file in ("", ".", "..") or any(c in file for c in "/\\\0"):
            raise WeightError(f"{blob.name!r} refers to {file!r}, which is no name of a file beside it")
    return places, notes
