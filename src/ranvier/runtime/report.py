"""``session.report``: what the model is, what the passes did, where every node runs and why, and what moves."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ranvier.errors import RanvierError
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType, Type
from ranvier.ops import TypeInference
from ranvier.passes.manager import PassReport
from ranvier.providers.base import NodePrecision, TellsDecisions, TellsJoined, TellsPrecision
from ranvier.providers.own_memory import TellsCaptures
from ranvier.records import dataclass
from ranvier.runtime.compiled import Compiled
from ranvier.runtime.program import kernels_of
from ranvier.runtime.transfer import HOST, TransferCount, TransferCounts, space_of

if TYPE_CHECKING:
    from ranvier.runtime.predicted import Prediction

_EXAMPLES = 3  # nodes named for a reason that many share


@dataclass(frozen=True)
class NodeReport:
    """One node of the optimized graph. Values it reads are named once each, constants left out."""

    name: str
    op: str
    provider: str
    note: str = ""
    origin: str = ""  # the rule that made it
    declined: tuple[tuple[str, str], ...] = ()  # (provider, reason)
    part: int = -1  # position among the parts
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    types: tuple[str, ...] = ()  # of the outputs
    weight_bytes: int = 0  # of the constants it reads
    inside: int = 0  # nodes in bodies of control flow, run by the same provider
    precision: str = ""  # what it computes in, where that was a question: f32, bf16 or fp16 …
    stored: str = ""  # … and what its result is stored in
    precision_why: str = ""


@dataclass(frozen=True)
class PartReport:
    """Nodes that one provider compiled together, and the values that go in and out."""

    provider: str
    memory: str  # that it works in
    nodes: tuple[int, ...]  # positions among the nodes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wave: int = -1  # parts of one wave run at the same time in threads of the host, those of a lane in order
    lane: int = 0
    threads: int = 0  # that it may use itself; 0: all that the session has


@dataclass(frozen=True)
class TransferReport:
    """Values that go together from one memory to another, once in every run."""

    values: tuple[str, ...]
    source: str
    target: str
    types: tuple[str, ...] = ()
    bytes: int | None = None  # None: the sizes are known only when it runs


@dataclass(frozen=True)
class CaptureReport:
    """A kind of run of a part, by the sizes of its inputs, that a device could launch as a whole: whether it does so,
    and why not."""

    part: int  # position among the parts
    provider: str
    text: str


@dataclass(frozen=True)
class DeclineReport:
    """A reason for which a provider did not take nodes."""

    provider: str
    reason: str
    count: int
    operators: tuple[str, ...]
    examples: tuple[str, ...]  # names of the first of them


@dataclass
class Report:
    """Data first; ``str(report)`` is for people."""

    model: str
    providers: tuple[str, ...]
    optimization: str
    nodes_loaded: int
    nodes: list[NodeReport] = field(default_factory=list)
    parts: list[PartReport] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # types of the graph's inputs and outputs
    outputs: dict[str, str] = field(default_factory=dict)
    passes: list[PassReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # load, optimize, compile
    transfers: list[TransferReport] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what type inference could not make sense of
    precision: str = "float32"  # what the session allows
    precisions: dict[str, NodePrecision] = field(default_factory=dict)  # by name, of nodes in bodies too
    refused: str = ""  # why a provider does not make use of it
    calibration: str = ""  # what a sample told about it
    constants: str = ""  # what is said of inputs whose defaults were taken for constants
    tuned: int = 0  # decisions of planners that were taken by measurement
    joined: list[tuple[str, ...]] = field(default_factory=list)  # nodes of products of one tensor that are one step
    predicted: Prediction | None = None  # seconds of a run, where costs decided the placement
    counts: TransferCounts = field(default_factory=TransferCounts, repr=False, compare=False)
    captured: list[tuple[int, weakref.ref[Any]]] = field(default_factory=list, repr=False, compare=False)  # kernels

    def by_provider(self) -> Counter[str]:
        return Counter(node.provider for node in self.nodes)

    def by_precision(self) -> Counter[str]:
        """How many nodes compute in what, and how many results are stored in 16 bits; of those it is known of."""
        found = Counter(each.computes for each in self.precisions.values() if each.computes)
        found.update(f"stored in {each.stores}" for each in self.precisions.values() if each.stores not in ("", "f32"))
        return found

    def moved(self) -> list[TransferCount]:
        """What all runs of the session so far moved, by pair of memories."""
        return self.counts.snapshot()

    def captures(self) -> list[CaptureReport]:
        """What is launched as a whole by now, and why the rest is not; of parts whose kernels can do that."""
        found: list[CaptureReport] = []
        for part, kernel in self.captured:
            told: TellsCaptures | None = kernel()
            lines = () if told is None else told.graph_report()
            found.extend(CaptureReport(part, self.parts[part].provider, line) for line in lines)
        return found

    def declines(self) -> list[DeclineReport]:
        """Why providers declined nodes: alike reasons together, the most frequent first."""
        groups: dict[tuple[str, str], list[NodeReport]] = {}
        for node in self.nodes:
            for who, why in node.declined:
                groups.setdefault((who, why), []).append(node)
        found = [
            DeclineReport(
                who,
                why,
                len(nodes),
                tuple(dict.fromkeys(n.op for n in nodes)),
                tuple(n.name or n.op for n in nodes[:_EXAMPLES]),
            )
            for (who, why), nodes in groups.items()
        ]
        return sorted(found, key=lambda group: -group.count)

    def together(self) -> list[str]:
        """For each wave its lanes in words: who runs what, with how many threads, and how long by prediction. Then
        what all of it would take part after part."""
        waves: dict[int, dict[int, list[int]]] = {}
        for k, part in enumerate(self.parts):
            if part.wave >= 0:
                waves.setdefault(part.wave, {}).setdefault(part.lane, []).append(k)
        if not waves:
            return []
        texts = [" | ".join(self._lane(parts) for parts in lanes.values()) for lanes in waves.values()]
        found = [f"at the same time: {text}" for text in texts]
        if self.predicted is not None:
            found.append(f"{self.predicted.serial * 1e3:.3g} ms are predicted for one after the other")
        return found

    def _lane(self, parts: list[int]) -> str:
        first = self.parts[parts[0]]
        nodes = [k for p in parts for k in self.parts[p].nodes]
        who = ", ".join(dict.fromkeys(self.parts[p].provider for p in parts))
        name = self.nodes[nodes[0]].name or self.nodes[nodes[0]].op
        label = name if len(nodes) == 1 else f"{name} +{len(nodes) - 1}"
        times = {part.nodes: part.end - part.start for part in self.predicted.parts} if self.predicted else {}
        known = [times[self.parts[p].nodes] for p in parts if self.parts[p].nodes in times]
        spent = f", {sum(known) * 1e3:.3g} ms" if len(known) == len(parts) else ""
        return f"{who} {label} ({first.threads} thread{'s' if first.threads != 1 else ''}{spent})"

    def to_dict(self) -> dict[str, Any]:
        """Everything in types JSON has."""
        live = ("counts", "captured")
        held = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in live}
        more = {
            "by_provider": dict(self.by_provider()),
            "declined": self.declines(),
            "moved": self.moved(),
            "captures": self.captures(),
            "together": self.together(),
        }
        return {**held, **{name: _plain(value) for name, value in more.items()}}

    def __str__(self) -> str:
        where = ", ".join(f"{count} on {name}" for name, count in self.by_provider().most_common())
        times = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in self.seconds.items())
        nodes = f"{self.nodes_loaded} nodes loaded, {len(self.nodes)} after optimization ({self.optimization})"
        lines = [f"{self.model}: {nodes}: {where or 'none'}", f"  {times}"]
        if self.predicted is not None:
            lines.append(f"  {self.predicted}")
        lines.extend(f"  {text}" for text in self.together())
        if self.constants:
            lines.append(f"  {self.constants}")
        if self.precision != "float32":
            lines.append(f"  {precision_text(self)}")
        if self.tuned:
            lines.append(f"  tuned: {self.tuned} decisions about shapes taken by measurement")
        if self.joined:
            lines.append(f"  {joined_text(self)}")
        for step in self.passes:
            if step.changes:
                count = f"{step.nodes_before} → {step.nodes_after} nodes"
                lines.append(f"  pass {step.name}: {step.changes} changes, {count}")
        for transfer in self.transfers:
            size = "" if transfer.bytes is None else f" ({transfer.bytes} bytes)"
            lines.append(f"  transfer {', '.join(transfer.values)}: {transfer.source} → {transfer.target}{size}")
        lines.extend(f"  part {each.part} on {each.provider}: {each.text}" for each in self.captures())
        lines.extend(f"  fallback: {text}" for text in self.fallbacks)
        return "\n".join(lines)


def joined_text(report: Report) -> str:
    """One line about products of one tensor that are one step."""
    count, first = len(report.joined), ", ".join(report.joined[0])
    return f"products of one tensor taken as one step: {count} times, first {first}"


def precision_text(report: Report) -> str:
    """One line about what float32 values are computed and stored in."""
    if report.refused:
        return f"precision float32 instead of {report.precision}: {report.refused}"
    counts = ", ".join(f"{count} {what}" for what, count in report.by_precision().most_common())
    found = f"; {report.calibration}" if report.calibration else ""
    return (
        f"precision {report.precision}: nodes {counts or 'not compiled yet: sizes are known at the first run'}{found}"
    )


def describe_placement(report: Report, compiled: Compiled, types: Mapping[Value, Type | None] | None = None) -> None:
    """Write into the report where nodes run and what moves; ``types`` may know sizes that the graph does not."""
    graph, partitioning = compiled.graph, compiled.partitioning
    report.predicted = partitioning.predicted
    known = types or {}

    def type_of(value: Value) -> Type | None:
        return known.get(value) or value.type

    report.precisions = _precisions(report, compiled)
    kernels = [each.kernel for each in compiled.parts if isinstance(each.kernel, TellsDecisions)]
    report.tuned = len({d.key for kernel in kernels for d in kernel.decisions() if d.chosen})
    joining = [each.kernel for each in compiled.parts if isinstance(each.kernel, TellsJoined)]
    report.joined = [names for kernel in joining for names in kernel.joined()]
    index = {id(p.node): k for k, p in enumerate(partitioning.placements)}
    part_of = {id(n): k for k, part in enumerate(partitioning.parts) for n in part.subgraph.nodes}
    report.nodes = [
        NodeReport(
            p.node.name,
            p.node.op,
            p.provider,
            p.note,
            p.node.origin,
            p.declined,
            part=part_of[id(p.node)],
            inputs=_names(p.node.dependencies()),
            outputs=tuple(v.name for v in p.node.outputs),
            types=tuple(str(type_of(v)) for v in p.node.outputs),
            weight_bytes=_weights(p.node),
            inside=sum(1 for body in p.node.subgraphs() for _ in body.all_nodes()) if p.node.has_subgraphs else 0,
            **_told(report.precisions.get(p.node.name or p.node.op)),
        )
        for p in partitioning.placements
    ]
    report.parts = [
        PartReport(
            part.provider.name,
            space_of(part.provider),
            tuple(index[id(n)] for n in part.subgraph.nodes),
            _names(part.subgraph.inputs),
            _names(part.subgraph.outputs),
            *(() if part.beside is None else (part.beside.wave, part.beside.lane, part.beside.threads)),
        )
        for part in partitioning.parts
    ]
    tellers = [(k, each.kernel) for k, each in enumerate(compiled.parts) if isinstance(each.kernel, TellsCaptures)]
    report.captured = [(k, weakref.ref(kernel)) for k, kernel in tellers]
    report.inputs = {v.name: str(type_of(v)) for v in graph.inputs}
    report.outputs = {v.name: str(type_of(v)) for v in graph.outputs}
    report.transfers = []
    if any(part.memory != HOST for part in report.parts):
        for kernel, values in compiled.program(tuple(v.name for v in graph.outputs)).transfers():
            kinds = [type_of(v) for v in values]
            names = tuple(v.name for v in values)
            report.transfers.append(TransferReport(names, *kernel.way, tuple(map(str, kinds)), _bytes(kinds)))


def _precisions(report: Report, compiled: Compiled) -> dict[str, NodePrecision]:
    """Of the nodes whose precision was a question, in bodies too; says in the report whether nobody asked it."""
    if report.precision == "float32":
        return {}
    kernels = [kernel for kernel in kernels_of(compiled.parts) if isinstance(kernel, TellsPrecision)]
    none = "" if kernels else "no provider here stores or multiplies float32 values in anything else"
    report.refused = none or next((k.refused for k in kernels if k.refused), "")
    there = {node.name or node.op for node in compiled.graph.all_nodes()}
    told = (each for kernel in kernels for each in kernel.precisions().items())
    return {name: found for name, found in told if name in there}


def _told(found: NodePrecision | None) -> dict[str, str]:
    return {} if found is None else {"precision": found.computes, "stored": found.stores, "precision_why": found.why}


def report_for(session: Any, dims: Mapping[str, int]) -> Report:
    """The report of a session for these sizes of its symbolic dims: types, bytes and costs are those of such a run.

    Costs are predicted from the figures that are known, whatever the nodes were placed by; nothing is measured.
    """
    from ranvier.runtime.beside import count_of
    from ranvier.runtime.calibration.lazy import figures_for  # a session itself needs these seldom
    from ranvier.runtime.calibration.model import guessed
    from ranvier.runtime.predicted import predict

    report: Report = dataclasses.replace(session.report)
    inference = TypeInference(dims, annotated=True)
    inference.run(session.graph)
    compiled: Compiled = session._compiled
    if session.config.precision != "float32":
        with suppress(RanvierError):  # sizes that are not all given: then nothing is known of them
            session.bind(**dims)
    describe_placement(report, compiled, inference.types)
    if report.predicted is None or dims:
        names = set(report.by_provider())
        for others in report.predicted.options if report.predicted is not None else ():
            names.update(other.provider for other in others if other.seconds is not None)
        figures = figures_for([p for p in compiled.providers if p.name in names], session.config, measuring=False)
        known = guessed(compiled.graph, sizes=dims)
        report.predicted = predict(compiled.partitioning, compiled.providers, figures, known, count_of(session.config))
    return report


def _names(values: Iterable[Value]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v.name for v in values if v.const is None or v.producer is not None))


def _weights(node: Node) -> int:
    return sum(v.const.nbytes for v in dict.fromkeys(node.dependencies()) if v.const is not None)


def _bytes(types: Iterable[Type | None]) -> int | None:
    total = 0
    for kind in types:
        nbytes = kind.nbytes if isinstance(kind, TensorType) else None
        if nbytes is None:
            return None
        total += nbytes
    return total


def _plain(data: Any) -> Any:
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {f.name: _plain(getattr(data, f.name)) for f in dataclasses.fields(data)}
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(item) for item in data]
    return data


__all__ = [
    "CaptureReport",
    "DeclineReport",
    "NodeReport",
    "PartReport",
    "Report",
    "TransferReport",
    "describe_placement",
    "precision_text",
    "report_for",
]
