"""Measured figures of one provider, and how a time is read off them. Plain data, to and from JSON."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ranvier.records import dataclass

Point = tuple[float, float]  # amount of work, seconds
_LEAST = 1e-9  # seconds: what is below cannot be told from nothing


@dataclass(frozen=True)
class Figures:
    """One provider on one machine.

    ``points``: by ``class element-type``, ascending amounts of work with the seconds they took. ``inward`` and
    ``outward`` are the way from the host to its memory and back: seconds of latency, bytes a second; None where
    the host's memory is its own. ``provisional`` counts the measurements so far where none of them is to be relied on,
    because the machine was at work: they are repeated.
    """

    provider: str
    launch: float = 0.0  # seconds to start a part
    node: float = 0.0  # seconds of the smallest node within a part
    points: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    inward: tuple[float, float] | None = None
    outward: tuple[float, float] | None = None
    quick: bool = False  # only the most important classes, and those hastily
    seconds: float = 0.0  # that measuring took
    iteration: float | None = None  # seconds to run a nested graph once, beside what is in it; None: runs none
    provisional: int = 0

    @property
    def quality(self) -> str:
        how = ["in haste"] if self.quick else []
        how += ["provisional"] if self.provisional else []
        return f"measured {', '.join(how)}".strip()

    def time(self, kind: str, dtype: str, amount: float) -> float | None:
        """Seconds for an amount of work of a class; None where nothing like it was measured."""
        found = self.points.get(f"{kind} {dtype}")
        if not found:
            found = self.points.get(f"{kind} float32")
        if not found:
            return None
        return max(self.node, interpolated(found, amount))

    def to_dict(self) -> dict[str, Any]:
        return {
            "provider": self.provider,
            "launch": self.launch,
            "node": self.node,
            "points": {name: [list(point) for point in points] for name, points in self.points.items()},
            "inward": None if self.inward is None else list(self.inward),
            "outward": None if self.outward is None else list(self.outward),
            "quick": self.quick,
            "seconds": self.seconds,
            "iteration": self.iteration,
            "provisional": self.provisional,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Figures:
        """The figures; ValueError where the data are anything else."""
        try:
            points = {
                str(name): tuple((_positive(amount), _positive(seconds)) for amount, seconds in given)
                for name, given in data["points"].items()
            }
            if any(list(given) != sorted(given) for given in points.values()):
                raise ValueError("points must ascend")
            return cls(
                str(data["provider"]),
                _number(data["launch"]),
                _number(data["node"]),
                points,
                _way(data["inward"]),
                _way(data["outward"]),
                bool(data["quick"]),
                _number(data["seconds"]),
                None if data["iteration"] is None else _number(data["iteration"]),
                int(_number(data["provisional"])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no figures of a provider ({type(error).__name__}: {error})") from None


def least_of(a: Figures, b: Figures) -> Figures:
    """Of two measurements on a machine at work the shorter times: others only ever add. Classes of either count."""
    points = {name: tuple(b.points.get(name, a.points.get(name, ()))) for name in {**a.points, **b.points}}
    for name in a.points.keys() & b.points.keys():
        before = dict(a.points[name])
        points[name] = tuple((amount, min(seconds, before.get(amount, seconds))) for amount, seconds in b.points[name])
    return replace(
        b,
        launch=min(a.launch, b.launch),
        node=min(a.node, b.node),
        points=points,
        inward=_quicker(a.inward, b.inward),
        outward=_quicker(a.outward, b.outward),
        quick=a.quick and b.quick,
        iteration=min((each for each in (a.iteration, b.iteration) if each is not None), default=None),
        provisional=a.provisional + b.provisional,
    )


def _quicker(a: tuple[float, float] | None, b: tuple[float, float] | None) -> tuple[float, float] | None:
    return (min(a[0], b[0]), max(a[1], b[1])) if a is not None and b is not None else b


def interpolated(points: Sequence[Point], amount: float) -> float:
    """Between two points a straight line on logarithmic scales; beyond the ends time grows as the work does."""
    if amount <= 0:
        return 0.0
    first, last = points[0], points[-1]
    if amount <= first[0]:
        return first[1] * amount / first[0]
    if amount >= last[0]:
        return last[1] * amount / last[0]
    k = bisect.bisect_right(points, (amount, math.inf))
    (a, s), (b, t) = points[k - 1], points[k]
    share = math.log(amount / a) / math.log(b / a)
    return float(math.exp(math.log(max(s, _LEAST)) * (1 - share) + math.log(max(t, _LEAST)) * share))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a number of 0 or more")
    return float(value)


def _positive(value: Any) -> float:
    found = _number(value)
    if not found:
        raise ValueError("0 where only more makes sense")
    return found


def _way(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    latency, bandwidth = value
    return _number(latency), _positive(bandwidth)
