"""Files and bytes of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ranvier.errors import WeightError
from ranvier.records import dataclass
from ranvier.rules import Checked, Rule
from ranvier.weights.blob import Blob, MemoryBlob
from ranvier.weights.given import PATH, TEXT, TEXT_OR_NONE, Buffer
from ranvier.weights.sources.base import Context


@dataclass(frozen=True)
class FileSource(Checked):
    """A file. ``tensor`` names the one that is meant where a checkpoint holds several."""

    path: str | os.PathLike[str]
    tensor: str | None = None
    format: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {"path": PATH, "tensor": TEXT_OR_NONE, "format": TEXT_OR_NONE}

    @property
    def address(self) -> str:
        return os.fspath(self.path)

    def open(self, context: Context) -> Blob:
        path = Path(self.path)
        blob = MemoryBlob.of_file(path)
        blob.path = path
        return blob

    def sibling(self, name: str) -> FileSource:
        """A file in the same folder. In a content-addressed cache both are links into the folder of contents."""
        path = Path(self.path)
        try:
            found = (path.parent / name).resolve()
            allowed = {path.parent.resolve(), path.resolve().parent}
            below = any(found.is_relative_to(folder) for folder in allowed)
            absent = below and found.parent not in allowed and not found.exists()
        except (OSError, RuntimeError, ValueError) as error:
            raise WeightError(f"{name!r} beside {path.name!r} cannot be used: {error}") from None
        if absent:
            raise WeightError(f"there is no file {name!r} below the folder of {path.name!r}")
        if found.parent not in allowed:
            raise WeightError(f"{name!r} beside {path.name!r} leads out of its folder")
        return FileSource(path.parent / name)

    def fetch(self, context: Context) -> Path | None:
        if not self.exists(context):
            raise WeightError(f"there is no file {self.address!r}")
        return Path(self.path)

    def exists(self, context: Context) -> bool:
        return os.path.isfile(self.path)  # false also where the name is one no file can have


@dataclass(frozen=True)
class MemorySource(Checked):
    """Bytes that somebody has, with the format they are in."""

    data: Any
    format: str | None = None
    name: str = "memory"

    RULES: ClassVar[Mapping[str, Rule]] = {"data": Buffer(), "format": TEXT_OR_NONE, "name": TEXT}

    @property
    def address(self) -> str:
        return f"memory:{self.name}"

    def open(self, context: Context) -> Blob:
        return MemoryBlob(self.name, self.data)

    def sibling(self, name: str) -> MemorySource:
        raise WeightError(f"{self.name!r} refers to {name!r}, and bytes in memory have no other files beside them")

    def fetch(self, context: Context) -> Path | None:
        return None

    def exists(self, context: Context) -> bool:
        return True
