"""How patient and how careful the network is used: one set of options for every source that is not on this machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, ClassVar, TypeVar

from ranvier.errors import WeightError
from ranvier.records import dataclass
from ranvier.rules import Checked, Flag, Positive, Rule, Whole
from ranvier.weights.connections import Connections
from ranvier.weights.given import Able, Kind
from ranvier.weights.progress import Progress, Silent
from ranvier.weights.together import Stop

T = TypeVar("T")
GOOD_PIECE = 1 << 20  # bytes; an attempt that brings fewer is one in vain, or a server could keep us for ever
_DOUBLINGS = 64  # of the time between attempts; any wait is the longest one by then
_LONGEST = 1e6  # seconds; what operating systems take as a timeout


class Transient(WeightError):
    """Something that may work when it is tried again; ``after`` is how long the other side asks us to wait."""

    after: float = 0.0
    advanced: bool = False  # a good piece had come, and the next attempt goes on behind it


class Unreachable(WeightError):
    """The source gave no answer in all attempts."""


class NotCached(WeightError):
    """Offline, and what was asked for is not in the cache."""


class Stopped(WeightError):
    """Whoever wanted it has given up: another part failed, or the caller was interrupted."""


class Seconds(Rule):
    """A time above zero. There is none without end: a server that stalls would keep us for ever."""

    def check(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LONGEST:
            raise ValueError(f"must be a number of seconds above zero, got {value!r}")
        return value

    def parse(self, text: str) -> Any:
        return float(text)


@dataclass(frozen=True)
class Access(Checked):
    timeout: float = 20.0  # seconds without a byte after which an attempt is given up
    retries: int = 4  # further attempts after the first, or after one that brought a good piece
    backoff: float = 0.5  # seconds before the second attempt; each further one waits twice as long
    longest_wait: float = 30.0
    file_bytes: int | None = 1 << 40  # no file is larger
    offline: bool = False
    progress: Progress = field(default_factory=Silent)
    sleep: Callable[[float], None] | None = None  # None: until the time has passed or the work is stopped
    stop: Stop = field(default_factory=Stop)
    connections: Connections = field(default_factory=Connections)  # of all files that are read this way

    RULES: ClassVar[Mapping[str, Rule]] = {
        "timeout": Seconds(),
        "retries": Whole(0),
        "backoff": Seconds(),
        "longest_wait": Seconds(),
        "file_bytes": Positive(),
        "offline": Flag(),
        "progress": Able(("begin", "advance", "end")),
        "sleep": Kind("a function of seconds", (Callable,), optional=True),  # type: ignore[arg-type]
        "stop": Kind("a Stop", (Stop,)),
        "connections": Kind("Connections", (Connections,)),
    }

    def go_on(self, what: str) -> None:
        """Stopped where nobody waits for ``what`` any more; asked between one piece and the next."""
        if self.stop.is_set():
            raise Stopped(f"{what}: stopped, nobody waits for it any more")

    def attempts(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of ``attempt``, tried again while it fails in a way that may pass."""
        count = in_vain = 0
        while True:
            self.go_on(what)
            try:
                return attempt()
            except Transient as error:
                count += 1
                in_vain = 1 if error.advanced else in_vain + 1
                if in_vain > self.retries:
                    times = f"{count} attempts" if count > 1 else "one attempt"
                    raise Unreachable(f"{what}: {error} (after {times})") from error
                wait = max(self.backoff * 2 ** min(in_vain - 1, _DOUBLINGS) * random.uniform(0.7, 1.3), error.after)
                (self.sleep or self.stop.sleep)(min(wait, self.longest_wait))
