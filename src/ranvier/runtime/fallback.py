"""What happens when a provider fails while a request runs.

The request starts again from its inputs: on the same providers where the failure is a passing one, otherwise without
the provider that failed. So a caller gets a whole and correct answer or a typed error, never a part of one. A provider
that fails again and again is left out for a while, then tried with a single request; while it stays broken, the while
grows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ranvier.errors import KernelError, OutOfMemory, ProviderFailed, ProviderUnavailable, RanvierError
from ranvier.logs import warn_once
from ranvier.providers.base import ExecutionProvider
from ranvier.providers.registry import REGISTRY
from ranvier.records import dataclass
from ranvier.runtime.compiled import Compiled

RETRIES = 2  # of a passing failure, before others take over
DEMOTED_AFTER = 3  # failures in a row
_PAUSES = (0.01, 0.05)  # seconds before each retry
_FIRST_REST = 1.0  # seconds that a demoted provider is left out at first
_LONGEST_REST = 300.0

FAILURES = (ProviderFailed, ProviderUnavailable, KernelError, OutOfMemory)  # of a provider, not of the request


@dataclass
class Condition:
    """How a provider does in this session."""

    failures: int = 0  # in a row
    failed: int = 0  # in all
    fallbacks: int = 0  # requests that others finished
    retries: int = 0
    rest: float = 0.0  # seconds it is left out next time
    until: float = 0.0  # when it will be tried again, by time.monotonic
    last_error: str = ""

    @property
    def demoted(self) -> bool:
        return self.failures >= DEMOTED_AFTER


class Recovery:
    """Failures of one session, and the variants of its model that do without some providers."""

    def __init__(
        self,
        providers: Sequence[ExecutionProvider],
        compile_for: Callable[[Sequence[ExecutionProvider]], Compiled],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._providers = list(providers)
        self._compile_for = compile_for
        self._clock = clock
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._conditions = {p.name: Condition() for p in providers}
        self._variants: dict[frozenset[str], Compiled] = {}
        self.events: dict[str, int] = {}  # what happened, and how often

    @property
    def troubled(self) -> bool:
        """Did anything fail lately? Only then must a request ask who is left out."""
        return any(c.failures for c in self._conditions.values())

    def conditions(self) -> dict[str, Condition]:
        with self._lock:
            return {name: Condition(**vars(c)) for name, c in self._conditions.items()}

    def left_out(self) -> frozenset[str]:
        """Providers a new request does without. One whose time is up is tried by the request that asks."""
        found: set[str] = set()
        with self._lock:
            now = self._clock()
            for name, condition in self._conditions.items():
                if not condition.demoted:
                    continue
                if now >= condition.until:
                    condition.until = now + condition.rest  # for others, until this attempt is decided
                else:
                    found.add(name)
        return frozenset(found)

    def worked(self, compiled: Compiled) -> None:
        """A request went through: its providers are well."""
        with self._lock:
            for provider in compiled.providers:
                condition = self._conditions[provider.name]
                if condition.failures:
                    condition.failures = 0
                    condition.rest = 0.0

    def variant(self, without: frozenset[str]) -> Compiled | None:
        """The model compiled without some providers; None where there is no provider left, or they do not suffice."""
        with self._lock:
            found = self._variants.get(without)
        if found is not None:
            return found
        remaining = [p for p in self._providers if p.name not in without]
        if not remaining:
            return None
        with self._making:
            with self._lock:
                found = self._variants.get(without)
            if found is None:
                try:
                    found = self._compile_for(remaining)
                except RanvierError:
                    return None
                with self._lock:
                    self._variants[without] = found
        return found

    def run(
        self,
        error: RanvierError,
        first: Compiled,
        without: frozenset[str],
        attempt: Callable[[Compiled], list[Any]],
    ) -> list[Any]:
        """Finish a request whose first attempt ended with ``error``; the last error where nothing helps."""
        compiled, retries = first, 0
        while True:
            name = self._name(error, compiled)
            if name is None:
                raise error
            self._failed(name, error)
            passing = isinstance(error, ProviderFailed) and error.transient
            if passing and retries < RETRIES:
                time.sleep(_PAUSES[retries])
                retries += 1
                with self._lock:
                    self._conditions[name].retries += 1
            else:
                without |= {name}
                other = self.variant(without)
                if other is None:
                    raise error
                with self._lock:
                    self._conditions[name].fallbacks += 1
                self._tell(name, error, other)
                compiled, retries = other, 0
            try:
                results = attempt(compiled)
            except FAILURES as next_error:
                next_error.__context__ = error
                error = next_error
                continue
            self.worked(compiled)
            return results

    def close(self) -> None:
        with self._lock:
            variants, self._variants = self._variants, {}
        for compiled in variants.values():
            compiled.close()

    def _name(self, error: RanvierError, compiled: Compiled) -> str | None:
        """The provider to blame, where it is one of those that ran."""
        name = getattr(error, "provider", None)
        return name if any(p.name == name for p in compiled.providers) else None

    def _failed(self, name: str, error: RanvierError) -> None:
        REGISTRY.ledger.failed(name, error)
        with self._lock:
            condition = self._conditions[name]
            condition.failures += 1
            condition.failed += 1
            condition.last_error = str(error)
            if condition.demoted:
                condition.rest = min(condition.rest * 2 or _FIRST_REST, _LONGEST_REST)
                condition.until = self._clock() + condition.rest

    def _tell(self, name: str, error: RanvierError, other: Compiled) -> None:
        others = ", ".join(p.name for p in other.providers)
        text = f"{name} failed while running ({type(error).__name__}); {others} finished"
        with self._lock:
            self.events[text] = self.events.get(text, 0) + 1
        warn_once(f"fallback {name} {id(self)}", f"{error}; {others} finished the request")
