"""Which parts of the host may run at the same time: what a session's threads allow, and where that is worth it.

NumPy computes large arrays without the interpreter's lock and everything else with it; native code and other runtimes
never hold it. Bodies of the reference that walk through their data in Python hold it for as long as they run, so they
gain beside native code only. Its products leave the number of threads to NumPy's own library, which nobody here can
tell to use fewer: they run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ranvier.config import SessionConfig
from ranvier.devices import usable_cores
from ranvier.graph.ir import Graph
from ranvier.graph.types import TensorType
from ranvier.ops.estimate import BYTES_PER_SECOND, FLOPS_PER_SECOND, SECONDS_PER_NODE, node_cost
from ranvier.providers.base import ExecutionProvider
from ranvier.providers.own_memory import OwnMemory
from ranvier.runtime.calibration.classes import BY_ARITHMETIC
from ranvier.runtime.calibration.lazy import figures_for
from ranvier.runtime.calibration.model import MachineCosts, guessed
from ranvier.runtime.partition import Partitioning
from ranvier.runtime.partition.costs import Posed
from ranvier.runtime.partition.issuing import order_of_issue
from ranvier.runtime.partition.placing import parts_of
from ranvier.runtime.partition.problem import CANNOT, Problem
from ranvier.runtime.partition.schedule import Schedule
from ranvier.runtime.partition.waves import DEVICE, GAIN, UNKNOWN, Threads, in_waves

_IN_PYTHON = frozenset({"other", "trees", "recurrent"})  # classes whose bodies are loops of the interpreter, often
_BY_LIBRARY = BY_ARITHMETIC - _IN_PYTHON
_SLOWER = 64.0  # times at most that NumPy takes as long as native code, by nominal costs
_WORTH_MEASURING = 1e-3  # seconds saved in a run
_LIBRARY_TYPES = frozenset({"float32", "float64", "float16", "bfloat16", "complex64", "complex128"})


def count_of(config: SessionConfig) -> int:
    """The threads of a session."""
    return config.threads or usable_cores()


def threads_of(posed: Posed, providers: Sequence[ExecutionProvider], model: MachineCosts, count: int) -> Threads:
    """What ``count`` threads of the host allow the parts of a graph."""
    used = [_used(provider, count) for provider in providers]
    locked: dict[tuple[int, int], float] = {}
    alone: set[tuple[int, int]] = set()
    for k, row in enumerate(posed.problem.seconds):
        for p, seconds in enumerate(row):
            if used[p] != 1 or seconds == CANNOT:
                continue
            work = model.work(posed.claims.nodes[k])
            if posed.claims.nodes[k].has_subgraphs or work.kind in _IN_PYTHON or work.dtype == "string":
                locked[k, p] = seconds
            elif work.kind in _BY_LIBRARY and work.dtype in _LIBRARY_TYPES:
                alone.add((k, p))
            else:
                locked[k, p] = min(seconds, SECONDS_PER_NODE)
    return Threads(count, used, locked, frozenset(alone))


def _used(provider: ExecutionProvider, count: int) -> int:
    if isinstance(provider, OwnMemory):
        return DEVICE
    return {"one": 1, "given": count}.get(provider.capability().threads, UNKNOWN)


def side_by_side(
    graph: Graph, found: Partitioning, providers: Sequence[ExecutionProvider], config: SessionConfig
) -> Partitioning:
    """A placement that was made without a look at costs, with parts at the same time where that is worth it.

    Nothing is measured unless there may be something to gain.
    """
    from ranvier.runtime.predicted import posed_as, prediction_of

    count = count_of(config)
    if count < 2 or not _enough(found):
        return found
    used = {part.provider.name for part in found.parts}
    involved = [provider for provider in providers if provider.name in used]
    known = guessed(graph)
    figures = figures_for(involved, config, measuring=False)
    while True:
        model = MachineCosts(providers, figures, known.types, known.values)
        posed, owner = posed_as(found, providers, model)
        threads = threads_of(posed, providers, model, count)
        waves = _worthwhile(posed.problem, owner, threads)
        if figures or (waves is None and not _hopeful(posed.problem, owner, threads)):
            break
        figures = figures_for(involved, config)
        if not figures:  # which cannot be had, or nobody wants them measured
            break
    if waves is None:
        return found
    issue = order_of_issue(posed.problem, waves)
    steps = [waves.steps[k] for k in issue]
    predicted = prediction_of(posed, owner, steps, waves.seconds, [p.name for p in providers], model)
    return replace(found, parts=parts_of(graph, providers, posed, waves, issue), predicted=predicted)


def _enough(found: Partitioning) -> bool:
    """A first look that costs little: do parts on one thread have enough to do, or cannot the graph alone tell?"""
    spent = 0.0
    for part in found.parts:
        if part.provider.capability().threads != "one":
            continue
        for node in part.subgraph.nodes:
            known = [v.type for v in (*node.inputs, *node.outputs) if v is not None]
            if node.has_subgraphs or not all(isinstance(t, TensorType) and t.is_static for t in known):
                return True
            cost = node_cost(node)
            spent += max(cost.flops / FLOPS_PER_SECOND, cost.bytes / BYTES_PER_SECOND)
    return spent * _SLOWER > _WORTH_MEASURING


def _worthwhile(problem: Problem, owner: Sequence[int], threads: Threads) -> Schedule | None:
    """The run in waves, where it saves enough."""
    found = in_waves(problem, owner, threads)
    return found if found is not None and found.seconds < (1 - GAIN) * problem.cost(owner).total else None


def _hopeful(problem: Problem, owner: Sequence[int], threads: Threads) -> bool:
    """Might measured costs tell what nominal ones do not? Those are the same for all providers of the host, whereas
    NumPy takes many times as long as native code. So: is there something to gain where both have as much to do?"""
    one = sum(row[who] for row, who in zip(problem.seconds, owner) if threads.used[who] == 1)
    more = sum(row[who] for row, who in zip(problem.seconds, owner) if threads.used[who] > 1)
    if one <= 0:
        return False
    slower = min(max(1.0, threads.count * more / one), _SLOWER)
    slow = [slower if used == 1 else 1.0 for used in threads.used]
    seconds = [[each * factor for each, factor in zip(row, slow)] for row in problem.seconds]
    guess = replace(problem, seconds=seconds)
    found = _worthwhile(guess, owner, threads)
    return found is not None and guess.cost(owner).total - found.seconds > _WORTH_MEASURING
