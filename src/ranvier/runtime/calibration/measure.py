"""Run the samples on a provider and take down how long they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.errors import RanvierError
from ranvier.graph.types import TensorType
from ranvier.logs import logger
from ranvier.providers.base import Decline, ExecutionProvider, GraphView, OwnMemory
from ranvier.runtime.calibration.classes import work_of
from ranvier.runtime.calibration.samples import Built, Sample, samples, tiny, tiny_row
from ranvier.runtime.calibration.table import Figures, Point
from ranvier.runtime.control import RunControl

BUDGET = 5.0  # seconds for a provider
QUICK = 0.5
_PER_SAMPLE = 0.03  # seconds of runs, beside what compiling takes
_LEAST_RUNS, _MOST_RUNS = 5, 200
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
    inward, outward = _ways(provider)
    moved = 0.0 if inward is None or outward is None else inward[0] + outward[0]
    launch = max(0.0, _run_seconds(provider, tiny(), config, 3 * per_sample) - moved)
    node = _node_seconds(provider, config, per_sample, launch + moved)
    points: dict[str, list[Point]] = {}
    wanted = [sample for sample in samples() if sample.urgent or not quick]
    for sample in wanted if progress is None else progress(wanted):
        if time.perf_counter() > end:
            break
        built = sample.make()
        if not _takes(provider, built):
            continue
        try:
            whole = _run_seconds(provider, built, config, per_sample)
        except RanvierError as error:
            logger.info("calibration of %s: %s left out (%s)", provider.name, sample.name, error)
            continue
        seconds = whole - launch
        if inward is not None and outward is not None:
            seconds -= inward[0] + outward[0] + built.feed["x"].nbytes / inward[1] + _result_bytes(built) / outward[1]
        seconds -= _others(built, points, node)
        amount = sum(work_of(each).amount for each in built.measured) / len(built.measured)
        if amount > 0:
            points.setdefault(sample.name, []).append((amount, max(seconds, _SHARE * whole) / len(built.measured)))
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


def _node_seconds(provider: ExecutionProvider, config: SessionConfig, seconds: float, rest: float) -> float:
    row = tiny_row()
    if not _takes(provider, row):
        return 0.0
    return max(0.0, _run_seconds(provider, row, config, 3 * seconds) - rest) / len(row.measured)


def _result_bytes(built: Built) -> int:
    kind = built.graph.outputs[0].type
    return (kind.nbytes or 0) if isinstance(kind, TensorType) else 0


def _run_seconds(provider: ExecutionProvider, built: Built, config: SessionConfig, seconds: float) -> float:
    """The time of a run, results on the host."""
    from ranvier.runtime.compiled import Compiled  # which places by what is measured here

    compiled = Compiled(built.graph, [provider], config.updated(policy="priority", pins={}))
    try:
        types = [value.type for value in built.graph.inputs]
        values = [built.feed[value.name] for value in built.graph.inputs]
        plan = compiled.plan(tuple((x.dtype, x.shape) for x in values), types, {}, ("y",))
        control = RunControl(None, config.limits)

        def run() -> Any:
            found = plan.run_directly(values)
            return plan.run(values, control, None) if found is None else found

        return _best(run, seconds)
    finally:
        compiled.close()


def _best(run: Callable[[], Any], seconds: float) -> float:
    """The shortest of as many runs as ``seconds`` allow, after one that warms up: a neighbour on the machine only
    ever adds time, and in a busy moment a median is the neighbour's."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _MOST_RUNS:
        begin = time.perf_counter()
        run()
        now = time.perf_counter()
        times.append(now - begin)
        if now > end and len(times) >= _LEAST_RUNS:
            break
    return min(times)


def _ways(provider: ExecutionProvider) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Latency and bandwidth to the provider's memory and back; None for one that works in the host's.

    Sending returns before the data are there, so a round trip is timed and both ways get half of it.
    """
    if not isinstance(provider, OwnMemory):
        return None, None

    def there_and_back(nbytes: int) -> float:
        array = np.zeros(nbytes, np.uint8)
        return _best(lambda: provider.download(provider.upload([array])), _PER_SAMPLE)

    small, large = there_and_back(64), there_and_back(_LARGE)
    bandwidth = 2 * _LARGE / max(large - small, 1e-6)
    return (small / 2, bandwidth), (small / 2, bandwidth)
