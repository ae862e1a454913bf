"""The search: alternatives of all shapes of a model at once, stage by stage, each against what stands so far.

One run of the whole model tells what every launch takes in the state its caches are in there, with weights that other
layers have pushed out. So a round compiles the model with one alternative for every shape and runs it in turn with
what stands so far, so that both meet the same conditions. The best time of a launch counts; what stands so far has run
in earlier rounds too, so noise speaks for it and not against it. What wins is tried once more, together, and stays
where it wins again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ranvier.codegen import tuning_store
from ranvier.codegen.tuning import STAGES, Table
from ranvier.codegen.tuning_store import Entry
from ranvier.errors import InvalidConfig
from ranvier.providers.base import TellsDecisions
from ranvier.records import dataclass
from ranvier.runtime.tuning.variant import Variant, agree, interleaved

if TYPE_CHECKING:
    from ranvier.runtime.session import Session

DEFAULT_SECONDS = 60.0
_WINS = 0.95  # the part of the time that an alternative must get by with …
_WINS_AGAIN = 0.96  # … and once more, with all that won: where its memory lies alone makes 3 %
_ROUND = 0.25  # seconds of a round, at least
_AT_THE_END = 0.1  # of the time, for comparing the result with the default
Progress = Callable[[str, float], None]  # what is being tried, and the part of the time that has passed


@dataclass
class Outcome:
    """What was found for one decision."""

    key: str
    site: str
    nodes: int  # groups of nodes that it was taken for
    seconds: float  # of these, by default
    tried: dict[str, float] = field(default_factory=dict)  # time by alternative, in times of the default
    chosen: str = ""  # empty: the default stays
    gain: float = 1.0


@dataclass
class Tuned:
    """The result of a search."""

    isa: str
    threads: int
    outcomes: list[Outcome]
    known: int  # decisions that were settled before
    seconds: float  # that it took
    default_seconds: float  # of all launches of a run by default, each at its best …
    tuned_seconds: float  # … and with all that is known now
    finished: bool  # whether everything was tried
    kept: bool  # on disk
    table: Table  # all decisions that are not the default's
    rejected: int = 0  # alternatives whose results were not the same

    @property
    def gain(self) -> float:
        return self.default_seconds / self.tuned_seconds


def tune(
    session: Session,
    feed: Mapping[str, Any],
    *,
    seconds: float = DEFAULT_SECONDS,
    again: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """Find faster decisions for the shapes that a run with these inputs has, and keep them for every session.

    Shapes that were measured before, for this model or another, are left as they are unless ``again``.
    """
    with _Search(session, feed, seconds, progress or (lambda _what, _part: None)) as search:
        return search.run(again)


class _Search:
    def __init__(self, session: Session, feed: Mapping[str, Any], seconds: float, progress: Progress) -> None:
        kernels = [part.kernel for part in session._parts if isinstance(part.kernel, TellsDecisions)]
        if not kernels:
            raise InvalidConfig("nothing of the model runs on a provider that can be tuned")
        targets = {(kernel.code, kernel.threads) for kernel in kernels}
        self.isa, self.threads = max(targets, key=lambda t: t[1])
        self.session, self.feed, self.progress = session, feed, progress
        self.narrow = session.config.precision != "float32"
        self.budget = seconds
        self.started = time.perf_counter()
        self.outcomes: dict[str, Outcome] = {}
        self.rejected = 0
        self._stack = ExitStack()

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started

    def variant(self, table: Table) -> Variant:
        made = Variant(self.session, table, self.feed)
        self._stack.callback(made.close)
        made.run()
        return made

    def run(self, again: bool) -> Tuned:
        before = {} if again else tuning_store.entries(self.isa, self.threads)
        table = Table({key: entry.chosen for key, entry in before.items() if entry.chosen})
        standing = self.variant(table)
        repeatable = agree(standing.run(), standing.run(), self.narrow)
        finished = True
        for number, stage in enumerate(STAGES):
            questions = {
                key: each.others
                for key, each in standing.decisions().items()
                if each.site in stage and key not in before and key not in self.outcomes
            }
            afterwards, all_tried = self._stage(number, standing, questions, repeatable)
            finished = finished and all_tried
            if afterwards is not standing:
                standing.close()
                standing = afterwards
        usual = self.variant(Table())
        for each in (usual, standing):
            each.forget()
        interleaved(usual, standing, max(_ROUND, _AT_THE_END * self.budget))
        lost = self._taken_back(usual, standing)
        entries = {key: Entry(o.chosen, o.gain, o.seconds) for key, o in self.outcomes.items()}
        kept = tuning_store.save(self.isa, self.threads, entries) if entries else True
        return Tuned(
            self.isa,
            self.threads,
            sorted(self.outcomes.values(), key=lambda o: -o.seconds),
            sum(key in before for key in standing.decisions()),
            self.spent,
            usual.seconds,
            standing.seconds - lost,
            finished,
            kept,
            standing.table.having({key: "" for key, o in self.outcomes.items() if not o.chosen}),
            self.rejected,
        )

    def _taken_back(self, usual: Variant, standing: Variant) -> float:
        """Decisions that are slower than the default after all are not kept; the seconds that they lost."""
        changed = [key for key, o in self.outcomes.items() if o.chosen]
        before, after = usual.costs(changed), standing.costs(changed)
        lost = 0.0
        for key in changed:
            if key in before and key in after and after[key].seconds > before[key].seconds:
                lost += after[key].seconds - before[key].seconds
                self.outcomes[key].chosen, self.outcomes[key].gain = "", 1.0
        return lost

    def _stage(
        self, number: int, standing: Variant, questions: Mapping[str, tuple[str, ...]], repeatable: bool
    ) -> tuple[Variant, bool]:
        """What stands afterwards, and whether there was time for everything. What was not tried to the end is left for
        another time."""
        if not questions:
            return standing, True
        rounds = max(map(len, questions.values()))
        measured: dict[str, Outcome] = {}
        for k in range(rounds):
            if self.spent >= self.budget:
                measured = {key: o for key, o in measured.items() if len(questions[key]) <= k}
                break
            names = {key: others[k] for key, others in questions.items() if k < len(others)}
            self.progress(f"stage {number + 1} of {len(STAGES)}, {len(names)} shapes", self.spent / self.budget)
            for key, ratio in self._against(standing, names, self._share(number, rounds - k), repeatable, measured):
                measured[key].tried[names[key]] = ratio
        finished = self.spent < self.budget or all(key in measured for key in questions)
        self.outcomes.update(measured)
        winners = {key: best for key, o in measured.items() if (best := _best(o))}
        if not winners:
            return standing, finished
        self.progress(f"stage {number + 1} of {len(STAGES)}, once more", self.spent / self.budget)
        stays: dict[str, str] = {}
        for key, ratio in self._against(standing, winners, self._share(number, 1), repeatable, measured):
            found = measured[key]
            if ratio <= _WINS_AGAIN:
                stays[key] = found.chosen = winners[key]
                found.gain = 1 / max(ratio, found.tried[winners[key]])
        return self.variant(standing.table.having(stays)) if stays else standing, finished

    def _share(self, number: int, rounds: int) -> float:
        """Seconds of a round: an even part of what is left, thought to be three more rounds for every later stage."""
        left = (1 - _AT_THE_END) * self.budget - self.spent
        return max(_ROUND, left / (rounds + 1 + 4 * (len(STAGES) - 1 - number)))

    def _against(
        self,
        standing: Variant,
        names: Mapping[str, str],
        seconds: float,
        repeatable: bool,
        measured: dict[str, Outcome],
    ) -> Iterator[tuple[str, float]]:
        """Time of each alternative in times of what stands; nothing where results are not the same."""
        other = self.variant(standing.table.having(names))
        try:
            if repeatable and not agree(standing.run(), other.run(), self.narrow):
                self.rejected += len(names)
                return
            interleaved(standing, other, seconds)
            usual, changed = standing.costs(names), other.costs(names)
        finally:
            other.close()
        for key, cost in usual.items():
            if key in changed and cost.seconds > 0:
                each = measured.setdefault(key, Outcome(key, cost.decision.site, cost.times, cost.seconds))
                each.seconds = min(each.seconds, cost.seconds)
                yield key, changed[key].seconds / cost.seconds


def _best(outcome: Outcome) -> str:
    """The fastest alternative, if it is fast enough to be believed."""
    name = min(outcome.tried, key=lambda n: outcome.tried[n], default="")
    return name if name and outcome.tried[name] <= _WINS else ""
