"""A GGUF checkpoint in several files, as llama.cpp's ``gguf-split`` writes it.

There is no index. The header of every file says which part of how many it is, and the others are found by its name:
``name-00001-of-00003.gguf``. What the files say comes from anywhere, so it is held against the names and against each
other before a tensor can be asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as in_short
from typing import Any, TypeGuard

from ranvier.errors import WeightError
from ranvier.records import dataclass
from ranvier.weights.access import NotCached
from ranvier.weights.blob import Blob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.http import Missing
from ranvier.weights.stored import Weight
from ranvier.weights.together import AT_ONCE, Stop, together

ALIGNMENT = "general.alignment"
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
_NAME = re.compile(r"([^/\\\0]+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_MOST_PARTS = 1 << 12  # there are some with a file for each tensor, more than a thousand


@dataclass(frozen=True)
class Part:
    """What one file holds."""

    file: str
    notes: Mapping[str, Any]
    placed: Callable[[Any], Mapping[str, Weight]]
    """Its tensors; where their data begins may hang on how the first part aligns its own, which is given."""


@dataclass(frozen=True)
class _Place:
    """Which part a file says it is."""

    number: int  # the first is 0
    count: int
    tensors: int  # of all parts together

    def __str__(self) -> str:
        return f"part {self.number + 1} of {self.count}"


def files_of(file: str, notes: Mapping[str, Any]) -> list[str]:
    """The files of the checkpoint that this one is a part of, in order; itself where it is the whole."""
    place = _place(file, notes)
    if place is None:
        return [file]
    end = f"-{place.number + 1:05d}-of-{place.count:05d}.gguf"
    match = _NAME.fullmatch(file)
    if match is None:
        raise WeightError(
            f"{file!r} is {place} of a checkpoint, and the others are found beside it by their names: it must be a "
            f"file called {file.removesuffix('.gguf') + end!r}, or all parts be joined to one file "
            "('llama-gguf-split --merge' does that)"
        )
    if not file.endswith(end):
        raise WeightError(
            f"{file!r} is part {int(match[2])} of {int(match[3])} by its name, but {place} by its header: "
            f"give it the name {match[1] + end!r}, or fetch it anew"
        )
    return [f"{match[1]}-{number + 1:05d}-of-{place.count:05d}.gguf" for number in range(place.count)]


def whole(named: Part, opening: Opening, read: Callable[[Blob], Part], alignment: int) -> Checkpoint:
    """The checkpoint that the named part belongs to; ``read`` gives what another file holds, and ``alignment`` is that
    of files which tell none."""
    files = files_of(named.file, named.notes)
    if len(files) == 1:
        return Checkpoint(named.placed(alignment), named.notes, repr(named.file))

    def part(number: int) -> tuple[Part, _Place]:
        file = files[number]
        found = named if file == named.file else read(_beside(file, len(files), named.file, opening))
        place = _place(file, found.notes)
        if place is None or (place.number, place.count) != (number, len(files)):
            said = "a whole checkpoint" if place is None else str(place)
            raise WeightError(
                f"{file!r} beside {named.file!r} is part {number + 1} of {len(files)} by its name, but {said} by its "
                "header: the files do not belong together"
            )
        # those of the others nobody sees, and a vocabulary in each of them would take much memory meanwhile
        return Part(file, found.notes if number == 0 else {}, found.placed), place

    # far away, every header is some requests; those beside a file that is near may be far
    return _joined(together(part, range(len(files)), AT_ONCE, Stop()), named.file, alignment)


def _joined(parts: Sequence[tuple[Part, _Place]], label: str, alignment: int) -> Checkpoint:
    weights: dict[str, Weight] = {}
    usual = parts[0][0].notes.get(ALIGNMENT, alignment)
    for part, _ in parts:
        for name, weight in part.placed(usual).items():
            if name in weights:
                raise WeightError(f"tensor {name!r} is in {weights[name].info.source!r} and again in {part.file!r}")
            weights[name] = weight
    for part, place in parts:
        if place.tensors != len(weights):
            raise WeightError(
                f"{part.file!r} says that the {place.count} parts have {place.tensors} tensors together; they have "
                f"{len(weights)}"
            )
    first = parts[0][0]
    # these are about files, not about what is given here: one that was written with them would be taken for a part
    notes = {key: value for key, value in first.notes.items() if key not in (NUMBER, COUNT, TENSORS)}
    return Checkpoint(weights, notes, repr(label))


def _place(file: str, notes: Mapping[str, Any]) -> _Place | None:
    """None where it is the whole: without these keys, or joined again, which leaves a count of 0."""
    count = notes.get(COUNT, 1)
    if not _is_count(count) or count > _MOST_PARTS:
        raise WeightError(f"{file!r}: {COUNT} is {in_short(count)}, not a number up to {_MOST_PARTS}")
    if count < 2:
        return None
    number, tensors = notes.get(NUMBER), notes.get(TENSORS)
    if not _is_count(number) or number >= count:
        raise WeightError(f"{file!r}: {NUMBER} is {in_short(number)}, not a number below {COUNT}, {count}")
    if not _is_count(tensors):
        raise WeightError(f"{file!r}: {TENSORS} is {in_short(tensors)}, not a number of tensors")
    return _Place(number, count, tensors)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0  # true and false are no numbers here


def _beside(file: str, count: int, named: str, opening: Opening) -> Blob:
    try:
        return opening.beside(file, named)
    except WeightError as error:
        kind = type(error)
        if kind not in (WeightError, Missing, NotCached):  # the network, or who stopped it, is not about parts
            raise
        raise kind(f"{named!r} is one of {count} parts, and {file!r} cannot be had: {error}") from error
