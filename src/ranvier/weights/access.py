"""How patient and how careful the network is used: one set of options for every source that is not on this machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import ClassVar, TypeVar

from ranvier.errors import WeightError
from ranvier.records import dataclass
from ranvier.rules import Checked, Positive, Rule, Whole
from ranvier.weights.progress import Progress, Silent

T = TypeVar("T")


class Transient(WeightError):
    """Something that may work when it is tried again; ``after`` is how long the other side asks us to wait."""

    after: float = 0.0


class Unreachable(WeightError):
    """The source gave no answer in all attempts."""


class NotCached(WeightError):
    """Offline, and what was asked for is not in the cache."""


@dataclass(frozen=True)
class Access(Checked):
    timeout: float = 20.0  # seconds without a byte after which an attempt is given up
    retries: int = 4  # further attempts after the first
    backoff: float = 0.5  # seconds before the second attempt; each further one waits twice as long
    longest_wait: float = 30.0
    file_bytes: int | None = 1 << 40  # no file is larger
    offline: bool = False
    progress: Progress = field(default_factory=Silent)
    sleep: Callable[[float], None] = time.sleep

    RULES: ClassVar[Mapping[str, Rule]] = {
        "timeout": Positive(whole=False),
        "retries": Whole(0),
        "backoff": Positive(whole=False),
        "longest_wait": Positive(whole=False),
        "file_bytes": Positive(),
    }

    def attempts(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of ``attempt``, tried again while it fails in a way that may pass."""
        for count in range(self.retries + 1):
            try:
                return attempt()
            except Transient as error:
                if count == self.retries:
                    raise Unreachable(f"{what}: {error} (after {count + 1} attempts)") from error
                wait = max(self.backoff * 2**count * random.uniform(0.7, 1.3), error.after)
                self.sleep(min(wait, self.longest_wait))
        raise AssertionError("unreachable")
