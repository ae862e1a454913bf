"""What a run needs to go on, in files that are whole or not there.

A checkpoint is one safetensors file: tensors, and beside them facts (step, position in the data, versions, options) as
JSON with the tensors' checksum. It is written under another name, brought to the disk, and then renamed; so a process
that is killed at any byte leaves the one before. One that was damaged later is noticed by its checksum and passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.errors import CannotWrite, InvalidConfig, WeightError
from ranvier.logs import logger
from ranvier.records import dataclass
from ranvier.weights.blob import MemoryBlob
from ranvier.weights.formats.base import Opening
from ranvier.weights.formats.safetensors import SafeTensors, save

Array = np.ndarray[Any, Any]
_NAME = re.compile(r"step-(\d{10})\.safetensors")
_FACTS, _CHECKSUM, _FORMAT = "ranvier.facts", "ranvier.sha256", "ranvier.checkpoint"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read."""

    path: Path
    step: int
    tensors: Mapping[str, Array]
    facts: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run in a folder; the last ``keep`` stay (all with None)."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise InvalidConfig(f"at least one checkpoint is kept, not {keep}")
        self.folder = Path(folder)
        self._keep = keep

    def save(self, step: int, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove those that are too many."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"cannot write to {str(self.folder)!r}: {error.strerror or error}") from error
        target = self.folder / f"step-{step:010d}.safetensors"
        write(target, tensors, {**facts, "step": step})
        self._forget()
        return target

    def paths(self) -> list[Path]:
        """All checkpoints, the last one first."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)), reverse=True)

    def latest(self) -> Saved | None:
        """The last checkpoint that is whole."""
        for path in self.paths():
            try:
                return read(path)
            except WeightError as error:
                logger.warning("the checkpoint %s is passed over: %s", path.name, error)
        return None

    def _forget(self) -> None:
        for path in [] if self._keep is None else self.paths()[self._keep :]:
            with suppress(OSError):
                path.unlink()
        for path in self.folder.glob(".*step-*.part"):  # what killed processes left
            with suppress(OSError):
                path.unlink()


def write(path: Path, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """One checkpoint, as durable as the system can make it before it takes its name."""
    arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    notes = {_FORMAT: "1", _FACTS: text, _CHECKSUM: _checksum(arrays, text)}
    staged = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save(staged, arrays, notes)
        _to_disk(staged)
        os.replace(staged, path)
        _to_disk(path.parent)
    except OSError as error:
        raise CannotWrite(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            staged.unlink()


def read(path: str | os.PathLike[str]) -> Saved:
    """A checkpoint; WeightError where it is none, or not whole."""
    where = Path(path)
    opened = SafeTensors().open(MemoryBlob.of_file(where), Opening())
    text, checksum = opened.notes.get(_FACTS), opened.notes.get(_CHECKSUM)
    if text is None or checksum is None:
        raise WeightError(f"{where.name!r} has no facts of a run beside its tensors")
    tensors = {name: np.array(opened[name].read()) for name in opened}
    if _checksum(tensors, text) != checksum:
        raise WeightError(f"{where.name!r} is damaged: its content is not what was written")
    facts = json.loads(text)
    return Saved(where, int(facts["step"]), tensors, facts)


def _checksum(arrays: Mapping[str, Array], text: str) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        found.update(f"{name}\0{arrays[name].dtype}\0{arrays[name].shape}\0".encode())
        found.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some systems cannot do it for folders
            raise
    finally:
        os.close(handle)
