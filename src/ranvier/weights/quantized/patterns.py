"""Patterns of names in the settings of a checkpoint, matched in a time that does not explode.

Python's own matcher tries one way after another, and of ``(a+)+b`` there are more than anybody waits for; a checkpoint
comes from anywhere. Here all ways are followed at once: the places of a name that a piece of the pattern may lead to
are the bits of a number. What stands for one character, or for a place between two, Python's matcher is asked; and
the whole pattern where it has a few repeats and none of groups, as nearly all have, which is a hundred times as fast.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from ranvier.errors import WeightError

_LONGEST = 2000  # characters of a pattern
_LONGEST_NAME = 5000
_DEEPEST = 50  # groups in groups
_STEPS = 200_000  # of one match; patterns that checkpoints have take some dozens
_FEW = 3  # repeats that Python's matcher tries on a short name in well below a second, whatever they are
_SHORT_NAME = 300
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_PLACE = re.compile(r"\^|\$|\\[AZbB]")
_CHARACTER = re.compile(r"\\[dDwWsSnrtfv]|\\[\W_]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\()|*+?\[]", re.DOTALL)
_REPEAT = re.compile(r"([*+?]|\{(?=[^}])(\d*)(?:(,)(\d*))?\})\??")
_GROUP = re.compile(r"\((?:\?(?:(:|P<\w+>)|([=!])))?")
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Name:
    """A name that is matched, and how many steps that may still take."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST_NAME:
            raise WeightError(f"the name {text[:100]!r} ... has {len(text)} characters, too many for a pattern")
        self.text, self.left = text, _STEPS
        self._places: dict[re.Pattern[str], int] = {}
        self._of: dict[str, int] = {}
        for at, character in enumerate(text):
            self._of[character] = self._of.get(character, 0) | 1 << at

    def characters(self, atom: re.Pattern[str]) -> int:
        """Where characters are that match."""
        if atom not in self._places:
            of = self._of.items()
            self._places[atom] = sum(places for character, places in of if _is_one(atom, character))
        return self._places[atom]

    def between(self, atom: re.Pattern[str]) -> int:
        """Where it matches between characters: at the end, for example."""
        return sum(1 << at for at in range(len(self.text) + 1) if atom.match(self.text, at))


@functools.lru_cache(maxsize=1 << 12)
def _is_one(atom: re.Pattern[str], character: str) -> bool:
    return atom.fullmatch(character) is not None


_Piece = Callable[[int, _Name], int]  # places where it may begin, to places where it may end


def matches(pattern: str, name: str) -> bool:
    """Whether a name begins as a pattern says; WeightError where that takes too long, or the pattern is none, or one
    that refers to what another piece of it has matched."""
    found = _parsed(pattern)
    if _is_plain(pattern) and len(name) <= _SHORT_NAME:
        return re.match(pattern, name) is not None
    return _followed(found, name)


def _followed(piece: _Piece, name: str) -> bool:
    return piece(1, _Name(name)) != 0


@functools.lru_cache(maxsize=256)
def _is_plain(pattern: str) -> bool:
    """Whether so few ways lead through it that they may be tried one after another."""
    return sum(map(pattern.count, "*+?{")) <= _FEW and _REPEATED_GROUP.search(pattern) is None


@functools.lru_cache(maxsize=256)
def _parsed(pattern: str) -> _Piece:
    try:
        if len(pattern) > _LONGEST:
            raise ValueError(f"it has {len(pattern)} characters")
        re.compile(pattern)
        return _Parser(pattern).whole()
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise WeightError(f"the pattern of names {pattern[:200]!r} cannot be used: {error}") from None


class _Parser:
    """Reads a pattern that Python has found to be one."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at, self._depth = pattern, 0, 0

    def whole(self) -> _Piece:
        found = self._either()
        if self._at < len(self._pattern):
            raise self._unknown()
        return found

    def _either(self) -> _Piece:
        ways = [self._sequence()]
        while self._took("|"):
            ways.append(self._sequence())
        return _any_of(ways) if len(ways) > 1 else ways[0]

    def _sequence(self) -> _Piece:
        pieces: list[_Piece] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            piece = self._piece()
            if match := self._matched(_REPEAT):
                if self._pattern.startswith("+", self._at):
                    raise self._unknown()
                piece = _repeated(piece, *_times(match))
            pieces.append(piece)
        return _in_order(pieces)

    def _piece(self) -> _Piece:
        if match := self._matched(_PLACE):
            return _place(re.compile(match[0]))
        if match := self._matched(_CHARACTER):
            return _character(re.compile("\\{" if match[0] == "{" else match[0]))  # no repeat: it stands for itself
        match = self._matched(_GROUP)
        self._depth += 1
        if match is None or self._depth > _DEEPEST:
            raise self._unknown()
        inner = self._either()
        if not self._took(")"):
            raise self._unknown()
        self._depth -= 1
        return _ahead(inner, match[2] == "=") if match[2] else inner

    def _matched(self, what: re.Pattern[str]) -> re.Match[str] | None:
        match = what.match(self._pattern, self._at)
        self._at = self._at if match is None else match.end()
        return match

    def _took(self, mark: str) -> bool:
        there = self._pattern.startswith(mark, self._at)
        self._at += there
        return there

    def _unknown(self) -> ValueError:
        return ValueError(f"{self._pattern[self._at : self._at + 10]!r} is none of what is known here")


def _times(repeat: re.Match[str]) -> tuple[int, int | None]:
    if repeat[1] in _TIMES:
        return _TIMES[repeat[1]]
    least = int(repeat[2] or 0)
    if not repeat[3]:
        return least, least
    return least, int(repeat[4]) if repeat[4] else None


def _place(atom: re.Pattern[str]) -> _Piece:
    return lambda begins, name: _counted(begins, name) & name.between(atom)


def _character(atom: re.Pattern[str]) -> _Piece:
    return lambda begins, name: (_counted(begins, name) & name.characters(atom)) << 1


def _in_order(pieces: list[_Piece]) -> _Piece:
    def follow(begins: int, name: _Name) -> int:
        for piece in pieces:
            begins = begins and piece(begins, name)
        return begins

    return follow


def _any_of(ways: list[_Piece]) -> _Piece:
    def follow(begins: int, name: _Name) -> int:
        return functools.reduce(int.__or__, (way(begins, name) for way in ways))

    return follow


def _repeated(piece: _Piece, least: int, most: int | None) -> _Piece:
    def follow(begins: int, name: _Name) -> int:
        found, before = begins, None
        for _ in range(least):
            if not found or found == before:
                break
            before, found = found, piece(_counted(found, name), name)
        new, left = found, None if most is None else most - least
        while new and left != 0:
            new = piece(_counted(new, name), name) & ~found
            found |= new
            left = None if left is None else left - 1
        return found

    return follow


def _ahead(piece: _Piece, wanted: bool) -> _Piece:
    def follow(begins: int, name: _Name) -> int:
        each = (1 << at for at in range(len(name.text) + 1) if begins >> at & 1)
        return sum(one for one in each if bool(piece(_counted(one, name), name)) == wanted)

    return follow


def _counted(places: int, name: _Name) -> int:
    name.left -= 1
    if name.left < 0:
        raise WeightError(f"a pattern takes more than {_STEPS} steps to be matched with {name.text[:100]!r}")
    return places
