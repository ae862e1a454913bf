"""Cheap records behave as the standard library's dataclasses do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from ranvier.records import dataclass

Decorator = Callable[..., Any]


class Base:
    """Declared twice below, once by each decorator."""

    count: int
    label: str = "none"
    parts: list[int] = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=5, repr=False, compare=False)
    fixed: tuple[int, ...] = dataclasses.field(default=(1, 2), init=False)
    named: float = dataclasses.field(default=0.5, kw_only=True)
    shared: ClassVar[int] = 3


def twice(**options: bool) -> tuple[Any, Any]:
    """The same class by the library and by ours."""
    body = {"__annotations__": dict(Base.__annotations__), "__doc__": "Doc.", "__module__": __name__}
    body |= {k: v for k, v in Base.__dict__.items() if k in Base.__annotations__}
    return tuple(
        make(**options)(type("Record", (), {k: copy.copy(v) for k, v in body.items()}))
        for make in (dataclasses.dataclass, dataclass)
    )  # type: ignore[return-value]


OPTIONS: list[dict[str, bool]] = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"slots": True, "unsafe_hash": True},
    {"eq": False},
    {"frozen": True, "eq": False},
    {"order": True},
]


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_behave_alike(options: dict[str, bool]) -> None:
    theirs, ours = twice(**options)

    def told(kind: Any) -> list[Any]:
        one, same, other = kind(1, named=2.0), kind(1, "none", named=2.0), kind(count=2, label="x", parts=[4])

        def assign() -> None:
            one.count = 7

        def delete() -> None:
            del other.count

        return [
            *map(repr, (one, same, other)),
            one == same,
            one == other,
            one == 1,
            one != same,
            outcome(lambda: hash(kind(1, parts=())) == hash(kind(1, parts=()))),
            outcome(lambda: hash(kind(1))),
            outcome(lambda: kind()),
            outcome(lambda: kind(1, "a", [2], 3, 4)),
            outcome(lambda: kind(1, unknown=2)),
            one.parts is not same.parts,
            [(f.name, f.type, f.init, f.kw_only) for f in dataclasses.fields(kind)],
            repr(dataclasses.replace(one, label="new")),
            dataclasses.asdict(other),
            dataclasses.is_dataclass(kind),
            kind.__match_args__,
            repr(copy.copy(other)),
            repr(copy.deepcopy(other)),
            outcome(assign),
            outcome(delete),
            one.count,
            one.hidden,
            one.fixed,
            kind.shared,
            hasattr(one, "__dict__"),
            kind.__doc__,
        ]

    ids = (theirs, ours)
    first, second = map(told, ids)
    if not options.get("eq", True):  # by identity: the numbers differ
        first[8], second[8] = isinstance(first[8], int), isinstance(second[8], int)
    for a, b in zip(first, second, strict=True):
        assert a == b


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", self.y + 1)


@dataclass(frozen=True)
class Deep(Point):
    z: int = 3


@dataclass(frozen=True, slots=True)
class Small:
    x: int


@dataclass
class Plain:
    x: int = 1


@dataclass(eq=False)
class Wider(Plain):
    y: int = 2
    z: int = dataclasses.field(default=3, kw_only=True)


@dataclass
class Own:
    """What a class has itself stays."""

    x: int

    def __repr__(self) -> str:
        return "own"

    def __hash__(self) -> int:
        return 4


def test_what_is_inherited_and_what_is_the_classes_own() -> None:
    assert Deep(1, 2) == Deep(1, 2, 3) and Deep(1) != Point(1)
    assert repr(Deep(1, 2, 4)) == "Deep(x=1, y=3, z=4)"
    assert (Point(5).x, Point(5).y) == (5, 1)
    assert repr(Own(1)) == "own" and hash(Own(1)) == 4 and Own(1) == Own(1)
    assert {Point(1), Point(1), Deep(1)} == {Point(1), Deep(1)}
    assert repr(Wider(5, z=6)) == "Wider(x=5, y=2, z=6)" and Wider(5) == Wider(5, 7) != Plain(5)


def test_a_record_that_holds_itself_is_shown() -> None:
    record = Own(1)
    held = [record]
    record.x = held  # type: ignore[assignment]
    assert repr(held) == "[own]"

    @dataclass
    class Holder:
        inside: Any = None

    holder = Holder()
    holder.inside = holder
    assert repr(holder).endswith("Holder(inside=...)")


@pytest.mark.parametrize("made", [Point(1, 2), Deep(1, 2, 3), Small(4), Own(5)], ids=lambda r: type(r).__name__)
def test_records_go_through_pickle(made: Any) -> None:
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_frozen_record_cannot_be_changed_in_a_subclass_either() -> None:
    record = Deep(1)
    for name in ("x", "z"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(record, name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del record.x
