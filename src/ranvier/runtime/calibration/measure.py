"""Run the samples on a provider and take down how long they took."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.graph.types import TensorType
from ranvier.logs import logger
from ranvier.providers.base import Decline, ExecutionProvider, GraphView
from ranvier.providers.own_memory import OwnMemory
from ranvier.runtime.calibration.classes import work_of
from ranvier.runtime.calibration.rounds import AT_WORK, Clock, Timed, disturbance, take_turns
from ranvier.runtime.calibration.samples import Built, Sample, looping, samples, tiny, tiny_row
from ranvier.runtime.calibration.table import Figures, Point
from ranvier.runtime.control import RunControl

BUDGET = 5.0  # seconds for a provider
QUICK = 0.5
_PER_SAMPLE = 0.01  # seconds of runs in a round, beside what compiling takes
_ROUNDS = 3  # after the first look
_LOOKING = 0.8  # share of the time in which samples are compiled and looked at: the rest is for repeating
_LOOKING_QUICKLY = 0.6
_LEAST_SAMPLES = 2  # however little time there is: one class by operations, one by bytes
_SHARE = 0.1  # of a run, at least, is the work itself: what is taken off was measured at another moment
_LARGE = 4 << 20  # bytes of the transfer that tells the bandwidth
_TRIPS = 1, 17  # of the loops whose difference tells what a round of a loop takes
Progress = Callable[[Sequence[Sample]], Iterable[Sample]]


def measure(
    provider: ExecutionProvider,
    config: SessionConfig | None = None,
    *,
    quick: bool = False,
    budget: float | None = None,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Figures:
    """The figures of a provider. Samples are dropped when the time is up, the less telling ones first.

    Nothing is begun after ``budget`` seconds but what no figures can do without: the smallest graph, and two samples.
    Interrupting loses nothing but the measurement. A sample that the provider does not take, or fails at, is left
    out; so is a provider's whole calibration where not even the smallest graph runs, by the error of that.
    """
    config = config or SessionConfig(providers=(provider.name,))
    started = clock()
    budget = budget or (QUICK if quick else BUDGET)
    end = started + budget
    looked = started + budget * (_LOOKING_QUICKLY if quick else _LOOKING)
    complete = True
    each = _PER_SAMPLE / 3 if quick else _PER_SAMPLE
    ways = _Ways(provider, clock)
    with ExitStack() as stack:
        bench = _Bench(provider, config, stack, clock)
        small = bench.prepared(tiny())
        runs: list[tuple[Sample, _Run]] = []
        others: list[Timed] = [small, *ways.timed]
        for first in others:
            first.run(each, end)
        row = tiny_row()
        many = None if quick else bench.tried(row, "a row of nodes")
        loops = [made for made in (bench.tried(looping(trips), "a loop") for trips in _TRIPS) if made is not None]
        others += [made for made in (many, *loops) if made is not None]
        wanted = [sample for sample in samples() if sample.urgent or not quick]
        for sample in wanted if progress is None else progress(wanted):
            if clock() >= looked and len(runs) >= _LEAST_SAMPLES:
                complete = False
                break
            made = bench.tried(sample.make(), sample.name)
            if made is not None:
                made.run(each, end)
                runs.append((sample, made))
        everything = [*others, *(made for _, made in runs)]
        take_turns(everything, _ROUNDS, each, end, clock)
        for left in others:
            if not left.rounds:
                left.run(0.0, end)
    moved = ways.both
    launch = max(0.0, small.best - moved)
    node = 0.0 if many is None else max(0.0, many.best - launch - moved) / len(row.measured)
    points: dict[str, list[Point]] = {}
    for sample, made in runs:
        seconds = made.best - launch - moved
        seconds -= ways.seconds(made.built.feed["x"].nbytes + _result_bytes(made.built))
        seconds -= _others(made.built, points, node)
        count = len(made.built.measured)
        amount = sum(work_of(each).amount for each in made.built.measured) / count
        if amount > 0:
            points.setdefault(sample.name, []).append((amount, max(seconds, _SHARE * made.best) / count))
    iteration = None
    if len(loops) == len(_TRIPS):
        a_round = (loops[1].best - loops[0].best) / (_TRIPS[1] - _TRIPS[0])
        iteration = max(0.0, a_round - small.best)
    return Figures(
        provider.name,
        launch,
        node,
        {name: tuple(sorted(found)) for name, found in points.items()},
        ways.way,
        ways.way,
        quick,
        clock() - started,
        iteration,
        int(disturbance(everything) > AT_WORK or not complete),
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


class _Run(Timed):
    """A sample on a provider."""

    def __init__(self, built: Built, call: Callable[[], Any], clock: Clock) -> None:
        super().__init__(call, clock)
        self.built = built
        call()  # warms up


class _Bench:
    """Where samples are compiled for a provider; what it made is given back with ``stack``."""

    def __init__(self, provider: ExecutionProvider, config: SessionConfig, stack: ExitStack, clock: Clock) -> None:
        self.provider = provider
        self.config = config.updated(policy="priority", pins={}, fallback="off")
        self.stack = stack
        self.clock = clock

    def tried(self, built: Built, name: str) -> _Run | None:
        """The sample, or None where the provider does not take it or fails at it."""
        if not _takes(self.provider, built):
            return None
        try:
            return self.prepared(built)
        except Exception as error:  # a provider may raise anything; the other samples are worth having
            logger.info("calibration of %s: %s left out (%s)", self.provider.name, name, error)
            return None

    def prepared(self, built: Built) -> _Run:
        """The sample compiled by the provider, as a session would have it, results on the host."""
        from ranvier.runtime.compiled import Compiled  # which places by what is measured here

        compiled = Compiled(built.graph, [self.provider], self.config)
        self.stack.callback(compiled.close)
        types = [value.type for value in built.graph.inputs]
        values = [built.feed[value.name] for value in built.graph.inputs]
        plan = compiled.plan(tuple((x.dtype, x.shape) for x in values), types, {}, ("y",))
        control = RunControl(None, self.config.limits)

        def call() -> Any:
            found = plan.run_directly(values)
            return plan.run(values, control, None) if found is None else found

        return _Run(built, call, self.clock)


class _Ways:
    """Latency and bandwidth to the provider's memory and back; nothing for one that works in the host's.

    Sending returns before the data are there, so a round trip is timed and both ways get half of it.
    """

    def __init__(self, provider: ExecutionProvider, clock: Clock) -> None:
        self.timed: list[Timed] = []
        if isinstance(provider, OwnMemory):
            for nbytes in (64, _LARGE):
                array = np.zeros(nbytes, np.uint8)
                self.timed.append(Timed(functools.partial(_there_and_back, provider, array), clock))

    @property
    def both(self) -> float:
        """Seconds of latency, there and back."""
        return self.timed[0].best if self.timed else 0.0

    @property
    def way(self) -> tuple[float, float] | None:
        if not self.timed:
            return None
        small, large = self.timed
        return small.best / 2, 2 * _LARGE / max(large.best - small.best, 1e-6)

    def seconds(self, nbytes: float) -> float:
        """What bytes take beside the latency."""
        way = self.way
        return 0.0 if way is None else nbytes / way[1]


def _there_and_back(provider: OwnMemory, array: np.ndarray[Any, Any]) -> None:
    provider.download(provider.upload([array]))
