"""Decisions of planners that measurements may take: which tile, which blocks, which algorithm.

A planner knows what it would do, and what else it could do. It asks :func:`choose`, which returns the former unless a
table of decisions is consulted that holds another. Keys are what a decision depends on besides the instruction set and
the number of threads, which a table is for. Without a table nothing is looked up and no alternative is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import TypeVar

from ranvier.records import dataclass
from ranvier.varying import following

T = TypeVar("T")
Key = Callable[[], tuple[object, ...]]  # made when it is needed

# Decisions in the order in which they are taken: those of one stage do not concern the same launch, later ones are
# best taken when earlier ones are settled.
STAGES: tuple[Mapping[str, str], ...] = (
    {
        "product way": "by dots, packed, or where B lies; by tiles or by pairs",
        "conv way": "direct, by dots, or by Winograd's algorithm",
        "integer way": "the unit that multiplies codes",
        "integer squares": "3x3 of codes by taps, or by squares of outputs",
    },
    {
        "product panels": "vectors of a panel of B, and with that the rows of a tile",
        "conv panels": "vectors of a panel of filters, and with that the rows of a tile",
    },
    {
        "product depth": "steps of K that are multiplied at a time",
        "conv depth": "steps of K that are multiplied at a time",
        "integer depth": "groups of K that are multiplied at a time",
    },
    {
        "product blocks": "rows and panels of a tile of work",
        "conv blocks": "pixels and panels of a tile of work",
        "integer blocks": "rows and panels of a tile of work",
        "integer rows": "lines of an image that a tile of work takes",
    },
    {"threads": "by one thread or by all"},
    {"product joining": "products of one tensor as one step, or one by one"},
)
SITES = {name: text for stage in STAGES for name, text in stage.items()}


@dataclass(frozen=True)
class Table:
    """Names of alternatives by key; what is not in it is decided as ever."""

    chosen: Mapping[str, str] = field(default_factory=dict)

    def having(self, more: Mapping[str, str]) -> Table:
        """The table with other decisions; an empty name takes one back."""
        found = {**self.chosen, **more}
        return Table({key: name for key, name in found.items() if name})


@dataclass
class Decision:
    """One that was taken, and the launches of a partition that it concerned: from ``first`` up to ``end``."""

    site: str
    key: str
    others: tuple[str, ...]  # names of the alternatives
    chosen: str  # one of them, or empty: as without a table
    first: int
    end: int = 0


class Consultation:
    """A table in use while one partition is lowered; ``launches`` says how many there are so far."""

    def __init__(self, table: Table, launches: Callable[[], int]) -> None:
        self.table = table
        self.decisions: list[Decision] = []
        self._launches = launches
        self._open: dict[str, Decision] = {}

    def choose(self, site: str, key: Key, default: T, others: Callable[[], Mapping[str, T]]) -> T:
        text = f"{site} {key()!r}"
        different: dict[str, T] = {}
        for name, value in others().items():
            if value != default and value not in different.values():
                different[name] = value
        if not different:
            return default
        name = self.table.chosen.get(text, "")
        name = name if name in different else ""  # another version's, or what another decision made impossible
        if text not in self._open:
            self._open[text] = Decision(site, text, tuple(different), name, self._launches())
        return different[name] if name else default

    def begin(self) -> None:
        """What was decided so far was about no launch that is to come."""
        self._open.clear()

    def settle(self) -> None:
        """The launches that the open decisions are about are all there."""
        for each in self._open.values():
            each.end = self._launches()
            self.decisions.append(each)
        self._open.clear()


_consulted: ContextVar[Consultation | None] = ContextVar("consulted", default=None)
_given: ContextVar[Table | None] = ContextVar("given", default=None)


def consulted() -> bool:
    """Is there a table to look things up in? Not where sizes vary: they are no key."""
    return _consulted.get() is not None and not following()


def choose(site: str, key: Key, default: T, others: Callable[[], Mapping[str, T]]) -> T:
    """What a planner shall do: ``default``, or one of ``others``, which have names that stay the same."""
    consultation = _consulted.get()
    if consultation is None or following():
        return default
    return consultation.choose(site, key, default, others)


@contextmanager
def consulting(table: Table | None, launches: Callable[[], int]) -> Iterator[Consultation | None]:
    """Let :func:`choose` look things up in a table, in this thread."""
    made = None if table is None else Consultation(table, launches)
    token = _consulted.set(made)
    try:
        yield made
    finally:
        _consulted.reset(token)


@contextmanager
def given(table: Table) -> Iterator[None]:
    """Let what is compiled in this thread use a table in place of the one that is kept."""
    token = _given.set(table)
    try:
        yield
    finally:
        _given.reset(token)


def given_table() -> Table | None:
    return _given.get()
