"""What ran when: a recording of kernel calls, as a summary and as a trace for chrome://tracing or Perfetto.

Events are the steps of a run, one for each partition. A provider that runs many kernels inside one step hands them in
as :class:`KernelRecord`, with the work they did; for the steps of others the work is estimated from their nodes.
Steps that move values between memories are told apart from those that compute, with the bytes they moved.
"""

from __future__ import annotations

import bisect
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.codegen.launch import Units
from ranvier.formats.files import write_files
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType, Type
from ranvier.ops.estimate import node_cost
from ranvier.ops.registry import Cost
from ranvier.providers.base import KernelTime, Subgraph
from ranvier.records import dataclass
from ranvier.runtime.transfer import TransferCount, TransferCounts, TransferKernel


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel call; times in nanoseconds of the process's monotonic clock."""

    name: str
    op: str
    provider: str
    start: int
    end: int
    thread: int
    shapes: tuple[str, ...]
    way: tuple[str, str] | None = None  # of a transfer: from one memory to another
    bytes: int = 0  # that it moved


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One call of a generated kernel; times in nanoseconds of the process's monotonic clock."""

    label: str  # the nodes it stands for
    kernel: str  # what it is: "gemm float32 6x64"; records of one kind begin with the same word
    provider: str
    start_ns: int
    end_ns: int
    flops: float
    bytes: float  # moved to and from memory at least
    threads: int = 1  # that worked on it
    caller: int = 0  # the thread that ran the step around it
    units: Units = ""  # what did the arithmetic

    @property
    def seconds(self) -> float:
        return max(self.end_ns - self.start_ns, 1) / 1e9


@dataclass(frozen=True, slots=True)
class OpTime:
    """All calls of one operator."""

    op: str
    provider: str
    calls: int
    seconds: float
    share: float


class Profiler:
    """Collects events while it is active: ``with session.profile("trace.json"): session.run(...)``."""

    def __init__(self, session: Any, path: str | os.PathLike[str] | None = None) -> None:
        self._session = session
        self._path = path
        self._lock = threading.Lock()
        self.events: list[Event] = []
        self.kernels: list[KernelRecord] = []
        self._calls: list[tuple[Event, Any, list[TensorType | None]]] = []  # with the kernel and its operands

    def record(self, step: Any, start: int, end: int, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        shapes = tuple(_shape(x) for x in inputs)
        kernel = step.kernel
        moved = (kernel.way, sum(kernel.sizes(inputs, outputs))) if isinstance(kernel, TransferKernel) else ()
        event = Event(step.label, step.op, step.provider, start, end, threading.get_ident(), shapes, *moved)
        types = [TensorType(dtypes.of(x), x.shape) if isinstance(x, np.ndarray) else None for x in [*inputs, *outputs]]
        with self._lock:
            self.events.append(event)
            self._calls.append((event, step.kernel, types))

    def add_kernels(self, records: Iterable[KernelRecord]) -> None:
        """Kernels that a provider ran inside a step; called by the provider, before or after the step is recorded."""
        found = list(records)
        with self._lock:
            self.kernels.extend(found)

    def inside(self, step: Any, times: Iterable[KernelTime]) -> None:
        """What a step's kernel tells of its own parts."""
        caller = threading.get_ident()
        self.add_kernels(
            KernelRecord(
                *(t.label, t.kernel, step.provider, t.start_ns, t.end_ns, t.flops, t.bytes, t.threads), caller, t.units
            )
            for t in times
        )

    def runs(self) -> list[tuple[int, int]]:
        """Start and end of every whole run."""
        return [(e.start, e.end) for e in self.events if e.op == "run"]

    def records(self) -> list[KernelRecord]:
        """Every kernel with its work: those handed in, and for steps that hold none of them the step itself."""
        parts = {item.kernel: item.part.subgraph for item in self._session._parts}
        nested = {node.name: node for node in self._session.graph.all_nodes()}
        found = list(self.kernels)
        holding = self._holding()
        for event, kernel, types in self._calls:
            if id(event) in holding:
                continue
            part, node = parts.get(kernel), nested.get(event.name)
            work = Cost(0.0, float(event.bytes))
            if part is not None:
                work = _work(part, types)
            elif node is not None:  # of a body of control flow
                work = node_cost(node, _operands(node, types))
            found.append(
                KernelRecord(event.name, event.op, event.provider, event.start, event.end, work.flops, work.bytes)
            )
        return sorted(found, key=lambda k: (k.start_ns, -k.end_ns))

    def _holding(self) -> set[int]:
        """Steps (by identity) inside which a provider reported kernels: in the same thread, or from nobody knows."""
        by_caller: dict[int, list[int]] = {}
        for kernel in sorted(self.kernels, key=lambda k: k.start_ns):
            by_caller.setdefault(kernel.caller, []).append(kernel.start_ns)
        found = set()
        for event in self.events:
            for starts in (by_caller.get(event.thread, ()), by_caller.get(0, ())):
                at = bisect.bisect_left(starts, event.start)
                if at < len(starts) and starts[at] <= event.end:
                    found.add(id(event))
        return found

    def span(self, name: str, start: int, end: int) -> None:
        """An event around others: a whole run."""
        with self._lock:
            self.events.append(Event(name, "run", "session", start, end, threading.get_ident(), ()))

    def __enter__(self) -> Profiler:
        self._session._attach(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session._detach(self)
        if self._path is not None and kind is None:
            self.save(self._path)

    def summary(self) -> list[OpTime]:
        """Time by operator and provider, the longest first; kernels that were handed in stand for their step."""
        holding = self._holding()
        times = [(e.op, e.provider, e.end - e.start) for e in self.events if e.op != "run" and id(e) not in holding]
        times += [(k.kernel, k.provider, k.end_ns - k.start_ns) for k in self.kernels]
        sums: dict[tuple[str, str], list[float]] = {}
        for op, who, length in times:
            entry = sums.setdefault((op, who), [0, 0.0])
            entry[0] += 1
            entry[1] += length / 1e9
        total = sum(s for _, s in sums.values()) or 1.0
        rows = [OpTime(op, who, int(calls), s, s / total) for (op, who), (calls, s) in sums.items()]
        return sorted(rows, key=lambda row: -row.seconds)

    def transfers(self) -> list[TransferCount]:
        """What moved while it was recorded, by pair of memories."""
        found = TransferCounts()
        for event in self.events:
            if event.way is not None:
                found.add(*event.way, len(event.shapes), event.bytes, (event.end - event.start) / 1e9)
        return found.snapshot()

    def trace(self) -> dict[str, Any]:
        """The recording in the Trace Event Format.

        Every provider has rows of its own, one for each thread that called it and one for the kernels it ran inside;
        so have whole runs, and transfers.
        """
        base = min((e.start for e in self.events), default=0)
        ops = {node.name or node.op: node.op for node in self._session.graph.all_nodes()}
        threads = {ident: k for k, ident in enumerate(dict.fromkeys(e.thread for e in self.events))}
        rows: dict[tuple[str, int], int] = {}  # in the order in which they are shown
        for event in sorted(self.events, key=_row_order):
            rows.setdefault((_row(event), event.thread), len(rows))
        for kernel in self.kernels:  # below the threads that called them
            rows.setdefault((f"kernels of {kernel.provider}", 0), len(rows))
        events = _row_names(rows, threads)
        for event in self.events:
            args: dict[str, Any] = {"op": event.op, "provider": event.provider, "inputs": list(event.shapes)}
            if event.way is not None:
                args["from"], args["to"] = event.way
                args["bytes"] = event.bytes
                args["GB/s"] = event.bytes / max(event.end - event.start, 1)
            events.append(
                {
                    "ph": "X",
                    "name": event.name or event.op,
                    "cat": event.op,
                    "pid": 1,
                    "tid": rows[_row(event), event.thread],
                    "ts": (event.start - base) / 1e3,
                    "dur": (event.end - event.start) / 1e3,
                    "args": args,
                }
            )
        for kernel in self.kernels:
            events.append(
                {
                    "ph": "X",
                    "name": kernel.label or kernel.kernel,
                    "cat": kernel.kernel,
                    "pid": 1,
                    "tid": rows[f"kernels of {kernel.provider}", 0],
                    "ts": (kernel.start_ns - base) / 1e3,
                    "dur": (kernel.end_ns - kernel.start_ns) / 1e3,
                    "args": {
                        "op": " + ".join(ops.get(name, name) for name in kernel.label.split(" + ")),
                        "kernel": kernel.kernel,
                        "provider": kernel.provider,
                        "threads": kernel.threads,
                        "GFLOP/s": kernel.flops / kernel.seconds / 1e9,
                        "GB/s": kernel.bytes / kernel.seconds / 1e9,
                    },
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace; open it in https://ui.perfetto.dev or chrome://tracing."""
        write_files({Path(path): [json.dumps(self.trace()).encode()]})


def _row(event: Event) -> str:
    return "transfers" if event.way is not None else event.provider


def _row_order(event: Event) -> int:
    """Whole runs first, then who computes, then what moves."""
    return 0 if event.op == "run" else 2 if event.way is not None else 1


def _row_names(rows: Mapping[tuple[str, int], int], threads: Mapping[int, int]) -> list[dict[str, Any]]:
    """What the rows of a trace are called and how they are ordered."""
    made: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "ranvier"}}]
    for (name, thread), row in rows.items():
        title = f"{name}, thread {threads[thread]}" if len(threads) > 1 and thread in threads else name
        made.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": title}})
        made.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": row, "args": {"sort_index": row}})
    return made


def _operands(node: Node, types: Sequence[TensorType | None]) -> dict[Value, Type]:
    """The types of a call by value: a step takes each value once."""
    taken = list(dict.fromkeys(v for v in node.inputs if v is not None))
    values = [*taken, *node.outputs]
    return {v: t for v, t in zip(values, types) if t is not None} if len(values) == len(types) else {}


def _work(part: Subgraph, types: Sequence[TensorType | None]) -> Cost:
    """Arithmetic and traffic of a partition at the sizes of a call.

    What several nodes hand to each other inside a partition need not travel through memory: only what it reads,
    constants among it, and what it makes counts. A single node says itself what it moves. Types of values in another
    memory are those of the graph.
    """
    known: dict[Value, Type] = {v: t for v, t in zip([*part.inputs, *part.outputs], types) if t is not None}
    costs = [node_cost(node, known) for node in part.nodes]
    if len(costs) == 1:
        return costs[0]
    kinds = [known.get(v) or v.type for v in [*part.inputs, *part.outputs]]
    moved = sum(kind.nbytes or 0 for kind in kinds if isinstance(kind, TensorType))
    return Cost(sum(c.flops for c in costs), float(moved))


def _shape(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
