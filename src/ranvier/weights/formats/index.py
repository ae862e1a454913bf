"""A checkpoint in several files, with an index in JSON that says which tensor is in which.

Written by Hugging Face's libraries beside safetensors and PyTorch files alike: ``model.safetensors.index.json``,
``pytorch_model.bin.index.json``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ranvier.errors import WeightError
from ranvier.weights.blob import Blob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.documents import read_json
from ranvier.weights.formats.registry import open_checkpoint
from ranvier.weights.stored import Weight
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

        def shard(file: str) -> Checkpoint:
            if file.endswith(self.suffixes):
                raise WeightError(f"{blob.name!r} refers to {file!r}, which is an index again")
            return open_checkpoint(opening.beside(file, blob.name), opening)

        shards = _Shards(places, shard, 1 if blob.near else AT_ONCE)
        return Checkpoint(shards, notes, repr(blob.name), shards.open)


class _Shards(Mapping[str, Weight]):
    """Tensors in the files of a checkpoint, each of which is opened once one of its tensors is asked for: far away,
    that is some requests, and who wants one tensor of a hundred files need not wait for all of them."""

    def __init__(self, places: Mapping[str, str], opened: Callable[[str], Checkpoint], at_once: int) -> None:
        self._places, self._opened, self._at_once = places, opened, at_once
        self._files: dict[str, Checkpoint] = {}
        self._locks = {file: threading.Lock() for file in places.values()}

    def __getitem__(self, name: str) -> Weight:
        return self._file(self._places[name])[name]

    def _file(self, file: str) -> Checkpoint:
        with self._locks[file]:
            if file not in self._files:
                self._files[file] = self._opened(file)
            return self._files[file]

    def open(self, names: Iterable[str]) -> None:
        """Open the files that these are in, some at a time; what is nowhere is told when it is asked for."""
        files = dict.fromkeys(self._places[name] for name in names if name in self._places)
        missing = [file for file in files if file not in self._files]
        if self._at_once == 1 or len(missing) < 2:
            for file in missing:
                self._file(file)
        else:
            together(self._file, missing, self._at_once, Stop())

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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
