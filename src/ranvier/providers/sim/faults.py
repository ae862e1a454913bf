"""Faults that a simulated accelerator is told to have, and when."""

from __future__ import annotations

from ranvier.errors import InvalidConfig, nearest
from ranvier.records import dataclass

KINDS = ("fail", "flaky", "oom", "hang", "slow", "crash", "corrupt")


@dataclass(frozen=True)
class Fault:
    """``at`` the n-th run (from 1), or at ``every`` n-th. ``seconds`` for those that take time."""

    kind: str
    at: int = 0
    every: int = 0
    seconds: float = 0.0

    def due(self, run: int) -> bool:
        return run == self.at if self.at else run % self.every == 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """``"oom@3, flaky/2, hang@5:1.5"``: out of memory at the third run, a passing failure at every second one, and at
    the fifth no answer for 1.5 seconds."""
    found: list[Fault] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        head, _, seconds = entry.partition(":")
        mark = "@" if "@" in head else "/"
        kind, _, count = head.partition(mark)
        if kind not in KINDS:
            raise InvalidConfig(f"faults: no fault is called {kind!r}{nearest(kind, KINDS)}")
        try:
            number, delay = int(count), float(seconds or 0.0)
        except ValueError:
            number, delay = 0, 0.0
        if number < 1 or delay < 0:
            raise InvalidConfig(f"faults: {entry!r} is not of the form KIND@RUN, KIND/EVERY or KIND@RUN:SECONDS")
        found.append(Fault(kind, number, 0, delay) if mark == "@" else Fault(kind, 0, number, delay))
    return tuple(found)
