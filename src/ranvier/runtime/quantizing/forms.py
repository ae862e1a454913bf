"""Models that one model may become: how far each moves results, and how long it takes, whole."""

from __future__ import annotations

import functools
import glob
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.graph.ir import Graph
from ranvier.records import dataclass
from ranvier.runtime.quantizing.report import Difference, difference
from ranvier.runtime.quantizing.samples import Feed, as_array
from ranvier.runtime.session import Session

Array = np.ndarray[Any, Any]
Names = frozenset[str]
_OPEN = 4  # sessions that wait to be compared
_SECONDS = 0.2  # of turns for a comparison of two
_EVEN = 1.1  # times the time of the fastest form, up to which others may become the fastest
_TELLING = 3  # samples that show what a form does


@dataclass(frozen=True)
class Form:
    """``floats``: layers without codes of 8 bits. ``wide``: nodes that sessions in bfloat16 leave in float32; None
    where sessions are in float32. ``joins``: what lies between coded layers is coded too. ``words``: which of the
    ``floats`` read codes of 16 bits."""

    floats: Names
    wide: Names | None = None
    joins: bool = True
    words: Names = frozenset()

    def running(self, config: SessionConfig) -> SessionConfig:
        """Options of sessions that run it."""
        if self.wide is None:
            return config
        patterns = (*config.keep_f32, *map(glob.escape, sorted(self.wide)))
        return config.updated(precision="bf16", keep_f32=patterns)


@dataclass(frozen=True)
class Telling:
    """The samples that a form does most to, what is expected of them, and what part they are of all that it was tried
    with."""

    feeds: Sequence[Feed]
    expected: Sequence[Sequence[Array]]
    part: float

    @classmethod
    def of(
        cls, found: Sequence[Sequence[Array]], feeds: Sequence[Feed], expected: Sequence[Sequence[Array]]
    ) -> Telling:
        errors = [difference([row], [wanted]).error for row, wanted in zip(found, expected)]
        those = sorted(range(len(feeds)), key=lambda k: -errors[k])[:_TELLING]
        return cls([feeds[k] for k in those], [expected[k] for k in those], len(those) / len(feeds))


@dataclass(frozen=True)
class Ranked:
    """A form, and what a run of it takes."""

    seconds: float
    form: Form


class Trials:
    """Makes forms of a model, each once, and compares them. ``groups``: samples, and what is expected of them. What is
    true of a form is what the worst of them shows, so that a lucky one alone chooses nothing.

    A context manager: sessions of forms that are near enough stay open, so that those which are compared in time need
    not be made again."""

    def __init__(
        self,
        make: Callable[[Form], Graph],
        config: SessionConfig,
        groups: Sequence[tuple[Sequence[Feed], Sequence[Sequence[Array]]]],
        near: Callable[[Difference], bool],
    ) -> None:
        self._make, self._config, self._near = make, config, near
        self._groups, self._feed = groups, groups[0][0][0]
        self._found: dict[Form, Difference] = {}
        self._telling: dict[Form, Telling] = {}  # of forms that are not near
        self._open: dict[Form, Session] = {}

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._open.values():
            session.close()
        self._open.clear()

    def session(self, form: Form) -> Session:
        """An open session; those that were asked for longest ago are closed."""
        found = self._open.pop(form, None) or Session(self._make(form), form.running(self._config))
        self._open[form] = found
        while len(self._open) > _OPEN:
            self._open.pop(next(iter(self._open))).close()
        return found

    def drop(self, form: Form) -> None:
        if form in self._open:
            self._open.pop(form).close()

    def difference(self, form: Form) -> Difference:
        if form not in self._found:
            session = self.session(form)
            rows = [_results(session, feeds) for feeds, _ in self._groups]
            each = [difference(found, expected) for found, (_, expected) in zip(rows, self._groups)]
            self._found[form] = functools.reduce(Difference.worse, each)
            if not self._near(self._found[form]):
                self.drop(form)
                worst = max(range(len(each)), key=lambda k: each[k].error)
                self._telling[form] = Telling.of(rows[worst], *self._groups[worst])
        return self._found[form]

    def telling(self, form: Form) -> Telling | None:
        """Samples that show why a form is not near, once that was found."""
        return self._telling.get(form)

    def forget(self, which: Callable[[Form], bool]) -> None:
        """What is made of these forms has changed."""
        for form in [form for form in {**self._found, **self._open} if which(form)]:
            self.drop(form)
            self._found.pop(form, None)
            self._telling.pop(form, None)

    def near(self, form: Form) -> bool:
        return self._near(self.difference(form))

    def ranked(self, forms: Sequence[Form], seconds: float) -> list[Ranked]:
        """The fastest first, as measured in turns; of those that are even the first one given."""
        times = fastest([self.session(form) for form in forms[:_OPEN]], self._feed, seconds)
        return sorted(map(Ranked, times, forms), key=lambda each: each.seconds)

    def compared(self, one: Form, other: Form) -> tuple[float, float]:
        """Seconds of the fastest run of each, in turns."""
        now, then = fastest((self.session(one), self.session(other)), self._feed, _SECONDS)
        return now, then

    def all_improved(self, ranked: Sequence[Ranked], improved: Callable[[Form], Form], seconds: float) -> list[Form]:
        """The forms that are about as fast as the first one, improved, the fastest first: which of them can be made
        faster shows only when all have been tried."""
        even = [each.form for each in ranked if each.seconds <= _EVEN * ranked[0].seconds]
        found = list(dict.fromkeys(improved(form) for form in even))
        return [each.form for each in self.ranked(found, seconds)] if len(found) > 1 else found

    def improved(
        self,
        best: Form,
        batches: Sequence[Names],
        other: Callable[[Form, Names], Form | None],
        allowed: Callable[[Form], bool],
        until: float,
        step: Callable[[int, int], None],
    ) -> Form:
        """The form after trials with each batch of layers the other way round; what is faster and near enough stays.

        What a layer costs depends on its neighbours: codes between two layers that stay in float bring conversions, and
        take chains apart that one kernel would compute. So whole models are compared."""
        for k, batch in enumerate(batches):
            step(k, len(batches))
            form = other(best, batch)
            if form is None or form == best:
                continue
            if time.perf_counter() > until:
                break
            now, then = self.compared(best, form)
            if then < now and allowed(form):
                self.drop(best)
                best = form
            else:
                self.drop(form)
        return best


def _results(session: Session, feeds: Sequence[Feed]) -> list[list[Array]]:
    return [[as_array(x) for x in session.run(feed).values()] for feed in feeds]


def fastest(sessions: Sequence[Session], feed: Feed, seconds: float) -> list[float]:
    """Seconds of the fastest run of each, in turns."""
    found = [math.inf] * len(sessions)
    for session in sessions:
        session.run(feed)
    until, turns = time.perf_counter() + seconds, 0
    while time.perf_counter() < until or turns < 3:
        for k, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(feed)
            found[k] = min(found[k], time.perf_counter() - start)
        turns += 1
    return found
