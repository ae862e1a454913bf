"""What a placement is predicted to take, node by node and part by part: plain data for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from ranvier.ops import TypeInference
from ranvier.providers.base import ExecutionProvider
from ranvier.records import dataclass
from ranvier.runtime.beside import threads_of
from ranvier.runtime.calibration.model import MachineCosts, guessed
from ranvier.runtime.calibration.table import Figures
from ranvier.runtime.partition import Partitioning
from ranvier.runtime.partition.costs import Claims, Posed, pose
from ranvier.runtime.partition.explain import Option, explain
from ranvier.runtime.partition.issuing import order_of_issue
from ranvier.runtime.partition.placing import Placed
from ranvier.runtime.partition.problem import Problem
from ranvier.runtime.partition.schedule import Step, in_sequence, schedule
from ranvier.runtime.partition.waves import timed


@dataclass(frozen=True)
class PartCost:
    """One part, by the positions of its nodes; seconds from the start of a run to its own start and end."""

    provider: str
    nodes: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class TransferCost:
    """One value on its way from one memory to another."""

    value: str
    source: str
    target: str
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of one run. ``options``: for every node what each provider would take, and why it was not chosen."""

    seconds: float  # with what runs at the same time
    compute: float
    transfer: float
    launch: float
    sources: Mapping[str, str]  # of the figures, by provider: "nominal", or "measured" and how
    parts: tuple[PartCost, ...] = ()
    transfers: tuple[TransferCost, ...] = ()
    options: tuple[tuple[Option, ...], ...] = field(default=(), repr=False)

    @property
    def serial(self) -> float:
        """The same placement, part after part."""
        return self.compute + self.transfer + self.launch

    def __str__(self) -> str:
        by: dict[str, float] = {}
        for part in self.parts:
            by[part.provider] = by.get(part.provider, 0.0) + part.end - part.start
        shares = [f"{name} {_milliseconds(seconds)}" for name, seconds in by.items()]
        if self.transfers:
            total = sum(t.bytes for t in self.transfers)
            shares.append(f"transfers {_milliseconds(self.transfer)} for {total:,.0f} bytes")
        return f"predicted {_milliseconds(self.seconds)}: {', '.join(shares) or 'nothing to do'}"


def prediction(placed: Placed, names: Sequence[str], model: MachineCosts) -> Prediction:
    """The prediction behind a placement by cost."""
    options = tuple(each.options for each in placed.explain())
    steps = [placed.schedule.steps[k] for k in placed.issue]
    return _prediction(placed.posed, placed.owner, steps, placed.schedule.seconds, names, model, options)


def predict(
    partitioning: Partitioning,
    providers: Sequence[ExecutionProvider],
    figures: Mapping[str, Figures],
    known: TypeInference | None = None,
    threads: int = 1,
) -> Prediction:
    """What a placement takes with the types and values that are ``known``; nothing is measured for it.

    Where costs decided, the providers that could have had a node are told again, at the costs of these sizes.
    """
    if not partitioning.parts:
        return Prediction(0.0, 0.0, 0.0, 0.0, {})
    known = guessed(partitioning.parts[0].subgraph.graph) if known is None else known
    model = MachineCosts(providers, figures, known.types, known.values)
    posed, owner = posed_as(partitioning, providers, model)
    if any(part.beside is not None for part in partitioning.parts):
        allowed = threads_of(posed, providers, model, threads)
        found = timed(posed.problem, owner, allowed, _groups(partitioning))
        steps: Sequence[Step] = [found.steps[k] for k in order_of_issue(posed.problem, found)]
        seconds = found.seconds
    else:
        steps, seconds = _steps(posed.problem, owner, partitioning)
    return prediction_of(posed, owner, steps, seconds, [provider.name for provider in providers], model)


def posed_as(
    partitioning: Partitioning, providers: Sequence[ExecutionProvider], model: MachineCosts
) -> tuple[Posed, tuple[int, ...]]:
    """The problem of a placement that is there already, and who has which node."""
    position = {provider.name: p for p, provider in enumerate(providers)}
    owner = tuple(position[placement.provider] for placement in partitioning.placements)
    nodes = [placement.node for placement in partitioning.placements]
    notes = {(k, who): partitioning.placements[k].note for k, who in enumerate(owner)}
    for k, others in enumerate(partitioning.predicted.options if partitioning.predicted is not None else ()):
        for other in others:
            if other.seconds is not None and other.provider in position:
                notes.setdefault((k, position[other.provider]), "")
    reasons = {
        (k, position[name]): reason
        for k, placement in enumerate(partitioning.placements)
        for name, reason in placement.declined
        if name in position
    }
    graph = partitioning.parts[0].subgraph.graph
    return pose(graph, providers, model, claims=Claims(nodes, notes, reasons)), owner


def _groups(partitioning: Partitioning) -> list[list[list[tuple[int, ...]]]]:
    """The nodes of parts by wave and lane; a part that is in none stands by itself."""
    index = {id(placement.node): k for k, placement in enumerate(partitioning.placements)}
    found: list[list[list[tuple[int, ...]]]] = []
    place: tuple[int, int] | None = None  # the wave and lane of the part before
    for part in partitioning.parts:
        nodes = tuple(index[id(node)] for node in part.subgraph.nodes)
        here = None if part.beside is None else (part.beside.wave, part.beside.lane)
        if here is None or place is None or here[0] != place[0]:
            found.append([[nodes]])
        elif here[1] != place[1]:
            found[-1].append([nodes])
        else:
            found[-1][-1].append(nodes)
        place = here
    return found


def _steps(problem: Problem, owner: Sequence[int], partitioning: Partitioning) -> tuple[Sequence[Step], float]:
    """The parts as they are, in time: with what overlaps where they are those of a schedule, else one by one."""
    if partitioning.predicted is not None:
        found = schedule(problem, owner)
        index = {id(placement.node): k for k, placement in enumerate(partitioning.placements)}
        steps = {tuple(sorted(step.nodes)): step for step in found.steps}
        wanted = [tuple(sorted(index[id(node)] for node in part.subgraph.nodes)) for part in partitioning.parts]
        if all(nodes in steps for nodes in wanted) and len(wanted) == len(steps):
            return [steps[nodes] for nodes in wanted], found.seconds
    found = in_sequence(problem, owner)
    return found.steps, found.seconds


def prediction_of(
    posed: Posed,
    owner: Sequence[int],
    steps: Sequence[Step],
    seconds: float,
    names: Sequence[str],
    model: MachineCosts,
) -> Prediction:
    """The prediction behind a placement whose parts are put into time already."""
    options = tuple(each.options for each in explain(posed.problem, owner, posed.reasons))
    return _prediction(posed, owner, steps, seconds, names, model, options)


def _prediction(
    posed: Posed,
    owner: Sequence[int],
    steps: Sequence[Step],
    seconds: float,
    names: Sequence[str],
    model: MachineCosts,
    options: tuple[tuple[Option, ...], ...],
) -> Prediction:
    problem = posed.problem
    transfers: list[TransferCost] = []
    for value, flow in zip(posed.values, problem.flows):
        source, targets = problem.reached(flow, owner)
        transfers += [
            TransferCost(
                value.name,
                posed.devices[source],
                posed.devices[target],
                flow.nbytes,
                problem.moving(source, target, flow.nbytes),
            )
            for target in targets
        ]
    cost = problem.cost(owner)
    sources = {}
    for name in names:
        figures = model.figures.get(name)
        sources[name] = "nominal" if figures is None else figures.quality
    return Prediction(
        seconds,
        cost.compute,
        cost.transfer,
        cost.launch,
        sources,
        tuple(PartCost(names[step.owner], step.nodes, step.start, step.end) for step in steps),
        tuple(transfers),
        options,
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


__all__ = ["PartCost", "Prediction", "TransferCost", "posed_as", "predict", "prediction", "prediction_of"]
