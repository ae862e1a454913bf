"""Data of tensors in files beside the model: where it is said to lie, and what of that is believed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranvier.errors import IntegrityError, WeightError
from ranvier.records import dataclass

_DIGITS = 20  # of a number of bytes


@dataclass(frozen=True)
class Place:
    """Bytes of a file that is named from the model's folder."""

    location: str
    offset: int
    length: int
    checksum: str = ""  # SHA-1, where the model tells one

    @property
    def stop(self) -> int:
        return self.offset + self.length

    def check_inside(self, size: int, tensor: str) -> None:
        """WeightError where a file of this size does not have all of the bytes."""
        if self.stop > size:
            raise WeightError(
                f"tensor {tensor!r}: bytes {self.offset} to {self.stop} of {self.location!r}, which has {size}"
            )

    def check_sum(self, data: Any, tensor: str) -> None:
        """IntegrityError where these are not the bytes that the model was written with."""
        if self.checksum and hashlib.sha1(data, usedforsecurity=False).hexdigest() != self.checksum.lower():
            raise IntegrityError(f"tensor {tensor!r}: the external data does not match its checksum {self.checksum}")


def place_of(entries: Mapping[str, str], expected: int, tensor: str) -> Place:
    """What the entries ``external_data`` of a tensor say; ``expected`` is its length where they do not tell it."""
    location = entries.get("location", "")
    absolute = Path(location).is_absolute() or location.startswith("/")
    if not location or "\0" in location or absolute or ".." in Path(location).parts:
        raise WeightError(f"tensor {tensor!r}: external location {location!r} must be a path inside the model's folder")
    try:
        offset = _number(entries.get("offset") or "0")
        length = _number(entries.get("length") or str(expected))
    except ValueError:
        raise WeightError(f"tensor {tensor!r}: external offset or length is not a number") from None
    if offset < 0 or length < 0:
        raise WeightError(f"tensor {tensor!r}: bytes {offset} to {offset + length} of {location!r}")
    return Place(location, offset, length, entries.get("checksum", ""))


def _number(text: str) -> int:
    if len(text) > _DIGITS:  # of no file; and Python does not write numbers of any length, as in a message
        raise ValueError
    return int(text)


def file_beside(model: Path, location: str, tensor: str) -> Path | None:
    """The file, None where there is none; WeightError where links lead out of the model's folder."""
    try:
        path = (model.parent / location).resolve()
        exists = path.is_file()
        # a model in a content-addressed cache is a link; its data lies beside the link's target
        folders = (model.parent.resolve(), model.resolve().parent)
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, links in a circle
        raise WeightError(f"tensor {tensor!r}: external location {location!r} cannot be used: {error}") from None
    if not any(path.is_relative_to(folder) for folder in folders):
        raise WeightError(f"tensor {tensor!r}: external location {location!r} leads outside the model's folder")
    return path if exists else None
