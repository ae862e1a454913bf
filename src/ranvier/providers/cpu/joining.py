"""Products of one tensor: what all of them need of it is made once, and they are one step where that pays.

Q, K and V of attention are the usual ones. Decided when all launches of a partition are there: what is copied, how long
each product takes and what stands between them are known then, whatever operators they came from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Literal

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, Launch
from ranvier.codegen.llvm.gemm.driver import Dim, driver_spec
from ranvier.codegen.llvm.joined import joined
from ranvier.codegen.llvm.program import SERIAL_NS, estimated_ns
from ranvier.codegen.storage import Storage
from ranvier.records import dataclass
from ranvier.varying import following

_REACH = 12  # launches that a product may be moved past, or a copy wait: memory is held that much longer …
_FAR, _SMALL = 48, 1 << 16  # … and more where that is this many bytes at most
_PREPARED = 4  # launches that may be moved with it, because it needs what they make
_MEETING_NS = 2_000  # what it costs threads to meet after a step


def made_once(launches: Sequence[Launch], prepares: Set[int], kept: Set[Storage]) -> tuple[list[Launch], list[int]]:
    """The launches without those that make again, of the same tensors, what was made shortly before; and where each
    one is. What is computed again long after is so in order not to be held meanwhile.

    Three products of one tensor each make a copy of its rows in the order in which the matrix unit takes them.
    ``prepares`` are the places of launches that prepare operands of products, ``kept`` storages that are looked at from
    outside.
    """
    if len(prepares) < 2:
        return list(launches), list(range(len(launches)))
    writers = Counter(storage for launch in launches for storage in launch.writes)
    made: list[Launch] = []
    places: list[int] = []
    written: dict[Storage, int] = {}  # when a storage was last written
    known: dict[tuple[object, ...], list[tuple[int, Launch]]] = {}
    instead: dict[Storage, Storage] = {}
    for place, launch in enumerate(launches):
        if instead and any(isinstance(b, At) and b.storage in instead for b in launch.buffers):
            launch = _rewired(launch, instead)
        again: int | None = None
        if place in prepares and all(s.kind == "temp" and s not in kept and writers[s] == 1 for s in launch.writes):
            read = [b.storage for b in launch.buffers if isinstance(b, At) and b.storage not in launch.writes]
            # numbers may vary from call to call: they are compared, and never part of a key
            others = known.setdefault((launch.spec, *map(id, read)), [])
            near = [(k, each) for k, each in others if len(made) - k <= _reach(launch)]
            again = next(
                (k for k, each in near if _same(each, launch) and all(written.get(s, -1) < k for s in read)), None
            )
            if again is None:
                others.append((len(made), launch))
            else:
                instead.update(zip(launch.writes, made[again].writes))
        places.append(len(made) if again is None else again)
        if again is None:
            for storage in launch.writes:
                written[storage] = len(made)
            made.append(launch)
    return made, places


def _same(one: Launch, other: Launch) -> bool:
    """Whether two launches of one kernel that read the same storages do the same, each to storages of its own."""

    def buffers(x: Launch) -> list[object]:
        own = {storage: k for k, storage in enumerate(x.writes)}
        return [(own.get(b.storage, b.storage), b.offset) if isinstance(b, At) else b for b in x.buffers]

    alike = len(one.writes) == len(other.writes) and one.tiles == other.tiles and one.rounds == other.rounds
    return alike and buffers(one) == buffers(other) and one.dims == other.dims


def _reach(launch: Launch) -> int:
    """How many launches what one writes may be held for: what is small is in the way of nothing."""
    return _FAR if sum(storage.nbytes for storage in launch.writes) <= _SMALL else _REACH


def _rewired(launch: Launch, instead: dict[Storage, Storage]) -> Launch:
    buffers = tuple(
        At(instead[b.storage], b.offset) if isinstance(b, At) and b.storage in instead else b for b in launch.buffers
    )
    return replace(launch, buffers=buffers)


def together(
    launches: Sequence[Launch], products: Set[int], joins: Callable[[Sequence[int]], bool]
) -> tuple[list[Launch], list[int], list[tuple[str, ...]]]:
    """The launches with products of one tensor as one step each, where every launch is now, and what the products of
    each such step are called. ``products`` are the places of products; ``joins`` says of those that could be one step
    whether they are."""
    by_tensor: dict[Storage, list[int]] = {}
    for k in sorted(products):
        tensor = _tensor(launches[k])
        if tensor is not None:
            by_tensor.setdefault(tensor, []).append(k)
    found = _Groups(launches, products)
    groups: dict[int, _Group] = {}  # by the place of the first
    for places in by_tensor.values():
        while len(places) > 1:
            group = found.beginning(places)
            places = [k for k in places if k not in group.members]
            if len(group.members) > 1 and joins(group.members):
                groups[group.members[0]] = group
    if not groups:
        return list(launches), list(range(len(launches))), []
    moved = {k for group in groups.values() for k in (*group.before, *group.members[1:])}
    made: list[Launch] = []
    names: list[tuple[str, ...]] = []
    places = [0] * len(launches)
    for k, launch in enumerate(launches):
        if k in moved:
            continue
        if k not in groups:
            places[k] = len(made)
            made.append(launch)
            continue
        group = groups[k]
        for each in sorted(group.before):
            places[each] = len(made)
            made.append(launches[each])
        for each in group.members:
            places[each] = len(made)
        parts = [launches[each] for each in group.members]
        names.append(tuple(part.label for part in parts))
        made.append(joined(parts, in_turns=all(_cut(part) == "columns" for part in parts)))
    return made, places, names


@dataclass(frozen=True)
class _Group:
    """Products that can be done at the place of the first, and launches that have to be done before them there."""

    members: list[int]
    before: set[int]


class _Groups:
    def __init__(self, launches: Sequence[Launch], products: Set[int]) -> None:
        self._launches, self._products = launches, products
        self._touched: dict[int, set[Storage]] = {}

    def beginning(self, places: Sequence[int]) -> _Group:
        """The group of the first of ``places``, with those of the others that can join it."""
        first = places[0]
        members, before = [first], set[int]()
        for k in places[1:]:
            if k - first > _reach(self._launches[k]):
                continue
            needed = self._needed(first, k)
            if needed is not None:
                members.append(k)
                before |= needed
        return _Group(members, before)

    def _needed(self, first: int, k: int) -> set[int] | None:
        """What has to come before ``first`` with ``k``; None where that cannot be: other products (of the group they
        are then, and need nothing of each other), or more than a little."""
        needed: set[int] = set()
        for other in range(k - 1, first - 1, -1):
            if any(self._meet(other, each) for each in (k, *needed)):
                if other in self._products or len(needed) == _PREPARED:
                    return None
                needed.add(other)
        return needed

    def _meet(self, one: int, other: int) -> bool:
        """Whether one of two launches writes what the other touches."""
        a, b = self._launches[one], self._launches[other]
        return not (self._storages(one).isdisjoint(b.writes) and self._storages(other).isdisjoint(a.writes))

    def _storages(self, k: int) -> set[Storage]:
        if k not in self._touched:
            self._touched[k] = {b.storage for b in self._launches[k].buffers if isinstance(b, At)}
        return self._touched[k]


def _cut(launch: Launch) -> Literal["rows", "columns", ""]:
    """What tiles of a product are: rows with all columns, columns with all rows there are (and those are few), or
    anything else."""
    if launch.spec != driver_spec():
        return ""
    numbers = launch.dims
    if numbers[Dim.PANEL_GROUPS] == 1 and numbers[Dim.ROW_GROUPS] > 1:
        return "rows"
    return "columns" if numbers[Dim.ROW_BLOCKS] == 1 else ""


def _tensor(launch: Launch) -> Storage | None:
    """What a product multiplies by its weights: kernels name it first."""
    if launch.rounds > 1:
        return None
    return next((b.storage for b in launch.buffers if isinstance(b, At) and b.storage.kind != "const"), None)


class Choice:
    """Whether products are joined: as :func:`pays` says, or as a table of measurements does."""

    def __init__(self, launches: Sequence[Launch], threads: int, consultation: tuning.Consultation | None) -> None:
        self._launches, self._threads, self._consultation = launches, threads, consultation
        self._asked: list[tuple[tuning.Decision, Sequence[int]]] = []

    def __call__(self, members: Sequence[int]) -> bool:
        parts = [self._launches[k] for k in members]
        usual = pays(parts, self._threads)
        consultation = self._consultation
        if consultation is None or self._threads < 2 or following():
            return usual
        chosen = consultation.choose(
            "product joining",
            lambda: tuple((each.spec.name, each.tiles, each.flops, each.traffic) for each in parts),
            usual,
            lambda: {"apart" if usual else "joined": not usual},
        )
        consultation.settle()
        self._asked.append((consultation.decisions.pop(), members))
        return chosen

    def settle(self, places: Sequence[int]) -> None:
        """Let decisions be about launches as they are now."""
        for decision, members in self._asked:
            now = [places[k] for k in members]
            decision.first, decision.end = min(now), max(now) + 1
            assert self._consultation is not None
            self._consultation.decisions.append(decision)


def pays(launches: Sequence[Launch], threads: int) -> bool:
    """Whether products take less time as one step: threads meet once, and share what is too little to be shared
    alone. A single thread gains nothing by it. Where threads have rows of their own each finds them in its own cache,
    and B as well, which is lost when they have products of their own instead (measured: 3 to 4 %)."""
    if len(launches) < 2 or threads < 2 or any(_cut(each) == "rows" for each in launches):
        return False
    spans = [estimated_ns(each) for each in launches]

    def shared(span: float) -> float:
        return span if span < SERIAL_NS else span / threads + _MEETING_NS

    return shared(sum(spans)) < sum(map(shared, spans))
