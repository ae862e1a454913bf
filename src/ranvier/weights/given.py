"""What the arguments of sources, of the cache and of the loader may be.

Some of them are secrets, or have some inside: errors tell the kind of what was given, not what it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ranvier.records import dataclass
from ranvier.rules import Rule


@dataclass(frozen=True)
class Kind(Rule):
    """An object of one of these kinds, which ``words`` tell people."""

    words: str
    kinds: tuple[type, ...]
    optional: bool = False

    def check(self, value: Any) -> Any:
        if not isinstance(value, self.kinds) and not (value is None and self.optional):
            raise self.wrong(value)
        return value

    def wrong(self, value: Any) -> ValueError:
        return _wrong(self.words + (" or None" if self.optional else ""), value)


class Place(Kind):
    """A path as text; not as bytes, which an object that stands for a path may give too."""

    def check(self, value: Any) -> Any:
        if isinstance(super().check(value), os.PathLike) and not isinstance(os.fspath(value), str):
            raise self.wrong(os.fspath(value))
        return value


@dataclass(frozen=True)
class Named(Rule):
    """Objects of some kinds by names."""

    words: str
    kinds: tuple[type, ...] = (object,)

    def check(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(self.words, value)
        for name, each in value.items():
            if not isinstance(name, str):
                raise _wrong(self.words, name, " as a name")
            if not isinstance(each, self.kinds):
                raise _wrong(self.words, each, f" for {name!r}")
        return value


class Buffer(Rule):
    """Bytes, or what has some that others may look at."""

    def check(self, value: Any) -> Any:
        try:
            memoryview(value)
        except (TypeError, ValueError, BufferError):
            raise _wrong(
                "bytes, or an object with the buffer of some, such as a bytearray or an array", value
            ) from None
        return value


@dataclass(frozen=True)
class Able(Rule):
    """An object with these methods."""

    methods: tuple[str, ...]

    def check(self, value: Any) -> Any:
        if isinstance(value, type) or not all(callable(getattr(value, name, None)) for name in self.methods):
            raise _wrong(f"an object with the methods {', '.join(self.methods)}", value)
        return value


def _wrong(words: str, value: Any, where: str = "") -> ValueError:
    kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return ValueError(f"must be {words}, got {'None' if value is None else kind}{where}")


TEXT = Kind("text", (str,))
TEXT_OR_NONE = Kind("text", (str,), optional=True)
PATH = Place("a path", (str, os.PathLike))
PATH_OR_NONE = Place("a path", (str, os.PathLike), optional=True)
