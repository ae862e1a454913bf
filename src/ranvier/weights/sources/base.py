"""What a source of weights is, and what it is opened with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Protocol

from ranvier.records import dataclass
from ranvier.weights.access import Access
from ranvier.weights.blob import Blob
from ranvier.weights.cache import WeightCache


@dataclass(frozen=True)
class Context:
    """What all sources share: the cache, and how the network is used."""

    cache: WeightCache = field(default_factory=WeightCache)
    access: Access = field(default_factory=Access)
    verify: bool = False  # compare the bytes of cached files with their checksum


class Source(Protocol):
    """Where a checkpoint comes from. New ones come by the entry points ``ranvier.weight_sources``, named after the
    scheme of their addresses: a function of the address that gives an object like this."""

    @property
    def address(self) -> str:
        """What names it for people, without secrets."""
        ...

    @property
    def format(self) -> str | None:
        """The format by name, where it cannot or need not be found out."""
        ...

    def open(self, context: Context) -> Blob:
        """Its bytes, as near as they are: mapped, cached, or read by ranges."""
        ...

    def sibling(self, name: str) -> Source:
        """Another file beside it."""
        ...

    def fetch(self, context: Context) -> Path | None:
        """A file on this machine with its bytes, downloaded if need be; None where it is in memory already."""
        ...

    def exists(self, context: Context) -> bool: ...


def pinned(source: Source, context: Context) -> Source:
    """A source at the state that it is in now, so that files beside it are of the same. A source whose files have a
    state in common says so by a method of this name, which gives another source; those of others have none."""
    own: Callable[[Context], Source] | None = getattr(source, "pinned", None)
    return source if own is None else own(context)
