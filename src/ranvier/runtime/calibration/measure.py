"""Run the samples on a provider and take down how long they took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.graph.types import TensorType
from ranvier.logs import logger
from ranvier.providers.base import Decline, ExecutionProvider, GraphView, OwnMemory
from ranvier.runtime.calibration.classes import work_of
from ranvier.runtime.calibration.samples import Built, Sample, samples, tiny, tiny_row
from ranvier.runtime.calibration.table import Figures, Point
from ranvier.runtime.control import RunControl

BUDGET = 5.0  # seconds for a provider
QUICK = 0.5
_PER_SAMPLE = 0.02  # seconds of runs, beside what compiling takes
_LEAST_RUNS, _MOST_RUNS = 3, 200
_ROUNDS = 2  # after the first look
_LEAST_SAMPLES = 2  # however little time there is: one class by operations, one by bytes
_SHARE = 0.1  # of a run, at least, is the work itself: what is taken off was measured at another moment
_LARGE = 4 << 20  # bytes of the transfer that tells the bandwidth
Progress = Callable[[Sequence[Sample]], Iterable[Sample]]


def measure(
    provider: ExecutionProvider,
    config: SessionConfig | None = None,
    *,
    quick: bool = False,
    budget: float | None = None,
    progress: Progress | None = None,
) -> Figures:
    """The figures of a provider. Samples are dropped when the time is up, the less telling ones first.

    Interrupting loses nothing but the measurement. A sample that the provider does not take, or fails at, is left
    out; so is a provider's whole calibration where not even the smallest graph runs, by the error of that.
    """
    config = config or SessionConfig(providers=(provider.name,))
    started = time.perf_counter()
    end = started + (budget or (QUICK if quick else BUDGET))
    per_sample = _PER_SAMPLE / 3 if quick else _PER_SAMPLE
    inward, outward = _ways(provider, per_sample)
    moved = 0.0 if inward is None or outward is None else inward[0] + outward[0]
    with ExitStack() as stack:
        small = _prepared(provider, tiny(), config, stack)
        small.run(3 * per_sample)
        row = tiny_row()
        many = _prepared(provider, row, config, stack) if not quick and _takes(provider, row) else None
        runs: list[tuple[Sample, _Run]] = []
        wanted = [sample for sample in samples() if sample.urgent or not quick]
        for sample in wanted if progress is None else progress(wanted):
            if time.perf_counter() > end and len(runs) >= _LEAST_SAMPLES:
                break
            built = sample.make()
            if not _takes(provider, built):
                continue
            try:
                made = _prepared(provider, built, config, stack)
                made.run(per_sample)
            except Exception as error:  # a provider may raise anything; the other samples are worth having
                logger.info("calibration of %s: %s left out (%s)", provider.name, sample.name, error)
                continue
            runs.append((sample, made))
        for _ in range(_ROUNDS):  # a busy moment shall not decide about one class alone
            for each in (small, many, *(made for _, made in runs)):
                if each is not None and (each is many or time.perf_counter() < end):
                    each.run(per_sample / 2)
        launch = max(0.0, small.best - moved)
        node = 0.0 if many is None else max(0.0, many.best - launch - moved) / len(row.measured)
    points: dict[str, list[Point]] = {}
    for sample, made in runs:
        seconds = made.best - launch
        if inward is not None and outward is not None:
            seconds -= moved + made.built.feed["x"].nbytes / inward[1] + _result_bytes(made.built) / outward[1]
        seconds -= _others(made.built, points, node)
        count = len(made.built.measured)
        amount = sum(work_of(each).amount for each in made.built.measured) / count
        if amount > 0:
            points.setdefault(sample.name, []).append((amount, max(seconds, _SHARE * made.best) / count))
    return Figures(
        provider.name,
        launch,
        node,
        {name: tuple(sorted(found)) for name, found in points.items()},
        inward,
        outward,
        quick,
        time.perf_counter() - started,
    )


def _takes(provider: ExecutionProvider, built: Built) -> bool:
    return not any(isinstance(answer, Decline) for answer in provider.claim(GraphView(built.graph)))


def _others(built: Built, points: dict[str, list[Point]], node: float) -> float:
    """What the nodes of a sample take that are there only to be followed by others."""
    figures = Figures("", node=node, points={name: tuple(sorted(found)) for name, found in points.items()})
    counted = {id(each) for each in built.measured}
    total = 0.0
    for each in built.graph:
        if id(each) not in counted:
            work = work_of(each)
            total += figures.time(work.kind, work.dtype, work.amount) or 0.0
    return total


def _result_bytes(built: Built) -> int:
    kind = built.graph.outputs[0].type
    return (kind.nbytes or 0) if isinstance(kind, TensorType) else 0


class _Run:
    """A sample on a provider, and the shortest time it took so far: a neighbour on the machine only ever adds time,
    and in a busy moment a median is the neighbour's."""

    def __init__(self, built: Built, call: Callable[[], Any]) -> None:
        self.built = built
        self.best = math.inf
        self._call = call
        call()  # warms up

    def run(self, seconds: float) -> None:
        self.best = min(self.best, _best(self._call, seconds))


def _prepared(provider: ExecutionProvider, built: Built, config: SessionConfig, stack: ExitStack) -> _Run:
    """The sample compiled by the provider, as a session would have it, results on the host."""
    from ranvier.runtime.compiled import Compiled  # which places by what is measured here

    compiled = Compiled(built.graph, [provider], config.updated(policy="priority", pins={}, fallback="off"))
    stack.callback(compiled.close)
    types = [value.type for value in built.graph.inputs]
    values = [built.feed[value.name] for value in built.graph.inputs]
    plan = compiled.plan(tuple((x.dtype, x.shape) for x in values), types, {}, ("y",))
    control = RunControl(None, config.limits)

    def call() -> Any:
        found = plan.run_directly(values)
        return plan.run(values, control, None) if found is None else found

    return _Run(built, call)


def _best(call: Callable[[], Any], seconds: float) -> float:
    """The shortest of as many runs as ``seconds`` allow, and of a few at least."""
    best, end = math.inf, time.perf_counter() + seconds
    for count in range(_MOST_RUNS):
        begin = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - begin)
        if now > end and count + 1 >= _LEAST_RUNS:
            break
    return best


def _ways(provider: ExecutionProvider, seconds: float) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Latency and bandwidth to the provider's memory and back; None for one that works in the host's.

    Sending returns before the data are there, so a round trip is timed and both ways get half of it.
    """
    if not isinstance(provider, OwnMemory):
        return None, None

    def there_and_back(nbytes: int) -> float:
        array = np.zeros(nbytes, np.uint8)
        return _best(lambda: provider.download(provider.upload([array])), seconds)

    small, large = there_and_back(64), there_and_back(_LARGE)
    bandwidth = 2 * _LARGE / max(large - small, 1e-6)
    return (small / 2, bandwidth), (small / 2, bandwidth)
